"""Verification on XLA, in five steps: requests, positions, what their rows hold, counts, draws.

Two forms differ in how they read: `"xla_batched"`, for GPUs and TPUs, reads the rows of all
requests at once, and `"xla_lazy"`, for CPUs, in order. See `Reader`. Only small arrays go under
`vmap`: there a conditional computes both branches, and repeats what it closes over for every
request.

If the vocabulary is split over devices, there are three exchanges:

1. the statistics and the drafts' logits, by which all devices decide alike;
2. the masses of tiles, by which all devices find the tile that the token is in;
3. the token, which the device that holds it draws.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_specdec._src.blocks import entry_of, gathering
from jax_specdec._src.platform import platform_dependent
from jax_specdec._src.sampling import Filter, SamplingParams
from jax_specdec._src.types import PLACEHOLDER_TOKEN_ID, RejectionSampleOutput, Status
from jax_specdec._src.verify import draw
from jax_specdec._src.verify.draw import LocalRows
from jax_specdec._src.verify.exchange import Exchange
from jax_specdec._src.verify.position import Position
from jax_specdec._src.verify.reader import Form, Kernels, Reader
from jax_specdec._src.verify.requests import CallArrays, Request, requests_of
from jax_specdec._src.verify.rows import argmax_of_parts, compute_once
from jax_specdec._src.verify.rules import Rule, Standard

_LARGE = 2**23
"""Bytes of logits from which on it pays to ask first whether any request samples."""

MAX_PIECES = 32
"""Parts of the vocabulary that may share a tile if `Kernels.part_draw` draws: a lane for each."""


def verify(
    arrays: CallArrays,
    rule: Rule,
    *,
    k: int,
    size: int,
    form: Form,
    lazy: bool | None = None,
) -> RejectionSampleOutput:
    """Verify a batch.

    Args:
      arrays: of the call, with at least one target row. If the vocabulary is split, the logits are
        this device's columns of them, and all else is the same on all devices that split it.
      rule: the rule.
      k: K.
      size: ids from it on are padding; at most V.
      form: how the vocabulary is split. If it is, rows are read all at once.
      lazy: whether to read rows in order, or all at once; None chooses by platform.

    Returns:
      Output ``[B, K+1]`` and ``[B]``, the same on all devices that split the vocabulary.
    """
    run = functools.partial(_verify, rule=rule, k=k, size=size)
    by_tile = dataclasses.replace(form, keeps_sums=True)

    def in_order(arrays: CallArrays) -> RejectionSampleOutput:
        return run(arrays, form=dataclasses.replace(by_tile, in_order=True))

    def at_once(arrays: CallArrays, form: Form = by_tile) -> RejectionSampleOutput:
        some, logits = functools.partial(run, form=form), arrays.target_logits
        if logits.size * logits.dtype.itemsize < _LARGE or rule.conditional_rates is not None:
            return some(arrays)
        samples = arrays.sampling.temperature != 0
        if arrays.active is not None:
            samples &= arrays.active

        def none(arrays: CallArrays) -> RejectionSampleOutput:
            no_rows = dataclasses.replace(arrays.drafts, distribution=None)
            return some(arrays._replace(drafts=no_rows), samples=False)

        # Each branch makes its own requests, so that XLA fuses what they are made of with its use.
        return lax.cond(jnp.any(samples), some, none, arrays)

    def on_tpu(arrays: CallArrays) -> RejectionSampleOutput:
        return at_once(arrays, form)  # to sum rows by tile, a TPU would copy all of them

    if form.exchange.axis is not None:
        return run(arrays, form=form)

    if lazy:
        return in_order(arrays)
    on_cpu = in_order if lazy is None else at_once
    return platform_dependent(arrays, cpu=on_cpu, tpu=on_tpu, default=at_once)


def _verify(
    arrays: CallArrays, *, rule: Rule, k: int, size: int, form: Form, samples: bool = True
) -> RejectionSampleOutput:
    """`verify` in one form. If `samples` is false, every request is greedy."""
    requests = requests_of(arrays, k)
    rows = LocalRows.of(
        arrays.target_logits,
        arrays.drafts.distribution,
        arrays.token_bitmask,
        size,
        form.exchange,
        form.draft_is_split,
    )
    reader, drawer = Reader(rows, form), _Drawer(rows, form)
    positions = rule.choose(requests, reader.unread(requests))
    positions = rule.with_weights(reader.read(requests, positions, rule, samples))
    masses, residual_masses = None, positions.q
    if rule.is_block and rows.draft is not None:  # the rule takes the mass at every position
        masses = drawer.masses(compute_once(positions.drawn_by(requests)))
        residual_masses = jnp.sum(masses[..., 0, :], axis=(0, 3))
    num_accepted, status = rule.count(requests, positions, residual_masses)
    place = num_accepted - positions.offset[:, 0]
    if not samples:
        token_id = entry_of(positions.argmax, place)
        return _output(requests, num_accepted, status, token_id, jnp.zeros_like(requests.greedy))
    if masses is not None:
        masses = jax.vmap(entry_of, (0, None))(masses, place)
    last = jax.tree.map(lambda x: entry_of(x, place), positions.drawn_by(requests))
    token_id, bad_draft = drawer.draw(requests, compute_once(last), masses)
    return _output(requests, num_accepted, status, token_id, bad_draft)


def sample(
    logits: jax.Array,
    sampling: SamplingParams,
    uniforms: jax.Array,
    *,
    exchange: Exchange,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Sample one token from each row: a verification without drafts.

    Args:
      logits: ``[B, V]``, or this device's columns of them.
      sampling: parameters of each row.
      uniforms: ``[B, 2]`` float32, for tile and token.
      exchange: between the devices that split the vocabulary.

    Returns:
      Four arrays ``[B]``: token ids; ``logsumexp((logits - maximum) / temperature)`` of the logits
      that the filter keeps; the maxima; and the thresholds below which it keeps none, or None
      without a filter.
    """
    requests = Request.without_drafts(sampling.temperature, Filter.of(sampling), uniforms)
    form = Form(exchange, keeps_sums=True)
    rows = _rows_alone(logits, exchange)
    reader = Reader(rows, form)
    positions = reader.read(requests, reader.unread(requests), Standard())
    last = jax.tree.map(lambda x: x[:, 0], positions)
    token_ids, _ = _Drawer(rows, form).draw(requests, last, None)
    return token_ids, last.scale.log_scale, last.scale.shift, last.threshold


