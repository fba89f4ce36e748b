"""Every refusal of `rejection_sample` and `validate`, and the argument that it names."""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from filled import full, ones, zeros

import jax_specdec as sd

pytestmark = pytest.mark.newest

B, K, V, N, R, C = 2, 3, 8, 5, 6, 3
CONFIG = sd.SpecDecodeConfig(num_speculative_tokens=K)
AGREEMENT = sd.SpecDecodeConfig(num_speculative_tokens=K, rejection_sample_method="agreement")
CANDIDATES = np.array([[(r + j) % V for j in (5, 0, 2)] for r in range(R)], np.int32)
ROWS, VALID = zeros(N, jnp.int32), ones(B, bool)
DISTRIBUTIONS: dict[str, Any] = {
    "none": None,
    "probs": sd.DraftProbs(full((R, V), 1 / V), ROWS, VALID),
    "logits": sd.DraftLogits(zeros((R, V)), ROWS, VALID, zeros(R)),
    "map": sd.DraftLogits(zeros((R, C)), ROWS, ids=jnp.array([6, 2, 5], jnp.int32)),
    "candidates": sd.DraftProbs(full((R, C), 1 / C), ROWS, ids=CANDIDATES),
}
Changes = dict[str, Any]


def arguments(kind: str = "none", changes: Changes | None = None) -> dict[str, Any]:
    """A good call, but for what is changed: "sampling.top_k" is a field of an argument."""
    cu_num_draft_tokens = jnp.array([0, 3, 5], jnp.int32)
    args: dict[str, Any] = dict(
        target_logits=zeros((N + B, V)),
        drafts=sd.Drafts(zeros(N, jnp.int32), cu_num_draft_tokens, DISTRIBUTIONS[kind]),
        noise=sd.testing.Noise(zeros((B, K)), zeros((B, 2))),
        sampling=sd.SamplingParams(ones(B)),
        config=CONFIG,
    )
    for path, value in (changes or {}).items():
        name, *fields = path.split(".")
        args[name] = replaced(args.get(name), fields, value)
    return args


def replaced(tree: Any, fields: list[str], value: Any) -> Any:
    if not fields:
        return value
    inner = replaced(getattr(tree, fields[0]), fields[1:], value)
    return dataclasses.replace(tree, **{fields[0]: inner})


def with_noise(args: dict[str, Any]) -> sd.RejectionSampleOutput:
    return sd.testing.rejection_sample_with_noise(
        args.pop("target_logits"), args.pop("drafts"), args.pop("noise"), **args
    )


def with_keys(args: dict[str, Any]) -> sd.RejectionSampleOutput:
    del args["noise"]
    args.setdefault("keys", jax.random.split(jax.random.key(0), B))
    args.setdefault("positions", zeros(B, jnp.int32))
    return sd.rejection_sample(args.pop("target_logits"), args.pop("drafts"), **args)


def validate(args: dict[str, Any]) -> None:
    del args["noise"]
    sd.testing.validate(args.pop("target_logits"), args.pop("drafts"), **args)


ints, floats = zeros((B,), jnp.int32), zeros((B,))
DISTRIBUTION = "drafts.distribution"

