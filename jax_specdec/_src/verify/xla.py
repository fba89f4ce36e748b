"""Verification on XLA, in five steps: requests, positions, what their rows hold, counts, draws.

- `requests.requests_of` makes a request of the arrays of a call.
- A backend reads rows: `Backend.read` finds p and q among what they hold.
- A class of `rules` accepts drafts: by `goes_on`, one position; by `count`, a request. A new rule
  is one more class there.
- `draw.draw` draws the last token by what the backend knows of the masses of tiles.

If the vocabulary is split over devices, there are three exchanges:

1. the statistics and the drafts' logits, by which all devices decide alike;
2. the masses of tiles, by which all devices find the tile that the token is in;
3. the token, which the device that holds it draws.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax

from jax_specdec._src.blocks import any_under_vmap, entry_of
from jax_specdec._src.sampling import Filter, SamplingParams
from jax_specdec._src.types import PLACEHOLDER_TOKEN_ID, RejectionSampleOutput, Status
from jax_specdec._src.verify.draw import Residuals, draw
from jax_specdec._src.verify.part import Part, part_of
from jax_specdec._src.verify.position import Position
from jax_specdec._src.verify.requests import (
    CallArrays,
    DrawnRaces,
    Races,
    Request,
    Uniforms,
    requests_of,
)
from jax_specdec._src.verify.rules import Agreement, Rule, Standard
from jax_specdec._src.verify.source import LocalRows, Source
from jax_specdec._src.verify.statistics import argmax_of_parts

if TYPE_CHECKING:
    from jax_specdec._src.verify.backends.gather import Gather
    from jax_specdec._src.verify.call import Static

_LARGE = 2**23
"""Bytes of logits from which on it pays to ask first whether any request samples."""


def verify(
    arrays: CallArrays, rule: Rule, static: Static, *, backend: Gather
) -> RejectionSampleOutput:
    """Verifies a batch.

    Args:
      arrays: of the call, with at least one target row. If the vocabulary is split, the logits are
        this device's columns of them, and all else is the same on all devices that split it.
      rule: the rule.
      static: of the call.
      backend: reads the rows.

    Returns:
      Output ``[B, K+1]`` and ``[B]``, the same on all devices that split the vocabulary.
    """
    logits = arrays.target_logits
    requests = requests_of(arrays, static.config.num_speculative_tokens, rule.draws_every_row)
    part = part_of(static.layout.vocab_axis, logits.shape[1])
    rows = LocalRows.of(
        logits,
        arrays.drafts.distribution,
        arrays.token_bitmask,
        size=static.size,
        backend=backend,
        part=part,
        draft_is_split=static.layout.draft_vocab,
        keeps_sums=backend.keeps_sums(part, rule, requests.filter),
    )
    # If nobody samples, neither sums nor draft rows are needed. Rows that are read in order, or one
    # of each request, are not read in vain.
    is_large = logits.size * logits.dtype.itemsize >= _LARGE
    is_read_at_once = backend.reads_ahead and not part.is_split and not rule.reads_one_position
    if not (is_large and is_read_at_once):
        return _verify(requests, rows, rule)
    samples = any_under_vmap(jnp.any(requests.is_ok & ~requests.greedy))
    return lax.cond(
        samples,
        lambda: _verify(requests, rows, rule),
        lambda: _verify(requests, rows.alone(), rule, samples=False),
    )


def _verify(
    requests: Request, rows: LocalRows, rule: Rule, samples: bool = True
) -> RejectionSampleOutput:
    """Verifies requests. If `samples` is false, every request is greedy."""
    backend = rows.backend
    # [B, P]: unread, every position, or the one that the rule chooses
    unread = Position.unread(requests, rows.target.size, rows.num_sums)
    positions = rule.choose(requests, unread)
    # Read, and judged: p, q and status of every draft that may matter
    positions = rule.with_weights(backend.read(rows, requests, positions, rule, samples))
    # Of a tree, the positions of the path that the drawn tokens take
    requests, positions, path = requests.order.along_path(requests, positions)
    sources = Source.of(requests, positions)
    # Only the block rule takes residual masses, where q is used; else q stands in their place.
    residuals = Residuals(sources, None, positions.q)
    if rule.is_block and not rows.q.is_one_hot:  # the rule takes the mass at every position
        residuals = backend.residuals(rows, lax.optimization_barrier(sources))
    # [B]: counted
    num_accepted, status = rule.count(requests, positions, residuals.residual)
    # [B]: the position that the last token is drawn at, of those that were read
    place = num_accepted - positions.offset[:, 0]
    if not samples or rule.draws_every_row:
        nothing_bad = jnp.zeros_like(requests.greedy)
        token_id = entry_of(positions.argmax, place)
        return _output(requests, num_accepted, status, token_id, nothing_bad, path)
    # [B]: drawn from the one position that is left of each request
    last, masses = residuals.at(place)
    token_id, bad_draft = draw(rows, requests, last, masses)
    return _output(requests, num_accepted, status, token_id, bad_draft, path)


def sample(
    logits: jax.Array,
    sampling: SamplingParams,
    noise: Uniforms | Races | DrawnRaces,
    *,
    part: Part,
    backend: Gather,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Samples one token from each row: a verification without drafts.

    Args:
      logits: ``[B, V]``, or this device's columns of them.
      sampling: parameters of each row.
      noise: uniforms, or the noise of the agreement rule's races, or what it is drawn from.
      part: of the vocabulary, which the columns are.
      backend: reads the rows, all at once.

    Returns:
      Four arrays ``[B]``: token ids; ``logsumexp((logits - maximum) / temperature)`` of the logits
      that the filter keeps; the maxima; and the thresholds below which it keeps none, or None
      without a filter.
    """
    requests = Request.without_drafts(sampling.temperature, Filter.of(sampling), noise)
    size = logits.shape[1] * part.num_parts
    rows = LocalRows.of(logits, None, None, size=size, backend=backend, part=part, keeps_sums=True)
    # [B, 1]: one position each, at which nothing is proposed
    unread = Position.unread(requests, size, rows.num_sums)
    rule = Standard() if isinstance(noise, Uniforms) else Agreement()
    positions = backend.read_ahead(rows, requests, unread, rule)
    last = jax.tree.map(lambda x: x[:, 0], positions)
    token_ids = last.argmax
    if not rule.draws_every_row:
        token_ids, _ = draw(rows, requests, Source.at(last), None)
    return token_ids, last.scale.log_scale, last.scale.shift, last.threshold


