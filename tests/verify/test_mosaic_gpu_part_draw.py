"""The kernels that weigh and draw from a part of the vocabulary, against XLA, part by part."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from lower_floor import (
    DraftScale,
    LocalRows,
    Source,
    SplitPart,
    Xla,
    draw_lib,
    gpu_parts,
    tiles,
)

import jax_specdec as sd

from .interpret_mode import interpret_gpu_params
from .positions import source_of_rows

NUM_PARTS, REQUESTS, ROWS = 3, 7, 9
BAD = 4


@dataclasses.dataclass(frozen=True)
class Case:
    """Parts of `width` ids; `size` of all ids count."""

    width: int
    size: int
    dtype: str
    kind: str | None = None
    peaked: float = 3.0

    def __str__(self) -> str:
        return f"{self.width}-{self.size}-{self.dtype}-{self.kind}-{self.peaked:g}"


CASES = [
    Case(2200, 6600, "bfloat16", "logits"),
    Case(1511, 4400, "float32"),
    Case(1000, 2500, "float16", "probs"),
]
LARGE = [
    Case(2204, 6000, "float16", "logits", peaked=60.0),
    Case(42752, 128256, "bfloat16", "logits"),
    Case(42751, 128250, "bfloat16"),
]


def logits_of(case: Case, seed: int) -> np.ndarray:
    values = np.random.default_rng(seed).standard_normal((ROWS, case.width * NUM_PARTS))
    return (case.peaked * values).astype(jnp.dtype(case.dtype))


def distribution_of(case: Case) -> Any:
    if case.kind is None:
        return None
    logits, valid = logits_of(case, 1), np.ones(REQUESTS, bool)
    if case.kind == "probs":
        probs = scipy.special.softmax(logits[:, : case.size].astype(np.float32), axis=1)
        probs = np.pad(probs, ((0, 0), (0, case.width * NUM_PARTS - case.size)))
        probs[BAD, 3] = np.nan
        return sd.DraftProbs(probs, valid=valid)
    logits[BAD, 3] = np.nan
    return sd.DraftLogits(logits, valid=valid)


def source_of(case: Case) -> Source:
    """Residuals, bonuses, rejected one-hot drafts; one draft row equals its target row."""
    rng = np.random.default_rng(2)
    rows = jnp.arange(REQUESTS, dtype=jnp.int32)
    inv = jnp.asarray(rng.uniform(0.5, 2.0, REQUESTS), jnp.float32)

    def scale_of(row: jax.Array, inv: jax.Array) -> tiles.Scale:
        x = row[: case.size]
        peak = jnp.max(jnp.where(jnp.isnan(x), jnp.inf, x))
        return tiles.Scale(peak, jnp.log(jnp.sum(jnp.exp((x - peak) * inv))))

    target = jnp.asarray(logits_of(case, 0).astype(np.float32))
    scale = jax.vmap(scale_of)(target[:REQUESTS], inv)
    draft_scale = DraftScale(
        tiles.Scale(jnp.zeros(REQUESTS), jnp.zeros(REQUESTS)), jnp.zeros(REQUESTS, bool)
    )
    if case.kind == "logits":
        draft = jnp.asarray(logits_of(case, 1)[:REQUESTS].astype(np.float32))
        draft_scale = draft_scale._replace(scale=jax.vmap(scale_of)(draft, inv))
    from_residual = jnp.arange(REQUESTS) % 3 > 0 if case.kind else jnp.zeros(REQUESTS, bool)
    proposed = from_residual | (jnp.arange(REQUESTS) % 2 == 0)
    token_ids = jnp.asarray(rng.integers(case.size, size=REQUESTS), jnp.int32)
    return source_of_rows(
        REQUESTS,
        case.size,
        draft_row=rows,
        token_id=jnp.where(proposed, token_ids, -1),
        scale=scale,
        draft_scale=draft_scale,
        weight=jnp.asarray(rng.uniform(0.5, 1.0, REQUESTS), jnp.float32),
        proposed=proposed,
        uses_q=from_residual,
        inv_temperature=inv,
    )


def cut(case: Case, matrix: np.ndarray, me: int) -> np.ndarray:
    return matrix[:, me * case.width : (me + 1) * case.width]


def of_part(case: Case, distribution: Any, me: int) -> Any:
    """The part's target logits and draft distribution."""
    target = cut(case, logits_of(case, 0), me)
    if distribution is None:
        return target, None
    name = case.kind
    assert name is not None
    return target, dataclasses.replace(
        distribution, **{name: cut(case, getattr(distribution, name), me)}
    )