# Kind of distribution, the argument or field that is wrong, its value, and the error.
WRONG: list[tuple[str, str, Any, type[Exception]]] = [
    ("none", "target_logits", zeros((N, V)), ValueError),
    ("none", "target_logits", zeros((N + B, 0)), ValueError),
    ("none", "target_logits", zeros((N + B, V), jnp.int32), TypeError),
    ("none", "bonus_token_ids", floats, TypeError),
    ("none", "active", ones(3, bool), ValueError),
    ("none", "active", ints, TypeError),
    ("none", "vocab_size", 9, ValueError),
    ("none", "vocab_size", 8.0, TypeError),
    ("none", "config", 3, TypeError),
    ("none", "drafts", zeros(3), TypeError),
    ("none", "drafts.token_ids", zeros((B, K), jnp.int32), ValueError),
    ("none", "drafts.token_ids", np.zeros(N, np.int64), TypeError),
    ("none", "drafts.cu_num_draft_tokens", zeros(0, jnp.int32), ValueError),
    ("none", "drafts.cu_num_draft_tokens", zeros(3), TypeError),
    ("none", "sampling", ones(B), TypeError),
    ("none", "sampling.temperature", ones(3), ValueError),
    ("none", "sampling.temperature", "hot", TypeError),
    ("none", "sampling.min_p", ones(3), ValueError),
    ("none", "sampling.top_k", floats, TypeError),
    ("none", "sampling.top_p", ints, TypeError),
    ("none", "token_bitmask", zeros((B, 1), jnp.int32), ValueError),
    ("none", "token_bitmask", zeros((N + B, 1), bool), TypeError),
    ("none", DISTRIBUTION, ones((N, V)), TypeError),
    ("probs", f"{DISTRIBUTION}.probs", ones((R, V + 1)), ValueError),
    ("probs", f"{DISTRIBUTION}.probs", ones((0, V)), ValueError),
    ("probs", f"{DISTRIBUTION}.probs", ones((R, V), jnp.bfloat16), TypeError),
    ("probs", f"{DISTRIBUTION}.rows", zeros(N + 1, jnp.int32), ValueError),
    ("probs", f"{DISTRIBUTION}.rows", zeros(N), TypeError),
    ("probs", f"{DISTRIBUTION}.valid", ones(N, bool), ValueError),
    ("probs", f"{DISTRIBUTION}.valid", ints, TypeError),
    ("logits", f"{DISTRIBUTION}.logits", ones(V), ValueError),
    ("logits", f"{DISTRIBUTION}.logits", ones((R, V), jnp.int8), TypeError),
    ("logits", f"{DISTRIBUTION}.log_normalizer", zeros(N), ValueError),
    ("logits", f"{DISTRIBUTION}.log_normalizer", zeros(R, jnp.float16), TypeError),
    ("logits", f"{DISTRIBUTION}.row_max", zeros(N), ValueError),
    ("map", f"{DISTRIBUTION}.row_max", zeros(R), ValueError),  # without a normalizer
    ("logits", f"{DISTRIBUTION}.threshold", zeros(N), ValueError),
    ("logits", f"{DISTRIBUTION}.threshold", zeros(R, jnp.int32), TypeError),
    ("map", f"{DISTRIBUTION}.ids", zeros(C + 1, jnp.int32), ValueError),
    ("map", f"{DISTRIBUTION}.ids", jnp.array([6, 2, 6]), ValueError),
    ("map", f"{DISTRIBUTION}.ids", [6, 2, 5], TypeError),
    ("candidates", f"{DISTRIBUTION}.ids", CANDIDATES[:2], ValueError),
    ("candidates", f"{DISTRIBUTION}.ids", CANDIDATES[None], ValueError),
    ("none", "noise", zeros((B, K)), TypeError),
    ("none", "noise.accept", zeros(N), ValueError),
    ("none", "noise.accept", zeros((B, K), jnp.int32), TypeError),
    ("none", "noise.recover", zeros(B), ValueError),
    ("none", "keys", zeros((B, 2), jnp.uint32), TypeError),
    ("none", "keys", jax.random.key(0), ValueError),
    ("none", "positions", zeros(3, jnp.int32), ValueError),
    ("none", "positions", floats, TypeError),
]
CALLS = {"noise": [with_noise], "keys": [with_keys], "positions": [with_keys]}


@pytest.mark.parametrize(("kind", "path", "value", "error"), WRONG)
def test_a_wrong_argument_is_named(kind, path, value, error):
    for call in CALLS.get(path.partition(".")[0], [with_noise, with_keys, validate]):
        with pytest.raises(error, match=f"^{re.escape(path)} must"):
            call(arguments(kind, {path: value}))


