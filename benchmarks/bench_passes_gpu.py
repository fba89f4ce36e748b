"""What a pass over few rows takes with and without the kernels that save launches, on one GPU.

    python benchmarks/bench_passes_gpu.py --seconds 120

Small models wait for launches rather than for bytes. Each model is cut to a few layers, whose
weights no cache of a GPU holds, and has a vocabulary of 1,024; passes run in a loop on the device,
each after the one before. Microseconds of a layer, of which some are the ends of a pass, in three
ways: XLA alone; heads rotated and written by a kernel; and splits of attention joined by its
kernel, too. The first way is what `BY_KERNEL = False` and `JOINED = ()` give.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import llamas
import measure
from jax import lax

from jax_specdec import lm
from jax_specdec._src.attention import mosaic_gpu
from jax_specdec.lm.models import rotate

MODELS: dict[str, tuple[lm.models.DecoderConfig, int]] = {
    "qwen-0.5b": (llamas.QWEN2_05B, 12),
    "qwen-1.5b": (llamas.QWEN2_15B, 12),
    "8b": (llamas.LLAMA_3_8B, 4),
    "smollm2": (llamas.SMOLLM2_135M, 24),
}
"""Each model, and the layers it is cut to."""
CELLS = [
    *[("qwen-0.5b", 1, 1), ("8b", 32, 5), ("qwen-1.5b", 1, 1), ("8b", 1, 5), ("smollm2", 1, 1)],
    *[("qwen-1.5b", 1, 5), ("8b", 8, 5), ("8b", 1, 1), ("8b", 32, 1), ("8b", 8, 1)],
    *[("smollm2", 1, 5), ("qwen-0.5b", 1, 5)],
]
"""Models, requests and rows of each, what matters most first."""
JOINED = mosaic_gpu.JOINED
WAYS = {"XLA": (False, ()), "rotated": (True, ()), "joined": (True, JOINED)}
"""Values of the switches of both kernels."""
ROOM, USED, PASSES = 1024, 400, 100


def passes(
    config: lm.models.DecoderConfig, depth: int, batch: int, rows: int
) -> Callable[[], jax.Array]:
    """Returns `PASSES` passes of a model cut to `depth` layers, compiled."""
    config = dataclasses.replace(llamas.cut(config, depth), vocab_size=1024)
    model = lm.models.Llama(config, jnp.dtype("bfloat16"))
    params = llamas.random_params(model, 0)
    cache = model.init_cache(batch, ROOM)
    start = jnp.full((batch,), USED, jnp.int32)

    def run(params: Any, start: jax.Array, cache: Any) -> jax.Array:
        def body(_: jax.Array, carry: Any) -> Any:
            token_ids, cache = carry
            (output,), cache = model.apply(params, [lm.models.Rows(token_ids, start)], cache)
            # [B, S, V] -> [B, S]: the next pass waits for this one
            return jnp.argmax(output.logits, axis=2).astype(jnp.int32), cache

        first = jnp.zeros((batch, rows), jnp.int32)
        return lax.fori_loop(0, PASSES, body, (first, cache))[0]

    compiled = jax.jit(run).lower(params, start, cache).compile()
    return functools.partial(compiled, params, start, cache)


def measure_passes(ways: list[str], repeats: int, name: str, batch: int, rows: int) -> list[Any]:
    """Returns a row: microseconds of a layer in each way."""
    config, depth = MODELS[name]
    runs = {}
    for way in ways:
        rotate.BY_KERNEL, mosaic_gpu.JOINED = WAYS[way]
        jax.clear_caches()  # of traces in another way
        runs[way] = passes(config, depth, batch, rows)
    samples = measure.alternate(runs, repeats, warm_up=1)
    us = {way: measure.median(samples[way]) / PASSES / depth * 1e6 for way in ways}
    row = {"model": name, "batch": batch, "rows": rows, "layers": depth, "us": us}
    return [row | {"samples": samples}]


def main(command_line: list[str] | None = None) -> int:
    parser = measure.gpu_parser(__doc__, repeats=5, seconds=100)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["XLA", "joined"])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    options = parser.parse_args(command_line)
    clock = measure.begin(options)
    if clock is None:
        return 0
    results = measure.Results("passes_gpu", ("model", "batch", "rows"), options.output)
    cells = {
        f"{name}, {batch} x {rows}": (name, batch, rows)
        for name, batch, rows in CELLS
        if name in options.models
    }
    if options.tiny:
        MODELS["tiny"] = llamas.TINY, 2
        cells = {"tiny": ("tiny", 2, 3)}
    switches = rotate.BY_KERNEL, mosaic_gpu.JOINED
    try:
        measured = functools.partial(measure_passes, options.ways, options.repeats)
        status = measure.measure_cells(results, clock, measured, cells)
    finally:
        rotate.BY_KERNEL, mosaic_gpu.JOINED = switches
    shown = []
    for row in results.rows:
        layers = 2 if options.tiny else len(MODELS[row["model"]][0].layers)
        shown.append(
            {"model": row["model"], "B": row["batch"], "rows": row["rows"]}
            | {f"{way}, us a layer": f"{us:.1f}" for way, us in row["us"].items()}
            | {f"{way}, ms a pass": f"{us * layers / 1e3:.2f}" for way, us in row["us"].items()}
        )
    measure.show("A pass over few rows, without the output matrix", shown)
    return status


if __name__ == "__main__":
    raise SystemExit(main())
