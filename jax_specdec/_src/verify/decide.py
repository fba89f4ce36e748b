"""Phase 2: how many drafts of one request are accepted, and the tokens it emits.

`judge` turns what was read of its rows into probabilities; `walk` accepts drafts by them, by any
rule; `assemble` turns their number into tokens. All are functions of one request, for `jax.vmap`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_specdec._src.sampling import Filter
from jax_specdec._src.types import PLACEHOLDER_TOKEN_ID, RejectionSampleOutput, Status
from jax_specdec._src.verify import rules, tiles
from jax_specdec._src.verify.draft_rows import DraftRows, DraftScale
from jax_specdec._src.verify.resample import Source
from jax_specdec._src.verify.rows import Partials
from jax_specdec._src.verify.rules import Rule


class Request(NamedTuple):
    """What verification knows of one request besides its rows (batched: a leading ``[B]``).

    Attributes:
      first_row: ``[]`` int32, target row of the first position.
      num_drafts: ``[]`` int32.
      token_ids: ``[K]`` int32, -1 past ``num_drafts``.
      draft_rows: ``[K]`` int32.
      stored: ``[]`` bool, whether its draft distribution is stored; else one-hot.
      inv_temperature: ``[]`` float32.
      filter: what it leaves out of target rows, or None where nobody leaves out anything.
      greedy: ``[]`` bool.
      accept: ``[K]`` float32 uniforms.
      recover: ``[2]`` float32 uniforms, or None where `exponential` is given.
      exponential: ``[V]`` float32 noise of a race, or None.
      bonus_token_id: ``[]`` int32, or None where the bonus row follows the draft rows.
      status: ``[]`` int32, not OK where none of its rows may be read.
    """

    first_row: jax.Array
    num_drafts: jax.Array
    token_ids: jax.Array
    draft_rows: jax.Array
    stored: jax.Array
    inv_temperature: jax.Array
    filter: Filter | None
    greedy: jax.Array
    accept: jax.Array
    recover: jax.Array | None
    exponential: jax.Array | None
    bonus_token_id: jax.Array | None
    status: jax.Array

    @property
    def num_rows(self) -> jax.Array:
        """Target rows it owns."""
        return self.num_drafts + (1 if self.bonus_token_id is None else 0)

    def place(self, position: jax.Array) -> jax.Array:
        """`position` as an index into the ``[K]`` arrays."""
        return jnp.minimum(position, self.token_ids.shape[0] - 1)

    def is_proposed(self, position: jax.Array, size: int) -> jax.Array:
        """Whether a proposal was made at a position: an id in range."""
        token_id = self.token_ids[self.place(position)]
        return (position < self.num_drafts) & (token_id >= 0) & (token_id < size)

    def uniforms(self, count: int) -> jax.Array:
        """``[count]`` those of the first positions; 0 if greedy, which leaves nothing to chance."""
        accept = jnp.pad(self.accept, (0, max(0, count - self.accept.shape[0])))
        return jnp.where(self.greedy, 0.0, accept[:count])

    def uses_q(self, position: jax.Array, size: int) -> jax.Array:
        """Whether a position's stored draft distribution counts."""
        return self.is_proposed(position, size) & self.stored & ~self.greedy


class Known(NamedTuple):
    """What was read of one request's rows, at positions ``[P]`` and drafts ``[D]``.

    D is P, or one less: after the last draft there is no draft row.

    Attributes:
      position: ``[P]`` int32.
      target: statistics of the target rows, ``[P]``.
      best_id: ``[P]`` int32, the argmax of each.
      threshold: ``[P]`` float32, entries below it count as -inf; None for none.
      p_masses: ``[P, T]`` float32, of the tiles of this part; None where only their sum was read.
      entry: ``[P]`` float32, the drafted token's logit; -inf where it does not count.
      draft_entry: ``[D]`` float32, its entry in the draft row; None without draft distributions.
      draft_scale: what normalizes the draft rows ``[D]``; None likewise.
    """

    position: jax.Array
    target: Partials
    best_id: jax.Array
    threshold: jax.Array | None
    p_masses: jax.Array | None
    entry: jax.Array
    draft_entry: jax.Array | None
    draft_scale: DraftScale | None


class Judged(NamedTuple):
    """The drafts at positions ``[P]`` of one request.

    Attributes:
      proposed: ``[P]`` bool, whether there is one.
      p: ``[P]`` float32, its target probability; 1 or 0 if greedy.
      q: ``[P]`` float32, its draft probability; 1 if greedy or one-hot.
      status: ``[P]`` int32, of the rows.
      scale: normalizers of the target rows, ``[P]``.
      draft_scale: normalizers of the draft rows, ``[P]``.
      weight: ``[P]`` float32, joint weight of the drafts before it; 1 but in block verification.
    """

    proposed: jax.Array
    p: jax.Array
    q: jax.Array
    status: jax.Array
    scale: tiles.Scale
    draft_scale: DraftScale
    weight: jax.Array