@pytest.mark.parametrize(
    ("kind", "changes", "named"),
    [
        ("none", {"bonus_token_ids": ints}, "target_logits"),
        ("probs", {f"{DISTRIBUTION}.rows": None}, f"{DISTRIBUTION}.probs"),
        ("map", {f"{DISTRIBUTION}.ids": jnp.array([6, -1, 5])}, f"{DISTRIBUTION}.ids[1]"),
        ("map", {"vocab_size": 6}, f"{DISTRIBUTION}.ids[0]"),
    ],
)
def test_what_does_not_fit_another_argument_is_named(kind, changes, named):
    for call in (with_noise, with_keys, validate):
        with pytest.raises(ValueError, match=f"^{re.escape(named)} must"):
            call(arguments(kind, changes))


@pytest.mark.parametrize(
    ("exponential", "error"),
    [(ones((B, V + 1)), ValueError), (ones((B, V), jnp.float16), TypeError)],
)
def test_wrong_race_noise_is_named(exponential, error):
    noise = sd.testing.RaceNoise(zeros((B, K)), exponential)
    with pytest.raises(error, match=r"^noise\.exponential must"):
        with_noise(arguments(changes={"noise": noise}))


def test_errors_are_raised_while_tracing():
    with pytest.raises(ValueError, match="^target_logits"):
        jax.eval_shape(lambda x: with_noise(arguments(changes={"target_logits": x})), zeros((N, V)))


@pytest.mark.parametrize("call", [with_noise, with_keys, validate])
def test_an_implementation_that_cannot_serve_is_refused(call):
    for name in ("triton", "mosaic_tpu"):
        must = f"implementation must be 'mosaic_gpu', 'xla' or None, but it is '{name}'"
        with pytest.raises(ValueError, match=must):
            call(arguments(changes={"implementation": name}))
    with pytest.raises(NotImplementedError, match="mosaic_gpu.*Hopper.*runs on cpu"):
        call(arguments(changes={"implementation": "mosaic_gpu"}))


def test_the_agreement_rule_takes_race_noise_at_each_position():
    with pytest.raises(TypeError, match="^noise must be a RaceNoise"):
        with_noise(arguments(changes={"config": AGREEMENT}))
    race = sd.testing.RaceNoise(zeros((B, K)), ones((B, V)))
    with pytest.raises(ValueError, match=r"noise\.exponential must .*\[B, K\+1, T\+L\]"):
        with_noise(arguments(changes={"config": AGREEMENT, "noise": race}))
    each = sd.testing.RaceNoise(zeros((B, K)), ones((B, K + 1, 1 + V)))
    with pytest.raises(ValueError, match=r"noise\.exponential must .*\[B, V\]"):
        with_noise(arguments(changes={"noise": each}))


# Drafts


@pytest.mark.parametrize(
    ("make", "ids", "counts", "named"),
    [
        (sd.Drafts.from_flat, [2.7], [1], "token_ids"),
        (sd.Drafts.from_flat, [1], [True], "num_draft_tokens"),
        (sd.Drafts.from_dense, np.float32([[1]]), [1], "token_ids"),
        (sd.Drafts.from_dense, [[1]], ["1"], "num_draft_tokens"),
    ],
)
def test_ids_and_counts_that_a_cast_would_change_are_refused(make, ids, counts, named):
    with pytest.raises(TypeError, match=f"^{named} must be integers"):
        make(ids, counts)


def test_ids_of_other_dtypes_are_taken_where_int32_holds_them():
    for dtype in ("int8", "uint8", "int16", "uint16", "int32", "int64", "uint32"):
        ids, counts = np.array([[3, 5]], dtype), np.array([1], dtype)
        drafts = sd.Drafts.from_dense(ids, counts)
        assert drafts.token_ids.tolist() == [3, -1] and drafts.token_ids.dtype == jnp.int32
        assert sd.Drafts.from_flat(ids[0], counts).cu_num_draft_tokens.tolist() == [0, 1]
    assert sd.Drafts.from_flat([3, 5], [2]).token_ids.tolist() == [3, 5]
    assert sd.Drafts.from_flat([], [0]).token_ids.shape == (0,)


# Values, on the host


def entry(
    shape: tuple[int, ...], index: Any, value: float, fill: float = 0.0, dtype: Any = np.float32
) -> jax.Array:
    filled = np.full(shape, fill, dtype)
    filled[index] = value
    return jax.device_put(filled)


