"""Log-normalizers that are stored: exact at any temperature, or not used at all.

Without `row_max` both terms of ``x / T - log_normalizer`` are of the size of ``max(x) / T``, and q
is off by half a unit in the last place of that. Relative to the maximum of the row it is not. The
old form is the control: what it gives as q must be told from the target.
"""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from serving.chi_square import ALPHA, p_value, tally

import jax_specdec as sd

from .batch import ALMOST_ONE, XLA, Layout, Request, agree, pack, verify
from .cases import cold_batch
from .test_mosaic_gpu import alone
from .test_xla_all_at_once import all_at_once

pytestmark = pytest.mark.newest

TEMPERATURES = (1e-3, 1e-4, 1e-5)
PEAKS = (30.0, 1000.0)
CASES = tuple(itertools.product(TEMPERATURES, PEAKS))
V, K = 6, 2


def rows(rng: np.random.Generator, temperature: float, peak: float, dtype: str) -> np.ndarray:
    """``[K + 1, V]`` logits near `peak`, whose differences matter at the temperature."""
    x = peak + temperature * 1.5 * rng.standard_normal((K + 1, V))
    # Rounding may make all of them equal: so lower some by much more than that.
    far = rng.random(x.shape) < 0.3
    far[:, :2] = False
    return np.where(far, x - peak / 8, x).astype(jnp.dtype(dtype)).astype(np.float64)


def softmax(x: np.ndarray, temperature: float) -> np.ndarray:
    return scipy.special.softmax(x / np.float64(np.float32(temperature)), axis=-1)


COLD = [
    Layout(vocab=256, num_requests=16, num_drafts=32, num_speculative_tokens=2, kind="relative"),
    Layout(
        vocab=4224,
        num_requests=16,
        num_drafts=32,
        num_speculative_tokens=2,
        kind="relative",
        block=True,
        dtype="bfloat16",
        draft_dtype="bfloat16",
    ),
]


# The standard rule, a row at a time: see the chi-square tests.
@pytest.mark.parametrize(
    ("layout", "verifier"),
    [(COLD[1], XLA), (COLD[0], all_at_once), (COLD[1], all_at_once)],
    ids=["block, lazy", "standard, all at once", "block, all at once"],
)
def test_cold_requests_get_the_tokens_of_the_oracle(layout, verifier):
    agree((cold_batch(layout, seed) for seed in range(12)), verifier)


HALF = dataclasses.replace(COLD[1], vocab=256, num_requests=6, num_drafts=12, kind="logits")


@pytest.mark.long
def test_cold_requests_get_them_from_the_kernel_too():
    agree((cold_batch(HALF, seed) for seed in range(6)), alone)


# Chi-square tests.


@dataclasses.dataclass(frozen=True)
class Models:
    """Rows near each peak for each temperature, the same for all requests of a case."""

    target: np.ndarray  # [cases, K + 1, V] logits
    draft: np.ndarray  # [cases, K, V]
    dtype: str

    @classmethod
    def random(cls, dtype: str, seed: int = 190) -> Models:
        """The seed is one of those at which the control rounds badly in every case."""
        rng = np.random.default_rng(seed)
        both = [[rows(rng, *case, dtype) for case in CASES] for _ in range(2)]
        return cls(np.stack(both[0]), np.stack(both[1])[:, :K], dtype)

    def p(self, case: int) -> np.ndarray:
        return softmax(self.target[case], CASES[case][0])

    def q(self, case: int) -> np.ndarray:
        return softmax(self.draft[case], CASES[case][0])

    def relative(self) -> sd.DraftLogits:
        """What `sample_draft_tokens` would have stored, from float64."""
        peak = self.draft.max(axis=2, keepdims=True)
        scaled = (self.draft - peak) / np.float32(TEMPERATURE_OF)[:, None, None]
        return sd.DraftLogits(
            self.draft.reshape(-1, V).astype(jnp.dtype(self.dtype)),
            log_normalizer=np.float32(scipy.special.logsumexp(scaled, axis=2).reshape(-1)),
            row_max=np.float32(peak.reshape(-1)),
        )

    def by_one_number(self) -> sd.DraftProbs:
        """The control: q as float32 gives it where the normalizer is not relative."""
        inv = np.float32(1) / np.float32(TEMPERATURE_OF)[:, None, None]
        scaled = self.draft.astype(np.float32) * inv
        exact = self.draft / np.float64(np.float32(TEMPERATURE_OF))[:, None, None]
        normalizer = scipy.special.logsumexp(exact, axis=2, keepdims=True).astype(np.float32)
        return sd.DraftProbs(np.exp(scaled - normalizer).reshape(-1, V))


