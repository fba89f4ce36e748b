"""Caches of three layouts: all read alike, to the last bit, and are written in place."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from lower_floor import attention_gpu as mosaic_gpu
from lower_floor import attention_xla as xla
from verify.interpret_mode import interpret_gpu_params

import jax_specdec as sd

from .test_attention import CASES, ON_GPU, made

Laid = tuple[np.ndarray, np.ndarray, "np.ndarray | None"]

PAGES = ((16, "random"), (64, "reversed"))  # positions of a page, and the order of a table
CUT = {  # what is added to the cases of attention; ends of pages lie inside its chains and trees
    "nothing before, and all of the cache": (2, 5, 2, 2, 64, 192, (0, 187), None, "chain", None),
    "a tree over the end of a page": (2, 12, 2, 1, 64, 192, (60, 122), None, "tree", None),
}


def positions_first(arrays: Any) -> Laid:
    """``[B, T, Nkv, D]``, of keys ``[B * Nkv, D, T]`` and values ``[B * Nkv, T, D]``."""
    batch, dim = len(arrays.query), arrays.query.shape[3]
    keys = arrays.keys.reshape(batch, -1, dim, arrays.keys.shape[2]).transpose(0, 3, 1, 2)
    values = arrays.values.reshape(batch, -1, *arrays.values.shape[1:]).transpose(0, 2, 1, 3)
    return np.ascontiguousarray(keys), np.ascontiguousarray(values), None


def in_pages(arrays: Any, page: int, order: str, window: int | None, seen: int) -> Laid:
    """Pages in some order; NaN lies in those of nobody, and entries that none sees name none."""
    keys, values, _ = positions_first(arrays)
    batch, room = keys.shape[:2]
    count = batch * (room // page)
    table = np.random.default_rng(count).permutation(count + 3)[:count]
    if order == "reversed":
        table = np.arange(count)[::-1]
    table = table.astype(np.int32).reshape(batch, -1)
    pools = []
    for x in (keys, values):
        pool = np.full((count + 3, page, *x.shape[2:]), np.nan, x.dtype)
        pool[table] = x.reshape(*table.shape, page, *x.shape[2:])
        pools.append(pool)
    for b, start in enumerate(arrays.start):
        table[b, -(-(start + seen) // page) :] = [-1, 10**6, -(10**6)][b % 3]
        if window is not None:
            table[b, : max(0, start - window + 1) // page] = -1
    return pools[0], pools[1], table


def check(case: Any, dtype: Any, attend: Any, pages: Any = PAGES, **settings: Any) -> None:
    """Every layout gives the bits of heads first, and these are the oracle's."""
    arrays, wanted, static = made(case, dtype)
    laid = [positions_first(arrays)]
    laid += [in_pages(arrays, *page, static.window, static.num_visible) for page in pages]
    ways = [arrays]
    ways += [arrays._replace(keys=k, values=v, pages=table) for k, v, table in laid]
    run = functools.partial(attend, static=static, **settings)
    ours, *others = map(np.asarray, jax.jit(lambda ways: [run(way) for way in ways])(ways))
    error = 2e-6 if dtype == np.float32 else 1.5e-2
    np.testing.assert_allclose(np.float64(ours), wanted, rtol=error, atol=error)
    for other in others:
        assert other.tobytes() == ours.tobytes()


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize(
    "name",
    [
        *list(CASES)[:6],
        *(pytest.param(x, marks=pytest.mark.slow) for x in [*list(CASES)[6:], *CUT]),
    ],
)
def test_every_layout_is_the_oracle_to_the_same_bits(name: str) -> None:
    check((CASES | CUT)[name], np.float32, xla.attend)


OF_KERNEL = {
    "two splits": (2, 5, 2, 2, 128, 192, (30, 150), None, "chain", (0, 2, 3)),
    "a window": (2, 5, 1, 4, 64, 256, (127, 10), 40, "chain", None),
    "large heads": (1, 5, 1, 2, 256, 192, (150,), None, "tree", (0, 1, 3)),
}
MORE_PAGES = *PAGES, (48, "random"), (192, "reversed")


@pytest.mark.long
@pytest.mark.newest
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[pytest.mark.slow] * (x != "two splits")) for x in OF_KERNEL]
)
def test_every_layout_is_the_oracle_in_the_interpreted_kernel(name: str) -> None:
    case = OF_KERNEL[name]
    pages = MORE_PAGES[2:3] if name == "two splits" else PAGES[:1]
    settings: dict[str, Any] = {"interpret": interpret_gpu_params(), "bounds": case[-1]}
    check(case, jnp.bfloat16, mosaic_gpu.attend, pages, **settings)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=str)
