"""What the parts of a target's pass cost by how many rows it has, on one GPU.

    python benchmarks/bench_rows_gpu.py

A step with K = 4 drafts of 64 requests is a pass over 320 rows. Up to some number of rows the
products of a pass take the time in which its weights are read, and beyond it the time of their
arithmetic, or that of tiles that do not fill the GPU. For the shape of Llama 3 8B in bfloat16,
milliseconds of a pass: the products of all layers, as XLA compiles them by default, with cuBLAS
alone, and by PyTorch in a CUDA graph; the output matrix; and attention over a cache. Beside them
the times of the weights' bytes at the speed of a copy, and of the arithmetic at `PEAK`.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import llamas
import measure
from jax import lax

import jax_specdec as sd
from jax_specdec import lm

PEAK = 989e12
"""Operations a second of an H100 in bfloat16, by its data sheet."""
ROOM, USED = 1024, 600
"""Positions of each request's cache, and those that hold tokens."""
CALLS = 20
XLA = {"XLA": {}, "XLA, cuBLAS": {"xla_gpu_enable_triton_gemm": False}}

Run = Callable[[], Any]


def shapes(config: lm.models.DecoderConfig) -> list[tuple[int, int]]:
    """Returns the matrices of a layer, in the order of their use."""
    spec = config.layers[0]
    heads, keys, values = spec.head_sizes
    hidden, inner = config.hidden_size, spec.intermediate_size
    return [(hidden, heads + keys + values), (heads, hidden), (hidden, 2 * inner), (inner, hidden)]


def layer(x: Any, matrices: Any, silu: Callable[[Any], Any]) -> Any:
    """Returns ``[M, H]``: the products of a layer, one after another; attention is left out."""
    qkv, out, gate_up, down = matrices
    x = (x @ qkv)[:, : out.shape[0]] @ out
    both = x @ gate_up
    inner = down.shape[0]
    return (silu(both[:, :inner]) * both[:, inner:]) @ down


def xla_products(
    config: lm.models.DecoderConfig, matrices: list[jax.Array], rows: int, options: dict[str, Any]
) -> Run:
    """Returns a pass: every layer reads the same matrices, which no cache of a GPU holds."""

    def run(x: jax.Array, matrices: list[jax.Array]) -> jax.Array:
        def body(_: Any, x: jax.Array) -> jax.Array:
            return layer(x, matrices, jax.nn.silu)

        return lax.fori_loop(0, len(config.layers), body, x)

    x = jnp.ones((rows, config.hidden_size), jnp.bfloat16)
    compiled = jax.jit(run).lower(x, matrices).compile(compiler_options=options)
    return functools.partial(compiled, x, matrices)


def attention_of_all(
    config: lm.models.DecoderConfig, query: jax.Array, cache: Any, start: jax.Array
) -> Run:
    """Returns attention of all layers in one loop; single calls would take what the host takes."""

    def run(query: jax.Array, cache: Any, start: jax.Array) -> jax.Array:
        def body(_: Any, query: jax.Array) -> jax.Array:
            return sd.decode_attention(query, *cache, start)

        return lax.fori_loop(0, len(config.layers), body, query)

    compiled = jax.jit(run).lower(query, cache, start).compile()
    return functools.partial(compiled, query, cache, start)


def torch_products(config: lm.models.DecoderConfig, rows: int) -> Run:
    """Returns the same pass as a CUDA graph of PyTorch."""
    import torch

    make = functools.partial(torch.ones, dtype=torch.bfloat16, device="cuda")
    # Transposed, as `torch.nn.Linear` has them.
    matrices = [(make((outputs, inputs)) / inputs).t() for inputs, outputs in shapes(config)]
    x = make((rows, config.hidden_size))

    def run() -> Any:
        found = x
        for _ in range(len(config.layers)):
            found = layer(found, matrices, torch.nn.functional.silu)
        return found

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = run()

    def replay() -> None:
        graph.replay()
        torch.cuda.synchronize()
        assert kept.shape == x.shape  # which the graph writes

    return replay


