"""Verification of logits whose vocabulary is split over a mesh axis, in three small exchanges.

1. Each device tells its part's statistics of every row, and its entries of the drafted tokens.
   All of them then decide alike, by the rules of `decide`.
2. Each tells how much of the chosen row's weight its part holds: in its first tile, in its last,
   which others may hold parts of too, and between them. All then know whose part the token is in.
3. The device that holds that part picks the tile and the token, and tells it.

No row of logits leaves its device.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_specdec._src.config import RejectionSampleMethod
from jax_specdec._src.types import DraftDistribution, DraftLogits, RejectionSampleOutput, Status
from jax_specdec._src.verify import tiles
from jax_specdec._src.verify.decide import (
    Request,
    assemble,
    eager_block_walk,
    eager_walk,
    num_accepted_by_rate,
    read_rows,
    source_of,
    weigh,
)
from jax_specdec._src.verify.resample import Source
from jax_specdec._src.verify.rows import DraftRows
from jax_specdec._src.verify.sharding import Layout
from jax_specdec._src.verify.told import Told, ToldDraft, ToldTarget
from jax_specdec._src.verify.vocabulary_shard import PartStats, RowPart, Weights, tile_masses


def verify(
    requests: Request,
    target_logits: jax.Array,
    distribution: DraftDistribution | None,
    token_bitmask: jax.Array | None,
    *,
    size: int,
    method: RejectionSampleMethod,
    conditional_rates: tuple[float, ...] | None,
    layout: Layout,
    kernels: Kernels | None = None,
) -> RejectionSampleOutput:
    """Verify a batch, inside `jax.shard_map`.

    Args:
      requests: batched requests, the same on all devices of the axis.
      target_logits: ``[M, V / devices]``, M at least 1.
      distribution: draft distributions, or None where every request is one-hot. Their storage is
        ``[R, V / devices]`` or ``[R, Vd]``, as `layout` says.
      token_bitmask: ``[M, ceil(V/32)]``, or None where every token is allowed.
      size: ids that count, at most V.
      method: the rule for sampled requests.
      conditional_rates: K rates of the synthetic rule, or None for the others.
      layout: mesh axis that the vocabulary is split over, and whether the draft storage is.
      kernels: what reads whole rows on a GPU, or None for XLA.

    Returns:
      Output ``[B, K+1]`` and ``[B]``, the same on all devices of that axis.
    """
    vocab_axis, draft_is_split = layout.vocab_axis, layout.draft_vocab
    assert vocab_axis is not None
    num_parts, width = lax.axis_size(vocab_axis), target_logits.shape[1]
    me = lax.axis_index(vocab_axis)
    target = RowPart(target_logits, True, me * width, width, size, -float("inf"), token_bitmask)
    rows: DraftRows | None = None
    draft: RowPart | None = None
    if distribution is not None:
        rows = DraftRows(distribution, size, None)
        shared = size if draft_is_split else rows.size
        draft = RowPart(rows.storage, draft_is_split, me * width, width, shared, rows.fill)
    talk = _Talk(target, draft, rows, num_parts, conditional_rates, kernels)

    read = _one_by_one(talk.read, requests) if kernels is None else talk.read_by(kernels, requests)
    told = _exchange(jax.vmap(talk.tell)(requests, *read), vocab_axis)
    by_request: Any = functools.partial(jax.vmap, in_axes=(0, 1))
    if method == "block":  # every position's masses judge the drafts before it
        sources = by_request(talk.sources)(requests, told)
        masses = talk.all_masses(sources)
        held = _exchange(jax.vmap(jax.vmap(talk.ends))(masses), vocab_axis)
        residual_masses = jnp.sum(held[..., 0, :], axis=(0, 3))
        decided = jax.vmap(talk.decide, in_axes=(0, 1, 0))(requests, told, residual_masses)
        masses = jax.vmap(operator.getitem)(masses, decided.num_accepted)
        held = jax.vmap(lambda x, i: x[:, i], (1, 0), 1)(held, decided.num_accepted)
    else:
        decided = by_request(talk.decide)(requests, told)
        masses = talk.all_masses(decided.source)
        held = _exchange(jax.vmap(talk.ends)(masses), vocab_axis)
    token_ids, bad_draft = talk.all_tokens(requests, decided, masses, held, me)
    token_ids = lax.psum(token_ids, vocab_axis)
    return jax.vmap(_output)(requests, decided, token_ids, bad_draft)


MAX_PARTS = 10
"""Parts that `mosaic_gpu.part_draw` knows: three pieces of each have a lane."""

ROUNDING = 2.0**-18
"""Residual mass that float32 normalizers of equal distributions may leave: a few steps of them."""


class Kernels(NamedTuple):
    """Functions of `mosaic_gpu` that read whole rows, each of its own name."""

    row_statistics: Callable[..., tuple[jax.Array, jax.Array, jax.Array]]
    tile_masses: Callable[..., jax.Array]
    part_draw: Callable[..., tuple[jax.Array, jax.Array]]


class Decided(NamedTuple):
    """What all devices know of one request after the first exchange.

    Attributes:
      num_accepted: ``[]`` int32.
      status: ``[]`` int32.
      best_id: ``[]`` int32, argmax of the chosen row if the request is greedy.
      source: what the last token is drawn from.
    """

    num_accepted: jax.Array
    status: jax.Array
    best_id: jax.Array
    source: Source


@dataclasses.dataclass(frozen=True)
class _Talk:
    """The steps between exchanges, each for one request on one device."""

    target: RowPart
    draft: RowPart | None
    draft_rows: DraftRows | None
    num_parts: int
    conditional_rates: tuple[float, ...] | None
    kernels: Kernels | None

    def read(self, request: Request) -> tuple[PartStats, PartStats | None]:
        """Statistics of this part of the target rows, and of the draft rows that need any."""
        positions, places, inv = *self._read(request), request.inv_temperature
        rows = request.first_row + positions
        stats = jax.vmap(lambda row: self.target.statistics(row, inv))(rows)
        draft = self.draft
        if draft is None or self._normalizers_are_stored:
            return stats, None
        draft_rows = request.draft_rows[places]
        return stats, jax.vmap(lambda row: draft.statistics(row, inv))(draft_rows)

    def read_by(self, kernels: Kernels, requests: Request) -> tuple[PartStats, PartStats | None]:
        """The same for a batch of requests, by a kernel that skips the rows nobody looks at."""
        positions, places = jax.vmap(self._read)(requests)
        is_ok = (requests.status == Status.OK)[:, None]
        rows = requests.first_row[:, None] + positions
        wanted = is_ok & (positions < requests.num_rows[:, None])
        stats = self.target.statistics_by(kernels.row_statistics, rows, wanted, requests)
        draft = self.draft
        if draft is None or self._normalizers_are_stored:
            return stats, None
        rows = jnp.take_along_axis(requests.draft_rows, places, axis=1)
        if not draft.is_split:
            return stats, jax.vmap(
                lambda rows, inv: jax.vmap(lambda row: draft.statistics(row, inv))(rows)
            )(rows, requests.inv_temperature)
        wanted = is_ok & (places < requests.num_drafts[:, None])
        wanted &= (requests.stored & ~requests.greedy)[:, None]
        return stats, draft.statistics_by(kernels.row_statistics, rows, wanted, requests)

    def tell(self, request: Request, stats: PartStats, draft_stats: PartStats | None) -> Told:
        """What of it decides."""
        positions, places = self._read(request)
        rows = request.first_row + positions
        entries = jax.vmap(self.target.at)(rows, request.token_ids[request.place(positions)])
        choice = jnp.where(request.greedy, stats.best_id, _bits(entries))
        told = Told(stats.max, stats.sum, choice)
        if self.draft is None:
            return told
        draft_rows = request.draft_rows[places]
        entries = jax.vmap(self.draft.at)(draft_rows, request.token_ids[places])
        told = told._replace(draft_entry=entries)
        if draft_stats is None:
            return told
        return told._replace(draft_max=draft_stats.max, draft_sum=draft_stats.sum)

    def decide(
        self, request: Request, told: Told, residual_masses: jax.Array | None = None
    ) -> Decided:
        """From what all devices said, ``[num_parts, ...]``; by the block rule if given masses."""
        local, target, draft = self._rows(request, told)
        if self.conditional_rates is not None:
            num_accepted = -local.first_row
            last = read_rows(local, num_accepted, target, draft)
            is_read = num_accepted < request.num_rows
            last = last._replace(status=jnp.where(is_read, last.status, Status.OK))
        elif residual_masses is None:
            num_accepted, last = eager_walk(local, target, draft)
        else:
            masses = residual_masses  # by position, which is the row
            found = eager_block_walk(local, target, draft, lambda source, *_: masses[source.row])
            num_accepted, last = found
        best_id = target.best(local.first_row + num_accepted, last.stats)
        source = self._source(request, num_accepted, last, target)
        return Decided(num_accepted, last.status, best_id, source)

    def sources(self, request: Request, told: Told) -> Source:
        """What the token after each position would be drawn from by the block rule, ``[K+1]``."""
        local, target, draft = self._rows(request, told)
        seen, p = weigh(local, target, draft)
        positions = jnp.arange(p.shape[0], dtype=jnp.int32)
        return jax.vmap(lambda i, seen: self._source(request, i, seen, target))(positions, seen)

    def _source(self, request: Request, position: jax.Array, seen: Any, target: Any) -> Source:
        """What the token after a position is drawn from; row -1 if none is drawn."""
        source = source_of(request, position, seen, target.size)
        drawn = (request.status == Status.OK) & ~request.greedy & (position < request.num_rows)
        return source._replace(row=jnp.where(drawn, source.row, -1))

    def _rows(self, request: Request, told: Told) -> tuple[Request, Any, Any]:
        """What was told as `decide` reads rows, and the request with positions for row indices."""
        positions, places = self._read(request)
        first = positions[0]
        draft = None
        if self.draft_rows is not None:
            draft = ToldDraft(told, self.target.width, self.draft_rows, request.draft_rows[places])
        indices = jnp.arange(request.token_ids.shape[0], dtype=jnp.int32) - first
        local = request._replace(first_row=-first, draft_rows=indices)
        return local, ToldTarget(told, self.target), draft

    def masses(self, source: Source) -> jax.Array:
        """Of the tiles of this part, ``[2, n]``: what the token is drawn by, and ``p``."""
        return tile_masses(self._weights(source), self.num_parts)

    def all_masses(self, sources: Source) -> jax.Array:
        """Masses of a batch of sources, of any shape."""
        shape = sources.row.shape
        if self._weighers is None:
            function = functools.reduce(lambda f, _: jax.vmap(f), shape[1:], self.masses)
            return _one_by_one(function, sources)
        flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[len(shape) :]), sources)
        masses = self._weighers.tile_masses(flat, **self._part, num_parts=self.num_parts)
        return masses.reshape(*shape, *masses.shape[1:])

    def all_tokens(
        self, requests: Request, decided: Decided, masses: jax.Array, held: jax.Array, me: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """`draw` for a batch."""
        if self._weighers is None or self.num_parts > MAX_PARTS:
            draw = jax.vmap(functools.partial(self.draw, me=me), in_axes=(0, 0, 0, 1))
            return draw(requests, decided, masses, held)
        source, units = decided.source, _units(self.target.width, self.num_parts)
        token_ids, bad = self._weighers.part_draw(
            source, requests.recover, masses, held, **self._part, unit_of=units, rounding=ROUNDING
        )
        return token_ids, source.from_residual & (bad | source.scale.bad)

    @property
    def _weighers(self) -> Kernels | None:
        """Kernels that read chosen rows; they know draft rows that are split alike."""
        return self.kernels if self.draft is None or self.draft.is_split else None

    @property
    def _part(self) -> dict[str, Any]:
        """What they read of."""
        target, draft = self.target, self.draft_rows
        distribution = None if draft is None else draft.distribution
        return dict(
            target=target.matrix,
            distribution=distribution,
            first_id=target.first_id,
            size=target.size,
        )

    def ends(self, masses: jax.Array) -> jax.Array:
        """``[2, 3]``: in its first tile, in those between, and in its last if that is another."""
        piece, last, held = jnp.arange(3, dtype=jnp.int32), self._last, jnp.zeros((2, 3))
        for n, mass in enumerate(masses.T):  # one by one, which XLA does in one go
            its = jnp.where(n < last, 1, 2) if n else 0
            held += jnp.where((piece == its) & (n <= last), mass[:, None], 0.0)
        return held

    @property
    def _last(self) -> jax.Array:
        """Tiles from the one that this part begins in to the one that it ends in."""
        first_id, bits = self.target.first_id, tiles.TILE.bit_length() - 1
        return ((first_id + self.target.width - 1) >> bits) - (first_id >> bits)

    def draw(
        self, request: Request, decided: Decided, masses: jax.Array, held: jax.Array, me: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Draw the token by this part's `masses` and everyone's `held` ``[num_parts, 2, 3]``.

        Returns:
          The token, 0 on devices that do not hold it, and whether the draft row is bad.
        """
        assert request.recover is not None
        (u_tile, u_token), source = request.recover, decided.source
        total = jnp.sum(held[:, 0])
        bad_draft = source.from_residual & (jnp.isnan(total) | source.scale.bad)
        # No weight left to draw from: draw from p. What is left of equal p and q is rounding, since
        # they were normalized apart.
        kind = jnp.where(total > jnp.where(source.from_residual, ROUNDING, 0.0), 0, 1)
        masses, pieces = masses[kind], held[:, kind].reshape(-1)

        # Pieces of one tile are one unit, as are the tiles that lie in one part alone.
        unit_of = _units(self.target.width, self.num_parts)
        index = np.arange(unit_of[-1] + 1, dtype=np.int32)
        units = jnp.sum(jnp.where(unit_of == index[:, None], pieces, 0.0), axis=1)
        unit = tiles.pick(units, u_tile)
        pieces = jnp.where(unit_of == unit, pieces, 0.0)
        piece = tiles.pick(pieces, u_token)

        sums = jnp.cumsum(units)
        before = sums[unit] - units[unit]
        n = jnp.arange(masses.shape[0], dtype=jnp.int32)
        inner = jnp.where((n > 0) & (n < self._last), masses, 0.0)
        inner_tile = tiles.pick_past(inner, u_tile * sums[-1] - before)
        is_inner = piece % 3 == 1
        tile = jnp.where(is_inner, inner_tile, jnp.where(piece % 3 == 0, 0, self._last))

        sums = jnp.cumsum(pieces)
        before = sums[piece] - pieces[piece]
        past = jnp.where(is_inner, u_token * masses[tile], u_token * sums[-1] - before)
        first_id = (self.target.first_id // tiles.TILE + tile) * tiles.TILE
        weights = self._weights(source).at(first_id + jnp.arange(tiles.TILE, dtype=jnp.int32))
        # Rounding can leave a tile of tiny residual mass without a positive weight of its own.
        kind = jnp.where(jnp.sum(weights[0]) > 0, kind, 1)
        token = first_id + tiles.pick_past(weights[kind], past)
        return jnp.where(piece // 3 == me, token, 0), bad_draft

    def _read(self, request: Request) -> tuple[jax.Array, jax.Array]:
        """Positions whose target row is read, and places of the drafts whose row may be."""
        if self.conditional_rates is None:
            positions = jnp.arange(request.token_ids.shape[0] + 1, dtype=jnp.int32)
            return positions, positions[:-1]
        rates = jnp.array(self.conditional_rates, jnp.float32)
        positions = num_accepted_by_rate(request, rates, self.target.size)[None]
        return positions, request.place(positions)

    @property
    def _normalizers_are_stored(self) -> bool:
        d = None if self.draft_rows is None else self.draft_rows.distribution
        return not isinstance(d, DraftLogits) or d.log_normalizer is not None

    def _weights(self, source: Source) -> Weights:
        return Weights(source, self.target, self.draft, self.draft_rows)


def _units(width: int, num_parts: int) -> np.ndarray:
    """Which pieces belong together: those of each part, of `_Talk.ends`, are numbered in turn.

    The same number for pieces of the same tile; another for all tiles between.
    """
    units, tile_of_last, unit = [], -1, -1
    for start in range(0, num_parts * width, width):
        first, last = start // tiles.TILE, (start + width - 1) // tiles.TILE
        unit += first != tile_of_last
        units += [unit, unit + (last > first), unit + 2 * (last > first)]
        unit, tile_of_last = units[-1], last
    return np.array(units, np.int32)


def _output(
    request: Request, decided: Decided, token_id: jax.Array, bad_draft: jax.Array
) -> RejectionSampleOutput:
    token_id = jnp.where(request.greedy, decided.best_id, token_id)
    status = jnp.where(request.status == Status.OK, decided.status, request.status)
    bad_draft &= ~request.greedy
    return assemble(request, decided.num_accepted, status, token_id, bad_draft)


def _bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.int32)


def _one_by_one(function: Callable[[Any], Any], requests: Any) -> Any:
    """Mapped over requests; the CPU, which copies the rows that it gathers, takes one at a time."""
    mapped = functools.partial(lax.map, function)
    return lax.platform_dependent(requests, cpu=mapped, default=jax.vmap(function))


def _exchange(tree: Any, vocab_axis: str) -> Any:
    """Every device's arrays ``[B, ...]`` of 32 bits as ``[num_parts, B, ...]``, in one gather."""
    arrays, treedef = jax.tree.flatten(tree)
    words = [_bits(x).reshape(x.shape[0], -1) for x in arrays]
    ends = np.cumsum([w.shape[1] for w in words])[:-1]
    heard = lax.all_gather(jnp.concatenate(words, axis=1), vocab_axis, to="invarying")
    parts = jnp.split(heard, ends, axis=2)
    told = [
        lax.bitcast_convert_type(part, x.dtype).reshape(-1, *x.shape)
        for part, x in zip(parts, arrays, strict=True)
    ]
    return jax.tree.unflatten(treedef, told)