@pytest.mark.parametrize("name", [*ON_GPU, *CUT, *OF_KERNEL])
def test_every_layout_is_the_oracle_in_the_kernel_on_a_gpu(name: str, dtype: Any) -> None:
    case = (ON_GPU | CUT | OF_KERNEL)[name]
    pages = [(page, order) for page, order in MORE_PAGES if case[5] % page == 0]
    check(case, dtype, mosaic_gpu.attend, pages, bounds=case[-1])


def test_requests_share_pages() -> None:
    """Those of two requests of one text, but for one in between that each has for itself."""
    case = 2, 3, 2, 2, 8, 48, (30, 35), None, "chain", None
    (query, keys, values, start, *_), _, _ = made(case, np.float32, poisoned=False)
    for x in (keys, values):
        x[2:] = x[:2]
    wanted = sd.testing.reference.decode_attention(query, keys, values, start)
    pool = positions_first(xla.AttentionArrays(query, keys, values, start))[:2]
    pool = tuple(x.reshape(6, 16, 2, 8) for x in pool)
    table = np.array([[0, 1, 2], [0, 4, 2]], np.int32)
    found = jax.jit(sd.decode_attention)(query, *pool, start, pages=table)
    np.testing.assert_allclose(found, wanted, rtol=2e-6, atol=2e-6)


# Written and moved

B, S, NKV, D, T, PAGE = 5, 4, 2, 3, 12, 4
TABLE = np.array([[9, 0, 3], [4, -1, 5], [2, 1, 99], [7, 8, 6], [10, 11, 12]], np.int32)
START = np.array([2, 3, 7, -2, 10], np.int32)  # over the ends of pages, and both of the cache
LAYOUTS = ("heads first", "positions first", "pages")


