"""Every refusal of `rejection_sample` and `validate`, and the argument that it names."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from filled import full, ones, zeros

import jax_specdec as sd

pytestmark = pytest.mark.newest

B, K, V, N, R, C = 2, 3, 8, 5, 6, 3
CANDIDATES = jnp.array([[(r + j) % V for j in (5, 0, 2)] for r in range(R)], jnp.int32)
KINDS = ["none", "logits", "map", "candidates"]
CONFIG = sd.SpecDecodeConfig(num_speculative_tokens=K)


def arguments(kind: str = "none", **changes: Any) -> dict[str, Any]:
    """A good call, but for what is changed: an argument, or a field of one by its name."""
    rows = zeros(N, jnp.int32)
    distributions: dict[str, Any] = {
        "none": None,
        "probs": sd.DraftProbs(full((R, V), 1 / V), rows, ones(B, bool)),
        "logits": sd.DraftLogits(zeros((R, V)), rows, ones(B, bool), zeros(R)),
        "map": sd.DraftLogits(zeros((R, C)), rows, ids=jnp.array([6, 2, 5], jnp.int32)),
        "candidates": sd.DraftProbs(full((R, C), 1 / C), rows, ids=CANDIDATES),
    }
    drafts = sd.Drafts(zeros(N, jnp.int32), jnp.array([0, 3, 5], jnp.int32))
    args: dict[str, Any] = dict(
        target_logits=zeros((N + B, V)),
        drafts=drafts,
        sampling=sd.SamplingParams(ones(B)),
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
    noise = args.pop("noise", sd.testing.Noise(zeros((B, K)), zeros((B, 2))))
    target_logits, drafts = args.pop("target_logits"), args.pop("drafts")
    return sd.testing.rejection_sample_with_noise(target_logits, drafts, noise, **args)


def with_keys(args: dict[str, Any]) -> sd.RejectionSampleOutput:
    args.pop("noise", None)
    args.setdefault("keys", jax.random.split(jax.random.key(0), B))
    args.setdefault("positions", zeros(B, jnp.int32))
    return sd.rejection_sample(args.pop("target_logits"), args.pop("drafts"), **args)


def validate(args: dict[str, Any]) -> None:
    sd.validate(args.pop("target_logits"), args.pop("drafts"), **args)


ints, floats = zeros((B,), jnp.int32), zeros((B,))
NOISE = sd.testing.Noise(zeros((B, K)), zeros((B, 2)))

# Kind of distribution, what is changed, the error, and the name that its message begins with.
CALLS = [
    ("none", dict(target_logits=zeros((N, V))), ValueError, "target_logits"),
    ("none", dict(target_logits=zeros(V)), ValueError, "target_logits"),
    ("none", dict(target_logits=zeros((N + B, 0))), ValueError, "target_logits"),
    ("none", dict(target_logits=zeros((N + B, V), jnp.int32)), TypeError, "target_logits"),
    ("none", dict(target_logits=[[0.0] * V]), TypeError, "target_logits"),
    ("none", dict(bonus_token_ids=ints), ValueError, "target_logits"),
    ("none", dict(bonus_token_ids=ints[:1]), ValueError, "bonus_token_ids"),
    ("none", dict(bonus_token_ids=floats), TypeError, "bonus_token_ids"),
    ("none", dict(active=ones(3, bool)), ValueError, "active"),
    ("none", dict(active=ints), TypeError, "active"),
    ("none", dict(vocab_size=0), ValueError, "vocab_size"),
    ("none", dict(vocab_size=9), ValueError, "vocab_size"),
    ("none", dict(vocab_size=8.0), TypeError, "vocab_size"),
    ("none", dict(vocab_size=True), TypeError, "vocab_size"),
    ("none", dict(drafts=zeros(3)), TypeError, "drafts"),
    ("none", dict(token_ids=zeros((B, K), jnp.int32)), ValueError, r"drafts\.token_ids"),
    ("none", dict(token_ids=zeros(N)), TypeError, r"drafts\.token_ids"),
    ("none", dict(token_ids=np.zeros(N, np.int64)), TypeError, r"drafts\.token_ids"),
    (
        "none",
        dict(cu_num_draft_tokens=zeros((3, 1), jnp.int32)),
        ValueError,
        r"drafts\.cu_num_draft_tokens",
    ),
    (
        "none",
        dict(cu_num_draft_tokens=zeros(0, jnp.int32)),
        ValueError,
        r"drafts\.cu_num_draft_tokens",
    ),
    ("none", dict(cu_num_draft_tokens=zeros(3)), TypeError, r"drafts\.cu_num_draft_tokens"),
    ("none", dict(sampling=ones(B)), TypeError, "sampling"),
    ("none", dict(temperature=ones(3)), ValueError, r"sampling\.temperature"),
    ("none", dict(temperature=ints), TypeError, r"sampling\.temperature"),
    ("none", dict(temperature="hot"), TypeError, r"sampling\.temperature"),
    ("none", dict(config=3), TypeError, "config"),
    ("none", dict(distribution=ones((N, V))), TypeError, r"drafts\.distribution"),
    ("probs", dict(probs=ones(V)), ValueError, r"drafts\.distribution\.probs"),
    (
        "probs",
        dict(probs=ones((R, V), jnp.bfloat16)),
        TypeError,
        r"drafts\.distribution\.probs",
    ),
    ("probs", dict(probs=ones((R, V + 1))), ValueError, r"drafts\.distribution\.probs"),
    ("probs", dict(probs=ones((0, V))), ValueError, r"drafts\.distribution\.probs"),
    ("probs", dict(rows=None), ValueError, r"drafts\.distribution\.probs"),
    ("probs", dict(rows=zeros(N + 1, jnp.int32)), ValueError, r"drafts\.distribution\.rows"),
    ("probs", dict(rows=zeros(N)), TypeError, r"drafts\.distribution\.rows"),
    ("probs", dict(valid=ones(N, bool)), ValueError, r"drafts\.distribution\.valid"),
    ("probs", dict(valid=ints), TypeError, r"drafts\.distribution\.valid"),
    ("logits", dict(logits=ones(V)), ValueError, r"drafts\.distribution\.logits"),
    ("logits", dict(logits=ones((R, V), jnp.int8)), TypeError, r"drafts\.distribution\.logits"),
    (
        "logits",
        dict(log_normalizer=zeros(N)),
        ValueError,
        r"drafts\.distribution\.log_normalizer",
    ),
    (
        "logits",
        dict(log_normalizer=zeros(R, jnp.float16)),
        TypeError,
        r"drafts\.distribution\.log_normalizer",
    ),
    (
        "logits",
        dict(log_normalizer=zeros(R), row_max=zeros(N)),
        ValueError,
        r"drafts\.distribution\.row_max",
    ),
    (
        "logits",
        dict(log_normalizer=None, row_max=zeros(R)),
        ValueError,
        r"drafts\.distribution\.row_max",
    ),
    ("logits", dict(threshold=zeros(N)), ValueError, r"drafts\.distribution\.threshold"),
    ("logits", dict(threshold=ints), ValueError, r"drafts\.distribution\.threshold"),
    (
        "logits",
        dict(threshold=zeros(R, jnp.int32)),
        TypeError,
        r"drafts\.distribution\.threshold",
    ),
    ("map", dict(ids=zeros(C + 1, jnp.int32)), ValueError, r"drafts\.distribution\.ids"),
    ("candidates", dict(ids=CANDIDATES[:2]), ValueError, r"drafts\.distribution\.ids"),
    ("candidates", dict(ids=CANDIDATES[None]), ValueError, r"drafts\.distribution\.ids"),
    ("map", dict(ids=zeros(C)), TypeError, r"drafts\.distribution\.ids"),
    ("map", dict(ids=[6, 2, 5]), TypeError, r"drafts\.distribution\.ids"),
    ("map", dict(ids=jnp.array([6, -1, 5])), ValueError, r"drafts\.distribution\.ids\[1\]"),
    ("map", dict(vocab_size=6), ValueError, r"drafts\.distribution\.ids\[0\]"),
    ("map", dict(ids=jnp.array([6, 2, 6])), ValueError, r"drafts\.distribution\.ids"),
    ("none", dict(min_p=ones(3)), ValueError, r"sampling\.min_p"),
    ("none", dict(min_p="low"), TypeError, r"sampling\.min_p"),
    ("none", dict(top_k=floats), TypeError, r"sampling\.top_k"),
    ("none", dict(top_k=ints[:1]), ValueError, r"sampling\.top_k"),
    ("none", dict(top_p=ints), TypeError, r"sampling\.top_p"),
    ("none", dict(token_bitmask=zeros((B, 1), jnp.int32)), ValueError, "token_bitmask"),
    ("none", dict(token_bitmask=zeros((N + B, 2), jnp.uint32)), ValueError, "token_bitmask"),
    ("none", dict(token_bitmask=zeros((N + B, 1), bool)), TypeError, "token_bitmask"),
]
names = [f"{'/'.join(changes)}-{error.__name__}" for _, changes, error, _ in CALLS]
calls = pytest.mark.parametrize(("kind", "changes", "error", "message"), CALLS, ids=names)


@calls
@pytest.mark.parametrize("call", [with_noise, with_keys, validate])
def test_a_wrong_argument_is_named(kind, changes, error, message, call):
    with pytest.raises(error, match=f"^{message}"):
        call(arguments(kind, **changes))


@pytest.mark.parametrize(
    ("noise", "error", "message"),
    [
        (zeros((B, K)), TypeError, "noise"),
        (dict(accept=zeros(N)), ValueError, r"noise\.accept"),
        (dict(accept=zeros((B, K), jnp.int32)), TypeError, r"noise\.accept"),
        (dict(recover=zeros(B)), ValueError, r"noise\.recover"),
        (dict(recover=zeros((B, 2), bool)), TypeError, r"noise\.recover"),
    ],
)
def test_wrong_noise_is_named(noise, error, message):
    if isinstance(noise, dict):
        noise = dataclasses.replace(NOISE, **noise)
    with pytest.raises(error, match=f"^{message}"):
        with_noise(arguments(noise=noise))


@pytest.mark.parametrize(
    ("exponential", "error", "message"),
    [
        (ones((B, V + 1)), ValueError, r"noise\.exponential"),
        (ones((B, V), jnp.float16), TypeError, r"noise\.exponential"),
    ],
)
def test_wrong_race_noise_is_named(exponential, error, message):
    noise = sd.testing.RaceNoise(zeros((B, K)), exponential)
    with pytest.raises(error, match=f"^{message}"):
        with_noise(arguments(noise=noise))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (dict(keys=zeros((B, 2), jnp.uint32)), TypeError, "keys"),
        (dict(keys=jax.random.key(0)), ValueError, "keys"),
        (dict(positions=zeros(3, jnp.int32)), ValueError, "positions"),
        (dict(positions=floats), TypeError, "positions"),
    ],
)
def test_wrong_keys_and_positions_are_named(changes, error, message):
    with pytest.raises(error, match=f"^{message}"):
        with_keys(arguments(**changes))


def test_errors_are_raised_while_tracing():
    with pytest.raises(ValueError, match="^target_logits"):
        jax.eval_shape(lambda x: with_noise(arguments(target_logits=x)), zeros((N, V)))


@pytest.mark.parametrize("name", ["triton", "mosaic_tpu"])
@pytest.mark.parametrize("call", [with_noise, with_keys, validate])
def test_an_unknown_implementation_is_refused(call, name):
    must = f"implementation must be 'mosaic_gpu', 'xla' or None, but it is '{name}'"
    with pytest.raises(ValueError, match=must):
        call(arguments(implementation=name))


@pytest.mark.parametrize("call", [with_noise, with_keys, validate])
def test_a_named_implementation_that_cannot_serve_says_why(call):
    with pytest.raises(NotImplementedError, match="mosaic_gpu.*Hopper.*runs on cpu"):
        call(arguments(implementation="mosaic_gpu"))


AGREEMENT = sd.SpecDecodeConfig(num_speculative_tokens=K, rejection_sample_method="agreement")


def test_the_agreement_rule_takes_race_noise_at_each_position():
    with pytest.raises(TypeError, match="^noise must be a RaceNoise"):
        with_noise(arguments(config=AGREEMENT))
    race = sd.testing.RaceNoise(zeros((B, K)), ones((B, V)))
    with pytest.raises(ValueError, match=r"noise\.exponential must .*\[B, K\+1, T\+L\]"):
        with_noise(arguments(config=AGREEMENT, noise=race))
    each = sd.testing.RaceNoise(zeros((B, K)), ones((B, K + 1, 1 + V)))
    with pytest.raises(ValueError, match=r"noise\.exponential must .*\[B, V\]"):
        with_noise(arguments(noise=each))


def test_from_dense_needs_a_rectangle():
    with pytest.raises(ValueError, match="^token_ids"):
        sd.Drafts.from_dense(zeros(4, jnp.int32))


def from_flat(ids: Any, counts: Any) -> sd.Drafts:
    return sd.Drafts.from_flat(ids, counts)


def from_dense(ids: Any, counts: Any) -> sd.Drafts:
    return sd.Drafts.from_dense(np.asarray(ids)[None] if isinstance(ids, list) else ids, counts)


@pytest.mark.parametrize("make", [from_flat, from_dense])
@pytest.mark.parametrize("name", ["token_ids", "num_draft_tokens"])
@pytest.mark.parametrize(
    ("values", "error"),
    [
        ([2.7], TypeError),
        (np.float32([1]), TypeError),
        ([True], TypeError),
        (["5"], TypeError),
        ([None], TypeError),
        ([2**40], ValueError),
        ([-(2**31) - 1], ValueError),
        (np.uint32([2**31]), ValueError),
        (jnp.uint32([2**32 - 1]), ValueError),
        (jnp.float32([1]), TypeError),
    ],
    ids=str,
)
def test_ids_and_counts_that_a_cast_would_change_are_refused(make, name, values, error):
    if name == "token_ids":
        values = values if isinstance(values, list) or make is from_flat else values[None]
        arguments: Any = values, [1]
    else:
        arguments = [1], values
    with pytest.raises(error, match=f"^{name}"):
        make(*arguments)


@pytest.mark.parametrize("name", ["token_ids", "num_draft_tokens"])
@pytest.mark.parametrize("dtype", ["float32", "bool"])
def test_traced_ids_that_are_no_integers_are_refused(name, dtype):
    traced, other = jax.ShapeDtypeStruct((1,), dtype), jax.ShapeDtypeStruct((1,), "int32")
    pair = (traced, other) if name == "token_ids" else (other, traced)
    with pytest.raises(TypeError, match=f"^{name} .* of {dtype}"):
        jax.eval_shape(sd.Drafts.from_flat, *pair)


@pytest.mark.parametrize("dtype", ["uint32", "int64", "uint64"])
def test_traced_ids_that_int32_does_not_hold_are_the_nearest_that_it_does(dtype):
    limits, far = np.iinfo(np.int32), np.iinfo(dtype)
    with jax.enable_x64(True):
        ids = jnp.asarray([far.min, 5, far.max], dtype)
        drafts = jax.jit(sd.Drafts.from_flat)(ids, jnp.asarray([3], dtype))
    assert drafts.token_ids.tolist() == [max(far.min, limits.min), 5, limits.max]
    assert drafts.token_ids.dtype == drafts.cu_num_draft_tokens.dtype == jnp.int32


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32"])
def test_ids_that_no_cast_can_change_are_taken(dtype):
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


def entry(
    shape: tuple[int, ...], index: Any, value: float, fill: float = 0.0, dtype: Any = np.float32
) -> jax.Array:
    filled = np.full(shape, fill, dtype)
    filled[index] = value
    return jax.device_put(filled)


def candidates(last: int) -> jax.Array:
    """Those of the first row with another one in the last place."""
    changed = np.array(CANDIDATES)
    changed[0, 2] = last
    return jax.device_put(changed)


def offsets(*values: int) -> dict[str, Any]:
    return dict(cu_num_draft_tokens=jnp.array(values, jnp.int32))


nan, inf = float("nan"), float("inf")
LOGITS = (N + B, V)

VALUES = [
    ("none", offsets(1, 3, 5), r"drafts\.cu_num_draft_tokens"),
    ("none", offsets(0, 3, 2), r"drafts\.cu_num_draft_tokens"),
    ("none", offsets(0, 4, 5), r"drafts\.cu_num_draft_tokens"),
    ("none", offsets(0, 3, 6), r"drafts\.cu_num_draft_tokens"),
    ("none", dict(temperature=jnp.array([1.0, -1.0])), r"sampling\.temperature\[1\]"),
    ("none", dict(temperature=jnp.array([nan, 1.0])), r"sampling\.temperature\[0\]"),
    ("none", dict(temperature=jnp.array([inf, 1.0])), r"sampling\.temperature\[0\]"),
    ("none", dict(token_ids=jnp.array([0, 1, 8, 0, 0])), r"drafts\.token_ids\[2\]"),
    ("none", dict(token_ids=jnp.array([0, -2, 0, 0, 0])), r"drafts\.token_ids\[1\]"),
    ("none", dict(token_ids=jnp.array([0, 1, 7, 0, 0]), vocab_size=7), r"drafts\.token_ids\[2\]"),
    ("none", dict(target_logits=entry(LOGITS, (3, 1), nan)), r"target_logits\[3\]"),
    ("none", dict(target_logits=entry(LOGITS, (6, 7), inf)), r"target_logits\[6\]"),
    ("none", dict(target_logits=entry(LOGITS, 2, -inf)), r"target_logits\[2\]"),
    (
        "none",
        dict(target_logits=zeros((N, V)), bonus_token_ids=jnp.array([0, 8])),
        r"bonus_token_ids\[1\]",
    ),
    (
        "none",
        dict(target_logits=zeros((N, V)), bonus_token_ids=jnp.array([-1, 0])),
        r"bonus_token_ids\[0\]",
    ),
    ("probs", dict(rows=jnp.array([0, 1, 6, 0, 0])), r"drafts\.distribution\.rows\[2\]"),
    ("probs", dict(rows=jnp.array([0, -1, 0, 0, 0])), r"drafts\.distribution\.rows\[1\]"),
    ("probs", dict(probs=entry((R, V), (0, 2), nan, 1 / V)), r"drafts\.distribution\.probs\[0\]"),
    ("probs", dict(probs=entry((R, V), (0, 2), -0.5, 1 / V)), r"drafts\.distribution\.probs\[0\]"),
    ("probs", dict(probs=full((R, V), 0.2)), r"drafts\.distribution\.probs\[0\]"),
    ("logits", dict(logits=entry((R, V), (0, 2), nan)), r"drafts\.distribution\.logits\[0\]"),
    ("logits", dict(logits=entry((R, V), (0, 2), inf)), r"drafts\.distribution\.logits\[0\]"),
    ("logits", dict(logits=entry((R, V), 0, -inf)), r"drafts\.distribution\.logits\[0\]"),
    (
        "logits",
        dict(log_normalizer=entry((R,), 0, nan)),
        r"drafts\.distribution\.log_normalizer\[0\]",
    ),
    (
        "logits",
        dict(log_normalizer=entry((R,), 0, -1024.0)),
        r"drafts\.distribution\.log_normalizer\[0\]",
    ),
    (
        "logits",
        dict(log_normalizer=zeros(R), row_max=entry((R,), 0, inf)),
        r"drafts\.distribution\.row_max\[0\]",
    ),
    ("logits", dict(threshold=entry((R,), 0, nan)), r"drafts\.distribution\.threshold\[0\]"),
    ("logits", dict(threshold=full(R, 0.5)), r"drafts\.distribution\.logits\[0\]"),
    ("candidates", dict(ids=candidates(8)), r"drafts\.distribution\.ids\[0\]\[2\]"),
    ("candidates", dict(ids=candidates(5)), r"drafts\.distribution\.ids\[0\]"),
    ("none", dict(min_p=jnp.array([0.0, -0.5])), r"sampling\.min_p\[1\]"),
    ("none", dict(min_p=jnp.array([nan, 0.5])), r"sampling\.min_p\[0\]"),
    ("none", dict(top_k=jnp.array([0, -2])), r"sampling\.top_k\[1\]"),
    ("none", dict(top_p=jnp.array([0.0, 1.0])), r"sampling\.top_p\[0\]"),
    ("none", dict(top_p=jnp.array([1.0, 1.5])), r"sampling\.top_p\[1\]"),
    ("none", dict(positions=jnp.array([3, -1])), r"positions\[1\]"),
    (
        "none",
        dict(token_bitmask=entry((N + B, 1), (2, 0), 256, -1, np.int32)),  # a bit past V
        r"target_logits\[2\]",
    ),
]


@pytest.mark.parametrize(
    ("kind", "changes", "message"), VALUES, ids=["/".join(changes) for _, changes, _ in VALUES]
)
def test_validate_names_the_value_that_is_wrong(kind, changes, message):
    with pytest.raises(ValueError, match=f"^{message}"):
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
    validate(arguments(kind, token_ids=jnp.array([0, -1, 7, 0, 0]), temperature=zeros(B)))
    bonus = dict(target_logits=zeros((N, V)), bonus_token_ids=ints)
    validate(arguments(kind, **bonus))
    assert not with_noise(arguments(kind)).status.any()
    filters = dict(min_p=ones(B), top_k=ints, top_p=ones(B))
    hidden = dict(target_logits=entry(LOGITS, (3, 1), nan), token_bitmask=full((N + B, 1), 1))
    for changes in (filters, hidden, filters | hidden):
        validate(arguments(kind, **changes))
    assert not with_noise(arguments(kind, **filters | hidden)).status.any()


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
    with pytest.raises(ValueError, match="^N must"):
        validate(arguments(sharding=sd.VerifySharding(mesh, batch_axis="v")))


def test_one_count_above_k_ends_its_request_and_no_other():
    # Outside jit too, where counts are known. A batch raises if no request fits.
    drafts = sd.Drafts(zeros((2 * K + 1,), jnp.int32), jnp.array([0, K + 1, K + 2]))
    args = arguments(target_logits=zeros((2 * K + 1 + B, V)))
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
