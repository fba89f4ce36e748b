"""Phase 2: one request's walk over its positions, and the tokens it emits.

`read_position` reads one position; `visit` judges its draft by the standard rule, `judge` the
drafts before it by the block rule; `emit` turns the number accepted into tokens. All are functions
of one request: a backend maps them over the batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_specdec._src.sampling import Filter
from jax_specdec._src.types import PLACEHOLDER_TOKEN_ID, RejectionSampleOutput, Status
from jax_specdec._src.verify import rules, tiles
from jax_specdec._src.verify.resample import Source, resample, residual_mass
from jax_specdec._src.verify.rows import DraftRows, DraftScale, TargetRows

ResidualMass = Callable[[Source, TargetRows, DraftRows], jax.Array]


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

    def uniform(self, position: jax.Array) -> jax.Array:
        """The uniform of a position's draft; 0 if greedy, which leaves nothing to chance."""
        return jnp.where(self.greedy, 0.0, self.accept[self.place(position)])

    def uses_q(self, position: jax.Array, size: int) -> jax.Array:
        """Whether a position's stored draft distribution counts."""
        return self.is_proposed(position, size) & self.stored & ~self.greedy


class Visit(NamedTuple):
    """What was read at a position of a request.

    Attributes:
      accepted: ``[]`` bool.
      status: ``[]`` int32.
      stats: statistics of the target row.
      scale: normalizer of the draft row; unit where none was needed.
      weight: ``[]`` float32, joint weight of the drafts before it; 1 but in block verification.
    """

    accepted: jax.Array
    status: jax.Array
    stats: tiles.RowStats
    scale: DraftScale
    weight: jax.Array

    @classmethod
    def nothing(cls, request: Request, size: int) -> Visit:
        """Stands for a position not visited."""
        zeros = jnp.zeros((tiles.num_tiles(size),), jnp.float32)
        threshold = None if request.filter is None else jnp.float32(-jnp.inf)
        return cls(
            jnp.bool_(False),
            jnp.int32(Status.OK),
            tiles.RowStats(zeros, zeros, threshold),
            DraftScale.unit(),
            jnp.float32(1),
        )


def read_rows(
    request: Request, position: jax.Array, target: TargetRows, draft: DraftRows | None
) -> Visit:
    """Read the rows of one position, judging the rows only."""
    inv = request.inv_temperature
    stats = target.stats(request.first_row + position, inv, request.greedy, request.filter)
    status = jnp.where(jnp.isfinite(stats.peak), Status.OK, Status.BAD_TARGET_ROW)
    scale = DraftScale.unit()
    if draft is not None:
        scale = lax.cond(
            request.uses_q(position, target.size),
            lambda: draft.scale(request.draft_rows[request.place(position)], inv),
            DraftScale.unit,
        )
        bad_draft = (status == Status.OK) & scale.bad
        status = jnp.where(bad_draft, Status.BAD_DRAFT_ROW, status)
    return Visit(jnp.bool_(False), status.astype(jnp.int32), stats, scale, jnp.float32(1))


def read_position(
    request: Request, position: jax.Array, target: TargetRows, draft: DraftRows | None
) -> tuple[Visit, jax.Array, jax.Array]:
    """Read the rows of one position, and p and q of its draft: 1 or 0 and 1 if greedy."""
    found = read_rows(request, position, target, draft)
    row, inv, stats = request.first_row + position, request.inv_temperature, found.stats
    place = request.place(position)
    token_id = request.token_ids[place]

    p = lax.cond(
        request.greedy,
        lambda: rules.accepts_greedy(token_id, target.best(row, stats)).astype(jnp.float32),
        lambda: stats.scale(inv).probs(target.at(row, token_id, stats.threshold), inv),
    )
    q, status = jnp.float32(1), found.status
    if draft is not None:
        stored_q = draft.at(request.draft_rows[place], token_id, found.scale, inv)
        uses_q = request.uses_q(position, target.size)
        q = jnp.where(uses_q, stored_q, q)
        bad_q = uses_q & ~((q >= 0) & (q < jnp.inf)) & (status == Status.OK)
        status = jnp.where(bad_q, Status.BAD_DRAFT_ROW, status)
    return found._replace(status=status), p, q


def visit(
    request: Request, position: jax.Array, target: TargetRows, draft: DraftRows | None
) -> Visit:
    """Read the rows of one position and judge its draft by the greedy or the standard rule."""
    found, p, q = read_position(request, position, target, draft)
    accepted = rules.accepts(request.uniform(position), p, q)
    accepted &= request.is_proposed(position, target.size) & (found.status == Status.OK)
    return found._replace(accepted=accepted)


def judge(
    request: Request,
    position: jax.Array,
    found: Visit,
    p: jax.Array,
    target: TargetRows,
    draft: DraftRows | None,
    residual_mass: ResidualMass = residual_mass,
) -> Visit:
    """Judge the drafts before a position by the block rule.

    Args:
      request: the request.
      position: ``[]`` int32.
      found: what was read there, with the joint weight of the drafts before it; after the last
        draft only that weight counts.
      p: ``[]`` float32, target probability of the draft there.
      target: target rows.
      draft: draft rows, or None.
      residual_mass: how the mass of a stored draft's residual is found.

    Returns:
      The same; `accepted` says whether the drafts before the position are accepted.
    """
    mass = jnp.where(
        request.is_proposed(position, target.size),
        rules.one_hot_residual_mass(found.weight, p),
        found.weight,
    )
    status = found.status
    if draft is not None:
        source = source_of(request, position, found, target.size)
        mass = lax.cond(
            request.uses_q(position, target.size),
            lambda: residual_mass(source, target, draft),
            lambda: mass,
        )
        bad_q = jnp.isnan(mass) & (status == Status.OK)
        status = jnp.where(bad_q, Status.BAD_DRAFT_ROW, status)
    return found._replace(accepted=passes(request, position, found.weight, mass), status=status)


