"""What steps with trees of drafts cost on one GPU, by nodes, and from which batch a chain wins.

    python benchmarks/bench_trees_gpu.py

A target of the shape of Qwen3-8B with a DSpark head of five of its layers and a block of 7, random
weights in bfloat16, temperature 0.8, the agreement rule. Per batch size, wall times of a plain
step, of a step with a chain of 7 drafts and with trees of 8 to 64 nodes, and of drafting alone;
what is left is the pass, the walk and the commit. Speed-ups are for the tokens per pass that
`results/trees_cpu.json` has for the embedded target's DSpark head.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import llamas
import measure
from bench_block_gpu import block_way
from bench_steps_gpu import time_ways

import jax_specdec as sd
from jax_specdec import lm
from jax_specdec.lm.decoding.core import PLAIN, Decoder
from jax_specdec.lm.drafting.drafter import NoDrafter

CHAIN = 0
"""In place of a number of nodes."""


def config_of(num_drafts: int) -> sd.SpecDecodeConfig:
    return sd.SpecDecodeConfig(
        num_speculative_tokens=num_drafts, rejection_sample_method="agreement"
    )


def measure_batch(
    target: Any, params: Any, way: Any, options: Any, size: int
) -> list[dict[str, Any]]:
    """A row for the chain, and for each number of nodes."""
    plain = dataclasses.replace(PLAIN, rejection_sample_method="agreement")
    runs: dict[str, Any] = {"plain": (Decoder(target, NoDrafter(), plain), "step", params, None)}
    for nodes in options.nodes:
        drafter = way.drafter
        if nodes != CHAIN:
            given = dict(tree_depth=way.k, num_candidates=options.candidates or None)
            drafter = dataclasses.replace(drafter, **given)
        decoder = Decoder(target, drafter, config_of(way.k if nodes == CHAIN else nodes - 1))
        runs |= {
            f"{nodes}, {kind}": (decoder, kind, params, way.params) for kind in ("step", "draft")
        }
    samples = time_ways(runs, size, options.prompt, options)
    ms = {name: measure.median(x) / options.steps * 1e3 for name, x in samples.items()}
    return [
        {
            "batch": size,
            "nodes": nodes,
            "candidates": options.candidates,
            "depth": way.k,
            "steps": options.steps,
            "ms": {
                "plain": ms["plain"],
                "step": ms[f"{nodes}, step"],
                "draft": ms[f"{nodes}, draft"],
            },
            "samples": {"plain": samples["plain"], "step": samples[f"{nodes}, step"]},
        }
        for nodes in options.nodes
    ]


def tokens_per_pass(temperature: float) -> dict[int, float]:
    """By nodes, of the embedded target's DSpark head; empty if it was not measured."""
    document = measure.load(measure.RESULTS / "trees_cpu.json") or {"rows": []}
    return {
        row["nodes"]: row["tokens_per_pass"]
        for row in document["rows"]
        if (row["drafter"], row["temperature"]) == ("dspark", temperature)
    }


def show(rows: list[dict[str, Any]]) -> None:
    lengths = tokens_per_pass(0.8)
    cells = []
    for row in rows:
        ms, length = row["ms"], lengths.get(row["nodes"])
        cells.append(
            {
                "B": row["batch"],
                "nodes": row["nodes"] or f"chain of {row['depth']}",
                "plain step": f"{ms['plain']:.3f}",
                "step": f"{ms['step']:.3f}",
                "pays above": f"{ms['step'] / ms['plain']:.2f}",
                "drafting": f"{ms['draft']:.3f}",
                "speed-up": f"{length * ms['plain'] / ms['step']:.2f}" if length else "-",
            }
        )
    measure.show("ms; tokens per step above which drafts pay; speed-up at T = 0.8", cells)


def main(command_line: list[str] | None = None) -> int:
    parser = measure.gpu_parser(__doc__, repeats=5, seconds=450)
    add = parser.add_argument
    add("--batches", type=int, nargs="+", default=[1, 4, 8, 16, 32])
    add(
        "--nodes",
        type=int,
        nargs="+",
        default=[CHAIN, 8, 16, 32, 64],
        help="the newest token and the drafts; 0 for a chain",
    )
    add("--candidates", type=int, default=64, help="of each row of the block; 0 for all ids")
    add("--steps", type=int, default=32, help="per run")
    add("--prompt", type=int, default=128, help="tokens before the first step")
    options = parser.parse_args(command_line)
    clock = measure.begin(options)
    if clock is None:
        return 0
    target = lm.models.Llama(llamas.TINY if options.tiny else llamas.QWEN3_8B, "bfloat16")
    params = llamas.random_params(target, 0)
    way = block_way(target, params, True, 3 if options.tiny else 7, ())
    results = measure.Results("trees_gpu", ("batch", "nodes", "candidates"), options.output)
    measured = functools.partial(measure_batch, target, params, way, options)
    cells = {f"B = {size}": (size,) for size in options.batches}
    status = measure.measure_cells(results, clock, measured, cells)
    show(results.rows)
    return status


if __name__ == "__main__":
    raise SystemExit(main())
