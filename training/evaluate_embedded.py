"""Measures the embedded pair on the held-out files; see README.md.

    python training/evaluate_embedded.py

Prints JSON and writes it, with what the training runs recorded, to `results.json` beside this file.
"""

import argparse
import ast
import hashlib
import json
import platform
from pathlib import Path
from typing import Any

import jax
import stdlib_text
from train_embedded import bits_per_byte

import jax_specdec as sd
from jax_specdec import lm

NUM_COMPLETIONS = 50
COMPLETION_BYTES = 512  # at most


def function_text(head: str, completion: str) -> tuple[str, bool]:
    """The function that `completion` continues, and whether it came to its end.

    The function ends with its document, or before the first line that is indented no deeper than
    its head. If there is neither, the last line, which may be cut off, is dropped.
    """
    indent = len(head) - len(head.lstrip(" "))
    completion, separator, _ = completion.partition(chr(lm.DOCUMENT_SEPARATOR))
    lines, ended = completion.split("\n"), bool(separator)
    lines = lines if ended else lines[:-1]
    for number, line in enumerate(lines):
        if line.strip() and len(line) - len(line.lstrip(" ")) <= indent:
            lines, ended = lines[:number], True
            break
    lines = [line[indent:] for line in [head.rstrip("\n"), *lines]]
    return "\n".join(lines) + "\n", ended


def parses(source: str) -> bool:
    """Whether `ast.parse` accepts a text."""
    try:
        ast.parse(source)
    except (SyntaxError, ValueError):
        return False
    return True


def evaluate(
    target: lm.formats.LoadedModel,
    draft: lm.formats.LoadedModel,
    text: stdlib_text.Text,
    temperature: float,
) -> dict[str, Any]:
    """All the measurements."""
    held_out = stdlib_text.join(text.held_out)
    bits = {
        name: round(bits_per_byte(loaded.model, loaded.params, held_out, batch_size=4), 4)
        for name, loaded in (("target", target), ("draft", draft))
    }
    heads = stdlib_text.function_heads(text.held_out, NUM_COMPLETIONS)
    output = lm.generate(
        target.model,
        target.params,
        [lm.encode_bytes(context + head) for context, head in heads],
        drafter=lm.ModelDrafter(draft.model),
        draft_params=draft.params,
        config=sd.SpecDecodeConfig(num_speculative_tokens=4),
        temperature=temperature,
        max_new_tokens=COMPLETION_BYTES,
        stop_token_ids=[lm.DOCUMENT_SEPARATOR],
    )
    functions = []
    for (_, head), completion in zip(heads, output.completions, strict=True):
        functions.append(function_text(head, lm.decode_bytes(completion)))
    stats = sd.AcceptanceStats.from_steps(output.steps)
    return {
        "held_out_bits_per_byte": {
            **bits,
            "difference": round(bits["draft"] - bits["target"], 4),
        },
        "completions": {
            "count": len(functions),
            "temperature": temperature,
            "parsed": sum(parses(source) for source, _ in functions),
            "ended": sum(ended for _, ended in functions),
            "context_bytes": stdlib_text.CONTEXT_BYTES,
            "completion_bytes": COMPLETION_BYTES,
        },
        "speculative_decoding_of_the_completions": {
            "num_speculative_tokens": 4,
            "mean_acceptance_length": round(stats.mean_acceptance_length, 3),
            "unconditional_rates": [round(rate, 3) for rate in stats.unconditional_rates],
        },
        "examples": [source for source, _ in functions[:: NUM_COMPLETIONS // 5]],
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    parser.add_argument("--stdlib", type=Path, help="default: that of the running Python")
    parser.add_argument("--target", type=Path, help="checkpoint; default: the embedded one")
    parser.add_argument("--draft", type=Path, help="checkpoint; default: the embedded one")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results.json"))
    args = parser.parse_args()
    target, draft = lm.load_embedded_pair()
    target = lm.load_huggingface(args.target, "float32") if args.target else target
    draft = lm.load_huggingface(args.draft, "float32") if args.draft else draft
    text = stdlib_text.read_text(args.stdlib)
    weights = Path(sd.__file__).parent / "lm" / "weights"
    digests = {
        name: hashlib.sha256((directory / "model.safetensors").read_bytes()).hexdigest()
        for name, directory in (
            ("target", args.target or weights / "target"),
            ("draft", args.draft or weights / "draft"),
        )
    }
    results = {
        "evaluation": {
            "python": platform.python_version(),
            "jax": jax.__version__,
            "device": jax.devices()[0].device_kind,
            "text_sha256": stdlib_text.digest(text),
            "weights_sha256": digests,
            "held_out": [name for name, _ in text.held_out],
            **evaluate(target, draft, text, args.temperature),
        }
    }
    for name, directory in (("target", args.target), ("draft", args.draft)):
        if directory and (directory / "training.json").exists():
            results[f"{name}_training"] = json.loads((directory / "training.json").read_text())
    print(json.dumps(results["evaluation"], indent=2))
    args.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
