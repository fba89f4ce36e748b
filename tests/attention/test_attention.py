"""Attention over a cache: the oracle, what is not seen, who is beside, and what is refused.

The kernel is interpreted here. `pytest -m gpu` runs the same table on a GPU.
"""

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
from models.weights import sizes
from passes import run as run_pass
from verify.interpret_mode import interpret_gpu_params

import jax_specdec as sd
from jax_specdec import lm

B16 = jnp.bfloat16

# B, S, Nkv, heads that share one, D, T, start; window, kind of rows, bounds of the splits.
CASES: dict[str, tuple[Any, ...]] = {
    "a chain": (2, 5, 2, 4, 128, 192, (70, 150), None, "chain", None),
    "two splits, one request without a tile for the second": (
        *(2, 5, 2, 4, 128, 192, (30, 150)),
        *(None, "chain", (0, 2, 3)),
    ),
    "a window": (2, 5, 1, 4, 64, 256, (127, 10), 40, "chain", None),
    "a tree of two words": (1, 40, 1, 4, 64, 128, (60,), None, "tree", None),
    "a tree, split": (1, 12, 2, 4, 64, 192, (60,), None, "tree", (0, 1, 3)),
    "a block that sees all of itself": (1, 7, 1, 1, 64, 64, (20,), None, "block", None),
    "a level of a tree": (2, 5, 1, 4, 64, 256, (200, 60), None, "level", (0, 3, 4)),
    "a block in a window": (2, 6, 1, 2, 64, 256, (150, 10), 20, "block", (0, 1, 2, 4)),
    "several blocks of rows": (2, 70, 1, 2, 64, 256, (0, 100), None, "chain", (0, 1, 4)),
    "one row at the end of its cache": (1, 1, 1, 8, 64, 64, (63,), None, "chain", None),
}
SOFTCAPS = {CASES[name]: 2.0 for name in ("a window", "a tree, split")}  # the others have none
INTERPRETED = [
    pytest.param(
        name, marks=() if i == 1 else pytest.mark.long if i in (2, 3) else pytest.mark.slow
    )
    for i, name in enumerate(CASES)
]
ON_GPU: dict[str, tuple[Any, ...]] = CASES | {
    "lengths that differ": (3, 1, 8, 4, 128, 960, (900, 0, 64), None, "chain", None),
    "nine rows": (3, 9, 8, 4, 128, 960, (900, 0, 64), None, "chain", None),
    "a tree of 64": (2, 64, 2, 4, 128, 960, (896, 500), None, "tree", None),
    "one long request": (1, 5, 8, 4, 128, 4096, (4000,), None, "chain", None),
    "one long request, a window": (1, 5, 8, 4, 128, 4096, (4000,), 1000, "chain", None),
}


FINITE = xla.AttentionStatic(scale=64**-0.5, finite_cache=True, num_visible=5)


def words_of(bits: np.ndarray) -> np.ndarray:
    """``[B, S, 2]`` uint32 of ``[B, S, 64]`` bool."""
    shifted = bits.reshape(*bits.shape[:2], 2, 32) << np.arange(32, dtype=np.uint64)
    return shifted.sum(axis=3).astype(np.uint32)


def mask_of(kind: str, batch: int, count: int, rng: np.random.Generator) -> np.ndarray | None:
    if kind == "chain":
        return None
    bits = np.zeros((batch, count, 64), np.uint64)
    if kind == "block":
        bits[:, :, :count] = 1
    elif kind == "level":  # of what earlier calls wrote, too; the last bit is set for one row only
        bits = rng.integers(0, 2, bits.shape).astype(np.uint64)
        bits[:, :, -1] = np.arange(count) == 0
    else:
        for b, s in np.ndindex(batch, count):  # a row sees itself and its parent's ancestors
            bits[b, s, s] = 1
            if s:
                bits[b, s] |= bits[b, rng.integers(0, s)]
    return words_of(bits)


