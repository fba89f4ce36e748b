"""Attention over a cache on a GPU: the kernel, XLA, cuDNN, and whole passes of an 8B model.

A cell is a cache of B requests and T positions (`room`), of which `used` hold tokens, and S new
rows of each request, in the shape of Llama 3 8B. "xla" is one product over all T, as before the
kernel. "us" are those of the kernels of one layer, "ms" those of a whole pass; "bytes" the time in
which a copy moves what has to be read.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import llamas
import measure
from jax import lax

import jax_specdec as sd
from jax_specdec import lm
from jax_specdec._src.mosaic import gpus

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
CACHES = (
    *((8, 8192), (32, 4096), (1, 16384), (1, 4096), (32, 512), (8, 512), (1, 512)),
    *((32, 1024), (8, 1024), (1, 1024), (8, 4096)),
)
ROWS, CHUNK = (1, 5, 9), 256  # new rows; those of a prompt
USED = 508
PASSES = tuple(
    (batch, room, used)
    for batch, room, all_used in (
        (8, 8192, (USED, 2044, 4088, 8184)),
        (32, 4096, (USED, 1020, 2044, 4088)),
        (1, 16384, (USED, 16376)),
    )
    for used in all_used
)
PASS_ROWS, PASSES_AT_ONCE = 5, 20
Way = Callable[..., jax.Array]
Rows = Iterator[list[dict[str, Any]]]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = measure.gpu_parser(__doc__, repeats=7, seconds=500)
    options = parser.parse_args(arguments)
    clock = measure.begin(options)
    if clock is None:
        return 0
    bandwidth = 3e12 if options.tiny else measure.copy_bandwidth()
    results = measure.Results("attention_gpu", (), options.output, copy_bytes_per_s=bandwidth)
    for part in (_passes, _layers):
        for rows in part(options, clock, bandwidth):
            results.add(rows)
    for unit in ("ms", "us"):
        rows = [row for row in results.rows if f"bytes {unit}" in row]
        shown = [
            {key: value for key, value in row.items() if not isinstance(value, dict)}
            for row in rows
        ]
        keys = max(shown, key=len, default={})  # cuDNN does not take every shape
        measure.show(unit, [{key: row.get(key, "") for key in keys} for row in shown])
    return 0


def _layers(options: Any, clock: measure.Clock, bandwidth: float) -> Rows:
    for batch, room in ((2, 64),) if options.tiny else CACHES:
        for count in (*ROWS, CHUNK) if batch == 8 and room > 512 else ROWS:
            if clock.is_late(batch, room, count):
                return
            rows = _cell(options, batch, room, count, bandwidth)
            clock.say(*(f"{key} {value}" for key, value in rows[-1].items() if key != "samples"))
            yield rows


def _cell(
    options: Any, batch: int, room: int, count: int, bandwidth: float
) -> list[dict[str, Any]]:
    random = functools.partial(jax.random.normal, dtype=jnp.bfloat16)
    of_query, of_keys, of_values = jax.random.split(jax.random.key(0), 3)
    query = random(of_query, (batch, count, HEADS, HEAD_DIM))
    keys = random(of_keys, (batch * KV_HEADS, HEAD_DIM, room))
    values = random(of_values, (batch * KV_HEADS, room, HEAD_DIM))
    given = {"query": query, "keys": keys, "values": values}
    attend = functools.partial(sd.decode_attention, finite_cache=True)
    ways: dict[str, Way] = {"xla": functools.partial(attend, implementation="xla")}
    others: dict[str, Way] = {}
    if not options.tiny:
        ways["kernel"] = functools.partial(attend, implementation="mosaic_gpu")
        others = {"cudnn": _cudnn} | ({"pallas": _pallas} if count == 1 else {})
    theirs = given | _in_their_layout(**given)
    programs = {name: _compiled(way, given) for name, way in ways.items()}
    programs |= {name: _compiled(way, theirs) for name, way in others.items()}
    rows = []
    for used in sorted({min(USED, room - count), room - count}):
        start = jnp.full((batch,), used, jnp.int32)
        samples = {}
        for name, program in programs.items():
            arrays = theirs if name in others else given
            samples[name] = _times(options, program, arrays | {"start": start})
        us = {name: round(measure.median(own), 1) for name, own in samples.items() if own}
        bytes_ = 2 * 2 * batch * KV_HEADS * HEAD_DIM * (used + count)
        cell = {"batch": batch, "room": room, "used": used, "rows": count}
        cell |= {"bytes us": round(bytes_ / bandwidth * 1e6, 1), **us}
        rows.append({**cell, "samples": samples})
    return rows


def _compiled(way: Way, given: dict[str, Any]) -> Any:
    """The program of a way; None where it does not take these shapes."""
    start = jax.ShapeDtypeStruct(given["query"].shape[:1], jnp.int32)
    try:
        run = jax.jit(
            lambda query, keys, values, start, **pages: way(query, keys, values, start, **pages)
        )
        return run.lower(**given, start=start).compile()
    except (ValueError, RuntimeError, ImportError) as error:
        print(f"left out: {str(error).splitlines()[0][:150]}", file=sys.stderr)
        return None


def _times(options: Any, program: Any, given: dict[str, Any]) -> list[float]:
    """Microseconds of all kernels of a call, several times; none where there is no program."""
    if program is None:
        return []
    if options.tiny:
        return [0.0 for _ in jax.block_until_ready(program(**given))]
    runs = [measure.kernel_times(program, given) for _ in range(options.repeats)]
    return [sum(us for _, us in run.values()) for run in runs]


def _in_their_layout(query: Any, keys: Any, values: Any) -> dict[str, Any]:
    """Keys and values ``[B, T, Nkv, D]``, as cuDNN and Pallas' own kernel take them."""
    shape = query.shape[0], KV_HEADS, keys.shape[2], HEAD_DIM
    keys = keys.swapaxes(1, 2).reshape(shape).swapaxes(1, 2)
    return {"keys": keys, "values": values.reshape(shape).swapaxes(1, 2)}