def judge(request: Request, known: Known, draft: DraftRows | None, size: int, rule: Rule) -> Judged:
    """Probabilities of a request's drafts, from what was read of its rows.

    Args:
      request: the request.
      known: what was read.
      draft: what draft rows mean, or None where every request is one-hot.
      size: ids that count.
      rule: the rule.
    """
    inv, positions, target = request.inv_temperature, known.position, known.target
    proposed = request.is_proposed(positions, size)
    is_best = rules.accepts_greedy(request.token_ids[request.place(positions)], known.best_id)
    scale = tiles.Scale(target.max, jnp.log(target.sum))
    p = jnp.where(request.greedy, is_best.astype(jnp.float32), scale.probs(known.entry, inv))
    status = jnp.where(jnp.isfinite(target.max), Status.OK, Status.BAD_TARGET_ROW)
    status, q = status.astype(jnp.int32), jnp.ones_like(p)
    draft_scale = jax.tree.map(lambda x: jnp.broadcast_to(x, p.shape), DraftScale.unit())
    if draft is not None and known.draft_entry is not None:
        of_draft = known.draft_entry, known.draft_scale
        missing = 0, p.shape[0] - known.draft_entry.shape[0]
        entry, draft_scale = jax.tree.map(lambda x: jnp.pad(x, missing), of_draft)
        uses_q = request.uses_q(positions, size)
        q = jnp.where(uses_q, draft.probs(entry, draft_scale, inv), q)
        is_bad = uses_q & (draft_scale.bad | ~((q >= 0) & (q < jnp.inf)))
        is_bad &= status == Status.OK
        status = jnp.where(is_bad, Status.BAD_DRAFT_ROW, status)
    weight = jnp.ones_like(p)
    if rule.is_block:
        weight = _joint_weights(p, q)[:-1]
    return Judged(proposed, p, q, status, scale, draft_scale, weight)


def _joint_weights(p: jax.Array, q: jax.Array) -> jax.Array:
    """``[P + 1]`` joint weights of the first drafts, from none to all."""

    def step(weight: jax.Array, draft: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        weight = rules.joint_weight(weight, *draft)
        return weight, weight

    _, weights = lax.scan(step, jnp.float32(1), (p, q), unroll=True)
    return jnp.concatenate([jnp.ones_like(weights[:1]), weights])


def goes_on(request: Request, drafts: Judged, rule: Rule) -> jax.Array:
    """``[P]`` bool: whether what comes after a position may matter."""
    ok = drafts.proposed & (drafts.status == Status.OK)
    if rule.is_block:
        return ok & (_joint_weights(drafts.p, drafts.q)[1:] > 0)
    u = request.uniforms(drafts.p.shape[0])
    return ok & rules.accepts(u, drafts.p, drafts.q)


def walk(
    request: Request, known: Known, drafts: Judged, masses: jax.Array, size: int, rule: Rule
) -> tuple[jax.Array, jax.Array]:
    """How many drafts are accepted, and the status of the rows that this was decided by.

    Args:
      request: the request.
      known: what was read of its rows.
      drafts: its drafts.
      masses: ``[P]`` float32 residual masses after the drafts before each position, where its
        draft distribution is stored; of the block rule.
      size: ids that count.
      rule: the rule.

    Returns:
      ``(num_accepted [], status [])``.
    """
    if rule.conditional_rates is not None:
        (num_accepted,), (status,) = known.position, drafts.status
        return num_accepted, jnp.where(num_accepted < request.num_rows, status, Status.OK)
    stop = tiles.first(~goes_on(request, drafts, rule))
    num_accepted, status, is_visited = stop, drafts.status, stop < request.num_rows
    if rule.is_block:
        positions, uses_q = known.position, request.uses_q(known.position, size)
        one_hot = rules.one_hot_residual_mass(drafts.weight, drafts.p)
        mass = jnp.where(drafts.proposed, one_hot, drafts.weight)
        mass = jnp.where(uses_q, masses, mass)
        is_bad = uses_q & jnp.isnan(mass) & (status == Status.OK)
        status = jnp.where(is_bad, Status.BAD_DRAFT_ROW, status)
        # Nothing is read past the first bad row.
        stop = jnp.minimum(stop, tiles.first(status != Status.OK))
        u = jnp.roll(request.uniforms(drafts.p.shape[0]), 1)  # of the draft before
        passes = (positions == 0) | rules.passes(u, drafts.weight, mass)
        num_accepted = jnp.max(jnp.where((positions <= stop) & passes, positions, 0))
        is_visited &= drafts.proposed[stop] | (num_accepted == stop)
    return num_accepted, jnp.where(is_visited, status[stop], Status.OK)


def num_accepted_by_rate(request: Request, rates: jax.Array, size: int) -> jax.Array:
    """Drafts that the synthetic rule keeps at conditional `rates` ``[K]``; no row is needed."""
    proposed = request.is_proposed(jnp.arange(rates.shape[0], dtype=jnp.int32), size)
    return tiles.first(~(proposed & rules.accepts_synthetic(request.accept, rates)))


def sources_of(request: Request, known: Known, drafts: Judged) -> Source:
    """What the token at each position would be drawn from, ``[P]``; row -1 where none is."""
    place = request.place(known.position)
    may_be = (request.status == Status.OK) & ~request.greedy & (drafts.weight > 0)
    may_be &= known.position < request.num_rows
    return Source(
        row=jnp.where(may_be, request.first_row + known.position, -1),
        draft_row=request.draft_rows[place],
        token_id=request.token_ids[place],
        scale=drafts.scale,
        threshold=known.threshold,
        p_masses=known.p_masses,
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
    """One request's output, from what was drawn; `bad_draft`: the draft row it was drawn from."""
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
