"""What drafting a block costs on one GPU, beside an EAGLE-3 head and a draft model.

    python benchmarks/bench_block_gpu.py

A target of the shape of Qwen3-8B, block heads of five of its layers (DSpark with a block of 7,
DFlash with one of 16), an EAGLE-3 head with 32000 ids and a draft model of the shape of Qwen3-0.6B,
random weights in bfloat16, temperature 0.8. Per batch size, wall times of a plain step, of a step
with K drafts and of drafting alone, beside the time in which a large copy moves the bytes that
drafting reads; and the speed-up at the mean lengths that are published for GSM8K and MT-Bench
(arXiv 2607.05147, table 1, temperature 1).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import llamas
import measure
from bench_steps_gpu import make_head, time_ways

import jax_specdec as sd
from jax_specdec import lm
from jax_specdec.lm.decoding.core import PLAIN, Decoder
from jax_specdec.lm.drafting.drafter import NoDrafter

RANK = 256


class Way(NamedTuple):
    """A drafter, its weights, K, the bytes that drafting reads, and published lengths."""

    drafter: Any
    params: Any
    k: int
    draft_bytes: int
    lengths: tuple[float, ...] = ()


def nbytes(*trees: Any) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(trees))


def block_way(target: Any, params: Any, is_dspark: bool, size: int, lengths: Any) -> Way:
    c = target.config
    count = len(c.layers)
    depth = min(5, count)
    config = lm.BlockHeadConfig.of_target(
        c,
        layers=c.layers[:depth],
        aux_hidden_state_layers=tuple(range(count - depth + 1, count + 1)),
        block_size=size,
        mask_token_id=c.vocab_size - 1,
        sample_from_anchor=is_dspark,
        markov_rank=RANK if is_dspark else None,
    )
    head = lm.BlockHead(config, "bfloat16")
    given = jax.jit(head.init_params)(jax.random.key(3), params)
    given |= {name: params[name] for name in ("embed_tokens", "lm_head")}  # not copies
    once = nbytes(given["fc"], given["layers"], given["lm_head"])
    each = nbytes(given["markov_w2"]) if is_dspark else 0
    k = config.max_drafts
    return Way(lm.BlockDrafter(head), given, k, once + k * each, lengths)


def make_ways(target: Any, params: Any, is_tiny: bool) -> dict[str, Way]:
    sizes = (3, 4) if is_tiny else (7, 16)
    k = sizes[0]
    eagle = make_head(target.config, 32 if is_tiny else 32000)
    eagle_params = jax.jit(eagle.init_params)(jax.random.key(2), params)
    eagle_params["embed_tokens"] = params["embed_tokens"]
    layer = nbytes(*(eagle_params[name] for name in ("layer", "lm_head")))
    small = lm.models.Llama(llamas.TINY if is_tiny else llamas.QWEN3_06B, "bfloat16")
    small_params = llamas.random_params(small, 1)
    eagle_bytes = nbytes(eagle_params["fc"]) + k * layer
    model_bytes = k * nbytes(small_params)
    return {
        "DSpark": block_way(target, params, True, sizes[0], (6.17, 3.72)),
        "DFlash": block_way(target, params, False, sizes[1], ()),
        "EAGLE-3": Way(lm.Eagle3Drafter(eagle), eagle_params, k, eagle_bytes, (5.30, 2.66)),
        "model": Way(lm.ModelDrafter(small), small_params, k, model_bytes),
    }


def measure_batch(
    target: Any, params: Any, ways: dict[str, Way], options: Any, size: int
) -> list[dict[str, Any]]:
    """A row for each drafter."""
    runs: dict[str, Any] = {"plain": (Decoder(target, NoDrafter(), PLAIN), "step", params, None)}
    for name, way in ways.items():
        config = sd.SpecDecodeConfig(num_speculative_tokens=way.k)
        decoder = Decoder(target, way.drafter, config)
        runs |= {
            f"{name}, {kind}": (decoder, kind, params, way.params) for kind in ("step", "draft")
        }
    samples = time_ways(runs, size, options.prompt, options)
    rows = []
    for name, way in ways.items():
        of_kind = {"plain": "plain", "step": f"{name}, step", "draft": f"{name}, draft"}
        found = {kind: samples[run] for kind, run in of_kind.items()}
        rows.append(
            {
                "batch": size,
                "drafter": name,
                "k": way.k,
                "steps": options.steps,
                "draft_bytes": way.draft_bytes,
                "lengths": way.lengths,
                "ms": {kind: measure.median(x) / options.steps * 1e3 for kind, x in found.items()},
                "samples": found,
            }
        )
    return rows


def show(rows: list[dict[str, Any]], bandwidth: float | None) -> None:
    cells = []
    for row in rows:
        ms, least = row["ms"], row["draft_bytes"] / bandwidth * 1e3 if bandwidth else 0
        gains = [length * ms["plain"] / ms["step"] for length in row["lengths"]]
        cells.append(
            {
                "B": row["batch"],
                "drafts by": row["drafter"],
                "K": row["k"],
                "plain step": f"{ms['plain']:.3f}",
                "step": f"{ms['step']:.3f}",
                "pays above": f"{ms['step'] / ms['plain']:.2f}",
                "drafting": f"{ms['draft']:.3f}",
                "its bytes": f"{least:.3f}" if least else "-",
                "gives at published lengths": ", ".join(f"{x:.2f}" for x in gains) or "-",
            }
        )
    measure.show("ms; tokens per step above which drafts pay; GSM8K, MT-Bench", cells)


def main(command_line: list[str] | None = None) -> int:
    parser = measure.gpu_parser(__doc__, repeats=5, seconds=500)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--steps", type=int, default=32, help="per run")
    parser.add_argument("--prompt", type=int, default=128, help="tokens before the first step")
    options = parser.parse_args(command_line)
    clock = measure.begin(options)
    if clock is None:
        return 0
    target = lm.models.Llama(llamas.TINY if options.tiny else llamas.QWEN3_8B, "bfloat16")
    params = llamas.random_params(target, 0)
    ways = make_ways(target, params, options.tiny)
    bandwidth = None if options.tiny else measure.copy_bandwidth()
    names = ("batch", "drafter")
    results = measure.Results("block_gpu", names, options.output, copy_bytes_per_second=bandwidth)
    measured = functools.partial(measure_batch, target, params, ways, options)
    cells = {f"B = {size}": (size,) for size in options.batches}
    status = measure.measure_cells(results, clock, measured, cells)
    show(results.rows, bandwidth)
    return status


if __name__ == "__main__":
    raise SystemExit(main())