@dataclasses.dataclass(frozen=True)
class One(SplitPart):
    """What one device would exchange, whose part is known."""

    me: Any
    num_parts = NUM_PARTS

    @property
    def index(self) -> jax.Array:
        return self.me

    def sum(self, x: jax.Array) -> jax.Array:
        return x


def rows_of(case: Case, target: jax.Array, own: Any, me: jax.Array) -> LocalRows:
    part = One("v", me * target.shape[1], me)
    backend = Xla().on("cpu")
    return LocalRows.of(
        target, own, None, size=case.size, backend=backend, part=part, draft_is_split=True
    )


WANTED = np.arange(REQUESTS) != 5


def compare(case: Case, **options: Any) -> None:
    """Masses of every part, then tokens of every part, by the kernels and by XLA."""
    distribution = distribution_of(case)
    source = jax.jit(functools.partial(source_of, case))()
    recover = np.random.default_rng(3).random((REQUESTS, 2), np.float32)

    def wanted() -> Source:
        return source._replace(row=jnp.where(WANTED, source.row, -1))

    @jax.jit
    def sum_by_tile(me: jax.Array, target: jax.Array, own: Any) -> Any:
        rows = rows_of(case, target, own, me)
        found = gpu_parts.part_masses(rows, wanted(), **options)
        return found, rows.backend.masses_of(rows, source)

    @jax.jit
    def draw(me: jax.Array, target: jax.Array, own: Any, masses: jax.Array) -> Any:
        rows = rows_of(case, target, own, me)
        found, bad = gpu_parts.part_draw(rows, wanted(), jnp.asarray(recover), masses, **options)
        bad = source.uses_q & (bad | source.draft_scale.bad)
        return (found, bad), draw_lib.inverse_cdf_draw(
            rows, source, draw_lib.TileMasses(masses), jnp.asarray(recover)
        )

    parts = [(np.int32(me), *of_part(case, distribution, me)) for me in range(NUM_PARTS)]
    all_masses = []
    for part in parts:
        found, expected = jax.device_get(sum_by_tile(*part))
        np.testing.assert_allclose(found[WANTED], expected[WANTED], rtol=2e-5, atol=1e-9)
        assert not np.any(found[~WANTED])
        all_masses.append(expected)
    tokens, expected = np.zeros((2, REQUESTS), int)
    for part in parts:
        (found, is_bad), (token_ids, bad) = jax.device_get(draw(*part, np.stack(all_masses)))
        np.testing.assert_array_equal(is_bad, bad & WANTED)
        assert not np.any(found[~WANTED])
        tokens, expected = tokens + found, expected + token_ids
    good = WANTED & ~bad
    np.testing.assert_array_equal(tokens[good], expected[good])
    assert np.count_nonzero(tokens[good]) > 3
    assert bad.any() == (case.kind is not None)


newest = pytest.mark.newest
MARKS = {None: (), "logits": newest, "probs": pytest.mark.long}
SOME = [pytest.param(case, marks=MARKS[case.kind]) for case in CASES]


@pytest.mark.parametrize("case", SOME, ids=str)
def test_masses_and_tokens_of_every_part_are_those_of_xla(case):
    compare(case, interpret=interpret_gpu_params())


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*CASES, *LARGE], ids=str)
def test_masses_and_tokens_of_every_part_are_those_of_xla_on_a_gpu(case):
    compare(case)