def passes(request: Request, position: jax.Array, weight: jax.Array, mass: jax.Array) -> jax.Array:
    """Whether the drafts before a position are kept, given their joint weight and residual mass."""
    u = request.uniform(jnp.maximum(position - 1, 0))
    return (position == 0) | rules.passes(u, weight, mass)


def eager_walk(
    request: Request, target: TargetRows, draft: DraftRows | None
) -> tuple[jax.Array, Visit]:
    """All positions at once; what lies past the first that is not accepted is dropped."""
    k = request.token_ids.shape[0]
    positions = jnp.arange(k + 1, dtype=jnp.int32)
    found = jax.vmap(lambda i: visit(request, i, target, draft))(positions)
    num_accepted = tiles.first(~found.accepted)
    last = jax.tree.map(lambda x: x[num_accepted], found)
    visited = num_accepted < request.num_rows
    return num_accepted, last._replace(status=jnp.where(visited, last.status, Status.OK))


def num_accepted_by_rate(request: Request, rates: jax.Array, size: int) -> jax.Array:
    """Drafts that the synthetic rule keeps at conditional `rates` ``[K]``; no row is needed."""
    positions = jnp.arange(rates.shape[0], dtype=jnp.int32)
    proposed = jax.vmap(functools.partial(request.is_proposed, size=size))(positions)
    return tiles.first(~(proposed & jax.vmap(rules.accepts_synthetic)(request.accept, rates)))


def joint_weights(
    request: Request, target: TargetRows, draft: DraftRows | None
) -> tuple[Visit, jax.Array]:
    """All positions at once, with the joint weights of the drafts before them, and their p."""
    k = request.token_ids.shape[0]
    positions = jnp.arange(k + 1, dtype=jnp.int32)
    found, p, q = jax.vmap(lambda i: read_position(request, i, target, draft))(positions)

    def step(weight: jax.Array, draft: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return rules.joint_weight(weight, *draft), weight

    _, weights = lax.scan(step, jnp.float32(1), (p, q), unroll=True)
    return found._replace(weight=weights), p


def eager_block_walk(
    request: Request,
    target: TargetRows,
    draft: DraftRows | None,
    residual_mass: ResidualMass = residual_mass,
) -> tuple[jax.Array, Visit]:
    """All positions at once."""
    found, p = joint_weights(request, target, draft)
    positions = jnp.arange(p.shape[0], dtype=jnp.int32)

    def judged(i: jax.Array, found: Visit, p: jax.Array) -> Visit:
        return judge(request, i, found, p, target, draft, residual_mass)

    found = jax.vmap(judged)(positions, found, p)
    proposed = jax.vmap(functools.partial(request.is_proposed, size=target.size))(positions)
    goes_on = proposed & (jnp.append(found.weight[1:], 0.0) > 0) & (found.status == Status.OK)
    stop = tiles.first(~goes_on)
    num_accepted = jnp.max(jnp.where((positions <= stop) & found.accepted, positions, 0))
    last = jax.tree.map(lambda x: x[num_accepted], found)
    visited = proposed[stop] | ((num_accepted == stop) & (stop < request.num_rows))
    return num_accepted, last._replace(status=jnp.where(visited, found.status[stop], Status.OK))


def emit(
    request: Request,
    num_accepted: jax.Array,
    last: Visit,
    target: TargetRows,
    draft: DraftRows | None,
) -> RejectionSampleOutput:
    """One request's tokens: the accepted ones, then one drawn from the last row visited.

    Args:
      request: the request.
      num_accepted: ``[]`` int32, drafts kept.
      last: what was read at position `num_accepted`; its `accepted` does not matter.
      target: target rows.
      draft: draft rows, or None.

    Returns:
      Output without the batch axis.
    """
    source = source_of(request, num_accepted, last, target.size)
    token_id, bad_draft = lax.cond(
        request.greedy,
        lambda: (target.best(source.row, last.stats), jnp.bool_(False)),
        lambda: resample(source, target, draft, request.recover, request.exponential),
    )
    return assemble(request, num_accepted, last.status, token_id, bad_draft)


def source_of(request: Request, position: jax.Array, found: Visit, size: int) -> Source:
    """What the token after `position` drafts is drawn from."""
    place, proposed = request.place(position), request.is_proposed(position, size)
    return Source(
        row=request.first_row + position,
        draft_row=request.draft_rows[place],
        token_id=jnp.clip(request.token_ids[place], 0, size - 1),
        stats=found.stats,
        scale=found.scale,
        weight=found.weight,
        from_residual=proposed & request.stored,
        without_token=proposed & ~request.stored,
        inv_temperature=request.inv_temperature,
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