def stored(layout: str) -> tuple[Any, dict[str, Any], Any]:
    """A cache, its table, and a function that finds a position in it, or None."""
    rng = np.random.default_rng(0)
    shapes: Any = {
        "heads first": ((B * NKV, D, T), (B * NKV, T, D)),
        "positions first": ((B, T, NKV, D),) * 2,
        "pages": ((14, PAGE, NKV, D),) * 2,
    }
    cache = [rng.normal(size=shape).astype(np.float32) for shape in shapes[layout]]

    def at(cache: Any, b: int, t: int) -> Any:
        """Views of the key and value ``[Nkv, D]`` of a position."""
        keys, values = cache
        if not 0 <= t < T:
            return None
        if layout == "heads first":
            own = slice(b * NKV, (b + 1) * NKV)
            return keys[own, :, t], values[own, t]
        block, row = (b, t) if layout == "positions first" else (TABLE[b, t // PAGE], t % PAGE)
        return (keys[block, row], values[block, row]) if 0 <= block < len(keys) else None

    return cache, {"pages": TABLE} if layout == "pages" else {}, at


@functools.partial(jax.jit, donate_argnums=0)
def written(cache: Any, *given: Any, **pages: Any) -> Any:
    return sd.write_cache(*cache, *given, **pages)


moved = jax.jit(sd.move_rows, donate_argnums=0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_are_written_where_positions_are_and_others_dropped(layout: str) -> None:
    cache, pages, at = stored(layout)
    rng = np.random.default_rng(1)
    key, value = (rng.normal(size=(B, S, NKV, D)).astype(np.float32) for _ in range(2))
    value[0, 1, 1, 2] = np.inf
    wanted = [x.copy() for x in cache]
    for b, s in np.ndindex(B, S):
        place = at(wanted, b, START[b] + s)
        if place is not None:
            place[0][...], place[1][...] = key[b, s], value[b, s]
    place = at(wanted, 0, START[0] + 1)
    place[0][1, 2], place[1][1, 2] = np.nan, 0  # of that head, and that number, alone
    found = written(jax.device_put(cache), key, value, START, **pages)
    for x, y in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_of_a_path_are_moved_together_and_nothing_else(layout: str) -> None:
    cache, pages, at = stored(layout)
    path = np.array([[0, 2, 5, -1], [0, 1, 4, 6], [0, 3, -1, -1], [0, 2, 3, 4], [0, 1, 2, 3]])
    wanted = [x.copy() for x in cache]
    for b, j in np.ndindex(path.shape):
        place = None if path[b, j] < 0 else at(wanted, b, START[b] + j)
        source = at(cache, b, START[b] + path[b, j])
        if place is not None and source is not None:
            place[0][...], place[1][...] = source
    found = moved(jax.device_put(cache), START, path.astype(np.int32), **pages)
    for b, t in np.ndindex(B, T):
        place, right = at(found, b, t), at(wanted, b, t)
        # What comes from nowhere may be anything; it is in the place of a node that is not there.
        from_nowhere = [
            START[b] + j == t and at(cache, b, START[b] + node) is None
            for j, node in enumerate(path[b])
        ]
        if place is not None and not any(from_nowhere):
            np.testing.assert_array_equal(place, right)
    if layout == "pages":  # the one that no table names
        np.testing.assert_array_equal(found[0][13], cache[0][13])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_both_change_a_donated_cache_in_place(layout: str) -> None:
    cache, pages, _ = stored(layout)
    new, path = np.zeros((B, S, NKV, D), np.float32), np.zeros((B, S), np.int32)
    for lowered in (
        written.lower(cache, new, new, START, **pages),
        moved.lower(cache, START, path, **pages),
    ):
        program = lowered.compile()
        assert program.memory_analysis().alias_size_in_bytes == sum(x.nbytes for x in cache)


AXES = {  # of keys, and of values, over a mesh of 2 x 2
    "heads first": [
        ((("b", "n"), None, None),) * 2,
        ((None, None, "n"), (None, "n", None)),
        ((None, "n", "b"), (None, "b", "n")),
    ],
    "positions first": [((None, "b", "n", None),) * 2, ((None, "n", None, "b"),) * 2],
    "pages": [(("b", None, "n", None),) * 2, ((None, "b", None, "n"),) * 2],
}
SPLIT = [
    pytest.param(layout, axes, marks=() if i == j == 0 else pytest.mark.long)
    for i, (layout, each) in enumerate(AXES.items())
    for j, axes in enumerate(each)
]


@pytest.mark.parametrize(("layout", "axes"), SPLIT)
def test_a_cache_over_explicit_mesh_axes_is_written_and_moved_where_it_lies(
    layout: str, axes: Any
) -> None:
    """Requests, heads, positions, pages or numbers of a head, beside arrays that lie nowhere."""
    explicit = (AxisType.Explicit,) * 2
    mesh = jax.make_mesh((2, 2), ("b", "n"), explicit, devices=jax.devices()[:4])
    shapes = {
        "heads first": ((8, 4, T), (8, T, 4)),
        "positions first": ((4, T, 2, 4),) * 2,
        "pages": ((14, PAGE, 2, 4),) * 2,
    }
    rng = np.random.default_rng(0)
    cache = [rng.normal(size=shape).astype(np.float32) for shape in shapes[layout]]
    key, value = (rng.normal(size=(4, S, 2, 4)).astype(np.float32) for _ in range(2))
    path = np.array([[0, 2, 3, -1]] * 4, np.int32)
    pages = {"pages": TABLE[:4]} if layout == "pages" else {}

    def run(cache: Any, key: Any, start: Any) -> Any:
        cache = sd.write_cache(*cache, key, value, start, **pages)
        cache = sd.move_rows(cache, start, path, **pages)
        return cache, sd.decode_attention(key, *cache, start, **pages)

    places = [NamedSharding(mesh, P(*spec)) for spec in axes]
    split = jax.device_put(cache, places)
    by_request = NamedSharding(mesh, P("b"))
    start = START[:4].clip(0, T - S)
    wanted = jax.jit(run)(cache, key, start)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    for beside in ((key, start), jax.device_put((key, start), by_request)):
        found = jax.jit(run)(split, *beside)
        jax.tree.map(close, found, wanted)
        for x, place in zip(found[0], places, strict=True):
            assert x.sharding.is_equivalent_to(place, x.ndim)


def zeros(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


QUERY, NEW = zeros(2, 3, 4, 8), zeros(2, 3, 2, 8)
IN_HEADS = (zeros(5, 2, 16, 8),) * 2  # [P, Nkv, page, D], as others lay pools out
IN_PAGES = {"keys": zeros(5, 16, 2, 8), "values": zeros(5, 16, 2, 8)}
INT32 = np.dtype(np.int32)
REFUSED: list[tuple[dict[str, Any], str]] = [
    (IN_PAGES, r"keys must .*\[B, T, Nkv, D\] = \[2, T, .*: a pool of pages needs `pages`"),
    (IN_PAGES | {"pages": zeros(3, 4, dtype=INT32)}, r"pages must .*\[B, L\] = \[2, L\]"),
    (IN_PAGES | {"pages": zeros(2, 4)}, "pages must .*int32"),
    (
        {"keys": zeros(4, 8, 16), "values": zeros(4, 16, 8), "pages": zeros(2, 4, dtype=INT32)},
        r"keys must .*\[P, page, Nkv, D\]",
    ),
    (IN_PAGES | {"values": zeros(5, 32, 2, 8), "pages": zeros(2, 4, dtype=INT32)}, "values must"),
    (
        {
            "keys": zeros(0, 16, 2, 8),
            "values": zeros(0, 16, 2, 8),
            "pages": zeros(2, 4, dtype=INT32),
        },
        "keys must have a page",
    ),
    ({"keys": zeros(2, 16, 2, 8), "values": zeros(2, 16, 2, 8, dtype=np.float16)}, "values must"),
]


@pytest.mark.parametrize(("changed", "message"), REFUSED)
def test_a_cache_that_does_not_fit_is_refused(changed: dict[str, Any], message: str) -> None:
    given = dict(changed)
    cache, start = (given.pop("keys"), given.pop("values")), zeros(2, dtype=INT32)
    for call in (
        functools.partial(sd.decode_attention, QUERY, *cache, start),
        functools.partial(sd.write_cache, *cache, NEW, NEW, start),
        functools.partial(sd.move_rows, cache, start, zeros(2, 3, dtype=INT32)),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            call(**given)


@pytest.mark.parametrize("shapes", [((0, 8, 16), (0, 16, 8)), ((0, 16, 2, 8),) * 2])
def test_what_is_empty_is_written_and_moved(shapes: Any) -> None:
    cache, start = [zeros(*shape) for shape in shapes], zeros(0, dtype=INT32)
    new = sd.write_cache(*cache, NEW[:0], NEW[:0], start)
    for x, shape in zip(sd.move_rows(new, start, zeros(0, 3, dtype=INT32)), shapes, strict=True):
        assert x.shape == shape


def test_what_is_written_moved_and_read_must_fit_its_cache() -> None:
    start, path = zeros(2, dtype=INT32), zeros(2, 3, dtype=INT32)
    cache = zeros(2, 16, 2, 8), zeros(2, 16, 2, 8)
    heads = zeros(3, 8, 16), zeros(3, 16, 8)  # of no two requests
    for error, message, call in (
        (
            ValueError,
            "keys must have .* Nkv that divides N = 3",
            lambda: sd.decode_attention(QUERY[:, :, :3], *cache, start),
        ),
        (
            ValueError,
            "pages must have room",
            lambda: sd.decode_attention(QUERY, *cache, start, pages=path[:, :0]),
        ),
        (
            ValueError,
            r"Nkv that divides N = 4, .*: heads lie after positions, where swapaxes\(1, 2\) puts",
            lambda: sd.decode_attention(QUERY, *IN_HEADS, start, pages=path),
        ),
        (
            ValueError,
            "Nkv, D.* = .*: heads lie after positions",
            lambda: sd.write_cache(*IN_HEADS, NEW, NEW, start, pages=path),
        ),
        (
            ValueError,
            "Nkv, D.* = .*: heads lie after positions",
            lambda: sd.write_cache(IN_HEADS[0][:2], IN_HEADS[1][:2], NEW, NEW, start),
        ),
        (
            ValueError,
            "query must have at most T = 2 rows, the positions of the cache",
            lambda: sd.decode_attention(QUERY, cache[0][:, :2], cache[1][:, :2], start),
        ),
        (
            TypeError,
            "new_keys must .*float32",
            lambda: sd.write_cache(*cache, NEW.astype(int), NEW, start),
        ),
        (
            TypeError,
            "new_values must .*float32",
            lambda: sd.write_cache(*cache, NEW, NEW.astype(np.float16), start),
        ),
        (
            TypeError,
            "start must be integers",
            lambda: sd.write_cache(*cache, NEW, NEW, start + 0.5),
        ),
        (
            ValueError,
            r"keys must .*\[B\*Nkv, D, T\] = \[4, 8, T\]",
            lambda: sd.write_cache(*heads, NEW, NEW, start),
        ),
        (
            ValueError,
            "keys must have B . Nkv heads, for B = 2",
            lambda: sd.move_rows(heads, start, path),
        ),
        (ValueError, "cache must be two arrays", lambda: sd.move_rows(cache[:1], start, path)),
        (TypeError, "path must be integers", lambda: sd.move_rows(cache, start, path + 0.5)),
    ):
        with pytest.raises(error, match=message):
            call()