def offsets(*values: int) -> Changes:
    return {"drafts.cu_num_draft_tokens": np.int32(values)}


def token_ids(*values: int) -> Changes:
    return {"drafts.token_ids": np.int32(values)}


def bonus(*values: int) -> Changes:
    return {"target_logits": zeros((N, V)), "bonus_token_ids": np.int32(values)}


def stored(**fields: Any) -> Changes:
    return {f"{DISTRIBUTION}.{name}": value for name, value in fields.items()}


nan, inf = float("nan"), float("inf")
LOGITS = (N + B, V)

VALUES: list[tuple[str, Changes, str]] = [
    ("none", offsets(1, 3, 5), "drafts.cu_num_draft_tokens[0]"),
    ("none", offsets(0, 3, 2), "drafts.cu_num_draft_tokens, the count of request 1,"),
    ("none", offsets(0, 4, 5), "drafts.cu_num_draft_tokens, the count of request 0,"),
    ("none", offsets(0, 3, 6), "drafts.cu_num_draft_tokens[-1]"),
    ("none", token_ids(0, 1, 8, 0, 0), "drafts.token_ids[2]"),
    ("none", token_ids(0, -2, 0, 0, 0), "drafts.token_ids[1]"),
    ("none", token_ids(0, 1, 7, 0, 0) | {"vocab_size": 7}, "drafts.token_ids[2]"),
    ("none", {"target_logits": entry(LOGITS, (3, 1), nan)}, "target_logits[3].max()"),
    ("none", {"target_logits": entry(LOGITS, (6, 7), inf)}, "target_logits[6].max()"),
    ("none", {"target_logits": entry(LOGITS, 2, -inf)}, "target_logits[2].max()"),
    ("none", bonus(0, 8), "bonus_token_ids[1]"),
    ("none", bonus(-1, 0), "bonus_token_ids[0]"),
    ("none", {"sampling.temperature": np.float32([1, inf])}, "sampling.temperature[1]"),
    ("none", {"sampling.min_p": np.float32([nan, 0.5])}, "sampling.min_p[0]"),
    ("none", {"sampling.top_k": np.int32([0, -2])}, "sampling.top_k[1]"),
    ("none", {"sampling.top_p": np.float32([0, 1])}, "sampling.top_p[0]"),
    ("none", {"positions": np.array([3, -1])}, "positions[1]"),
    ("none", {"token_bitmask": entry((N + B, 1), 2, 256, -1, np.int32)}, "target_logits[2].max()"),
    ("probs", stored(rows=np.int32([0, 1, 6, 0, 0])), f"{DISTRIBUTION}.rows[2]"),
    ("probs", stored(rows=np.int32([0, -1, 0, 0, 0])), f"{DISTRIBUTION}.rows[1]"),
    ("probs", stored(probs=entry((R, V), (0, 2), nan, 1 / V)), f"{DISTRIBUTION}.probs[0].min()"),
    ("probs", stored(probs=entry((R, V), (0, 2), -0.5, 1 / V)), f"{DISTRIBUTION}.probs[0].min()"),
    ("probs", stored(probs=full((R, V), 1.0009 / V)), f"{DISTRIBUTION}.probs[0].sum()"),
    ("logits", stored(logits=entry((R, V), (0, 2), nan)), f"{DISTRIBUTION}.logits[0].max()"),
    ("logits", stored(logits=entry((R, V), 0, -inf)), f"{DISTRIBUTION}.logits[0].max()"),
    ("logits", stored(log_normalizer=entry((R,), 0, nan)), f"{DISTRIBUTION}.log_normalizer[0]"),
    ("logits", stored(log_normalizer=entry((R,), 0, -1024)), f"{DISTRIBUTION}.log_normalizer[0]"),
    ("logits", stored(row_max=entry((R,), 0, inf)), f"{DISTRIBUTION}.row_max[0]"),
    ("logits", stored(threshold=entry((R,), 0, nan)), f"{DISTRIBUTION}.threshold[0]"),
    ("logits", stored(threshold=full(R, 0.5)), f"{DISTRIBUTION}.logits[0].max()"),
    ("candidates", stored(ids=entry((R, 3), (0, 2), 8, 0, np.int32)), f"{DISTRIBUTION}.ids[0][2]"),
    ("candidates", stored(ids=zeros((R, 3), jnp.int32)), f"{DISTRIBUTION}.ids[0]"),
]