def calls(compiled: Any, *arguments: Any) -> Run:
    """Returns `CALLS` calls, one after another on the device, while the host is ahead."""
    return lambda: [compiled(*arguments) for _ in range(CALLS)]


def measure_rows(
    config: lm.models.DecoderConfig, bandwidth: float, options: Any, batch: int, each: int
) -> list[dict[str, Any]]:
    """Returns a row, milliseconds of a pass over `each` rows of each of `batch` requests."""
    rows = batch * each
    keys = jax.random.split(jax.random.key(0), 8)
    random = functools.partial(jax.random.normal, dtype=jnp.bfloat16)
    matrices = [
        random(key, shape) * shape[0] ** -0.5
        for key, shape in zip(keys, shapes(config), strict=False)
    ]
    output = random(keys[4], (config.hidden_size, config.vocab_size))
    x = random(keys[5], (rows, config.hidden_size))
    spec = config.layers[0]
    heads = batch * spec.num_key_value_heads
    query = random(keys[6], (batch, each, spec.num_attention_heads, spec.head_dim))
    cache = (
        random(keys[7], (heads, spec.head_dim, ROOM)),
        random(keys[7], (heads, ROOM, spec.head_dim)),
    )
    start = jnp.full((batch,), USED, jnp.int32)
    product = jax.jit(jnp.matmul).lower(x, output).compile()
    attention = attention_of_all(config, query, cache, start)
    ways: dict[str, tuple[Run, int]] = {
        name: (xla_products(config, matrices, rows, flags), 1)
        for name, flags in XLA.items()
        if not options.tiny or not flags
    }
    if not options.tiny and importlib.util.find_spec("torch"):
        ways["PyTorch"] = torch_products(config, rows), 1
    ways["output matrix"] = calls(product, x, output), CALLS
    ways["attention"] = attention, 1
    samples = measure.alternate({name: run for name, (run, _) in ways.items()}, options.repeats)
    ms = {name: measure.median(samples[name]) / each * 1e3 for name, (_, each) in ways.items()}
    size = len(config.layers) * sum(a * b for a, b in shapes(config))
    row = {
        "batch": batch,
        "each": each,
        "rows": rows,
        "ms": ms,
        "bytes_ms": 2 * size / bandwidth * 1e3,
        "arithmetic_ms": 2 * size * rows / PEAK * 1e3,
        "samples": samples,
    }
    return [row]


def main(command_line: list[str] | None = None) -> int:
    parser = measure.gpu_parser(__doc__, repeats=5, seconds=200)
    parser.add_argument("--batches", type=int, nargs="+", default=[64, 32, 48, 8])
    parser.add_argument("--each", type=int, nargs="+", default=[5, 1], help="rows of each request")
    options = parser.parse_args(command_line)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch needs memory too
    clock = measure.begin(options)
    if clock is None:
        return 0
    config = llamas.TINY if options.tiny else llamas.LLAMA_3_8B
    bandwidth = 3e12 if options.tiny else measure.copy_bandwidth()
    results = measure.Results(
        "rows_of_passes_gpu", ("batch", "each"), options.output, copy_bytes_per_second=bandwidth
    )
    measured = functools.partial(measure_rows, config, bandwidth, options)
    cells = {
        f"{batch} x {each} rows": (batch, each)
        for each, batch in itertools.product(options.each, options.batches)
    }
    status = measure.measure_cells(results, clock, measured, cells)
    shown = [
        {"B": row["batch"], "rows": row["rows"]}
        | {name: f"{ms:.2f}" for name, ms in row["ms"].items()}
        | {"bytes": f"{row['bytes_ms']:.2f}", "arithmetic": f"{row['arithmetic_ms']:.2f}"}
        for row in sorted(results.rows, key=lambda row: row["rows"])
    ]
    measure.show("ms of the parts of a pass, by its rows", shown)
    return status


if __name__ == "__main__":
    raise SystemExit(main())