def made(case: tuple[Any, ...], dtype: Any, poisoned: bool = True) -> tuple[Any, Any, Any]:
    """Arrays of a case, its oracle, and its rest; NaN and infinity lie where no row looks."""
    batch, count, num_kv, group, dim, room, start, window, kind, _ = case
    rng = np.random.default_rng(room + count)

    def random(*shape: int) -> np.ndarray:
        return np.array(jnp.asarray(rng.normal(size=shape), dtype))

    query = random(batch, count, num_kv * group, dim)
    keys, values = random(batch * num_kv, dim, room), random(batch * num_kv, room, dim)
    first, tree_mask = np.array(start, np.int32), mask_of(kind, batch, count, rng)
    wanted = sd.testing.reference.decode_attention(
        query, keys, values, first, tree_mask=tree_mask, window=window, softcap=SOFTCAPS.get(case)
    )
    for b in range(batch if poisoned else 0):
        own = slice(b * num_kv, (b + 1) * num_kv)
        unseen = [slice(first[b] + (64 if kind == "level" else count), None)]
        unseen += [slice(0, max(0, first[b] - window + 1))] if window else []
        for positions in unseen:
            keys[own, :, positions], values[own, positions] = np.nan, np.inf
    seen = 64 if kind == "level" else count
    static = xla.AttentionStatic(dim**-0.5, window, SOFTCAPS.get(case), not poisoned, seen)
    return xla.AttentionArrays(query, keys, values, first, tree_mask), wanted, static


def check(case: tuple[Any, ...], dtype: Any, attend: Any, **settings: Any) -> None:
    for poisoned in (True, False):  # False with the promise of a finite cache
        arrays, wanted, static = made(case, dtype, poisoned)
        run = functools.partial(attend, static=static, **settings)
        found = np.asarray(jax.jit(run)(arrays), np.float64)
        error = 2e-6 if dtype == jnp.float32 else 1.5e-2
        np.testing.assert_allclose(found, wanted, rtol=error, atol=error)


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_xla_is_the_oracle(name: str) -> None:
    check(CASES[name], B16, xla.attend)  # `test_cache.py` has float32


@pytest.mark.long
@pytest.mark.newest
@pytest.mark.parametrize("name", INTERPRETED)
def test_the_interpreted_kernel_is_the_oracle(name: str) -> None:
    settings: dict[str, Any] = {"interpret": interpret_gpu_params(), "bounds": CASES[name][-1]}
    check(CASES[name], B16, mosaic_gpu.attend, **settings)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [B16, jnp.float16], ids=str)
@pytest.mark.parametrize("name", ON_GPU)
def test_the_kernel_is_the_oracle_on_a_gpu(name: str, dtype: Any) -> None:
    check(ON_GPU[name], dtype, mosaic_gpu.attend, bounds=ON_GPU[name][-1])


def slots_are_read_in_place(name: str, attend: Any, **settings: Any) -> None:
    """A request of a cache of twice as many slots, the others NaN, has the bits of a whole cache.

    Slots come in another order than requests, and the last request has none: it is undefined.
    """
    arrays, _, static = made(ON_GPU[name], B16, poisoned=False)
    batch, num_kv = ON_GPU[name][0], ON_GPU[name][2]
    slots = np.arange(1, 2 * batch, 2, dtype=np.int32)[::-1]
    run = functools.partial(attend, static=static._replace(num_kv=num_kv), **settings)
    places = (slots[:, None] * num_kv + np.arange(num_kv)).ravel()
    cache = []
    for own in (arrays.keys, arrays.values):
        every = np.full((2 * len(own), *own.shape[1:]), np.nan, own.dtype)
        every[places] = own
        cache.append(every)
    slots = np.array([*slots[:-1], 2 * batch], np.int32) if batch > 1 else slots
    of_slots = arrays._replace(keys=cache[0], values=cache[1], slots=slots)
    found, wanted = (np.asarray(jax.jit(run)(x)) for x in (of_slots, arrays))
    read = slice(0, max(1, batch - 1))
    assert found[read].tobytes() == wanted[read].tobytes()


def test_slots_are_read_by_xla() -> None:
    slots_are_read_in_place("lengths that differ", xla.attend)