@pytest.mark.parametrize(("kind", "changes", "named"), VALUES)
def test_the_value_that_is_wrong_is_named(kind, changes, named):
    """By `validate`, and by a call outside jit unless it is one that a model computes."""
    probs = changes.get(f"{DISTRIBUTION}.probs", 0.0)
    is_computed = "max" in named or "threshold" in named or "normalizer" in named
    for call in [validate] if is_computed or np.isnan(probs).any() else [validate, with_keys]:
        with pytest.raises(ValueError, match=f"^{re.escape(named)} must"):
            call(arguments(kind, changes))


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    ["none", *(pytest.param(x, marks=pytest.mark.slow) for x in ("logits", "map", "candidates"))],
)
def test_validate_passes_what_can_be_verified(kind):
    validate(arguments(kind))
    validate(arguments(kind, token_ids(0, -1, 7, 0, 0) | {"sampling.temperature": zeros(B)}))
    validate(arguments(kind, bonus(0, 0)))
    assert not with_noise(arguments(kind)).status.any()
    filters = {"sampling": sd.SamplingParams(ones(B), min_p=ones(B), top_k=ints, top_p=ones(B))}
    hidden = {"target_logits": entry(LOGITS, (3, 1), nan), "token_bitmask": full((N + B, 1), 1)}
    for changes in (filters, hidden, filters | hidden):
        validate(arguments(kind, changes))
    assert not with_noise(arguments(kind, filters | hidden)).status.any()


def test_validate_takes_all_arguments_of_the_call():
    def names(function: Any) -> set[str]:
        return set(inspect.signature(function).parameters)

    assert names(sd.testing.validate) == names(sd.rejection_sample)
    mesh = jax.make_mesh((2,), ("v",), devices=jax.devices()[:2])
    all_of_them = {
        "keys": jax.random.split(jax.random.key(0), B),
        "positions": ints,
        "implementation": "xla",
        "kernel_config": sd.testing.KernelConfig(),
        "sharding": sd.VerifySharding(mesh, vocab_axis="v"),
    }
    validate(arguments(changes=all_of_them))
    with pytest.raises(ValueError, match="^N must"):
        validate(arguments(changes={"sharding": sd.VerifySharding(mesh, batch_axis="v")}))


def test_one_count_above_k_ends_its_request_and_no_other():
    # Outside jit too, where counts are known. A batch raises if no request fits.
    ids, logits = zeros((2 * K + 1,), jnp.int32), zeros((2 * K + 1 + B, V))
    for cu, bad in (([0, K + 1, K + 2], sd.Status.BAD_INPUT), ([0, 1, 2], sd.Status.OK)):
        drafts = sd.Drafts(ids, jnp.array(cu))
        output = with_noise(arguments(changes={"target_logits": logits, "drafts": drafts}))
        assert output.status.tolist() == [bad, sd.Status.OK]


def test_validate_does_not_look_at_what_nobody_reads():
    inactive = {"active": jnp.array([True, False])}
    validate(arguments(changes={"target_logits": entry(LOGITS, 5, nan)} | inactive))
    validate(arguments(changes={"sampling.temperature": np.float32([1, nan])} | inactive))
    validate(arguments(changes=token_ids(0, 0, 0, 99, 99) | inactive))
    validate(arguments(changes={"target_logits": entry(LOGITS, (0, 7), nan), "vocab_size": 7}))
    evicted = stored(rows=np.int32([9, 9, 9, 1, 1]), valid=jnp.array([False, True]))
    validate(arguments("probs", evicted))
    unread = np.array(CANDIDATES)
    unread[3, 0] = 99
    validate(arguments("candidates", stored(ids=unread)))
