"""The XLA backend: the phases mapped over requests, in two ways that give the same tokens.

On CPUs requests are walked one after another and a row is read only when its position is reached.
On GPUs all rows are read at once, since a loop of small reads would be all launches; on TPUs those
of a few requests at a time, which fit in the vector memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_specdec._src.types import (
    DraftDistribution,
    RejectionSampleOutput,
    Status,
)
from jax_specdec._src.verify import batched, rules, tiles
from jax_specdec._src.verify.batched import NOT_SPLIT, Split
from jax_specdec._src.verify.decide import (
    Request,
    Visit,
    emit,
    judge,
    num_accepted_by_rate,
    passes,
    read_position,
    read_rows,
    visit,
)
from jax_specdec._src.verify.rows import DraftRows, TargetRows
from jax_specdec._src.verify.rules import Rule

Walk = Callable[[Request, TargetRows, DraftRows | None], tuple[jax.Array, Visit]]


def verify(
    requests: Request,
    target_logits: jax.Array,
    distribution: DraftDistribution | None,
    token_bitmask: jax.Array | None = None,
    *,
    size: int,
    rule: Rule,
    lazy: bool | None = None,
    split: Split = NOT_SPLIT,
) -> RejectionSampleOutput:
    """Verify a batch.

    Args:
      requests: batched requests.
      target_logits: ``[M, V]``, M at least 1.
      distribution: draft distributions, or None where every request is one-hot.
      token_bitmask: ``[M, ceil(V/32)]``, or None where every token is allowed.
      size: ids that count, at most V.
      rule: the rule.
      lazy: read rows one by one as they are reached, or all at once (on TPUs those of `BLOCK`
        requests); None chooses by platform.
      split: how the vocabulary is split over devices; if it is, rows are read all at once.

    Returns:
      Output ``[B, K+1]`` and ``[B]``.
    """

    def walk_by(standard: Walk, jointly: Walk) -> Walk:
        if rule.conditional_rates is not None:
            return _synthetic_walk(rule.conditional_rates)
        return jointly if rule.is_block else standard

    def rows(chunk: int | None) -> tuple[TargetRows, DraftRows | None]:
        draft = None if distribution is None else DraftRows(distribution, size, chunk)
        return TargetRows(target_logits, size, chunk, token_bitmask), draft

    def one_by_one(requests: Request) -> RejectionSampleOutput:
        target, draft = rows(tiles.CHUNK)
        walk = walk_by(_lazy_walk, _lazy_block_walk)
        return lax.map(lambda r: _verify_request(r, walk, target, draft), requests)

    def all_at_once(requests: Request) -> RejectionSampleOutput:
        given = requests, target_logits, distribution, token_bitmask
        return batched.verify(*given, size=size, rule=rule, split=split)

    if split.exchange.axis is not None:
        return all_at_once(requests)
    if lazy:
        return one_by_one(requests)
    if lazy is None:
        return lax.platform_dependent(requests, cpu=one_by_one, default=all_at_once)
    return all_at_once(requests)


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
        found = visit(request, position, target, draft)
        return position + 1, found

    position, last = lax.while_loop(
        goes_on, step, (jnp.int32(0), Visit.nothing(request, target.size))
    )
    num_accepted = jnp.where(last.accepted | (position == 0), position, position - 1)
    return num_accepted, last


class _Block(NamedTuple):
    """Block verification after some positions.

    Attributes:
      position: ``[]`` int32, the next to read.
      weight: ``[]`` float32, joint weight of the drafts before it.
      status: ``[]`` int32, of the positions read.
      num_accepted: ``[]`` int32, the most drafts that may be accepted, by what was read.
      last: what was read after them.
    """

    position: jax.Array
    weight: jax.Array
    status: jax.Array
    num_accepted: jax.Array
    last: Visit


def _lazy_block_walk(
    request: Request, target: TargetRows, draft: DraftRows | None
) -> tuple[jax.Array, Visit]:
    """Positions in order, while more drafts may yet be kept."""

    def may_go_on(state: _Block) -> jax.Array:
        return (state.weight > 0) & (state.status == Status.OK)

    def goes_on(state: _Block) -> jax.Array:
        return may_go_on(state) & request.is_proposed(state.position, target.size)

    def step(state: _Block) -> _Block:
        position = state.position
        found, p, q = read_position(request, position, target, draft)
        found = judge(request, position, found._replace(weight=state.weight), p, target, draft)
        num_accepted, last = jax.tree.map(
            functools.partial(jnp.where, found.accepted),
            (position, found),
            (state.num_accepted, state.last),
        )
        weight = rules.joint_weight(state.weight, p, q)
        return _Block(position + 1, weight, found.status, num_accepted, last)

    zero, ok = jnp.int32(0), jnp.int32(Status.OK)
    start = _Block(zero, jnp.float32(1), ok, zero, Visit.nothing(request, target.size))
    state = lax.while_loop(goes_on, step, start)

    position, weight = state.position, state.weight
    # After the last proposal, whose residual mass is its weight, no row is needed to judge.
    all_accepted = may_go_on(state) & passes(request, position, weight, weight)
    last = lax.cond(
        all_accepted & (position < request.num_rows),
        lambda: read_rows(request, position, target, draft),
        lambda: state.last._replace(status=state.status),
    )
    return jnp.where(all_accepted, position, state.num_accepted), last


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
            lambda: Visit.nothing(request, target.size),
        )
        return num_accepted, last

    return walk
