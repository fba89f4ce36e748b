"""The XLA backend: the phases mapped over requests, in two ways that give the same tokens.

On the CPU requests are walked one after another and a row is read only when its position is
reached. Elsewhere all rows are read at once, since a loop of small reads would be all launches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jax_specdec._src.types import DraftDistribution, RejectionSampleOutput, Status
from jax_specdec._src.verify import synthetic, tiles
from jax_specdec._src.verify.decide import Request, Visit, emit, read_rows, visit
from jax_specdec._src.verify.rows import DraftRows, TargetRows

Walk = Callable[[Request, TargetRows, DraftRows | None], tuple[jax.Array, Visit]]


def verify(
    requests: Request,
    target_logits: jax.Array,
    distribution: DraftDistribution | None,
    *,
    size: int,
    conditional_rates: tuple[float, ...] | None,
    lazy: bool | None = None,
) -> RejectionSampleOutput:
    """Verify a batch.

    Args:
      requests: batched requests.
      target_logits: ``[M, V]``, M at least 1.
      distribution: draft distributions, or None where every request is one-hot.
      size: ids that count, at most V.
      conditional_rates: K rates of the synthetic rule, or None for greedy and standard.
      lazy: read rows one by one as they are reached; None chooses by platform.

    Returns:
      Output ``[B, K+1]`` and ``[B]``.
    """

    def one_by_one(requests: Request) -> RejectionSampleOutput:
        target, draft = _rows(target_logits, distribution, size, tiles.CHUNK)
        walk = _lazy_walk if conditional_rates is None else _synthetic_walk(conditional_rates)
        return lax.map(lambda r: _verify_request(r, walk, target, draft), requests)

    def all_at_once(requests: Request) -> RejectionSampleOutput:
        target, draft = _rows(target_logits, distribution, size, None)
        walk = eager_walk if conditional_rates is None else _synthetic_walk(conditional_rates)
        return jax.vmap(lambda r: _verify_request(r, walk, target, draft))(requests)

    if lazy is None:
        return lax.platform_dependent(requests, cpu=one_by_one, default=all_at_once)
    return one_by_one(requests) if lazy else all_at_once(requests)


def _rows(
    logits: jax.Array, distribution: DraftDistribution | None, size: int, chunk: int | None
) -> tuple[TargetRows, DraftRows | None]:
    draft = None if distribution is None else DraftRows(distribution, size, chunk)
    return TargetRows(logits, size, chunk), draft


def _verify_request(
    request: Request, walk: Walk, target: TargetRows, draft: DraftRows | None
) -> RejectionSampleOutput:
    def skip() -> RejectionSampleOutput:
        # Nothing is read: an empty or bad slot may point anywhere.
        k = request.token_ids.shape[0]
        zero = jnp.int32(0)
        return RejectionSampleOutput(jnp.full((k + 1,), -1, jnp.int32), zero, zero, request.status)

    def run() -> RejectionSampleOutput:
        num_accepted, last = walk(request, target, draft)
        return emit(request, num_accepted, last, target, draft)

    return lax.cond(request.status == Status.OK, run, skip)


def _lazy_walk(
    request: Request, target: TargetRows, draft: DraftRows | None
) -> tuple[jax.Array, Visit]:
    """Positions in order, until one is not accepted."""

    def goes_on(state: tuple[jax.Array, Visit]) -> jax.Array:
        position, last = state
        return ((position == 0) | last.accepted) & (position < request.num_rows)

    def step(state: tuple[jax.Array, Visit]) -> tuple[jax.Array, Visit]:
        position, _ = state
        seen = visit(request, position, target, draft)
        return position + 1, seen

    position, last = lax.while_loop(goes_on, step, (jnp.int32(0), Visit.nothing(target.size)))
    num_accepted = jnp.where(last.accepted | (position == 0), position, position - 1)
    return num_accepted, last


def eager_walk(
    request: Request, target: TargetRows, draft: DraftRows | None
) -> tuple[jax.Array, Visit]:
    """All positions at once; what lies past the first that is not accepted is dropped."""
    k = request.token_ids.shape[0]
    positions = jnp.arange(k + 1, dtype=jnp.int32)
    seen = jax.vmap(lambda i: visit(request, i, target, draft))(positions)
    num_accepted = tiles.first(~seen.accepted)
    last = jax.tree.map(lambda x: x[num_accepted], seen)
    visited = num_accepted < request.num_rows
    return num_accepted, last._replace(status=jnp.where(visited, last.status, Status.OK))


def num_accepted_by_rate(request: Request, rates: jax.Array, size: int) -> jax.Array:
    """Drafts that the synthetic rule keeps at conditional `rates` ``[K]``; no row is needed."""
    positions = jnp.arange(rates.shape[0], dtype=jnp.int32)
    proposed = jax.vmap(functools.partial(request.is_proposed, size=size))(positions)
    return tiles.first(~(proposed & jax.vmap(synthetic.accepts)(request.accept, rates)))


def _synthetic_walk(conditional_rates: tuple[float, ...]) -> Walk:
    rates = jnp.array(conditional_rates, jnp.float32)

    def walk(
        request: Request, target: TargetRows, draft: DraftRows | None
    ) -> tuple[jax.Array, Visit]:
        """Accept by rate, then read the one row that the last token comes from."""
        num_accepted = num_accepted_by_rate(request, rates, target.size)
        last = lax.cond(
            num_accepted < request.num_rows,
            lambda: read_rows(request, num_accepted, target, draft),
            lambda: Visit.nothing(target.size),
        )
        return num_accepted, last

    return walk