@pytest.mark.parametrize(("kind", "num_seen"), [("chain", 5), ("level", 64)])
def test_what_nobody_sees_need_not_be_read(kind: str, num_seen: int) -> None:
    """Of T = 1,024 positions xla reads 256 where that is all that some row sees."""
    attend: Any = jax.jit(xla.attend, static_argnums=1)
    case: tuple[Any, ...] = 2, 5, 2, 2, 64, 1024, (256 - num_seen, 20), None, kind, None
    further = (*case[:6], (257 - num_seen, 20), *case[7:])
    for each, max_seen in ((case, 256), (case, 257), (further, 257), (further, 1024)):
        arrays, wanted, static = made(each, jnp.float32)
        for slots in (None, np.arange(2, dtype=np.int32)):
            given = arrays._replace(slots=slots, max_seen=np.int32(max_seen))
            found = np.asarray(attend(given, static._replace(num_kv=2)), np.float64)
            np.testing.assert_allclose(found, wanted, rtol=2e-6, atol=2e-6)
    # A promise that is not kept shows: the longer request misses what lies further on.
    finite, _, static = made(case, jnp.float32, poisoned=False)
    longer = finite._replace(start=np.array([700, 20], np.int32))
    less, whole = (attend(longer._replace(max_seen=np.int32(x)), static) for x in (256, 1024))
    np.testing.assert_allclose(less[1], whole[1], rtol=2e-6, atol=2e-6)
    assert np.abs(less[0] - whole[0]).max() > 1e-2


@pytest.mark.long
@pytest.mark.newest
def test_slots_are_read_by_the_interpreted_kernel() -> None:
    settings: dict[str, Any] = {"interpret": interpret_gpu_params(), "bounds": (0, 2, 3)}
    slots_are_read_in_place("a tree, split", mosaic_gpu.attend, **settings)
    slots_are_read_in_place("a chain", mosaic_gpu.attend, **settings)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_GPU)
def test_slots_are_read_by_the_kernel_on_a_gpu(name: str) -> None:
    slots_are_read_in_place(name, mosaic_gpu.attend, bounds=ON_GPU[name][-1])


@pytest.mark.gpu
def test_the_kernel_gives_a_request_the_same_bits_whoever_is_beside_it() -> None:
    others_change_nothing(functools.partial(sd.decode_attention, implementation="mosaic_gpu"))


def test_a_request_has_the_same_bits_whoever_is_beside_it() -> None:
    others_change_nothing(sd.decode_attention)


def others_change_nothing(attend: Any) -> None:
    """Requests 0 and 2 of three are others: other texts, lengths, and NaN all over."""
    case = 3, 5, 2, 2, 64, 512, (300, 100, 17), None, "chain", None
    (query, keys, values, start, *_), _, _ = made(case, B16)
    attend = jax.jit(attend)
    alone = attend(query, keys, values, start)[1]
    keys, values, query = keys.copy(), values.copy(), query.copy()
    query[[0, 2]] = np.nan
    keys[[0, 1, 4, 5]] = 1
    values[[0, 1, 4, 5]] = np.nan
    beside = attend(query, keys, values, np.array([507, 100, 1000], np.int32))[1]
    assert np.asarray(alone).tobytes() == np.asarray(beside).tobytes()


def rows_of_positions(attend: Any, room: int, first: int) -> list[set[bytes]]:
    """Bits of all rows of each position, of requests of one text that begin one position later."""
    batch, count, num_kv, group, dim = 9, 5, 1, 2, 64
    rng = np.random.default_rng(room)

    def random(*shape: int) -> np.ndarray:
        return np.array(jnp.asarray(rng.normal(size=shape), B16))

    start = first + np.arange(batch, dtype=np.int32)
    positions = start[:, None] + np.arange(count)  # [B, S]
    query = random(room, num_kv * group, dim)[positions]
    keys = np.repeat(random(num_kv, dim, room), batch, axis=0)
    values = np.repeat(random(num_kv, room, dim), batch, axis=0)
    found = np.asarray(attend(xla.AttentionArrays(query, keys, values, start, None)))
    each = (found[positions == position] for position in np.unique(positions))
    return [{row.tobytes() for row in rows} for rows in each]


def test_bits_do_not_depend_on_where_a_pass_begins() -> None:
    attend = functools.partial(xla.attend, static=FINITE)
    assert {len(rows) for rows in rows_of_positions(jax.jit(attend), 128, 58)} == {1}


@pytest.mark.long
@pytest.mark.newest
def test_bits_of_the_kernel_do_not_depend_on_where_a_pass_begins() -> None:
    """Across the end of a tile and of a split; elsewhere they depend on where splits end."""
    settings: dict[str, Any] = {"interpret": interpret_gpu_params(), "static": FINITE}
    attend = functools.partial(mosaic_gpu.attend, **settings)
    split, whole = (
        rows_of_positions(jax.jit(functools.partial(attend, bounds=bounds)), 128, 58)
        for bounds in ((0, 1, 2), (0, 2))
    )
    assert {len(rows) for rows in split + whole} == {1}
    assert split != whole


