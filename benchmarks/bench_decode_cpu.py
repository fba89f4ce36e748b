"""Speculative against plain decoding on the CPU, in one run, alternating.

python benchmarks/bench_decode_cpu.py                  # the embedded pair
python benchmarks/bench_decode_cpu.py --target DIR     # a published model drafting by lookup
python benchmarks/bench_decode_cpu.py --target DIR --draft DIR
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import time
from typing import Any, NamedTuple

import jax
import measure

import jax_specdec as sd
from jax_specdec import lm

PROMPTS = {
    "quicksort": "def quicksort(items):",
    "stack": "class Stack:\n    def __init__(self):\n",
    "files": "import os\n\ndef list_files(path):\n",
}

# For models of text: what repeats itself, and what does not.
TEXT_PROMPTS = {
    "code": (
        "class Circle:\n    def __init__(self, radius):\n        self.radius = radius\n\n"
        "    def area(self):\n        return 3.14159 * self.radius ** 2\n\n"
        "    def perimeter(self):\n        return 2 * 3.14159 * self.radius\n\n\nclass Square:\n"
    ),
    "summary": (
        "The lighthouse at Skagen was built in 1858. It stands forty-six metres tall and was, "
        "until 1957, the tallest lighthouse in Denmark. The lamp was first fed with oil, later "
        "with gas, and since 1914 with electricity. Its light can be seen twenty nautical miles "
        "out at sea. The keeper's house beside it is a museum today, and birds of passage rest on "
        "its lawn in spring.\n\nIn short: the lighthouse"
    ),
    "list": "Countries of Europe and their capitals:\n\n1. France: Paris\n2. Italy: Rome\n3.",
    "story": "Once upon a time, in a small village by the sea, there lived",
    "essay": "The history of the printing press begins with",
}


class Case(NamedTuple):
    """One row of the table for each prompt."""

    k: int = 6
    temperature: float = 0.0
    draft: str = "model"


CASES = (
    *(Case(k=k) for k in (1, 2, 3, 4, 5, 6, 8)),
    Case(draft="ngram"),
    Case(temperature=0.8),
)
LOOKUP_CASES = (
    *(Case(k=k, draft="ngram") for k in (2, 4, 6)),
    Case(temperature=0.8, draft="ngram"),
)


class Models(NamedTuple):
    """What decodes, and the prompts and cases it is measured with."""

    target: lm.formats.LoadedModel
    draft: lm.formats.LoadedModel | None
    prompts: dict[str, list[int]]
    cases: tuple[Case, ...]


def embedded() -> Models:
    prompts = {name: lm.encode_bytes(text) for name, text in PROMPTS.items()}
    return Models(*lm.load_embedded_pair(), prompts, CASES)


def published(target: pathlib.Path, draft: pathlib.Path | None) -> Models:
    loaded, tokenizer = lm.load_huggingface(target, "float32"), lm.load_tokenizer(target)
    prompts = {name: tokenizer.encode(text) for name, text in TEXT_PROMPTS.items()}
    size, cases = loaded.model.vocab_size, LOOKUP_CASES
    drafter = draft and lm.load_huggingface(draft, "float32", max_vocab_size=size)
    if drafter:
        cases += (*(Case(k=k) for k in (2, 4, 6)), Case(temperature=0.8))
    return Models(loaded, drafter or None, prompts, cases)


def run(
    models: Models, temperature: float, prompt: str, new_tokens: int, repeats: int
) -> list[dict[str, Any]]:
    """All cases of a temperature, and plain decoding, of one prompt in turn."""
    prompts = [models.prompts[prompt]]
    common: dict[str, Any] = {
        "temperature": temperature,
        "key": jax.random.key(0),
        "max_new_tokens": new_tokens,
    }

    def speculative(case: Case) -> lm.GenerateOutput:
        model = models.draft if case.draft == "model" else None
        return lm.generate(
            *models.target,
            prompts,
            drafter=lm.ModelDrafter(model.model) if model else lm.NGramDrafter(),
            draft_params=model.params if model else None,
            config=sd.SpecDecodeConfig(num_speculative_tokens=case.k),
            **common,
        )

    def plain() -> lm.GenerateOutput:
        return lm.generate_plain(*models.target, prompts, **common)

    cases = {str(i): case for i, case in enumerate(models.cases) if case.temperature == temperature}
    runs = {name: functools.partial(speculative, case) for name, case in cases.items()}
    runs["plain"] = plain
    cpu_samples: dict[str, list[float]] = {name: [] for name in runs}

    def counted(name: str) -> None:
        begin = time.process_time()
        runs[name]()
        cpu_samples[name].append(time.process_time() - begin)

    timed = {name: functools.partial(counted, name) for name in runs}
    samples = measure.alternate(timed, repeats, warm_up=1)
    plain_output, rows = plain(), []
    for name, case in cases.items():
        output = runs[name]()
        stats = sd.AcceptanceStats.from_steps(output.steps)
        differences = []
        if temperature == 0:
            differences = lm.greedy_differences(*models.target, prompts, output, plain_output)
        rows.append(
            {
                **case._asdict(),
                "prompt": prompt,
                "new_tokens": new_tokens,
                "mean_acceptance_length": stats.mean_acceptance_length,
                "tokens_per_target_pass": stats.tokens_per_target_pass,
                "unconditional_rates": stats.unconditional_rates,
                "differences": [dataclasses.asdict(d) for d in differences],
                "samples": {"speculative": samples[name], "plain": samples["plain"]},
                "cpu_samples": {
                    "speculative": cpu_samples[name][1:],
                    "plain": cpu_samples["plain"][1:],
                },
            }
        )
    return rows


def speeds(row: dict[str, Any], samples: str = "samples") -> tuple[float, float]:
    """Tokens per second, speculative and plain, the prompt's pass included."""
    ours, plain = (row[samples][name] for name in ("speculative", "plain"))
    return row["new_tokens"] / measure.median(ours), row["new_tokens"] / measure.median(plain)


def cells(row: dict[str, Any]) -> dict[str, Any]:
    ours, plain = speeds(row)
    cpu_ours, cpu_plain = speeds(row, "cpu_samples")
    return {
        "prompt": row["prompt"],
        "draft": row["draft"],
        "K": row["k"],
        "T": f"{row['temperature']:g}",
        "length": f"{row['mean_acceptance_length']:.2f}",
        "tokens/pass": f"{row['tokens_per_target_pass']:.2f}",
        "tokens/s": f"{ours:.0f}",
        "plain": f"{plain:.0f}",
        "ratio": f"{ours / plain:.2f}",
        "CPU ratio": f"{cpu_ours / cpu_plain:.2f}",
    }


def main(arguments: list[str] | None = None) -> None:
    parser = measure.parser(__doc__, repeats=5)
    parser.add_argument("--target", type=pathlib.Path, help="a Hugging Face directory")
    parser.add_argument("--draft", type=pathlib.Path, help="one of a smaller model of its family")
    parser.add_argument("--new-tokens", type=int, default=256)
    options = parser.parse_args(arguments)
    if options.draft and not options.target:
        parser.error("--draft needs --target")
    models = published(options.target, options.draft) if options.target else embedded()
    name = "decode_cpu" + (f"_{options.target.resolve().name}" if options.target else "")
    results = measure.Results(name)
    for temperature in dict.fromkeys(case.temperature for case in models.cases):
        for prompt in models.prompts:
            results.add(run(models, temperature, prompt, options.new_tokens, options.repeats))
    measure.show(
        f"{options.new_tokens} new tokens, batch of 1", [cells(row) for row in results.rows]
    )


if __name__ == "__main__":
    main()
