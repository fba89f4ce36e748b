"""Every refusal of `rejection_sample` and `validate`, those of other functions that take arrays."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from filled import full, ones, zeros

import jax_specdec as sd
from jax_specdec import lm

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
    ("none", "kernel_config", {}, TypeError),
    ("none", "sampling.top_p", [[0.5], []], TypeError),
    ("none", "noise", None, TypeError),
    ("none", "noise", (None, None), TypeError),
    ("none", "noise", zeros((B, K)), TypeError),
    ("none", "noise.accept", zeros(N), ValueError),
    ("none", "noise.accept", zeros((B, K), jnp.int32), TypeError),
    ("none", "noise.recover", zeros(B), ValueError),
    ("none", "keys", zeros((B, 2), jnp.uint32), TypeError),
    ("none", "keys", jax.random.key(0), ValueError),
    ("none", "positions", zeros(3, jnp.int32), ValueError),
    ("none", "positions", floats, TypeError),
    ("none", "positions", [[1], [2, 3]], TypeError),
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


# The other functions that take arrays

STORE = sd.DraftStore.create(B, K, V)
DRAFTS = sd.Drafts(*jax.device_put((np.zeros(B * K, np.int32), np.arange(0, 7, K, np.int32))))
OUTPUT = sd.RejectionSampleOutput(zeros((B, K + 1), jnp.int32), ints, ints, ints)
COUNTERS = sd.AcceptanceCounters(zeros((2, 3 * K + 3), jnp.uint32))
STEPS = lm.StepRecord(np.zeros((1, B, K + 1), np.int32), *[np.ones((1, B), np.int32)] * 4)
STATS = sd.AcceptanceStats.from_steps(STEPS)
LOGPROBS = sd.TokenLogprobs(zeros((B, K + 1)), zeros((B, K + 1, 1)), zeros((B, K + 1, 1)))
MIN_TOKENS = sd.MinTokens(zeros((B, 1), jnp.int32), ints)
KEYS = jax.random.split(jax.random.key(0), B)
CACHE = zeros((4, 8, 2, 8))
Call = Callable[..., Any]


def write(**changes: Any) -> Any:
    given = dict(offset=0, logits=zeros((B, V)), drawn=sd.DraftSample(ints, floats, floats))
    others = dict(positions=ints, sampling=sd.SamplingParams(0.8))
    return STORE.write(**{**given, **others, **changes})


def attach(drafts: sd.Drafts = DRAFTS, store: sd.DraftStore = STORE, **changes: Any) -> Any:
    return store.attach(
        drafts, **{"positions": ints, "sampling": sd.SamplingParams(0.8), **changes}
    )


def fallbacks(**changes: Any) -> Any:
    drafts = replaced(DRAFTS, ["distribution"], changes.pop("distribution", None))
    given = dict(sampling=sd.SamplingParams(0.8))
    return sd.DraftStore.count_fallbacks(drafts, **{**given, **changes})


def dense(distribution: Any) -> sd.Drafts:
    return sd.Drafts.from_dense(np.zeros((B, K), np.int32), distribution=distribution)


def flat(**changes: Any) -> sd.Drafts:
    given = dict(token_ids=np.zeros(N, np.int32), num_draft_tokens=[3, 2])
    return sd.Drafts.from_flat(**{**given, **changes})


def logprobs(output: Any = OUTPUT, drafts: Any = DRAFTS) -> Any:
    given = dict(sampling=sd.SamplingParams(0.8), config=CONFIG)
    return sd.token_logprobs(zeros((B * (K + 1), V)), drafts, output, **given)


def sample(**changes: Any) -> Any:
    given = dict(logits=zeros((B, V)), positions=ints, offset=0, keys=KEYS)
    return sd.sample_draft_tokens(**{**given, "sampling": sd.SamplingParams(0.8), **changes})


def process(drafts: Any) -> Any:
    processors = sd.LogitsProcessors(min_tokens=MIN_TOKENS)
    return sd.process_logits(zeros((B * (K + 1), V)), drafts, processors, config=CONFIG)


def penalties(**changes: Any) -> Any:
    names = ("frequency", "presence", "repetition")
    given = dict(token_ids=[[1], [2]], lengths=[1, 1], prompt_lengths=[1, 1], vocab_size=V)
    return sd.Penalties.from_sequences(**{**given, **dict.fromkeys(names, floats), **changes})


def attention(**changes: Any) -> Any:
    given = dict(query=zeros((B, 1, 4, 8)), keys=CACHE, values=CACHE, start=ints)
    return sd.decode_attention(**{**given, "pages": zeros((B, 2), jnp.int32), **changes})


def replaced_by(tree: Any, name: str, value: Any) -> Any:
    return replaced(tree, name.split("."), value)


# What is refused: the beginning of the sentence, and the call.
OTHERS: dict[type[Exception], list[tuple[str, Call]]] = {
    TypeError: [
        # Lists that hold no integers are no arrays: with fields, of any depth, and without.
        (
            "distribution.probs must be an array, but it is [[0.5",
            lambda: dense(sd.DraftProbs([[0.5]])),
        ),
        ("distribution.logits must be an array, but", lambda: dense(sd.DraftLogits((0.5, 1)))),
        ("distribution.ids must be an array, but", lambda: dense(sd.DraftProbs(floats, ids=[1]))),
        ("distribution.valid must be an array", lambda: dense(sd.DraftProbs(floats, valid=True))),
        ("distribution must be a DraftProbs, a Dra", lambda: flat(distribution=[[0.5]])),
        ("token_ids must be integers, but", lambda: flat(token_ids=[[1], [2, 3]])),
        ("logits must be an array [B, Vd] of", lambda: sample(logits=[[0.0] * V] * B)),
        ("offset must be integers", lambda: sample(offset=0.5)),
        # Stores
        ("offset must be an int, but it is 0.5", lambda: write(offset=0.5)),
        ("offset must be integers, but", lambda: write(offset=zeros(()))),
        ("slots must be integers, but", lambda: write(slots=[0.0, 1.0])),
        (
            "drawn.row_max must be an array [B] =",
            lambda: write(drawn=sd.DraftSample(ints, floats, ints)),
        ),
        ("slots must be integers, but", lambda: attach(slots=floats)),
        (
            "drafts.token_ids must be an array [N] of",
            lambda: attach(replaced_by(DRAFTS, "token_ids", [1])),
        ),
        (
            "store.positions must be an array [K, S]",
            lambda: attach(store=replaced_by(STORE, "positions", 5)),
        ),
        ("slots must be an array [S] = [2] of bool", lambda: STORE.evict([0, 1])),
        ("slots must be an array [S] = [2] of bool", lambda: STORE.evict(ints)),
        ("some must be a DraftStore", lambda: STORE.put(None, [0])),
        ("slots must be integers", lambda: STORE.put(STORE, None)),
        ("own_ids must be a bool", lambda: sd.DraftStore.create(B, K, V, own_ids=ints)),
        ("sampling.temperature must", lambda: fallbacks(sampling=sd.SamplingParams("hot"))),
        ("active must be an array [B] = [2] of bool", lambda: fallbacks(active=[True, True])),
        ("drafts.distribution must be a DraftP", lambda: fallbacks(distribution=floats)),
        # Outputs and counts
        (
            "output.token_ids must be an array [B, K+1]",
            lambda: sd.parse_output(replaced_by(OUTPUT, "token_ids", [[1]])),
        ),
        (
            "output.num_emitted must be an array [B]",
            lambda: sd.parse_output(replaced_by(OUTPUT, "num_emitted", floats)),
        ),
        (
            "output.num_emitted must be an array [B]",
            lambda: logprobs(replaced_by(OUTPUT, "num_emitted", floats)),
        ),
        (
            "drafts.token_ids must be an array [N]",
            lambda: logprobs(drafts=replaced_by(DRAFTS, "token_ids", [1])),
        ),
        ("request must be an int", lambda: LOGPROBS.of(0.5, 1)),
        ("num_tokens must be an int", lambda: LOGPROBS.of(0, None)),
        (
            "counters.words must be an array [2, 3K+3]",
            lambda: sd.AcceptanceCounters([0]).update(
                num_proposed=ints, num_accepted=ints, num_emitted=ints
            ),
        ),
        ("counters must be an AcceptanceCounters", lambda: sd.AcceptanceStats.from_counters(ints)),
        (
            "steps.num_kept must be integers",
            lambda: sd.AcceptanceStats.from_steps(replaced_by(STEPS, "num_kept", 0.5)),
        ),
        ("earlier must be an AcceptanceStats", lambda: STATS - 1),
        # Processors
        (
            "drafts.token_ids must be an array [N]",
            lambda: process(replaced_by(DRAFTS, "token_ids", [1])),
        ),
        (
            "drafts.parents must be an array [N]",
            lambda: process(replaced_by(DRAFTS, "parents", [0])),
        ),
        ("token_ids must be integers", lambda: MIN_TOKENS.append(floats)),
        ("biases must be a list, but it is {0: 1.0}", lambda: sd.LogitBias.from_mappings({0: 1.0})),
        ("biases[1] must be a Mapping", lambda: sd.LogitBias.from_mappings([{}, [1]])),
        ("biases[0].keys() must be integers", lambda: sd.LogitBias.from_mappings([{"a": 1.0}])),
        ("biases[0].values() must be numbers", lambda: sd.LogitBias.from_mappings([{1: "a"}])),
        ("size must be an int", lambda: sd.LogitBias.from_mappings([{}], size=1.0)),
        ("frequency must be an array [B] = [2] of f", lambda: penalties(frequency=[0.5, 0.5])),
        ("lengths must be integers", lambda: penalties(lengths=floats)),
        ("vocab_size must be an int", lambda: penalties(vocab_size=8.0)),
        ("presence must be numbers", lambda: sd.Penalties.pack([0.5], "x", [1.0])),
        ("words[0] must be a list, but it is 5", lambda: sd.BadWords.pack([5])),
        ("words[0][1] must be a list, but it is 'ab'", lambda: sd.BadWords.pack([[[1], "ab"]])),
        ("words must be integers", lambda: sd.BadWords.pack([[[1, 0.5]]])),
        ("num_words must be an int", lambda: sd.BadWords.pack([[[1]]], num_words=1.0)),
        ("words must be integers", lambda: sd.BadWords.from_sequences(floats, [[1]], lengths=[1])),
        (
            "token_ids must be a list, but it is 'ab'",
            lambda: sd.AllowedTokens.pack("ab", vocab_size=V),
        ),
        ("token_ids[0] must be integers", lambda: sd.AllowedTokens.pack([[0.5]], vocab_size=V)),
        ("vocab_size must be an int", lambda: sd.AllowedTokens.pack([[0]], vocab_size=None)),
        # Attention
        ("pages must be an array [B, L] = [2, L] of", lambda: attention(pages=[[0, 1]])),
        ("keys must be an array [P, page, Nkv, D]", lambda: attention(keys=CACHE.tolist())),
        ("finite_cache must be a bool", lambda: attention(finite_cache=[1])),
        ("cache must be two arrays", lambda: sd.move_rows(None, ints, zeros((B, 1), jnp.int32))),
        # Grammars
        (
            "drafts.token_ids must be an array [N]",
            lambda: sd.grammar.grammar_bitmask([None], sd.Drafts([1], ints), vocab_size=V),
        ),
        (
            "vocab_size must be an int",
            lambda: sd.grammar.forced_drafts([None], [[1]], vocab_size=None),
        ),
        (
            "end_token_ids must be a list",
            lambda: sd.grammar.forced_drafts([None], [[1]], vocab_size=V, end_token_ids=1),
        ),
        (
            "max_drafts must be integers",
            lambda: sd.grammar.forced_drafts([None], [[1]], vocab_size=V, max_drafts=0.5),
        ),
        (
            "one_hot must be an array [] or [B]",
            lambda: sd.grammar.forced_drafts([None], [[1]], vocab_size=V, one_hot=2),
        ),
        ("token_ids must be a list", lambda: sd.grammar.advance_matchers([None], None)),
        ("token_ids[0] must be a list", lambda: sd.grammar.advance_matchers([None], ["a"])),
        ("token_ids[0][0] must be an int", lambda: sd.grammar.advance_matchers([None], [[0.5]])),
        (
            "token_ids must be integers",
            lambda: sd.grammar.GrammarLookahead([None], vocab_size=V).append([0.5]),
        ),
        # Testing
        ("keys must be typed", lambda: sd.testing.draw_noise(ints, ints, K)),
        ("positions must be integers", lambda: sd.testing.draw_noise(KEYS, floats, K)),
        ("num_speculative_tokens must be an int", lambda: sd.testing.draw_noise(KEYS, ints, 3.0)),
        ("positions must be integers", lambda: sd.testing.token_exponentials(KEYS, "ab", V)),
        ("vocab_size must be an int", lambda: sd.testing.token_exponentials(KEYS, ints, 8.0)),
        (
            "drafts must be a Drafts",
            lambda: sd.testing.which_implementation(floats, None, config=CONFIG),
        ),
        (
            "config must be a Spec",
            lambda: sd.testing.which_implementation(floats, DRAFTS, config=3),
        ),
    ],
    ValueError: [
        ("offset must be in [0, 2], but it is 3", lambda: write(offset=K)),
        ("logits must be an array [B, Vd] = [1, 8]", lambda: write(slots=[1])),
        ("some.positions must be an array [K, S] = [3, 1]", lambda: STORE.put(STORE, [1])),
        (
            "store.logits must be an array [K*S, Vd] = [6, Vd]",
            lambda: attach(store=replaced_by(STORE, "logits", floats)),
        ),
        (
            "steps.num_kept must be an array [1, 2], as token_ids",
            lambda: sd.AcceptanceStats.from_steps(replaced_by(STEPS, "num_kept", ints)),
        ),
        ("request must be in [0, 1], but it is 2", lambda: LOGPROBS.of(2, 1)),
        ("token_ids must be an array [B] = [2] or [B, n]", lambda: MIN_TOKENS.append([1])),
        ("presence must be an array [B] = [1]", lambda: sd.Penalties.pack([0.5], [], [1.0])),
        (
            "max_drafts must be an array [] or [B] = [1]",
            lambda: sd.grammar.forced_drafts([None], [[1]], vocab_size=V, max_drafts=[1, 2]),
        ),
        ("softcap must be a finite number above 0", lambda: attention(softcap=True)),
        (
            "positions must have axes that broadcast",
            lambda: sd.testing.token_exponentials(KEYS, [1, 2, 3], V),
        ),
    ],
}


@pytest.mark.parametrize(
    ("error", "sentence", "call"),
    [(error, *case) for error, cases in OTHERS.items() for case in cases],
)
def test_a_wrong_argument_of_another_function_is_named(error, sentence, call):
    with pytest.raises(error, match=f"^{re.escape(sentence)}"):
        call()


def test_lists_of_integers_are_taken_as_arrays():
    slots, positions = [1, 0], [3, 7]
    store = write(slots=slots, positions=positions)
    assert store.positions[0].tolist() == [7, 3]
    attached = attach(store=store, slots=slots, positions=positions)
    assert attached.distribution.rows.tolist()[::K] == slots
    numbers = jax.tree.map(np.asarray, (DRAFTS, store))  # and arrays of NumPy as those of JAX
    again = attach(*numbers, slots=slots, positions=positions)
    assert again.distribution.valid.tolist() == attached.distribution.valid.tolist()