@pytest.mark.gpu
@pytest.mark.parametrize("finite_cache", [True, False])
@pytest.mark.parametrize(
    ("room", "first"),
    [(128, 58), *((16384, first) for first in (60, 1000, 5000, 16370)), (4096, 2040)],
)
def test_bits_do_not_depend_on_where_a_pass_begins_on_a_gpu(
    room: int, first: int, finite_cache: bool
) -> None:
    static = FINITE._replace(finite_cache=finite_cache)
    attend = functools.partial(mosaic_gpu.attend, static=static)
    assert {len(rows) for rows in rows_of_positions(jax.jit(attend), room, first)} == {1}


def nan_in_a_new_row_is_for_those_who_see_it(attend: Any) -> None:
    """Of four new rows of a tree, the third sees the second, the fourth does not."""
    case = 1, 4, 1, 1, 64, 64, (20,), None, "chain", None
    (query, keys, values, start, *_), _, _ = made(case, B16)
    bits = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 1]], np.uint64)
    tree_mask = words_of(np.pad(bits, ((0, 0), (0, 60)))[None])
    for array, at in ((keys, (0, 5, 21)), (values, (0, 21, 5))):
        broken = array.copy()
        broken[at] = np.nan
        given = (broken, values) if array is keys else (keys, broken)
        arrays = xla.AttentionArrays(query, *given, start, tree_mask)
        found = np.asarray(attend(arrays), np.float32)
        is_nan = np.isnan(found).any(axis=(2, 3))[0]
        assert is_nan.tolist() == [False, True, True, False]


def test_nan_in_a_new_row_is_for_those_who_see_it() -> None:
    nan_in_a_new_row_is_for_those_who_see_it(
        functools.partial(xla.attend, static=xla.AttentionStatic(64**-0.5))
    )


@pytest.mark.newest
@pytest.mark.long
def test_the_kernel_keeps_nan_to_those_who_see_it() -> None:
    settings: dict[str, Any] = {"interpret": interpret_gpu_params()}
    nan_in_a_new_row_is_for_those_who_see_it(
        functools.partial(mosaic_gpu.attend, static=xla.AttentionStatic(64**-0.5), **settings)
    )


@pytest.mark.gpu
def test_the_kernel_keeps_nan_to_those_who_see_it_on_a_gpu() -> None:
    nan_in_a_new_row_is_for_those_who_see_it(
        functools.partial(mosaic_gpu.attend, static=xla.AttentionStatic(64**-0.5))
    )


@pytest.mark.parametrize("name", ["a level of a tree", "a tree, split"])
def test_bits_mean_the_same_whether_they_are_constants_or_not(name: str) -> None:
    """Constants that name the new rows alone let the kernel end with these."""
    (query, keys, values, start, tree_mask, *_), wanted, static = made(CASES[name], np.float32)
    given = query, keys, values, start
    capped = functools.partial(sd.decode_attention, softcap=static.softcap)
    for attend in (
        functools.partial(capped, tree_mask=tree_mask),
        functools.partial(jax.jit(capped), tree_mask=tree_mask),
    ):
        found = np.asarray(attend(*given), np.float64)
        np.testing.assert_allclose(found, wanted, rtol=2e-6, atol=2e-6)


def test_windows_of_a_tree_count_back_from_each_node_and_scores_have_a_scale() -> None:
    (query, keys, values, start, tree_mask, *_), _, _ = made(CASES["a tree, split"], np.float32)
    depth = np.bitwise_count(tree_mask).sum(axis=2, dtype=np.int32) - 1
    given = query, keys, values, start
    how: dict[str, Any] = {"tree_mask": tree_mask, "depth": depth, "window": 9, "scale": 0.3}
    assert depth.max() >= 3
    found = np.asarray(jax.jit(functools.partial(sd.decode_attention, **how))(*given), np.float64)
    wanted = sd.testing.reference.decode_attention(*given, **how)
    np.testing.assert_allclose(found, wanted, rtol=2e-6, atol=2e-6)


