"""Reading on XLA: what a position knows of its rows, all rows at once or in order.

*At once*, for GPUs and TPUs, reads the rows of all requests in place, by operations on whole
matrices: a loop of small reads would spend its time on launches. *In order*, for CPUs, takes the
requests one after another, and reads the rows of a position only if the positions before it leave
it to matter.

If the vocabulary is split over devices, each reads its part of every row. One exchange of the
statistics lets all devices decide alike; filters exchange sums as well. No row leaves its device.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_specdec._src import ragged
from jax_specdec._src.blocks import any_under_vmap, gathering
from jax_specdec._src.noise import token_exponentials
from jax_specdec._src.platform import Platform
from jax_specdec._src.sampling import Filter
from jax_specdec._src.types import Status
from jax_specdec._src.verify import tiles
from jax_specdec._src.verify.draw import LocalRows, race_draw
from jax_specdec._src.verify.form import of_owner, pack, unpack
from jax_specdec._src.verify.position import Position
from jax_specdec._src.verify.requests import Request
from jax_specdec._src.verify.rows import Partials, TargetStatistics
from jax_specdec._src.verify.rules import Rule, accepts_greedy

_MANY_PAIRS = 2**22
"""Pairs of a row and a request from which on owners are searched for."""


def read(
    rows: LocalRows, requests: Request, positions: Position, rule: Rule, samples: bool = True
) -> Position:
    """The chosen positions, with what their rows hold.

    If `samples` is false, every request is greedy, and draft rows are not needed.
    """
    if rows.form.in_order:
        return _in_order(rows, requests, positions, rule)
    if rows.kernels is not None:
        stats = rows.kernels.statistics(rows, requests, positions, samples)
    elif rule.conditional_rates is not None:
        stats = _of_chosen_rows(rows, requests, positions)
    else:
        stats = _of_all_rows(rows, requests, positions, samples)
    positions = _judged(rows, requests, positions, stats)
    return _drawn(rows, requests, positions) if rule.draws_every_row and samples else positions


_FOUND = "argmax", "scale", "threshold", "p_masses", "draft_scale", "p", "q", "weight", "status"
"""What reading and the rule find of a position."""

_found_of: Callable[[Position], tuple[Any, ...]] = operator.attrgetter(*_FOUND)


def _in_order(rows: LocalRows, requests: Request, positions: Position, rule: Rule) -> Position:
    """`read` of one request after another: each until no other row of it can matter.

    What is found of a position stands side by side, so that one array is written for each.
    """
    no_masses: dict[str, Any] = dict(p_masses=None)
    given = positions._replace(**no_masses)
    num_owned = jnp.sum(positions.offset < requests.num_rows[:, None], axis=1, dtype=jnp.int32)
    num_owned = jnp.where(requests.is_ok, num_owned, 0)

    def of_request(b: jax.Array, words: jax.Array) -> jax.Array:
        request = jnp.uint32(b)  # an int under jax.disable_jit
        one = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, request, 1), requests)
        last = lax.dynamic_index_in_dim(num_owned, request, keepdims=False).astype(jnp.uint32)

        def step(state: Any) -> Any:
            _, i, weight, words = state
            place = request, i
            this = jax.tree.map(lambda x: lax.dynamic_slice(x, place, (1, 1)), given)
            this = _judged(rows, one, this, _of_one_row(rows, one, this))._replace(weight=weight)
            if rule.draws_every_row:
                this = lax.cond(one.greedy[0], lambda: this, lambda: _drawn(rows, one, this))
            own = pack(_found_of(this), 2)
            words = lax.dynamic_update_slice(words, own, (*place, jnp.uint32(0)))
            return rule.goes_on(this)[0, 0], i + 1, rule.next_weight(this), words

        start = jnp.bool_(True), jnp.uint32(0), jnp.ones((1, 1), jnp.float32), words
        return lax.while_loop(lambda state: state[0] & (state[1] < last), step, start)[3]

    unread = _found_of(positions)
    words = lax.fori_loop(0, num_owned.shape[0], of_request, pack(unread, 2))
    return positions._replace(**dict(zip(_FOUND, unpack(words, unread, 2), strict=True)))


def _of_all_rows(
    rows: LocalRows, requests: Request, positions: Position, samples: bool
) -> TargetStatistics:
    """Of all positions: every row is read, in place."""
    num_rows, target = rows.target.matrix.shape[0], rows.target
    given = requests.inv_temperature, requests.is_ok & ~requests.greedy, requests.filter
    if samples and _by_tile(rows, requests):
        inv_temperature, _, _ = of_owners(requests, num_rows, given)
        stats = _tile_by_tile(rows, requests, None, inv_temperature)
    else:
        peak, argmax = target.max_and_argmax(None)
        stats = TargetStatistics(Partials(peak, jnp.zeros_like(peak), argmax), None, None)
        if samples:
            stats = _summed(rows, None, peak, argmax, *of_owners(requests, num_rows, given))
    return at_positions(stats, positions, rows.form.platform)


def _of_chosen_rows(rows: LocalRows, requests: Request, positions: Position) -> TargetStatistics:
    """Of one position of each request: only these rows are read, if the device can."""
    wanted = requests.is_ok & (positions.offset[:, 0] < requests.num_rows)

    def read(which: jax.Array, *given: Any) -> TargetStatistics:
        return _summed(rows, which, *rows.target.max_and_argmax(which), *given)

    given = requests.inv_temperature, wanted & ~requests.greedy, requests.filter
    index = jnp.where(wanted, positions.row[:, 0], -1)
    if _by_tile(rows, requests):
        found = _tile_by_tile(rows, requests, index, requests.inv_temperature)
    else:
        found = gathering(read, rows.form.platform, index, index, *given)
    return jax.tree.map(lambda x: x[:, None], found)


def _by_tile(rows: LocalRows, requests: Request) -> bool:
    """Whether rows are read as `Rows.by_tile` does: on a TPU, without a filter."""
    target = rows.target
    whole_tiles = target.first_id is None or not rows.form.keeps_sums  # an edge may cut a tile
    no_filter = requests.filter is None and target.token_bitmask is None
    return rows.form.platform == "tpu" and whole_tiles and no_filter


def _tile_by_tile(
    rows: LocalRows, requests: Request, index: jax.Array | None, inv_temperature: jax.Array
) -> TargetStatistics:
    """Of rows ``index [n]``, or of all."""
    wants_argmax = any_under_vmap(jnp.any(requests.is_ok & requests.greedy))
    partials, sums = rows.target.by_tile(index, inv_temperature, wants_argmax)
    return TargetStatistics(partials, None, sums if rows.form.keeps_sums else None)


def _of_one_row(rows: LocalRows, one: Request, position: Position) -> TargetStatistics:
    """Of one position of one request: the argmax if it is greedy, else the sum."""
    row = position.row[:, 0]

    def greedy() -> TargetStatistics:
        peak, argmax = rows.target.max_and_argmax(row)
        least = None if one.filter is None else jnp.full((1,), -jnp.inf, jnp.float32)
        sums = jnp.zeros((1, rows.num_tiles), jnp.float32)
        return TargetStatistics(Partials(peak, jnp.ones_like(peak), argmax), least, sums)

    def sampled() -> TargetStatistics:
        peak, argmax = rows.target.peak(row), jnp.zeros_like(row)
        given = one.inv_temperature, ~one.greedy, one.filter
        stats = _summed(rows, row, peak, argmax, *given)
        return stats._replace(partials=stats.partials.checked())

    return jax.tree.map(lambda x: x[:, None], lax.cond(one.greedy[0], greedy, sampled))


def _summed(
    rows: LocalRows,
    index: jax.Array | None,
    peak: jax.Array,
    argmax: jax.Array,
    inv_temperature: jax.Array,
    wanted: jax.Array,
    filter: Filter | None,
) -> TargetStatistics:
    """Of target rows, whose maxima are known. Thresholds are found for those that are `wanted`."""
    least, target, form = None, rows.target, rows.form
    if filter is not None:
        given = filter, wanted, peak, inv_temperature, form
        least = target.find_thresholds(index, *given)
    sums = target.sums(index, peak, inv_temperature, least, rows.sums_kept)
    if not form.keeps_sums:
        return TargetStatistics(Partials(peak, sums, argmax), least, None)
    return TargetStatistics(Partials(peak, jnp.sum(sums, axis=1), argmax), least, sums)


def _judged(
    rows: LocalRows, requests: Request, positions: Position, stats: TargetStatistics
) -> Position:
    """Positions with p, q and the status of their rows, from the statistics of this part."""
    form, partials, least = rows.form, stats.partials, stats.threshold
    ids, inv, greedy = positions.token_id, positions.inv_temperature, requests.greedy[:, None]
    logit = rows.target.at(positions.row, ids)
    whole, of_draft, width = partials, None, rows.target.width
    # No draft follows the last of several positions.
    most = max(1, ids.shape[1] - 1)
    if rows.draft is not None:
        of_draft = _of_drafts(rows, requests, positions, most)
    if form.axis is not None:
        own = partials, logit, of_draft if form.draft_is_split else None
        parts, logits, of_parts = form.gather(own)
        whole, logit = Partials.of_whole(parts, inv), of_owner(logits, ids, width)
        if of_parts is not None:
            q_entries, q_parts = of_parts
            q_parts = None if q_parts is None else Partials.of_whole(q_parts, inv[:, :most])
            of_draft = of_owner(q_entries, ids[:, :most], width), q_parts
    scale, p_masses = tiles.Scale(whole.max, jnp.log(whole.sum)), None
    if stats.sums is not None:  # from sums of this part to sums of p
        moved = jnp.where(partials.max == whole.max, 0.0, partials.max - whole.max)
        p_masses = stats.sums * (jnp.exp(moved * inv) / whole.sum)[..., None]
    if least is not None:
        logit = jnp.where(logit < least, -jnp.inf, logit)
    assert whole.argmax is not None
    is_argmax = accepts_greedy(ids, whole.argmax).astype(jnp.float32)
    status = jnp.where(jnp.isfinite(whole.max), Status.OK, Status.BAD_TARGET_ROW)
    positions = positions._replace(
        argmax=whole.argmax,
        scale=scale,
        threshold=least,
        p_masses=p_masses,
        p=jnp.where(greedy, is_argmax, scale.probs(logit, inv)),
        status=status.astype(jnp.int32),
    )
    if rows.draft is None or of_draft is None:
        return positions
    entry, q_partials = of_draft
    draft_scale = rows.draft.scales(positions.draft_row[:, :most], q_partials)
    if most < ids.shape[1]:
        missing = ((0, 0), (0, ids.shape[1] - most))
        entry, draft_scale = jax.tree.map(lambda x: jnp.pad(x, missing), (entry, draft_scale))
    q = jnp.where(positions.uses_q, rows.draft.probs(entry, draft_scale, inv), positions.q)
    is_bad = positions.uses_q & (draft_scale.bad | ~((q >= 0) & (q < jnp.inf)))
    is_bad &= positions.status == Status.OK
    status = jnp.where(is_bad, Status.BAD_DRAFT_ROW, positions.status)
    return positions._replace(q=q, draft_scale=draft_scale, status=status)


def _drawn(rows: LocalRows, requests: Request, positions: Position) -> Position:
    """Positions with the token drawn from each row in place of its argmax.

    The sums by tile that the statistics found are used again. If none were kept, rows are read once
    more.
    """
    shape, nothing = positions.row.shape, jnp.zeros_like(positions.proposed)
    if requests.exponential is not None:
        places = positions.offset[:, :, None]
        exponential = jnp.take_along_axis(requests.exponential, places, axis=1)
    else:
        assert requests.token_keys is not None
        keys, first = requests.token_keys
        at = first[:, None] + positions.offset
        exponential = token_exponentials(keys[:, None], at, rows.vocab_size)
    exponential = exponential.reshape(-1, exponential.shape[2])
    source = positions.drawn_by(requests)._replace(proposed=nothing, uses_q=nothing)
    source = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), source)
    masses, platform = source.p_masses, rows.form.platform
    if masses is None:
        read = rows.masses
        masses = gathering(lambda those: read(those)[:, 1], platform, source.row, source)
    own = race_draw(rows, source, rows.form.gather(masses), exponential).reshape(shape)
    return positions._replace(argmax=jnp.where(requests.greedy[:, None], positions.argmax, own))


def _of_drafts(
    rows: LocalRows, requests: Request, positions: Position, most: int
) -> tuple[jax.Array, Partials | None]:
    """The entries of the first `most` drafts of each request, and the partials of their draft rows.

    Both are those of this part; the partials None if normalizers are stored.
    """
    draft, index = rows.draft, positions.draft_row[:, :most]
    assert draft is not None
    entries = draft.rows.at(index, positions.token_id[:, :most])
    if draft.is_normalized:
        return entries, None
    wanted = positions.uses_q[:, :most] & requests.is_ok[:, None]
    index, storage, platform = jnp.where(wanted, index, -1), draft.storage, rows.form.platform
    partials = None
    if rows.kernels is not None:
        partials = rows.kernels.draft_partials(rows, draft, requests, index)
    if partials is not None:
        return entries, partials

    def read(index: jax.Array, inv: jax.Array) -> Partials:
        peak = storage.peak(index)
        if platform != "tpu":
            return Partials(peak, storage.sums(index, peak, inv)).checked()
        sums = storage.sums(index, peak, inv, None, tiles.num_tiles(storage.width))
        return Partials(peak, jnp.sum(sums, axis=1)).checked()

    index = index.reshape(-1)
    inv = positions.inv_temperature[:, :most].reshape(-1)
    if platform == "tpu" and not rows.form.in_order:
        found = storage.by_tile(index, inv, jnp.bool_(False))[0]._replace(argmax=None)
    else:
        found = gathering(read, platform, index, index, inv)
    return entries, jax.tree.map(lambda x: x.reshape(wanted.shape), found)


def at_positions(
    stats: TargetStatistics, positions: Position, platform: Platform
) -> TargetStatistics:
    """Statistics ``[M]`` of all rows as ``[B, P]``.

    To gather 320 numbers, a TPU takes longer than for a sum over all pairs of a row and a position.
    """
    num_rows, shape = stats.partials.max.shape[0], positions.row.shape
    index = jnp.minimum(positions.row, num_rows - 1)
    if platform != "tpu" or num_rows * positions.row.size > _MANY_PAIRS:
        return jax.tree.map(lambda x: x[index], stats)
    is_row = jnp.arange(num_rows, dtype=jnp.int32)[:, None] == index.reshape(1, -1)

    def of_positions(x: jax.Array) -> jax.Array:
        if x.ndim > 1:
            return x[index]
        own = jnp.where(is_row, x[:, None], jnp.zeros_like(x[:, None]))
        return jnp.sum(own, axis=0, dtype=x.dtype).reshape(shape)

    return jax.tree.map(of_positions, stats)


def of_owners(requests: Request, size: int, values: Any) -> Any:
    """Arrays ``[B]`` as ``[size]``: for each target row, the value of its owner; 0 without one.

    A sum over all pairs of a row and a request takes one kernel on a GPU; finding the owners and
    indexing with them take several, but their time and memory do not grow with B squared.
    """
    num_rows = jnp.where(requests.is_ok, requests.num_rows, 0)
    if size * num_rows.shape[0] > _MANY_PAIRS:
        owner, is_owned = ragged.owner_of_rows(requests.first_row, num_rows, size)
        return jax.tree.map(lambda x: jnp.where(is_owned, x[owner], jnp.zeros_like(x[0])), values)
    row = jnp.arange(size, dtype=jnp.int32)[:, None] - requests.first_row[None, :]
    owns = (row >= 0) & (row < num_rows[None, :])

    def summed(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(owns, x[None, :], jnp.zeros_like(x)), axis=1, dtype=x.dtype)

    return jax.tree.map(summed, values)
