"""How many tokens a pass emits with trees of drafts, over their nodes, for the embedded target.

    python benchmarks/bench_trees.py

Functions of held-out files, those of `bench_drafters.py`, as one batch. The text under a seed is
the same for all of a temperature, so the number of passes is all that differs.
"""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import sys
from typing import Any

import jax
import measure
import numpy as np

import jax_specdec as sd
from jax_specdec import lm

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "training"))

CHAIN = 0
"""In place of a number of nodes."""
DEPTH = 7
"""Drafts of a chain, and of the longest path of a tree: those of a block of the DFlash head."""


def drafters(target: Any) -> dict[str, tuple[Any, Any]]:
    """Drafters by name, with their weights."""
    found: dict[str, tuple[Any, Any]] = {}
    for name in ("dflash", "dspark"):
        head, params = lm.load_embedded_head(target, name)
        found[name] = lm.BlockDrafter(head), params
    for name in ("eagle3", "eagle3-64"):
        head, params = lm.load_embedded_head(target, name)
        found[name] = lm.Eagle3Drafter(head), params
    return found


def main(command_line: list[str] | None = None) -> None:
    import stdlib_text

    parser = measure.parser(__doc__, repeats=1)
    add = parser.add_argument
    add("--prompts", type=int, default=16, help="functions")
    add("--max-new-tokens", type=int, default=192)
    add(
        "--nodes",
        type=int,
        nargs="+",
        default=[CHAIN, 8, 16, 32, 64],
        help="the newest token and the drafts; 0 for a chain",
    )
    add("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    add("--drafters", nargs="+", help="by name (default: all)")
    add("--output", type=pathlib.Path, help="folder of results (default: results)")
    options = parser.parse_args(command_line)
    target, _ = lm.load_embedded_pair()
    functions = stdlib_text.function_heads(stdlib_text.read_text().held_out, options.prompts)
    prompts = [lm.encode_bytes(context + head) for context, head in functions]
    ways = drafters(target)
    results = measure.Results(
        "trees_cpu", ("drafter", "nodes", "temperature"), options.output, prompts=len(prompts)
    )
    texts: dict[float, list[list[int]]] = {}
    grid = itertools.product(options.drafters or ways, options.temperatures, options.nodes)
    for name, temperature, nodes in grid:
        drafter, params = ways[name]
        if nodes != CHAIN:
            drafter = dataclasses.replace(drafter, tree_depth=DEPTH)
            if name == "dspark":  # as `bench_trees_gpu.py`, and the command line
                drafter = dataclasses.replace(drafter, num_candidates=64)
        config = sd.SpecDecodeConfig(
            num_speculative_tokens=DEPTH if nodes == CHAIN else nodes - 1,
            rejection_sample_method="agreement",
        )
        output = lm.generate(
            target.model,
            target.params,
            prompts,
            drafter=drafter,
            draft_params=params,
            config=config,
            temperature=temperature,
            max_new_tokens=options.max_new_tokens,
            key=jax.random.key(1),
        )
        emitted = np.asarray(output.steps.num_emitted)
        same = texts.setdefault(temperature, output.completions)
        row = {
            "drafter": name,
            "depth": DEPTH,
            "nodes": nodes,
            "temperature": temperature,
            "tokens_per_pass": float(emitted.sum() / (emitted > 0).sum()),
            "passes": int((emitted > 0).sum()),
            "same_text": sum(map(list.__eq__, same, output.completions)),
        }
        results.add([row])
        print(row, flush=True)
    measure.show(
        "tokens per pass",
        [
            {
                "drafter": row["drafter"],
                "T": f"{row['temperature']:g}",
                "nodes": row["nodes"] or f"chain of {DEPTH}",
                "tokens per pass": f"{row['tokens_per_pass']:.2f}",
            }
            for row in results.rows
        ],
    )


if __name__ == "__main__":
    main()