def test_a_slot_that_had_nan_is_clean_for_the_next_request() -> None:
    """Its cache still holds what a request wrote whose logits had become NaN."""
    model = lm.models.Llama(sizes(32, 16, 16, 2, (2, 1, 8)))
    params = model.init_params(jax.random.key(0))
    broken = {**params, "embed_tokens": params["embed_tokens"].at[7].set(jnp.inf)}
    apply, start = jax.jit(functools.partial(run_pass, model)), jnp.zeros((1,), jnp.int32)
    ids = jnp.array([[3, 4, 7, 5, 6]], jnp.int32)
    logits, cache = apply(broken, ids, start, model.init_cache(1, 8))[:2]
    is_nan = np.isnan(logits).any(axis=2)[0]
    assert is_nan.tolist() == [False, False, True, True, True]
    for wanted, used in ((False, model.init_cache(1, 8)), (True, cache)):
        found = apply(params, ids[:, :2], start, used).logits
        assert np.isfinite(found).all(), wanted
    np.testing.assert_array_equal(found, apply(params, ids[:, :2], start, used).logits)


GOOD: dict[str, Any] = {
    "query": np.zeros((2, 3, 4, 8), np.float32),
    "keys": np.zeros((4, 8, 16), np.float32),
    "values": np.zeros((4, 16, 8), np.float32),
    "start": np.zeros((2,), np.int32),
}


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"query": np.zeros((2, 3, 4, 8))}, TypeError, "query must be .*float32"),
        ({"query": np.zeros((2, 3, 8), np.float32)}, ValueError, r"query must .*\[B, S, N, D\]"),
        ({"keys": np.zeros((4, 8, 16), np.float16)}, TypeError, "keys must .*float32"),
        (
            {"keys": np.zeros((4, 7, 16), np.float32)},
            ValueError,
            r"keys must be an array \[B\*Nkv, D, T\]",
        ),
        (
            {"values": np.zeros((4, 8, 16), np.float32)},
            ValueError,
            r"values must be an array \[B\*Nkv, T, D\] = \[4, 16, 8\]",
        ),
        ({"start": np.zeros((3,), np.int32)}, ValueError, r"start must be an array \[B\] = \[2\]"),
        ({"start": np.zeros((2,), np.float32)}, TypeError, "start must be integers, but"),
        ({"start": [2**31, 0]}, ValueError, "start must be integers that int32 holds, but"),
        (
            {"keys": np.zeros((3, 8, 16), np.float32), "values": np.zeros((3, 16, 8), np.float32)},
            ValueError,
            "keys must have B . Nkv heads, for B = 2 and N = 4",
        ),
        (
            {"keys": np.zeros((0, 8, 16), np.float32), "values": np.zeros((0, 16, 8), np.float32)},
            ValueError,
            "keys must have B . Nkv heads",
        ),
        (
            {"keys": np.zeros((4, 8, 0), np.float32), "values": np.zeros((4, 0, 8), np.float32)},
            ValueError,
            "keys must have room for a position",
        ),
        ({"tree_mask": np.zeros((2, 2), np.uint32)}, ValueError, "tree_mask must .*S"),
        ({"tree_mask": np.zeros((3, 2), np.int32)}, TypeError, "tree_mask must .*uint32"),
        (
            {
                "query": np.zeros((2, 65, 4, 8), np.float32),
                "tree_mask": np.zeros((65, 2), np.uint32),
            },
            ValueError,
            "tree_mask must be None for more than 64 rows",
        ),
        ({"window": 0}, ValueError, "window must be .*1"),
        ({"softcap": 0.0}, ValueError, "softcap must be a finite number above 0"),
        ({"softcap": "50"}, ValueError, "softcap must be a finite number above 0"),
        ({"scale": -1}, ValueError, "scale must be a finite number above 0"),
        ({"depth": np.zeros((2, 3), np.int32)}, ValueError, "depth must be None without tree_mask"),
        ({"depth": np.zeros((2,), np.int32)}, ValueError, r"depth must be an array \[B, S\]"),
        ({"implementation": "triton"}, ValueError, "implementation must be .*mosaic_gpu"),
        ({"implementation": "mosaic_gpu"}, NotImplementedError, "takes bfloat16 and float16"),
    ],
)
def test_what_does_not_fit_is_refused(
    changed: dict[str, Any], error: type[Exception], message: str
) -> None:
    given = GOOD | changed
    arrays = [given.pop(name) for name in ("query", "keys", "values", "start")]
    with pytest.raises(error, match=message):
        sd.decode_attention(*arrays, **given)


