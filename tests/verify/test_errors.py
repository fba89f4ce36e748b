"""Every refusal of `rejection_sample` and `validate`: the argument, the rule and what came."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_specdec as sd

pytestmark = pytest.mark.newest

B, K, V, N, R, C = 2, 3, 8, 5, 6, 3
CANDIDATES = jnp.array([[(r + j) % V for j in (5, 0, 2)] for r in range(R)], jnp.int32)
KINDS = ["none", "logits", "map", "candidates"]
CONFIG = sd.SpecDecodeConfig(num_speculative_tokens=K)


def arguments(kind: str = "none", **changes: Any) -> dict[str, Any]:
    """A good call, but for what is changed: an argument, or a field of one by its name."""
    rows = jnp.zeros(N, jnp.int32)
    distributions: dict[str, Any] = {
        "none": None,
        "probs": sd.DraftProbs(jnp.full((R, V), 1 / V), rows, jnp.ones(B, bool)),
        "logits": sd.DraftLogits(jnp.zeros((R, V)), rows, jnp.ones(B, bool), jnp.zeros(R)),
        "map": sd.DraftLogits(jnp.zeros((R, C)), rows, ids=jnp.array([6, 2, 5], jnp.int32)),
        "candidates": sd.DraftProbs(jnp.full((R, C), 1 / C), rows, ids=CANDIDATES),
    }
    drafts = sd.Drafts(jnp.zeros(N, jnp.int32), jnp.array([0, 3, 5], jnp.int32))
    args: dict[str, Any] = dict(
        target_logits=jnp.zeros((N + B, V)),
        drafts=drafts,
        sampling=sd.SamplingParams(jnp.ones(B)),
        config=CONFIG,
    )
    distribution = distributions[kind]
    for name, value in changes.items():
        if name in ("token_ids", "cu_num_draft_tokens"):
            args["drafts"] = dataclasses.replace(args["drafts"], **{name: value})
        elif name in ("temperature", "min_p", "top_k", "top_p"):
            args["sampling"] = dataclasses.replace(args["sampling"], **{name: value})
        elif hasattr(distribution, name):
            distribution = dataclasses.replace(distribution, **{name: value})
        elif name == "distribution":
            distribution = value
        else:
            args[name] = value
    if isinstance(args["drafts"], sd.Drafts):
        args["drafts"] = dataclasses.replace(args["drafts"], distribution=distribution)
    return args


def with_noise(args: dict[str, Any]) -> sd.RejectionSampleOutput:
    noise = args.pop("noise", sd.testing.Noise(jnp.zeros((B, K)), jnp.zeros((B, 2))))
    target_logits, drafts = args.pop("target_logits"), args.pop("drafts")
    return sd.testing.rejection_sample_with_noise(target_logits, drafts, noise, **args)


def with_keys(args: dict[str, Any]) -> sd.RejectionSampleOutput:
    args.pop("noise", None)
    args.setdefault("keys", jax.random.split(jax.random.key(0), B))
    args.setdefault("positions", jnp.zeros(B, jnp.int32))
    return sd.rejection_sample(args.pop("target_logits"), args.pop("drafts"), **args)


def validate(args: dict[str, Any]) -> None:
    sd.validate(args.pop("target_logits"), args.pop("drafts"), **args)


ints, floats = jnp.zeros((B,), jnp.int32), jnp.zeros((B,))
NOISE = sd.testing.Noise(jnp.zeros((B, K)), jnp.zeros((B, 2)))

# Kind of distribution, what is changed, the error, and what its message must say.
CALLS = [
    ("none", dict(target_logits=jnp.zeros((N, V))), ValueError, r"target_logits .*N\+B.* \[5, 8\]"),
    ("none", dict(target_logits=jnp.zeros(V)), ValueError, r"target_logits .*shape.* \[8\]"),
    ("none", dict(target_logits=jnp.zeros((N + B, 0))), ValueError, "target_logits .*column.* 0"),
    (
        "none",
        dict(target_logits=jnp.zeros((N + B, V), jnp.int32)),
        TypeError,
        "target_logits must be float32 or bfloat16 or float16, but it is int32",
    ),
    ("none", dict(target_logits=[[0.0] * V]), TypeError, "target_logits must be an array"),
    (
        "none",
        dict(bonus_token_ids=ints),
        ValueError,
        r"target_logits .*\[N, V\].*bonus_token_ids is given.* \[7, 8\]",
    ),
    (
        "none",
        dict(bonus_token_ids=ints[:1]),
        ValueError,
        r"bonus_token_ids .*\[B\] = \[2\].* \[1\]",
    ),
    ("none", dict(bonus_token_ids=floats), TypeError, "bonus_token_ids must be int32.* float32"),
    ("none", dict(active=jnp.ones(3, bool)), ValueError, r"active .*\[B\] = \[2\].* \[3\]"),
    ("none", dict(active=ints), TypeError, "active must be bool.* int32"),
    ("none", dict(vocab_size=0), ValueError, r"vocab_size must be in \[1, 8\].* 0"),
    ("none", dict(vocab_size=9), ValueError, r"vocab_size must be in \[1, 8\].* 9"),
    ("none", dict(vocab_size=8.0), TypeError, "vocab_size must be an int.* 8.0"),
    ("none", dict(vocab_size=True), TypeError, "vocab_size must be an int.* True"),
    ("none", dict(drafts=jnp.zeros(3)), TypeError, "drafts must be a Drafts"),
    (
        "none",
        dict(token_ids=jnp.zeros((B, K), jnp.int32)),
        ValueError,
        r"token_ids .*\[N\].* \[2, 3\]",
    ),
    ("none", dict(token_ids=jnp.zeros(N)), TypeError, "token_ids must be int32.* float32"),
    ("none", dict(token_ids=np.zeros(N, np.int64)), TypeError, "token_ids must be int32.* int64"),
    (
        "none",
        dict(cu_num_draft_tokens=jnp.zeros((3, 1), jnp.int32)),
        ValueError,
        r"cu_num_draft_tokens .*\[B\+1\].* \[3, 1\]",
    ),
    (
        "none",
        dict(cu_num_draft_tokens=jnp.zeros(0, jnp.int32)),
        ValueError,
        r"cu_num_draft_tokens .*\[B\+1\].*empty",
    ),
    (
        "none",
        dict(cu_num_draft_tokens=jnp.zeros(3)),
        TypeError,
        "cu_num_draft_tokens must be int32",
    ),
    ("none", dict(sampling=jnp.ones(B)), TypeError, "sampling must be a SamplingParams"),
    ("none", dict(temperature=jnp.ones(3)), ValueError, r"temperature .*\[B\] = \[2\].* \[3\]"),
    ("none", dict(temperature=ints), TypeError, "temperature must be float32.* int32"),
    ("none", dict(temperature="hot"), TypeError, "temperature must be an array.* 'hot'"),
    ("none", dict(config=3), TypeError, "config must be a SpecDecodeConfig.* 3"),
    (
        "none",
        dict(distribution=jnp.ones((N, V))),
        TypeError,
        "distribution must be None, a DraftProbs",
    ),
    ("probs", dict(probs=jnp.ones(V)), ValueError, r"probs .*\[R, Vd\].* \[8\]"),
    (
        "probs",
        dict(probs=jnp.ones((R, V), jnp.bfloat16)),
        TypeError,
        "probs must be float32.* bfloat16",
    ),
    (
        "probs",
        dict(probs=jnp.ones((R, V + 1))),
        ValueError,
        "probs must have 1 to V = 8 columns.* 9",
    ),
    ("probs", dict(probs=jnp.ones((0, V))), ValueError, "probs must have at least one row"),
    ("probs", dict(rows=None), ValueError, "probs must have N = 5 rows .* 6"),
    ("probs", dict(rows=jnp.zeros(N + 1, jnp.int32)), ValueError, r"rows .*\[N\] = \[5\].* \[6\]"),
    ("probs", dict(rows=jnp.zeros(N)), TypeError, "rows must be int32.* float32"),
    ("probs", dict(valid=jnp.ones(N, bool)), ValueError, r"valid .*\[B\] = \[2\].* \[5\]"),
    ("probs", dict(valid=ints), TypeError, "valid must be bool.* int32"),
    ("logits", dict(logits=jnp.ones(V)), ValueError, r"logits .*\[R, Vd\].* \[8\]"),
    (
        "logits",
        dict(logits=jnp.ones((R, V), jnp.int8)),
        TypeError,
        "logits must be float32 .* int8",
    ),
    (
        "logits",
        dict(log_normalizer=jnp.zeros(N)),
        ValueError,
        r"log_normalizer .*\[R\] = \[6\].* \[5\]",
    ),
    (
        "logits",
        dict(log_normalizer=jnp.zeros(R, jnp.float16)),
        TypeError,
        "log_normalizer must be float32.* float16",
    ),
    (
        "logits",
        dict(log_normalizer=jnp.zeros(R), row_max=jnp.zeros(N)),
        ValueError,
        r"distribution.row_max .*\[R\] = \[6\].* \[5\]",
    ),
    (
        "logits",
        dict(log_normalizer=None, row_max=jnp.zeros(R)),
        ValueError,
        "row_max must come with the log_normalizer .* log_normalizer is None",
    ),
    (
        "logits",
        dict(threshold=jnp.zeros(N)),
        ValueError,
        r"distribution.threshold .*\[R\] = \[6\].* \[5\]",
    ),
    ("logits", dict(threshold=ints), ValueError, r"distribution.threshold .*\[R\] = \[6\].* \[2\]"),
    (
        "logits",
        dict(threshold=jnp.zeros(R, jnp.int32)),
        TypeError,
        "distribution.threshold must be float32.* int32",
    ),
    (
        "map",
        dict(ids=jnp.zeros(C + 1, jnp.int32)),
        ValueError,
        r"ids .*\[Vd\] = \[3\] .*one map.* or \[R, C\] = \[6, 3\].* \[4\]",
    ),
    ("candidates", dict(ids=CANDIDATES[:2]), ValueError, r"ids .*\[R, C\] = \[6, 3\].* \[2, 3\]"),
    ("candidates", dict(ids=CANDIDATES[None]), ValueError, r"ids .*\[R, C\] .* \[1, 6, 3\]"),
    ("map", dict(ids=jnp.zeros(C)), TypeError, "ids must be int32.* float32"),
    ("map", dict(ids=[6, 2, 5]), TypeError, "ids must be an array"),
    ("map", dict(ids=jnp.array([6, -1, 5])), ValueError, r"ids\[1\] must be .*\[0, 8\).* -1"),
    ("map", dict(vocab_size=6), ValueError, r"ids\[0\] must be .*\[0, 6\).* 6"),
    ("map", dict(ids=jnp.array([6, 2, 6])), ValueError, "ids must list each id once.* 6 .*2 times"),
    ("none", dict(min_p=jnp.ones(3)), ValueError, r"sampling.min_p .*\[B\] = \[2\].* \[3\]"),
    ("none", dict(min_p="low"), TypeError, "sampling.min_p must be an array.* 'low'"),
    ("none", dict(top_k=floats), TypeError, "sampling.top_k must be int32.* float32"),
    ("none", dict(top_k=ints[:1]), ValueError, r"sampling.top_k .*\[B\] = \[2\].* \[1\]"),
    ("none", dict(top_p=ints), TypeError, "sampling.top_p must be float32.* int32"),
    (
        "none",
        dict(token_bitmask=jnp.zeros((B, 1), jnp.int32)),
        ValueError,
        r"token_bitmask .*\[M, ceil\(V/32\)\] = \[7, 1\].* \[2, 1\]",
    ),
    (
        "none",
        dict(token_bitmask=jnp.zeros((N + B, 2), jnp.uint32)),
        ValueError,
        r"token_bitmask .*\[7, 1\].* \[7, 2\]",
    ),
    (
        "none",
        dict(token_bitmask=jnp.zeros((N + B, 1), bool)),
        TypeError,
        "token_bitmask must be int32 or uint32, but it is bool",
    ),
]
names = [f"{'/'.join(changes)}: {message[:30]}" for _, changes, _, message in CALLS]
calls = pytest.mark.parametrize(("kind", "changes", "error", "message"), CALLS, ids=names)


@calls
@pytest.mark.parametrize("call", [with_noise, with_keys, validate])
def test_a_wrong_argument_is_named_with_the_rule_and_what_came(kind, changes, error, message, call):
    with pytest.raises(error, match=message):
        call(arguments(kind, **changes))


@pytest.mark.parametrize(
    ("noise", "error", "message"),
    [
        (jnp.zeros((B, K)), TypeError, "noise must be a Noise or a RaceNoise"),
        (dict(accept=jnp.zeros(N)), ValueError, r"noise.accept .*\[B, K\] = \[2, 3\].* \[5\]"),
        (dict(accept=jnp.zeros((B, K), jnp.int32)), TypeError, "noise.accept must be float32"),
        (dict(recover=jnp.zeros(B)), ValueError, r"noise.recover .*\[B, 2\].* \[2\]"),
        (dict(recover=jnp.zeros((B, 2), bool)), TypeError, "noise.recover must be float32.* bool"),
    ],
)
def test_wrong_noise_is_named(noise, error, message):
    if isinstance(noise, dict):
        noise = dataclasses.replace(NOISE, **noise)
    with pytest.raises(error, match=message):
        with_noise(arguments(noise=noise))


@pytest.mark.parametrize(
    ("exponential", "error", "message"),
    [
        (jnp.ones((B, V + 1)), ValueError, r"noise.exponential .*\[B, V\] = \[2, 8\].* \[2, 9\]"),
        (jnp.ones((B, V), jnp.float16), TypeError, "noise.exponential must be float32.* float16"),
    ],
)
def test_wrong_race_noise_is_named(exponential, error, message):
    noise = sd.testing.RaceNoise(jnp.zeros((B, K)), exponential)
    with pytest.raises(error, match=message):
        with_noise(arguments(noise=noise))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (dict(keys=jnp.zeros((B, 2), jnp.uint32)), TypeError, "keys must be typed"),
        (dict(keys=jax.random.key(0)), ValueError, r"keys .*\[B\] = \[2\]"),
        (dict(positions=jnp.zeros(3, jnp.int32)), ValueError, r"positions .*\[B\] = \[2\].* \[3\]"),
        (dict(positions=floats), TypeError, "positions must be int32.* float32"),
    ],
)
def test_wrong_keys_and_positions_are_named(changes, error, message):
    with pytest.raises(error, match=message):
        with_keys(arguments(**changes))


def test_errors_are_raised_while_tracing():
    with pytest.raises(ValueError, match="target_logits"):
        jax.eval_shape(lambda x: with_noise(arguments(target_logits=x)), jnp.zeros((N, V)))


@pytest.mark.parametrize("call", [with_noise, with_keys, validate])
def test_an_unknown_implementation_is_refused(call):
    with pytest.raises(ValueError, match="implementation must be .*'xla'.* 'triton'"):
        call(arguments(implementation="triton"))


@pytest.mark.parametrize("call", [with_noise, with_keys])
def test_rows_of_a_split_vocabulary_are_not_read_lazily(call):
    mesh = jax.make_mesh((2,), ("v",), devices=jax.devices()[:2])
    sharding = sd.VerifySharding(mesh, vocab_axis="v")
    with pytest.raises(NotImplementedError, match="'xla_lazy' reads whole rows.* is split"):
        call(arguments(implementation="xla_lazy", sharding=sharding))


@pytest.mark.parametrize("call", [with_noise, with_keys, validate])
def test_a_named_implementation_that_cannot_serve_says_why_and_does_not_fall_back(call):
    with pytest.raises(NotImplementedError, match="mosaic_gpu.*Hopper.*runs on cpu"):
        call(arguments(implementation="mosaic_gpu"))


def test_from_dense_needs_a_rectangle():
    with pytest.raises(ValueError, match=r"token_ids must be \[B, K\].* \[4\]"):
        sd.Drafts.from_dense(jnp.zeros(4, jnp.int32))


def from_flat(ids: Any, counts: Any) -> sd.Drafts:
    return sd.Drafts.from_flat(ids, counts)


def from_dense(ids: Any, counts: Any) -> sd.Drafts:
    return sd.Drafts.from_dense(np.asarray(ids)[None] if isinstance(ids, list) else ids, counts)


@pytest.mark.parametrize("make", [from_flat, from_dense])
@pytest.mark.parametrize("name", ["token_ids", "num_draft_tokens"])
@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ([2.7], TypeError, "must be integers, but they are float64: .*2.7"),
        (np.float32([1]), TypeError, "must be integers, but they are float32"),
        ([True], TypeError, "must be integers, but they are bool"),
        (["5"], TypeError, "must be integers, but they are <U1"),
        ([None], TypeError, "must be integers, but they are object"),
        ([2**40], ValueError, "must be integers that int32 holds, but one is 1099511627776"),
        ([-(2**31) - 1], ValueError, "must be integers that int32 holds, but one is -2147483649"),
        (np.uint32([2**31]), ValueError, "must be integers that int32 holds, .* 2147483648"),
        (jnp.uint32([2**32 - 1]), ValueError, "must be integers that int32 holds, .* 4294967295"),
        (jnp.float32([1]), TypeError, "must be integers, but they are float32"),
    ],
    ids=str,
)
def test_ids_and_counts_that_a_cast_would_change_are_refused(make, name, values, error, message):
    if name == "token_ids":
        values = values if isinstance(values, list) or make is from_flat else values[None]
        arguments: Any = values, [1]
    else:
        arguments = [1], values
    with pytest.raises(error, match=f"{name} {message}"):
        make(*arguments)


@pytest.mark.parametrize("name", ["token_ids", "num_draft_tokens"])
@pytest.mark.parametrize("dtype", ["uint32", "float32", "bool"])
def test_traced_ids_and_counts_that_a_cast_could_change_are_refused(name, dtype):
    traced, other = jax.ShapeDtypeStruct((1,), dtype), jax.ShapeDtypeStruct((1,), "int32")
    pair = (traced, other) if name == "token_ids" else (other, traced)
    with pytest.raises(TypeError, match=f"{name} must be (int32|integers).* they are {dtype}"):
        jax.eval_shape(sd.Drafts.from_flat, *pair)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32"])
def test_ids_that_no_cast_can_change_are_taken_traced_and_not(dtype):
    ids, counts = np.array([[3, 5]], dtype), np.array([1], dtype)
    for make in (sd.Drafts.from_dense, jax.jit(sd.Drafts.from_dense)):
        drafts = make(ids, counts)
        assert drafts.token_ids.tolist() == [3, -1] and drafts.token_ids.dtype == jnp.int32
    assert sd.Drafts.from_flat(ids[0], counts).cu_num_draft_tokens.tolist() == [0, 1]


def test_ids_of_other_dtypes_are_taken_where_int32_holds_them():
    for ids in ([3, 5], np.int64([3, 5]), np.uint32([3, 5]), jnp.uint32([3, 5])):
        assert sd.Drafts.from_flat(ids, [2]).token_ids.tolist() == [3, 5]
    assert sd.Drafts.from_flat([], [0]).token_ids.shape == (0,)


# Values, on the host.


def entry(shape: tuple[int, ...], index: Any, value: float, fill: float = 0.0) -> jax.Array:
    return jnp.full(shape, fill).at[index].set(value)


def offsets(*values: int) -> dict[str, Any]:
    return dict(cu_num_draft_tokens=jnp.array(values, jnp.int32))


nan, inf = float("nan"), float("inf")
LOGITS = (N + B, V)

VALUES = [
    ("none", offsets(1, 3, 5), "cu_num_draft_tokens must begin with 0.* 1"),
    ("none", offsets(0, 3, 2), "cu_num_draft_tokens must not decrease.* entry 2 is 2 after 3"),
    ("none", offsets(0, 4, 5), "at most num_speculative_tokens=3 .* request 0 has 4"),
    ("none", offsets(0, 3, 6), "must end at most at N = 5.* 6"),
    ("none", dict(temperature=jnp.array([1.0, -1.0])), r"temperature\[1\] must be finite .* -1"),
    ("none", dict(temperature=jnp.array([nan, 1.0])), r"temperature\[0\] must be finite .* nan"),
    ("none", dict(temperature=jnp.array([inf, 1.0])), r"temperature\[0\] must be finite .* inf"),
    ("none", dict(token_ids=jnp.array([0, 1, 8, 0, 0])), r"token_ids\[2\] must be in \[0, 8\).* 8"),
    ("none", dict(token_ids=jnp.array([0, -2, 0, 0, 0])), r"token_ids\[1\] must be in .* -2"),
    (
        "none",
        dict(token_ids=jnp.array([0, 1, 7, 0, 0]), vocab_size=7),
        r"token_ids\[2\] must be in \[0, 7\).* 7",
    ),
    ("none", dict(target_logits=entry(LOGITS, (3, 1), nan)), r"target_logits\[3\] .*NaN.* nan"),
    ("none", dict(target_logits=entry(LOGITS, (6, 7), inf)), r"target_logits\[6\] .*inf.* inf"),
    (
        "none",
        dict(target_logits=entry(LOGITS, 2, -inf)),
        r"target_logits\[2\] .*finite entry.* -inf",
    ),
    (
        "none",
        dict(target_logits=jnp.zeros((N, V)), bonus_token_ids=jnp.array([0, 8])),
        r"bonus_token_ids\[1\] must be in \[0, 8\).* 8",
    ),
    (
        "none",
        dict(target_logits=jnp.zeros((N, V)), bonus_token_ids=jnp.array([-1, 0])),
        r"bonus_token_ids\[0\] must be in .* -1",
    ),
    (
        "probs",
        dict(rows=jnp.array([0, 1, 6, 0, 0])),
        r"rows\[2\] must be in \[0, R\) = \[0, 6\).* 6",
    ),
    ("probs", dict(rows=jnp.array([0, -1, 0, 0, 0])), r"rows\[1\] must be in .* -1"),
    ("probs", dict(probs=entry((R, V), (0, 2), nan, 1 / V)), r"probs\[0\] must be probabilities"),
    ("probs", dict(probs=entry((R, V), (0, 2), -0.5, 1 / V)), r"probs\[0\] must be .* -0.5"),
    ("probs", dict(probs=jnp.full((R, V), 0.2)), r"probs\[0\] must be .*sum to 1.* 1.6"),
    ("logits", dict(logits=entry((R, V), (0, 2), nan)), r"logits\[0\] must have .* nan"),
    ("logits", dict(logits=entry((R, V), (0, 2), inf)), r"logits\[0\] must have .* inf"),
    ("logits", dict(logits=entry((R, V), 0, -inf)), r"logits\[0\] must have .* -inf"),
    (
        "logits",
        dict(log_normalizer=entry((R,), 0, nan)),
        r"log_normalizer\[0\] must be finite.* nan",
    ),
    (
        "logits",
        dict(log_normalizer=entry((R,), 0, -1024.0)),
        r"log_normalizer\[0\] must be less than 1024 in size, but it is -1024.0: .* give row_max",
    ),
    (
        "logits",
        dict(log_normalizer=jnp.zeros(R), row_max=entry((R,), 0, inf)),
        r"row_max\[0\] must be finite.* inf",
    ),
    ("logits", dict(threshold=entry((R,), 0, nan)), r"threshold\[0\] must be a number.* nan"),
    ("logits", dict(threshold=jnp.full(R, 0.5)), r"logits\[0\] must have .* -inf"),
    (
        "candidates",
        dict(ids=CANDIDATES.at[0, 2].set(8)),
        r"ids\[0\]\[2\] must be an id in \[0, 8\).* 8",
    ),
    (
        "candidates",
        dict(ids=CANDIDATES.at[0, 2].set(5)),
        r"ids\[0\] must list .*once.* 5 .*2 times",
    ),
    ("none", dict(min_p=jnp.array([0.0, -0.5])), r"min_p\[1\] must be in \[0, 1\].* -0.5"),
    ("none", dict(min_p=jnp.array([nan, 0.5])), r"min_p\[0\] must be in \[0, 1\].* nan"),
    ("none", dict(top_k=jnp.array([0, -2])), r"top_k\[1\] must be at least 0.* -2"),
    ("none", dict(top_p=jnp.array([0.0, 1.0])), r"top_p\[0\] must be in \(0, 1\].* 0.0"),
    ("none", dict(top_p=jnp.array([1.0, 1.5])), r"top_p\[1\] must be in \(0, 1\].* 1.5"),
    ("none", dict(positions=jnp.array([3, -1])), r"positions\[1\] must be at least 0.* -1"),
    (
        "none",
        dict(token_bitmask=jnp.full((N + B, 1), -1).at[2, 0].set(256)),  # a bit past V
        r"target_logits\[2\] .*finite entry.* -inf",
    ),
]


@pytest.mark.parametrize(("kind", "changes", "message"), VALUES, ids=[m[:40] for *_, m in VALUES])
def test_validate_names_the_value_that_is_wrong(kind, changes, message):
    with pytest.raises(ValueError, match=message):
        validate(arguments(kind, **changes))


@pytest.mark.parametrize(
    "kind",
    [
        *KINDS[:1],
        *(pytest.param(kind, marks=pytest.mark.long) for kind in KINDS[1:]),
        pytest.param("probs", marks=pytest.mark.slow),
    ],
)
def test_validate_passes_what_can_be_verified(kind):
    validate(arguments(kind))
    validate(arguments(kind, token_ids=jnp.array([0, -1, 7, 0, 0]), temperature=jnp.zeros(B)))
    bonus = dict(target_logits=jnp.zeros((N, V)), bonus_token_ids=ints)
    validate(arguments(kind, **bonus))
    assert not with_noise(arguments(kind)).status.any()
    filters = dict(min_p=jnp.ones(B), top_k=ints, top_p=jnp.ones(B))
    hidden = dict(target_logits=entry(LOGITS, (3, 1), nan), token_bitmask=jnp.full((N + B, 1), 1))
    for changes in (filters, hidden):
        validate(arguments(kind, **changes))
        assert not with_noise(arguments(kind, **changes)).status.any()


def test_validate_takes_all_arguments_of_the_call():
    def names(function: Any) -> set[str]:
        return set(inspect.signature(function).parameters)

    assert names(sd.validate) == names(sd.rejection_sample)
    mesh = jax.make_mesh((2,), ("v",), devices=jax.devices()[:2])
    validate(
        arguments(
            keys=jax.random.split(jax.random.key(0), B),
            positions=ints,
            implementation="xla",
            kernel_config=sd.KernelConfig(),
            sharding=sd.VerifySharding(mesh, vocab_axis="v"),
        )
    )
    with pytest.raises(ValueError, match="N must divide over the 2 devices of 'v', but it is 5"):
        validate(arguments(sharding=sd.VerifySharding(mesh, batch_axis="v")))


def test_one_count_above_k_ends_its_request_and_no_other():
    # Outside jit too, where counts are known. A batch raises if no request fits.
    drafts = sd.Drafts(jnp.zeros((2 * K + 1,), jnp.int32), jnp.array([0, K + 1, K + 2]))
    args = arguments(target_logits=jnp.zeros((2 * K + 1 + B, V)))
    output = with_noise(args | dict(drafts=drafts))
    assert output.status.tolist() == [sd.Status.BAD_INPUT, sd.Status.OK]
    padded = sd.Drafts(drafts.token_ids, jnp.array([0, 1, 2]))
    assert not with_noise(args | dict(drafts=padded)).status.any()


def test_validate_does_not_look_at_what_nobody_reads():
    inactive = dict(active=jnp.array([True, False]))
    validate(arguments(target_logits=entry(LOGITS, 5, nan), **inactive))
    validate(arguments(temperature=jnp.array([1.0, nan]), **inactive))
    validate(arguments(token_ids=jnp.array([0, 0, 0, 99, 99]), **inactive))
    validate(arguments(target_logits=entry(LOGITS, (0, 7), nan), vocab_size=7))
    evicted = jnp.array([False, True])
    validate(arguments("probs", rows=jnp.array([9, 9, 9, 1, 1]), valid=evicted))
    validate(arguments("candidates", ids=CANDIDATES.at[3, 0].set(99)))
