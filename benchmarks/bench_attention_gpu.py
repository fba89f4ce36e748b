"""Attention over a cache on a GPU: the kernel, XLA, cuDNN, and whole passes of an 8B model.

A cell is a cache of B requests and T positions (`room`), of which `used` hold tokens, and S new
rows of each request, in the shape of Llama 3 8B. "xla" is one product over all T, as before the
kernel. "us" are those of the kernels of one layer, "ms" those of a whole pass; "bytes" the time in
which a copy moves what has to be read.

With `--layouts`: one layer over the same keys and values in each layout that `decode_attention`
takes, and how far what each reads is from the first, which is that of the tables above.

With `--paged`: the kernel over pages beside FlashInfer's, if `--flashinfer` names a folder with its
modules (see `flashinfer_paged`), and beside Pallas' own, which takes one row.
"""

from __future__ import annotations

import contextlib
import functools
import pathlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import flashinfer_paged
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
PAGES = 16, 64, 256  # positions of a page
LAYOUTS = "heads first", "positions first", *(f"pages of {page}" for page in PAGES)
LAYOUT_CELLS = (  # requests, positions, new rows, numbers of a head
    *((1, 4096, 5, 128), (8, 1024, 5, 128), (32, 1024, 5, 128), (8, 4096, 5, 128)),
    *((1, 16384, 5, 128), (1, 512, 5, 128), (8, 512, 5, 256), (1, 4096, 5, 256)),
    *((8, 8192, 5, 128), (32, 4096, 5, 128), (32, 512, 5, 128), (8, 512, 5, 128)),
    *((32, 4096, 5, 256), (1, 16384, 5, 256), (32, 4096, 5, 64), (32, 4096, 1, 128)),
    *((8, 8192, 1, 128), (1, 16384, 1, 128)),
)
PAGED_CELLS = (  # requests, positions, new rows
    *((8, 8192, 1), (8, 8192, 5), (1, 16384, 1), (1, 16384, 5), (32, 4096, 1), (32, 4096, 5)),
    *((8, 1024, 1), (8, 1024, 5), (1, 4096, 1), (1, 4096, 5)),
)

CELL = "batch room used rows"  # keys of a row that name it, with another of each table

Way = Callable[..., jax.Array]
Rows = Iterator[list[dict[str, Any]]]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = measure.gpu_parser(__doc__, repeats=7, seconds=500)
    parser.add_argument("--layouts", action="store_true", help="compare layouts, and nothing else")
    parser.add_argument("--paged", action="store_true", help="compare kernels of others over pages")
    parser.add_argument("--flashinfer", type=pathlib.Path, help="folder of its modules")
    options = parser.parse_args(arguments)
    clock = measure.begin(options)
    if clock is None:
        return 0
    bandwidth = 3e12 if options.tiny else measure.copy_bandwidth()
    name, identity, parts = "attention_gpu", "", (_passes, _layers)
    if options.layouts:
        name, identity, parts = "attention_layouts_gpu", f"{CELL} head", (_layouts,)
    if options.paged:
        name, identity, parts = "attention_paged_gpu", f"{CELL} page", (_paged,)
    results = measure.Results(
        name, tuple(identity.split()), options.output, copy_bytes_per_s=bandwidth
    )
    for part in parts:
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


def _layouts(options: Any, clock: measure.Clock, bandwidth: float) -> Rows:
    for cell in ((2, 256, 5, 64),) if options.tiny else LAYOUT_CELLS:
        if clock.is_late(*cell):
            return
        rows = _layout_cell(options, *cell, bandwidth)
        for row in rows:
            clock.say({key: value for key, value in row.items() if key != "samples"})
        yield rows


def _paged(options: Any, clock: measure.Clock, bandwidth: float) -> Rows:
    for cell in ((2, 256, 1),) if options.tiny else PAGED_CELLS:
        for page in PAGES[:2]:
            if clock.is_late(*cell, page):
                return
            rows = _paged_cell(options, *cell, page, bandwidth)
            for row in rows:
                clock.say({key: value for key, value in row.items() if key != "samples"})
            yield rows