@pytest.mark.parametrize("start", [[3, 9], np.array([3, 9], np.int64)])
def test_start_may_be_a_list_or_of_another_integer_type(start: Any) -> None:
    rng = np.random.default_rng(0)
    shapes = [GOOD[name].shape for name in ("query", "keys", "values")]
    arrays = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    wanted = sd.testing.reference.decode_attention(*arrays, start)
    np.testing.assert_allclose(sd.decode_attention(*arrays, start), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("dim", "room", "message"),
    [
        (32, 64, "takes heads of D = 64, 128 and 256, but D is 32"),
        (64, 96, "takes caches of T positions, a multiple of 64, but T is 96"),
    ],
)
def test_what_the_kernel_does_not_serve_is_said(dim: int, room: int, message: str) -> None:
    arrays = jnp.zeros((1, 1, 1, dim), B16), jnp.zeros((1, dim, room), B16)
    values, start = jnp.zeros((1, room, dim), B16), jnp.zeros((1,), jnp.int32)
    with pytest.raises(NotImplementedError, match=message):
        sd.decode_attention(*arrays, values, start, implementation="mosaic_gpu")


@pytest.mark.parametrize(
    ("shape", "heads"), [((0, 2, 4, 8), 0), ((2, 2, 0, 8), 2), ((2, 0, 4, 8), 4), ((2, 2, 4, 0), 4)]
)
def test_what_is_empty_reads_nothing(shape: tuple[int, ...], heads: int) -> None:
    found = sd.decode_attention(
        np.zeros(shape, np.float32),
        np.zeros((heads, shape[3], 16), np.float32),
        np.zeros((heads, 16, shape[3]), np.float32),
        np.zeros((shape[0],), np.int32),
    )
    assert found.shape == shape


@pytest.mark.parametrize("is_split", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_its_derivatives_are_those_of_the_oracle(is_split: bool) -> None:
    """In a direction, forward and reverse; over explicit mesh axes too. A large window is none.

    They stay what they are, to the bit, where NaN and infinity lie at positions that no row sees.
    """
    case = 4, 3, 2, 2, 8, 16, (3, 0, 7, 13), None, "chain", None
    (query, keys, values, start, *_), _, _ = made(case, np.float32, poisoned=False)
    given, weights = (query, keys, values), np.cos(np.arange(query.size)).reshape(query.shape)
    poisoned = made(case, np.float32)[0][:3]
    steps = tuple(np.sin(np.arange(x.size, dtype=np.float32)).reshape(x.shape) for x in given)

    def oracle(size: float) -> Any:
        moved = [np.float64(x) + size * step for x, step in zip(given, steps, strict=True)]
        return np.sum(weights * sd.testing.reference.decode_attention(*moved, start))

    wanted = (oracle(1e-4) - oracle(-1e-4)) / 2e-4
    if is_split:
        mesh = jax.make_mesh(
            (2, 2), ("b", "n"), (AxisType.Explicit,) * 2, devices=jax.devices()[:4]
        )
        place = NamedSharding(mesh, P("b", None, "n")), NamedSharding(mesh, P(("b", "n")))
        given = jax.device_put(given, (*place, place[1]))
        steps = jax.device_put(steps, (*place, place[1]))

    def loss(*arrays: Any) -> jax.Array:
        return jnp.sum(
            weights.astype(np.float32) * sd.decode_attention(*arrays, start, window=2**40)
        )

    both = jax.jit(lambda *x: (jax.grad(loss, (0, 1, 2))(*x), jax.jvp(loss, x, steps)[1]))
    reverse, forward = both(*given)
    if is_split:
        poisoned = jax.device_put(poisoned, (*place, place[1]))
    jax.tree.map(np.testing.assert_array_equal, both(*poisoned), (reverse, forward))
    dots = [
        np.vdot(np.asarray(x), np.asarray(step)) for x, step in zip(reverse, steps, strict=True)
    ]
    assert abs(wanted) > 1 and all(dots)
    np.testing.assert_allclose([sum(dots), forward], wanted, rtol=1e-4)
