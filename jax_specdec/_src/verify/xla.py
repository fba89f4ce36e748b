"""Verification on XLA, in five steps: requests, positions, what their rows hold, counts, draws.

- `requests.requests_of` makes a request of the arrays of a call.
- `reader.read` finds what rows hold, p and q among it. Two forms differ in how they read:
  `"xla_batched"`, for GPUs and TPUs, reads the rows of all requests at once, and `"xla_lazy"`, for
  CPUs, in order.
- A class of `rules` accepts drafts: by `goes_on`, one position; by `count`, a request. A new rule
  is one more class there.
- `draw.draw` draws the last token, on every device: on TPUs too, whose kernel only reads.

If the vocabulary is split over devices, there are three exchanges:

1. the statistics and the drafts' logits, by which all devices decide alike;
2. the masses of tiles, by which all devices find the tile that the token is in;
3. the token, which the device that holds it draws.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jax_specdec._src.blocks import any_under_vmap, entry_of
from jax_specdec._src.sampling import Filter, SamplingParams
from jax_specdec._src.types import PLACEHOLDER_TOKEN_ID, RejectionSampleOutput, Status
from jax_specdec._src.verify.draw import (
    Kernels,
    LocalRows,
    draw,
    masses_of_positions,
    residual_of_positions,
)
from jax_specdec._src.verify.form import Form
from jax_specdec._src.verify.position import Position
from jax_specdec._src.verify.reader import read
from jax_specdec._src.verify.requests import CallArrays, KeysAndPositions, Request, requests_of
from jax_specdec._src.verify.rows import argmax_of_parts
from jax_specdec._src.verify.rules import Agreement, Rule, Standard

_LARGE = 2**23
"""Bytes of logits from which on it pays to ask first whether any request samples."""


def verify(
    arrays: CallArrays,
    rule: Rule,
    *,
    k: int,
    size: int,
    form: Form,
    kernels: Kernels | None = None,
) -> RejectionSampleOutput:
    """Verify a batch.

    Args:
      arrays: of the call, with at least one target row. If the vocabulary is split, the logits are
        this device's columns of them, and all else is the same on all devices that split it.
      rule: the rule.
      k: K.
      size: ids from it on are padding; at most V.
      form: how rows are read; in order only if the vocabulary is not split.
      kernels: what reads rows in place of XLA, or None.

    Returns:
      Output ``[B, K+1]`` and ``[B]``, the same on all devices that split the vocabulary.
    """
    requests, drafts = requests_of(arrays, k, rule.draws_every_row), arrays.drafts.distribution
    rows = LocalRows.of(arrays.target_logits, drafts, arrays.token_bitmask, size, form, kernels)
    logits = arrays.target_logits
    is_large = logits.size * logits.dtype.itemsize >= _LARGE
    if form.in_order or form.axis or not is_large or rule.conditional_rates is not None:
        return _verify(requests, rows, rule)
    samples = any_under_vmap(jnp.any(requests.is_ok & ~requests.greedy))
    no_drafts = dataclasses.replace(rows, draft=None)
    return lax.cond(
        samples,
        lambda: _verify(requests, rows, rule),
        lambda: _verify(requests, no_drafts, rule, samples=False),
    )


def _verify(
    requests: Request, rows: LocalRows, rule: Rule, samples: bool = True
) -> RejectionSampleOutput:
    """Verify requests. If `samples` is false, every request is greedy."""
    unread = Position.unread(requests, rows.target.size, rows.sums_kept)
    positions = rule.choose(requests, unread)
    positions = rule.with_weights(read(rows, requests, positions, rule, samples))
    sources, residual_masses = positions.drawn_by(requests), positions.q
    masses = residual = None
    if rule.is_block and rows.draft is not None:  # the rule takes the mass at every position
        sources = lax.optimization_barrier(sources)
        residual = residual_of_positions(rows, sources)
        if residual is None:
            masses = masses_of_positions(rows, sources)
            residual_masses = jnp.sum(masses[..., 0, :], axis=(0, 3))
        else:
            residual_masses = jnp.sum(residual, axis=2)
    num_accepted, status = rule.count(requests, positions, residual_masses)
    place = num_accepted - positions.offset[:, 0]
    if not samples or rule.draws_every_row:
        nothing_bad = jnp.zeros_like(requests.greedy)
        return _output(
            requests, num_accepted, status, entry_of(positions.argmax, place), nothing_bad
        )
    if masses is not None:
        masses = jnp.stack(entry_of([*masses], place))
    last, residual = lax.optimization_barrier(entry_of((sources, residual), place))
    drawn = draw(rows, requests, last, masses, residual)
    return _output(requests, num_accepted, status, *drawn)


def sample(
    logits: jax.Array,
    sampling: SamplingParams,
    noise: jax.Array | KeysAndPositions,
    *,
    form: Form,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Sample one token from each row: a verification without drafts.

    Args:
      logits: ``[B, V]``, or this device's columns of them.
      sampling: parameters of each row.
      noise: ``[B, 2]`` float32 uniforms for tile and token; or keys ``[B]`` and positions ``[B]``
        to draw as the agreement rule does.
      form: how rows are read: all at once.

    Returns:
      Four arrays ``[B]``: token ids; ``logsumexp((logits - maximum) / temperature)`` of the logits
      that the filter keeps; the maxima; and the thresholds below which it keeps none, or None
      without a filter.
    """
    requests = Request.without_drafts(sampling.temperature, Filter.of(sampling), noise)
    rows = _rows_alone(logits, form)
    unread = Position.unread(requests, rows.target.size, rows.sums_kept)
    rule = Standard() if requests.token_keys is None else Agreement()
    last = jax.tree.map(lambda x: x[:, 0], read(rows, requests, unread, rule))
    token_ids = last.argmax if rule.draws_every_row else draw(rows, requests, last)[0]
    return token_ids, last.scale.log_scale, last.scale.shift, last.threshold


def argmax(logits: jax.Array, form: Form) -> jax.Array:
    """``[B]`` int32, the argmax of each row of ``[B, V]``; ties go to the lowest id."""
    target = _rows_alone(logits, form).target
    return argmax_of_parts(*form.gather(target.max_and_argmax(None)))


def _rows_alone(logits: jax.Array, form: Form) -> LocalRows:
    """Rows without drafts or padding."""
    return LocalRows.of(logits, None, None, logits.shape[1] * form.num_parts, form)


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