TEMPERATURE_OF = np.array([temperature for temperature, _ in CASES])
EACH = 50_000
GROUP = np.repeat(np.arange(len(CASES)), EACH)
KEYS = jax.random.wrap_key_data(
    np.random.default_rng(2).integers(2**32, size=(len(GROUP), 2), dtype=np.uint32),
    impl="threefry2x32",
)
decode = jax.jit(sd.rejection_sample, static_argnames="config")


def p_values(
    models: Models, distribution: sd.DraftProbs | sd.DraftLogits, method: str
) -> list[float]:
    """Of the first two tokens jointly, for each case."""
    rng = np.random.default_rng(1)
    ids = np.stack(
        [
            np.concatenate([rng.choice(V, EACH, p=models.q(c)[i]) for c in range(len(CASES))])
            for i in range(K)
        ],
        axis=1,
    )
    stored = GROUP[:, None] * K + np.arange(K)
    given = dataclasses.replace(distribution, rows=stored.reshape(-1).astype(np.int32))
    output = jax.device_get(
        decode(
            models.target[GROUP].reshape(-1, V).astype(jnp.dtype(models.dtype)),
            sd.Drafts.from_dense(ids, None, given),
            sampling=sd.SamplingParams(np.float32(TEMPERATURE_OF)[GROUP]),
            keys=KEYS,
            positions=np.zeros(len(GROUP), np.int32),
            config=sd.SpecDecodeConfig(num_speculative_tokens=K, rejection_sample_method=method),
        )
    )
    assert not output.status.any()
    assert 0 < output.num_accepted.mean() < K - 0.1
    found = []
    for c in range(len(CASES)):
        tokens, p = output.token_ids[GROUP == c, :2].copy(), models.p(c)
        short = output.num_emitted[GROUP == c] == 1
        tokens[short, 1] = rng.choice(V, short.sum(), p=p[1])
        found.append(p_value(tally(tokens, V), p[0][:, None] * p[1]))
    return found


@pytest.mark.parametrize(
    ("dtype", "method"),
    [
        ("float32", "standard"),
        ("bfloat16", "standard"),
        pytest.param("float32", "block", marks=pytest.mark.long),
    ],
)
def test_a_relative_normalizer_is_lossless_at_any_temperature(dtype, method):
    models = Models.random(dtype)
    found = p_values(models, models.relative(), method)
    print("p-values", dict(zip(CASES, found, strict=True)))
    assert min(found) > ALPHA


def test_one_number_without_the_maximum_would_not_be():
    models = Models.random("float32")
    found = p_values(models, models.by_one_number(), "standard")
    print("p-values", dict(zip(CASES, found, strict=True)))
    assert all(
        p < ALPHA
        for (temperature, peak), p in zip(CASES, found, strict=True)
        if peak / temperature > 2.9e5
    )


# The law of what is emitted where some normalizers are too large, by enumeration.

SMALL_V, NUM_MODELS = 3, 6
SIZES = 0.5, 1500.25  # of log-normalizers: one that is used, and one that is not


@dataclasses.dataclass(frozen=True)
class Tree:
    """Distributions after each prefix, ``[V] * i + [V]``, and which draft rows are too large."""

    p: list[np.ndarray]
    q: list[np.ndarray]
    is_large: list[np.ndarray]  # [V] * i

    @classmethod
    def random(cls, seed: int) -> Tree:
        rng = np.random.default_rng(seed)
        p = [rng.dirichlet(np.ones(SMALL_V), size=[SMALL_V] * i) for i in range(K + 1)]
        q = [rng.dirichlet(np.ones(SMALL_V), size=x.shape[:-1]) for x in p[:K]]
        return cls(p, q, [rng.random(x.shape[:-1]) < 0.5 for x in q])

    def drafted(self, ids: tuple[int, ...]) -> float:
        """Probability that `ids` are drafted."""
        return float(np.prod([self.q[i][ids[: i + 1]] for i in range(K)]))


TREES = [Tree.random(seed) for seed in range(NUM_MODELS)]
DRAFTED = [(tree, ids) for tree in TREES for ids in itertools.product(range(SMALL_V), repeat=K)]