def argmax(logits: jax.Array, *, part: Part, backend: Gather) -> jax.Array:
    """Returns ``[B]`` int32, the argmax of each row ``[B, V]``; ties go to the lowest id."""
    size = logits.shape[1] * part.num_parts
    rows = LocalRows.of(logits, None, None, size=size, backend=backend, part=part)
    return argmax_of_parts(*part.gather(backend.max_and_argmax(rows.target, None)))


def _output(
    requests: Request,
    num_accepted: jax.Array,
    status: jax.Array,
    token_id: jax.Array,
    bad_draft: jax.Array,
    path: jax.Array | None,
) -> RejectionSampleOutput:
    """Returns the output.

    Args:
      requests: the requests.
      num_accepted: ``[B]`` int32.
      status: ``[B]`` int32, of the rows that the decision rests on.
      token_id: ``[B]`` int32, the last token as it was drawn.
      bad_draft: ``[B]`` bool, whether it was drawn with a bad draft row.
      path: ``[B, K+1]`` int32, nodes of a tree, or None.
    """
    # Where the caller has sampled the bonus, nothing was to be drawn.
    if requests.bonus_token_id is not None:
        all_accepted = num_accepted == requests.num_drafts
        token_id = jnp.where(all_accepted, requests.bonus_token_id, token_id)
        bad_draft &= ~all_accepted
    # A bad draft row shows when it is drawn from, if not before.
    status = jnp.where((status == Status.OK) & bad_draft, Status.BAD_DRAFT_ROW, status)
    ok = status == Status.OK
    last = num_accepted[:, None]
    # [B, K+1]: the accepted drafts, the last token, and nothing after it
    index = jnp.arange(requests.token_ids.shape[1], dtype=jnp.int32)[None, :]
    emitted = jnp.where(index == last, token_id[:, None], requests.token_ids)
    is_emitted = ok[:, None] & (index <= last)
    emitted = jnp.where(is_emitted, emitted, PLACEHOLDER_TOKEN_ID)
    accepted = jnp.where(ok, num_accepted, 0)
    path = None if path is None else jnp.where(is_emitted, path, -1)
    return RejectionSampleOutput(emitted, accepted, jnp.where(ok, accepted + 1, 0), status, path)
