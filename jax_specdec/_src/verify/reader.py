"""What statistics of rows say of positions: p, q, normalizers and status.

If the vocabulary is split over devices, each reads its part of every row. One exchange of the
statistics lets all devices decide alike; filters exchange sums as well. No row leaves its device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from jax_specdec._src.base.types import Status
from jax_specdec._src.rows import tiles
from jax_specdec._src.rows.part import of_owner
from jax_specdec._src.verify.local_rows import LocalRows
from jax_specdec._src.verify.position import Position, Source
from jax_specdec._src.verify.q import Stored
from jax_specdec._src.verify.requests import Request, Uniforms
from jax_specdec._src.verify.rules import accepts_greedy
from jax_specdec._src.verify.statistics import Partials, TargetStatistics

SumDrafts: TypeAlias = Callable[[Stored, Request, jax.Array, jax.Array], Partials]
"""Returns the partials of draft rows: `Gather.draft_partials`."""

Race: TypeAlias = Callable[[LocalRows, Source, jax.Array], jax.Array]
"""Returns tokens drawn by races: `Gather.race_token`."""


class DraftsRead(NamedTuple):
    """What draft rows hold of drafts, ``[B, D]``: of one position, or of all but the last.

    Attributes:
      entries: float32, of each draft in its row.
      partials: of these rows; None if they need not be summed.
    """

    entries: jax.Array
    partials: Partials | None


def judged(
    rows: LocalRows,
    requests: Request,
    positions: Position,
    stats: TargetStatistics,
    sum_drafts: SumDrafts,
) -> Position:
    """Returns positions with p, q and the status of their rows.

    Args:
      rows: the rows on this device.
      requests: ``[B]``.
      positions: ``[B, P]``, unread.
      stats: of their target rows, or of this part of them.
      sum_drafts: sums draft rows, where they must be read to be normalized.
    """
    # [B, P]: the logit of each position's draft, if this device has it
    part = rows.part
    ids = positions.token_id
    inv = positions.inv_temperature
    greedy = requests.greedy[:, None]
    logit = rows.target.at(positions.row, ids)
    # Nothing is proposed at the last of several positions.
    num_with_draft = max(1, ids.shape[1] - 1)
    drafts = _drafts_read(rows, requests, positions, num_with_draft, sum_drafts)

    # From the statistics of this part to those of whole rows. The first exchange.
    whole = stats.partials
    if part.is_split:
        split = drafts if rows.draft_is_split else None
        parts, logits, of_parts = part.gather((stats.partials, logit, split))
        whole = Partials.of_whole(parts, inv)
        logit = of_owner(logits, ids, rows.target.width)
        if of_parts is not None:
            drafts = _of_whole_rows(of_parts, positions, rows.target.width)

    # p of the draft. A greedy request takes the argmax with certainty.
    scale = tiles.Scale(whole.max, jnp.log(whole.sum))
    p_masses = _p_masses(stats, whole, inv)
    logit = tiles.kept(logit, stats.threshold)
    assert whole.argmax is not None
    is_argmax = accepts_greedy(ids, whole.argmax).astype(jnp.float32)
    # NaN and infinity are in the maximum, and so is a row without any id: -inf.
    status = jnp.where(jnp.isfinite(whole.max), Status.OK, Status.BAD_TARGET_ROW)
    positions = positions._replace(
        argmax=whole.argmax,
        scale=scale,
        threshold=stats.threshold,
        p_masses=p_masses,
        p=jnp.where(greedy, is_argmax, scale.probs(logit, inv)),
        status=status.astype(jnp.int32),
    )
    if drafts is None:
        return positions
    assert isinstance(rows.q, Stored)
    return _with_q(rows.q, positions, drafts)


def _p_masses(
    stats: TargetStatistics, whole: Partials, inv_temperature: jax.Array
) -> jax.Array | None:
    """Returns the sums of ``p`` by tile, from the sums of this part; None if none were kept."""
    if stats.sums is None:
        return None
    # Sums are relative to the maximum of this part.
    moved = jnp.where(stats.partials.max == whole.max, 0.0, stats.partials.max - whole.max)
    return stats.sums * (jnp.exp(moved * inv_temperature) / whole.sum)[..., None]


def _drafts_read(
    rows: LocalRows,
    requests: Request,
    positions: Position,
    num_with_draft: int,
    sum_drafts: SumDrafts,
) -> DraftsRead | None:
    """Returns what draft rows hold of the first drafts of each request; None without such rows."""
    q = rows.q
    if not isinstance(q, Stored):
        return None
    # [B, D]: the entry of each draft in its row
    index = positions.draft_row[:, :num_with_draft]
    entries = q.at(index, positions.token_id[:, :num_with_draft])
    if q.kind.is_normalized:
        return DraftsRead(entries, None)
    wanted = positions.uses_q[:, :num_with_draft] & requests.is_ok[:, None]
    # [B, D]: rows to be summed, -1 where q is not used
    index = jnp.where(wanted, index, -1)
    inv = positions.inv_temperature
    return DraftsRead(entries, sum_drafts(q, requests, index, inv))


def _of_whole_rows(of_parts: DraftsRead, positions: Position, width: int) -> DraftsRead:
    """Returns what whole draft rows hold, from what each part of `width` ids does."""
    num_with_draft = of_parts.entries.shape[2]
    # [B, D]: from what the parts found, what the row has; from the owner of an id, its entry
    partials = of_parts.partials
    if partials is not None:
        partials = Partials.of_whole(partials, positions.inv_temperature[:, :num_with_draft])
    ids = positions.token_id[:, :num_with_draft]
    return DraftsRead(of_owner(of_parts.entries, ids, width), partials)


def _with_q(q: Stored, positions: Position, drafts: DraftsRead) -> Position:
    """Returns positions with q, from what their draft rows hold."""
    entries = drafts.entries
    num_with_draft = entries.shape[1]
    # [B, D]: from what was summed, or from what is stored
    draft_scale = q.scales(positions.draft_row[:, :num_with_draft], drafts.partials)
    missing = positions.token_id.shape[1] - num_with_draft
    if missing:  # the last position has no draft
        entries, draft_scale = jax.tree.map(
            lambda x: jnp.pad(x, ((0, 0), (0, missing))), (entries, draft_scale)
        )
    found = q.kind.probs(entries, draft_scale, positions.inv_temperature)
    # [B, P]: as before, 1, where the draft is one-hot or the request greedy
    found = jnp.where(positions.uses_q, found, positions.q)
    is_bad = positions.uses_q & (draft_scale.bad | ~((found >= 0) & (found < jnp.inf)))
    is_bad &= positions.status == Status.OK
    status = jnp.where(is_bad, Status.BAD_DRAFT_ROW, positions.status)
    return positions._replace(q=found, draft_scale=draft_scale, status=status)


def drawn(rows: LocalRows, requests: Request, positions: Position, race: Race) -> Position:
    """Returns positions with the token drawn from each row in place of its argmax.

    The sums by tile that the statistics found are used again. If none were kept, rows are read once
    more.
    """
    shape = positions.row.shape
    nothing = jnp.zeros_like(positions.proposed)
    noise = requests.noise
    assert not isinstance(noise, Uniforms)  # as for a rule that draws from every row
    # [B * P, T+L]: the noise of every position, and what it is drawn from
    depth = requests.order.depth(positions.offset)
    exponential = noise.of_rows(depth, rows.padded_vocab_size)
    exponential = exponential.reshape(-1, exponential.shape[2])
    source = requests.sources(positions)._replace(proposed=nothing, uses_q=nothing)
    source = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), source)
    # [B, P]: the token of each row; of a greedy request the argmax stays
    own = race(rows, source, exponential).reshape(shape)
    return positions._replace(argmax=jnp.where(requests.greedy[:, None], positions.argmax, own))