def request_of(tree: Tree, ids: tuple[int, ...], by_request: bool) -> Request:
    """`by_request` is the mistake: then one large normalizer has all drafts verified one-hot."""
    is_large = np.array([tree.is_large[i][ids[:i]] for i in range(K)])
    size = np.where(is_large & (not by_request), *SIZES[::-1])
    with np.errstate(divide="ignore"):
        target = np.log([tree.p[i][ids[:i]] for i in range(K + 1)])
        draft = np.log([tree.q[i][ids[:i]] for i in range(K)]) + size[:, None]
    valid = not (by_request and is_large.any())
    return Request(target, ids, draft, log_normalizer=size, valid=valid)


def bisected(holds, *shape: int) -> np.ndarray:
    """The share of the 2**24 uniforms, the least of them, for which something holds."""
    count = np.zeros(shape, np.int64)
    for bit in 2 ** np.arange(24, -1, -1):
        u = np.minimum((count + bit - 1) * 2.0**-24, ALMOST_ONE)
        count += bit * (holds(u) & (count + bit <= 2**24))
    return count * 2.0**-24


def emitted(block: bool, by_request: bool) -> list[np.ndarray]:
    """For each tree the distribution of K + 1 tokens: what a step emits, then the target's own."""
    cases, cuts = len(DRAFTED), SMALL_V - 1
    each = (K + 1) * cuts
    layout = Layout(
        vocab=SMALL_V,
        num_speculative_tokens=K,
        num_requests=cases * each,
        num_drafts=cases * each * K,
        kind="normalized",
        has_valid=True,
        block=block,
    )
    requests = [request_of(*case, by_request) for case in DRAFTED]
    batch = pack([one for one in requests for _ in range(each)], layout)
    kept = np.tile(np.repeat(np.arange(K + 1), cuts), cases)  # how many are to be
    cut = np.tile(np.arange(cuts), cases * (K + 1))

    def output(accept: np.ndarray, u: np.ndarray | float) -> sd.RejectionSampleOutput:
        recover = np.stack(np.broadcast_arrays(0.5, u, np.zeros(len(kept)))[:2], axis=1)
        noise = sd.testing.Noise(accept.astype(np.float32), recover.astype(np.float32))
        found = verify(batch.replace(noise=noise), XLA)
        assert not found.status.any()
        return found

    # Draft `kept` decides: of the others, all before it are kept by the standard rule, and by the
    # block rule, where a longer prefix that passes hides the shorter ones, none is.
    others = ALMOST_ONE if block else 0.0
    own = np.arange(K) == kept[:, None]
    passes = bisected(
        lambda u: output(np.where(own, u[:, None], others), 0.5).num_accepted > kept, len(kept)
    ).reshape(cases, K + 1, cuts)[:, :K, 0]
    # Then what follows: here the drafts are cut where they should be.
    before = np.arange(K) == kept[:, None] - 1 if block else np.arange(K) < kept[:, None]
    accept = np.where(before, 0.0, ALMOST_ONE)
    is_cut = output(accept, 0.5).num_accepted == kept

    def is_below(u: np.ndarray) -> np.ndarray:
        return output(accept, u).token_ids[np.arange(len(kept)), kept] <= cut

    below = bisected(is_below, len(kept)).reshape(cases, K + 1, cuts)
    tokens = np.diff(below, axis=2, prepend=0.0, append=1.0)

    joint = [np.zeros([SMALL_V] * (K + 1)) for _ in TREES]
    for c, (tree, ids) in enumerate(DRAFTED):
        h = np.append(1.0, passes[c])
        if block:  # the longest prefix that passes
            law = h * np.append(np.cumprod((1 - h)[:0:-1])[::-1], 1.0)
        else:
            law = np.cumprod(h) * np.append(1 - h[1:], 1.0)
        for i, chance in enumerate(law):
            assert chance < 1e-6 or is_cut.reshape(cases, -1)[c, i * cuts]
            following = tokens[c, i]
            for j in range(i + 1, K + 1):
                following = following[..., None] * tree.p[j][ids[:i]]
            joint[c // SMALL_V**K][ids[:i]] += tree.drafted(ids) * chance * following
    return joint


@pytest.mark.parametrize("block", [False, True], ids=["standard", "block"])
def test_each_draft_is_one_hot_by_its_own_normalizer_losslessly(block):
    off = []
    for tree, right, wrong in zip(TREES, *[emitted(block, x) for x in (False, True)], strict=True):
        target = np.ones(())
        for p in tree.p:
            target = target[..., None] * p
        np.testing.assert_allclose(right, target, atol=2e-6)
        off.append(abs(wrong - target).sum() / 2)
    print("total variation if the whole request were one-hot", np.round(off, 4))
    assert max(off) > 0.01