def _paged_cell(
    options: Any, batch: int, room: int, count: int, page: int, bandwidth: float
) -> list[dict[str, Any]]:
    inputs = _inputs(batch, room, count, HEAD_DIM)
    given = inputs[f"pages of {page}"]
    attend = functools.partial(sd.decode_attention, finite_cache=True)
    ours = functools.partial(attend, implementation=None if options.tiny else "mosaic_gpu")
    ways: dict[str, tuple[Any, dict[str, Any]]] = {"kernel": (_compiled(ours, given), given)}
    if count == 1 and not options.tiny:
        # Its pages are of one head: [P, page, Nkv, D] -> [Nkv, P, page, D].
        theirs = {name: given[name].transpose(2, 0, 1, 3) for name in ("keys", "values")}
        ways["pallas"] = _compiled(_pallas_paged, given | theirs), given | theirs
    rows = []
    for used in sorted({min(USED, room - count), room - count}):
        start = jnp.full((batch,), used, jnp.int32)
        runs = {name: (program, own | {"start": start}) for name, (program, own) in ways.items()}
        if options.flashinfer is not None:
            for kind in ("decode", "rows") if count == 1 else ("rows",):
                program = flashinfer_paged.compiled(options.flashinfer, kind, **given, start=start)
                runs[f"flashinfer, {kind}"] = program
        samples = {name: _times(options, *run) for name, run in runs.items()}
        reads = {name: program(**own) for name, (program, own) in runs.items() if program}
        bytes_ = 2 * 2 * batch * KV_HEADS * HEAD_DIM * (used + count)
        cell = {"batch": batch, "room": room, "used": used, "rows": count, "page": page}
        cell |= {"bytes us": round(bytes_ / bandwidth * 1e6, 1)}
        cell |= {name: round(measure.median(own), 1) for name, own in samples.items() if own}
        rows.append({**cell, "samples": samples, "largest difference": _apart(reads, "kernel")})
    return rows


def _pallas_paged(query: Any, keys: Any, values: Any, start: Any, pages: Any) -> Any:
    """The deprecated kernel that JAX has for one row and pages."""
    from jax.experimental.pallas.ops.gpu import paged_attention

    query = query[:, 0] * jnp.asarray(HEAD_DIM**-0.5, query.dtype)
    settings = {"pages_per_compute_block": 128 // keys.shape[2]}
    return paged_attention.paged_attention(query, keys, values, pages, start + 1, **settings)[
        :, None
    ]


def _apart(reads: dict[str, Any], first: str) -> dict[str, float]:
    """How far what each way reads is from what the first does."""
    wanted = reads[first].astype(jnp.float32)
    return {name: float(jnp.abs(read - wanted).max()) for name, read in reads.items()}


def _layout_cell(
    options: Any, batch: int, room: int, count: int, dim: int, bandwidth: float
) -> list[dict[str, Any]]:
    given = _inputs(batch, room, count, dim)
    attend = functools.partial(sd.decode_attention, finite_cache=True)
    of_kernel = functools.partial(attend, implementation=None if options.tiny else "mosaic_gpu")
    of_xla = functools.partial(attend, implementation="xla")
    ways = {name: (of_kernel, given[name]) for name in LAYOUTS}
    for name in ("heads first", "pages of 64"):
        ways[f"xla, {name}"] = of_xla, ways[name][1]
    # One after another: XLA may choose by timing how to join splits, which others would disturb.
    programs = {name: _compiled(*way) for name, way in ways.items()}
    rows = []
    for used in sorted({min(USED, room - count), room - count}):
        start = jnp.full((batch,), used, jnp.int32)
        samples, reads = {}, {}
        for name, (_, arrays) in ways.items():
            arrays = arrays | {"start": start}
            if "pages" in arrays and not name.startswith("xla"):  # which reads all that is named
                last = -(-(used + count) // arrays["keys"].shape[1])
                arrays["pages"] = arrays["pages"].at[:, last:].set(-1)
            reads[name] = programs[name](**arrays)
            samples[name] = _times(options, programs[name], arrays)
        bytes_ = 2 * 2 * batch * KV_HEADS * dim * (used + count)
        cell = {"batch": batch, "room": room, "used": used, "rows": count, "head": dim}
        cell |= {"bytes us": round(bytes_ / bandwidth * 1e6, 1)}
        cell |= {name: round(measure.median(own), 1) for name, own in samples.items()}
        apart = _apart(reads, "heads first")
        rows.append({**cell, "samples": samples, "largest difference": apart})
    return rows


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _inputs(batch: int, room: int, count: int, dim: int) -> dict[str, dict[str, Any]]:
    """The same arrays in each layout, by its name."""
    random = functools.partial(jax.random.normal, dtype=jnp.bfloat16)
    of_query, of_keys, of_values, of_pages = jax.random.split(jax.random.key(0), 4)
    query = random(of_query, (batch, count, HEADS, dim))
    keys, values = (random(key, (batch, room, KV_HEADS, dim)) for key in (of_keys, of_values))
    given: dict[str, dict[str, Any]] = {
        "heads first": {
            "keys": keys.transpose(0, 2, 3, 1).reshape(-1, dim, room),
            "values": values.swapaxes(1, 2).reshape(-1, room, dim),
        },
        "positions first": {"keys": keys, "values": values},
    }
    for page in PAGES:
        # Page i of the pool is the one that stands at `order[i]` in the tables, and another is of
        # nobody: there lies NaN.
        order = jax.random.permutation(of_pages, batch * room // page)
        pools = {}
        for name, x in (("keys", keys), ("values", values)):
            pool = x.reshape(-1, page, KV_HEADS, dim)[order]
            pools[name] = jnp.concatenate([pool, jnp.full_like(pool[:1], jnp.nan)])
        table = jnp.argsort(order).reshape(batch, -1).astype(jnp.int32)
        given[f"pages of {page}"] = {**pools, "pages": table}
    return {name: {"query": query, **own} for name, own in given.items()}


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
