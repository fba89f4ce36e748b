"""Phase 2: how many drafts of a request are accepted, and which tokens it emits.

From the statistics of its rows, `judge_drafts` computes p and q of each draft. By these,
`count_accepted` applies the rule. `sources_of` says what the last token is drawn from, and
`assemble` puts the output together. All are functions of one request, for `jax.vmap`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_specdec._src.types import PLACEHOLDER_TOKEN_ID, RejectionSampleOutput, Status
from jax_specdec._src.verify import rules, tiles
from jax_specdec._src.verify.draft_rows import DraftRows, DraftScale
from jax_specdec._src.verify.requests import Request
from jax_specdec._src.verify.resample import Source
from jax_specdec._src.verify.rows import Partials
from jax_specdec._src.verify.rules import Rule


class RowStatistics(NamedTuple):
    """Statistics of one request's rows: what phase 1 leaves of P target rows and D draft rows.

    D is P, or P - 1, since no draft follows the last position.

    Attributes:
      position: ``[P]`` int32, the positions whose rows were read.
      target: ``[P]``, maximum and sum of each target row.
      argmax: ``[P]`` int32, of each target row.
      threshold: ``[P]`` float32, below which logits were filtered out; None if none can be.
      p_masses: ``[P, T]`` float32, the sums of ``p`` over this device's tiles; None if only their
        total was computed.
      logit: ``[P]`` float32, the draft's logit in the target row; -inf if it is not allowed.
      draft_entry: ``[D]`` float32, the draft's entry in the draft row; None without distributions.
      draft_scale: ``[D]``, normalizers of the draft rows; None without distributions.
    """

    position: jax.Array
    target: Partials
    argmax: jax.Array
    threshold: jax.Array | None
    p_masses: jax.Array | None
    logit: jax.Array
    draft_entry: jax.Array | None
    draft_scale: DraftScale | None


class JudgedDrafts(NamedTuple):
    """Probabilities of one request's drafts, at the P positions of its `RowStatistics`.

    Attributes:
      proposed: ``[P]`` bool, whether a draft was proposed there.
      p: ``[P]`` float32, its target probability; for a greedy request 1 or 0.
      q: ``[P]`` float32, its draft probability; 1 if it is one-hot or the request greedy.
      status: ``[P]`` int32, of the rows read at the position.
      scale: ``[P]``, normalizers of the target rows.
      draft_scale: ``[P]``, normalizers of the draft rows.
      weight: ``[P]`` float32, joint weight of the drafts before the position; 1 except under the
        block rule.
    """

    proposed: jax.Array
    p: jax.Array
    q: jax.Array
    status: jax.Array
    scale: tiles.Scale
    draft_scale: DraftScale
    weight: jax.Array


def judge_drafts(
    request: Request, rows: RowStatistics, draft: DraftRows | None, size: int, rule: Rule
) -> JudgedDrafts:
    """Compute p, q and the joint weights of a request's drafts.

    Args:
      request: the request.
      rows: the statistics of its rows.
      draft: the draft rows, or None if every request is one-hot.
      size: ids from it on are padding.
      rule: the rule.
    """
    inv, positions, target = request.inv_temperature, rows.position, rows.target
    proposed = request.is_proposed(positions, size)
    is_argmax = rules.accepts_greedy(request.token_ids[request.place(positions)], rows.argmax)
    scale = tiles.Scale(target.max, jnp.log(target.sum))
    p = jnp.where(request.greedy, is_argmax.astype(jnp.float32), scale.probs(rows.logit, inv))
    status = jnp.where(jnp.isfinite(target.max), Status.OK, Status.BAD_TARGET_ROW)
    status, q = status.astype(jnp.int32), jnp.ones_like(p)
    draft_scale = jax.tree.map(lambda x: jnp.broadcast_to(x, p.shape), DraftScale.unit())
    if draft is not None and rows.draft_entry is not None:
        of_draft = rows.draft_entry, rows.draft_scale
        missing = 0, p.shape[0] - rows.draft_entry.shape[0]
        entry, draft_scale = jax.tree.map(lambda x: jnp.pad(x, missing), of_draft)
        uses_q = request.uses_q(positions, size)
        q = jnp.where(uses_q, draft.probs(entry, draft_scale, inv), q)
        is_bad = uses_q & (draft_scale.bad | ~((q >= 0) & (q < jnp.inf)))
        is_bad &= status == Status.OK
        status = jnp.where(is_bad, Status.BAD_DRAFT_ROW, status)
    weight = jnp.ones_like(p)
    if rule.is_block:
        weight = _joint_weights(p, q)[:-1]
    return JudgedDrafts(proposed, p, q, status, scale, draft_scale, weight)


def _joint_weights(p: jax.Array, q: jax.Array) -> jax.Array:
    """``[P + 1]`` joint weights of the prefixes of 0, 1, ..., P drafts."""

    def step(weight: jax.Array, draft: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        weight = rules.joint_weight(weight, *draft)
        return weight, weight

    _, weights = lax.scan(step, jnp.float32(1), (p, q), unroll=True)
    return jnp.concatenate([jnp.ones_like(weights[:1]), weights])


def goes_on(request: Request, drafts: JudgedDrafts, rule: Rule) -> jax.Array:
    """``[P]`` bool: whether the rows after a position may matter."""
    ok = drafts.proposed & (drafts.status == Status.OK)
    if rule.is_block:
        return ok & (_joint_weights(drafts.p, drafts.q)[1:] > 0)
    u = request.uniforms(drafts.p.shape[0])
    return ok & rules.accepts(u, drafts.p, drafts.q)


def count_accepted(
    request: Request,
    rows: RowStatistics,
    drafts: JudgedDrafts,
    residual_masses: jax.Array,
    size: int,
    rule: Rule,
) -> tuple[jax.Array, jax.Array]:
    """Apply the rule.

    Args:
      request: the request.
      rows: the statistics of its rows.
      drafts: its drafts.
      residual_masses: ``[P]`` float32, ``sum((weight * p - q)+)`` at each position whose draft
        distribution is stored. Only the block rule uses them.
      size: ids from it on are padding.
      rule: the rule.

    Returns:
      ``num_accepted []``, and the status ``[]`` of the rows that the decision rests on.
    """
    if rule.conditional_rates is not None:
        (num_accepted,), (status,) = rows.position, drafts.status
        return num_accepted, jnp.where(num_accepted < request.num_rows, status, Status.OK)
    stop = tiles.first_true(~goes_on(request, drafts, rule))
    num_accepted, status, is_visited = stop, drafts.status, stop < request.num_rows
    if rule.is_block:
        positions, uses_q = rows.position, request.uses_q(rows.position, size)
        one_hot = rules.one_hot_residual_mass(drafts.weight, drafts.p)
        mass = jnp.where(drafts.proposed, one_hot, drafts.weight)
        mass = jnp.where(uses_q, residual_masses, mass)
        is_bad = uses_q & jnp.isnan(mass) & (status == Status.OK)
        status = jnp.where(is_bad, Status.BAD_DRAFT_ROW, status)
        # Nothing is read past the first bad row.
        stop = jnp.minimum(stop, tiles.first_true(status != Status.OK))
        u = jnp.roll(request.uniforms(drafts.p.shape[0]), 1)  # of the draft before
        passes = (positions == 0) | rules.passes(u, drafts.weight, mass)
        num_accepted = jnp.max(jnp.where((positions <= stop) & passes, positions, 0))
        is_visited &= drafts.proposed[stop] | (num_accepted == stop)
    return num_accepted, jnp.where(is_visited, status[stop], Status.OK)


def num_accepted_by_rate(request: Request, rates: jax.Array, size: int) -> jax.Array:
    """How many drafts the synthetic rule accepts at conditional `rates` ``[K]``. Reads no row."""
    proposed = request.is_proposed(jnp.arange(rates.shape[0], dtype=jnp.int32), size)
    return tiles.first_true(~(proposed & rules.accepts_synthetic(request.accept, rates)))


def sources_of(request: Request, rows: RowStatistics, drafts: JudgedDrafts) -> Source:
    """``[P]``, what the token would be drawn from if it came at each position; row -1 for never."""
    place = request.place(rows.position)
    is_possible = (request.status == Status.OK) & ~request.greedy & (drafts.weight > 0)
    is_possible &= rows.position < request.num_rows
    return Source(
        row=jnp.where(is_possible, request.first_row + rows.position, -1),
        draft_row=request.draft_rows[place],
        token_id=request.token_ids[place],
        scale=drafts.scale,
        threshold=rows.threshold,
        p_masses=rows.p_masses,
        draft_scale=drafts.draft_scale,
        weight=drafts.weight,
        from_residual=drafts.proposed & request.stored,
        without_token=drafts.proposed & ~request.stored,
        inv_temperature=jnp.broadcast_to(request.inv_temperature, place.shape),
    )


def assemble(
    request: Request,
    num_accepted: jax.Array,
    status: jax.Array,
    token_id: jax.Array,
    bad_draft: jax.Array,
) -> RejectionSampleOutput:
    """Put one request's output together.

    Args:
      request: the request.
      num_accepted: ``[]`` int32.
      status: ``[]`` int32, from `count_accepted`.
      token_id: ``[]`` int32, the last token as it was drawn.
      bad_draft: ``[]`` bool, whether it was drawn with a bad draft row.
    """
    if request.bonus_token_id is not None:
        all_accepted = num_accepted == request.num_drafts
        token_id = jnp.where(all_accepted, request.bonus_token_id, token_id)
        bad_draft &= ~all_accepted

    status = jnp.where((status == Status.OK) & bad_draft, Status.BAD_DRAFT_ROW, status)
    ok = status == Status.OK
    position = jnp.arange(request.token_ids.shape[0] + 1, dtype=jnp.int32)
    drafts = jnp.append(request.token_ids, jnp.int32(PLACEHOLDER_TOKEN_ID))
    emitted = jnp.where(position == num_accepted, token_id, drafts)
    emitted = jnp.where(ok & (position <= num_accepted), emitted, PLACEHOLDER_TOKEN_ID)
    accepted = jnp.where(ok, num_accepted, 0)
    return RejectionSampleOutput(emitted, accepted, jnp.where(ok, accepted + 1, 0), status)