def _cudnn(query: Any, keys: Any, values: Any, start: Any) -> Any:
    """Reads the same bytes: every row sees all new rows."""
    return jax.nn.dot_product_attention(
        query, keys, values, key_value_seq_lengths=start + query.shape[1], implementation="cudnn"
    )


def _pallas(query: Any, keys: Any, values: Any, start: Any) -> Any:
    """The deprecated kernel that JAX has for one row."""
    from jax.experimental.pallas.ops.gpu import decode_attention

    scale = HEAD_DIM**-0.5
    found = decode_attention.gqa(query[:, 0], keys, values, kv_seq_len=start + 1, sm_scale=scale)
    return found[:, None]


@contextlib.contextmanager
def _without_kernel() -> Iterator[None]:
    """Models attend by XLA."""
    with mock.patch.object(gpus, "not_by_default", lambda: "this is the comparison"):
        yield


def _passes(options: Any, clock: measure.Clock, bandwidth: float) -> Rows:
    config = llamas.TINY if options.tiny else llamas.LLAMA_3_8B
    model = lm.models.Llama(config, "bfloat16")
    params = llamas.random_params(model, 0)
    bytes_of_weights = sum(x.nbytes for x in jax.tree.leaves(params))
    programs: dict[str, Any] = {}
    before = None
    for batch, room, used in ((2, 64, 9),) if options.tiny else PASSES:
        if clock.is_late(batch, room, used):
            return
        ids = jnp.zeros((batch, PASS_ROWS), jnp.int32)
        given = params, ids, jnp.full((batch,), used, jnp.int32)
        if (batch, room) != before:
            cache = model.init_cache(batch, room)
            programs = _programs(model, *given, cache)
            before = batch, room
        samples: dict[str, list[float]] = {name: [] for name in programs}
        for _ in range(options.repeats):
            for name, program in programs.items():
                for is_counted in (False, True):
                    begin = time.perf_counter()
                    _, cache = jax.block_until_ready(program(*given, cache))
                    if is_counted:
                        samples[name].append(time.perf_counter() - begin)
        ms = {k: round(measure.median(v) / PASSES_AT_ONCE * 1e3, 2) for k, v in samples.items()}
        of_cache = 2 * sum(sum(spec.head_sizes[1:]) for spec in config.layers)  # in 16 bits
        bytes_ = bytes_of_weights + batch * (used + PASS_ROWS) * of_cache
        cell = {"batch": batch, "room": room, "used": used, "rows": PASS_ROWS}
        cell |= {"bytes ms": round(bytes_ / bandwidth * 1e3, 2), **ms}
        clock.say(cell)
        yield [{**cell, "samples": samples}]


def _programs(model: Any, *given: Any) -> dict[str, Any]:
    """Passes one after another, by XLA's attention and by the kernel; the cache is donated."""

    def run(params: Any, ids: Any, start: Any, cache: Any) -> Any:
        def step(_: Any, carry: Any) -> Any:
            ids, cache = carry
            ((logits, _),), cache = model.apply(params, [lm.models.Rows(ids, start)], cache)
            return logits.argmax(-1).astype(jnp.int32), cache  # the next pass waits for these

        return lax.fori_loop(0, PASSES_AT_ONCE, step, (ids, cache))

    programs = {}
    for name, way in (("xla", _without_kernel), ("kernel", contextlib.nullcontext)):
        jax.clear_caches()  # or a trace with the other would be found
        with way():
            programs[name] = jax.jit(run, donate_argnums=3).lower(*given).compile()
    return programs


if __name__ == "__main__":
    sys.exit(main())
