"""How many drafts are accepted if the drafter's weights have 8 bits, and how near int8 logits are.

    python benchmarks/bench_int8_acceptance.py --published DIR

The drafters of the embedded target, on functions of held-out files as one batch; all weights are
those in the files (bfloat16), and in the second of each two rows the drafter's are quantized. And a
published model (`tools/make_model.py`) beside itself with int8 weights, on these functions: the
mean of ``sum(min(p, q))`` over the tokens is how often a draft of the one would be accepted by the
other. All in float32, on any device.
"""

from __future__ import annotations

import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import measure
import numpy as np

import jax_specdec as sd
from jax_specdec import lm

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "training"))

K = 4
TEMPERATURES = (0.0, 0.8)
HEADS = ("dspark", "dflash", "eagle3")


def drafters() -> tuple[Any, dict[str, tuple[Any, Any]]]:
    """The embedded target with its weights, and its drafters with theirs."""
    target, (draft, draft_params) = lm.load_embedded_pair()
    found: dict[str, tuple[Any, Any]] = {"model": (lm.ModelDrafter(draft), draft_params)}
    for name in HEADS:
        head, params = lm.load_embedded_head(target, name)
        kind = lm.Eagle3Drafter if name == "eagle3" else lm.BlockDrafter
        found[name] = (kind(head), params)
    return target, found


def accepted(target: Any, drafter: Any, params: Any, prompts: Any, options: Any) -> dict[str, Any]:
    """Mean acceptance lengths, and their standard errors, by temperature."""
    model, target_params = target
    lengths: dict[str, Any] = {}
    for temperature in TEMPERATURES:
        found = []
        for seed in range(options.repeats if temperature else 1):
            steps = lm.generate(
                model,
                target_params,
                prompts,
                drafter=drafter,
                draft_params=params,
                config=sd.SpecDecodeConfig(num_speculative_tokens=K),
                max_new_tokens=options.max_new_tokens,
                temperature=temperature,
                key=jax.random.key(seed),
            ).steps
            # [S, B]: steps that had all K drafts, as the last of a text may not
            found.append(1 + steps.num_accepted[steps.num_proposed == K])
        one = np.concatenate(found)
        error = one.std() / np.sqrt(len(one)) if temperature else 0.0
        lengths[f"{temperature:g}"] = {"mean": float(one.mean()), "error": float(error)}
    return lengths


def overlap(directory: str, texts: list[str]) -> dict[str, Any]:
    """How near the rows of a published model with int8 weights are to its own."""
    model, params = lm.load_huggingface(directory, "float32")
    tokenizer = lm.load_tokenizer(directory)
    int8 = lm.models.quantize(params)
    sums: dict[str, list[float]] = {name: [] for name in ("0", "0.8")}

    @jax.jit
    def compare(params: Any, int8: Any, ids: jax.Array) -> Any:
        rows = lm.models.Rows(ids, jnp.zeros((1,), jnp.int32))
        cache = model.init_cache(1, ids.shape[1])
        p, q = (model.apply(x, [rows], cache)[0][0].logits[0] for x in (params, int8))
        both = jnp.minimum(jax.nn.softmax(p / 0.8), jax.nn.softmax(q / 0.8)).sum(axis=1)
        return p.argmax(axis=1) == q.argmax(axis=1), both

    # all texts, one after another, in pieces of 128 tokens
    tokens = [token for text in texts for token in tokenizer.encode(text)]
    for piece in np.reshape(tokens[: len(tokens) // 128 * 128], (-1, 1, 128)):
        found = compare(params, int8, jnp.asarray(piece, jnp.int32))
        for values, x in zip(sums.values(), found, strict=True):
            values += np.asarray(x, np.float64).tolist()
    return {name: {"mean": float(np.mean(x)), "tokens": len(x)} for name, x in sums.items()}


def main(command_line: list[str] | None = None) -> None:
    import stdlib_text

    parser = measure.parser(__doc__, repeats=2)
    parser.add_argument("--prompts", type=int, default=24, help="functions")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument(
        "--drafters", nargs="*", default=["model", *HEADS], choices=["model", *HEADS]
    )
    parser.add_argument("--published", metavar="DIR", help="a Hugging Face directory")
    options = parser.parse_args(command_line)
    functions = stdlib_text.function_heads(stdlib_text.read_text().held_out, options.prompts)
    texts = [context + head for context, head in functions]
    results = measure.Results("int8_acceptance", ("drafter", "weights"))
    target, all_drafters = drafters()
    prompts = [lm.encode_bytes(text) for text in texts]
    for name in options.drafters:
        drafter, params = all_drafters[name]
        for weights, own in (("bfloat16", params), ("int8", lm.models.quantize(params))):
            lengths = accepted(target, drafter, own, prompts, options)
            results.add([{"drafter": name, "weights": weights, "k": K, "lengths": lengths}])
            print(name, weights, lengths, flush=True)
    if options.published:
        found = overlap(options.published, texts)
        results.add([{"drafter": "SmolLM2 of itself", "weights": "int8", "overlap": found}])
        print(found)


if __name__ == "__main__":
    main()
