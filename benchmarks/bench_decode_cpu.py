"""Speculative against plain decoding with the embedded pair, in one run, alternating."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any, NamedTuple

import jax
import measure
from rich.console import Console
from rich.table import Table

import jax_specdec as sd

PROMPTS = (
    "def quicksort(items):",
    "class Stack:\n    def __init__(self):\n",
    "import os\n\ndef list_files(path):\n",
)


class Case(NamedTuple):
    """One row of the table."""

    k: int = 6
    temperature: float = 0.0
    draft: str = "model"
    goal: float | None = None


CASES = (
    Case(goal=1.4),
    *(Case(k=k) for k in (1, 2, 3, 4, 5, 8)),
    Case(temperature=0.8),
    Case(draft="ngram"),
)


def run(case: Case, prompt: str, new_tokens: int, repeats: int) -> dict[str, Any]:
    (target, params), (draft, draft_params) = sd.load_embedded_pair()
    prompts = [sd.encode(prompt)]
    common: dict[str, Any] = {
        "temperature": case.temperature,
        "key": jax.random.key(0),
        "max_new_tokens": new_tokens,
    }
    model = case.draft == "model"

    def speculative() -> sd.GenerateOutput:
        return sd.generate(
            target,
            params,
            prompts,
            drafter=sd.ModelDrafter(draft) if model else sd.NGramDrafter(),
            draft_params=draft_params if model else None,
            config=sd.SpecDecodeConfig(num_speculative_tokens=case.k),
            **common,
        )

    def plain() -> sd.GenerateOutput:
        return sd.generate_plain(target, params, prompts, **common)

    samples = measure.alternate({"speculative": speculative, "plain": plain}, repeats, warm_up=1)
    output = speculative()
    stats = sd.AcceptanceStats.from_steps(output.steps)
    differences = []
    if case.temperature == 0:
        differences = sd.greedy_differences(target, params, prompts, output, plain())
    return {
        **case._asdict(),
        "prompt": prompt,
        "new_tokens": new_tokens,
        "mean_acceptance_length": stats.mean_acceptance_length,
        "unconditional_rates": stats.unconditional_rates,
        "differences": [dataclasses.asdict(d) for d in differences],
        "samples": samples,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=256)
    options = parser.parse_args()
    table = Table(title=f"{options.new_tokens} new tokens, batch of 1")
    for heading in ("K", "draft", "T", "prompt", "length", "tokens/s", "plain", "ratio", "goal"):
        table.add_column(heading, justify="left" if heading in ("draft", "prompt") else "right")
    rows = []
    console = Console(width=110)
    with console.status("running") as status:
        for case in CASES:
            for prompt in PROMPTS:
                status.update(f"{case}")
                row = run(case, prompt, options.new_tokens, options.repeats)
                rows.append(row)
                ours, plain = (measure.median(row["samples"][n]) for n in ("speculative", "plain"))
                table.add_row(
                    str(case.k),
                    case.draft,
                    f"{case.temperature:g}",
                    prompt.split("\n")[0],
                    f"{row['mean_acceptance_length']:.2f}",
                    f"{options.new_tokens / ours:.0f}",
                    f"{options.new_tokens / plain:.0f}",
                    f"{plain / ours:.2f}",
                    f"{case.goal:g}" if case.goal else "",
                )
    console.print(table)
    path = measure.save("decode_cpu", rows)
    console.print(f"raw samples: {path.name}")


if __name__ == "__main__":
    main()