def argmax(logits: jax.Array, exchange: Exchange) -> jax.Array:
    """``[B]`` int32, the argmax of each row of ``[B, V]``; ties go to the lowest id."""
    target = _rows_alone(logits, exchange).target
    return argmax_of_parts(*exchange.gather(target.max_and_argmax(None)))


def _rows_alone(logits: jax.Array, exchange: Exchange) -> LocalRows:
    """Rows without drafts or padding."""
    size = logits.shape[1] * exchange.num_parts
    return LocalRows.of(logits, None, None, size, exchange)


@dataclasses.dataclass(frozen=True)
class _Drawer:
    """Draws the last tokens, on XLA or by kernels."""

    rows: LocalRows
    form: Form

    def draw(
        self, requests: Request, last: Position, masses: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """The last token of each request ``[B]``, and whether its draft row is bad.

        Args:
          requests: the requests.
          last: ``[B]``, where their tokens come.
          masses: ``[num_parts, B, 2, num_tiles]``, if they are known.
        """
        exchange, kernels = self.form.exchange, self._kernels
        if requests.exponential is not None:
            drawn, bad_draft = self.rows.race(last, requests.exponential)
        else:
            assert requests.recover is not None
            if masses is None:
                masses = self.masses(jax.tree.map(lambda x: x[:, None], last))[:, :, 0]
            if kernels is not None:
                given = last, requests.recover, masses
                part, bad_draft = kernels.part_draw(*given, **self._part)
                drawn = exchange.sum(part)
                bad_draft = last.uses_q & (bad_draft | last.draft_scale.bad)
            else:
                drawn, bad_draft = draw.draw(self.rows, last, masses, requests.recover, exchange)
        return jnp.where(requests.greedy, last.argmax, drawn), bad_draft & ~requests.greedy

    def masses(self, positions: Position) -> jax.Array:
        """``[num_parts, B, P, 2, n]``: masses of the tiles of every part, at ``[B, P]``."""
        kernels, shape = self._kernels, positions.row.shape
        flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), positions)
        if kernels is not None:
            found = kernels.part_masses(flat, **self._part, num_parts=self.rows.num_parts)
        else:
            found = gathering(lambda _, those: self.rows.masses(those), flat.row, flat)
        return self.form.exchange.gather(found.reshape(*shape, *found.shape[1:]))

    @property
    def _kernels(self) -> Kernels | None:
        """The kernels, if they can read the rows to draw from: draft rows split as the target."""
        rows, width = self.rows, self.rows.target.width
        pieces = draw.pieces_of_tiles(width, rows.num_parts, rows.num_tiles)
        can_read = rows.draft is None or self.form.draft_is_split
        return self.form.kernels if can_read and pieces.shape[1] <= MAX_PIECES else None

    @property
    def _part(self) -> dict[str, Any]:
        """The arguments of the kernels that draw: what they read."""
        target, draft = self.rows.target, self.rows.draft
        return dict(
            target=target.matrix,
            distribution=None if draft is None else draft.distribution,
            first_id=target.first,
            size=target.size,
        )


def _output(
    requests: Request,
    num_accepted: jax.Array,
    status: jax.Array,
    token_id: jax.Array,
    bad_draft: jax.Array,
) -> RejectionSampleOutput:
    """Put the output together.

    Args:
      requests: the requests.
      num_accepted: ``[B]`` int32.
      status: ``[B]`` int32, of the rows that the decision rests on.
      token_id: ``[B]`` int32, the last token as it was drawn.
      bad_draft: ``[B]`` bool, whether it was drawn with a bad draft row.
    """
    if requests.bonus_token_id is not None:
        all_accepted = num_accepted == requests.num_drafts
        token_id = jnp.where(all_accepted, requests.bonus_token_id, token_id)
        bad_draft &= ~all_accepted
    status = jnp.where((status == Status.OK) & bad_draft, Status.BAD_DRAFT_ROW, status)
    ok, last = status == Status.OK, num_accepted[:, None]
    index = jnp.arange(requests.token_ids.shape[1], dtype=jnp.int32)[None, :]
    emitted = jnp.where(index == last, token_id[:, None], requests.token_ids)
    emitted = jnp.where(ok[:, None] & (index <= last), emitted, PLACEHOLDER_TOKEN_ID)
    accepted = jnp.where(ok, num_accepted, 0)
    return RejectionSampleOutput(emitted, accepted, jnp.where(ok, accepted + 1, 0), status)
