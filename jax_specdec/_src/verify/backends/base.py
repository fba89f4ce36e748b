"""`Backend`: verification in five steps, of which a backend does some as its device does them best.

- `requests.requests_of` makes a request of the arrays of a call.
- `Backend.read` finds p and q among what the rows of positions hold.
- A class of `rules` accepts drafts: by `goes_on`, one position; by `count`, a request. A new rule
  is one more class there.
- `Backend.draw` draws the last token by what is known of the masses of tiles.
- `_output` puts what was accepted and drawn together.

If the vocabulary is split over devices, there are three exchanges:

1. the statistics and the drafts' logits, by which all devices decide alike;
2. the masses of tiles, by which all devices find the tile that the token is in;
3. the token, which the device that holds it draws.
"""

from __future__ import annotations

import abc
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from jax_specdec._src.base.platform import Platform
from jax_specdec._src.base.sampling import Filter
from jax_specdec._src.base.types import PLACEHOLDER_TOKEN_ID, RejectionSampleOutput, Status
from jax_specdec._src.rows.blocks import any_under_vmap, entry_of
from jax_specdec._src.rows.device import Device
from jax_specdec._src.rows.part import Part, part_of
from jax_specdec._src.verify.call import Static
from jax_specdec._src.verify.draw import Residuals, TileMasses, race
from jax_specdec._src.verify.local_rows import LocalRows
from jax_specdec._src.verify.position import Position, Source
from jax_specdec._src.verify.requests import CallArrays, Races, Request, Uniforms, requests_of
from jax_specdec._src.verify.rules import Rule, accepts_greedy, first_true

_LARGE = 2**23
"""Bytes of logits from which on it pays to ask first whether any request samples."""


class Backend(abc.ABC):
    """One way to verify. Stateless; every method is traced, and chooses by static values alone.

    Attributes:
      only: the one platform that it has programs for; None for every platform.
      reads_ahead: whether rows are read before the positions ahead of them are judged.
      device: what rows are on.
    """

    only: ClassVar[Platform | None] = None
    reads_ahead: ClassVar[bool] = True
    device: ClassVar[Device] = Device()

    # A call: where it runs, and whether it is served.

    def on(self, platform: Platform) -> Backend:
        """Returns the backend that reads on a platform."""
        return self

    def no_device(self) -> str | None:
        """Returns why it cannot run on JAX's default device, as a sentence; None if it can."""
        return None

    def unserved(self, arrays: CallArrays, static: Static) -> str | None:
        """Returns why it cannot serve a call, as a sentence; None if it can."""
        return None

    # Its verification as a whole.

    def verify(self, arrays: CallArrays, rule: Rule, static: Static) -> RejectionSampleOutput:
        """Verifies a batch that `unserved` does not object to.

        Args:
          arrays: of the call, with at least one target row. If the vocabulary is split, the logits
            are this device's columns of them, and all else is the same on all devices that split
            it.

        Returns:
          Output ``[B, K+1]`` and ``[B]``, the same on all devices that split the vocabulary.
        """
        logits = arrays.target_logits
        k = static.config.num_speculative_tokens
        requests = requests_of(arrays, k, rule.draws_every_row)
        part = part_of(static.layout.vocab_axis, logits.shape[1])
        rows = LocalRows.of(
            logits,
            arrays.drafts.distribution,
            arrays.token_bitmask,
            size=static.size,
            device=self.device,
            part=part,
            draft_is_split=static.layout.draft_vocab,
            keeps_sums=self.keeps_sums(part, rule, requests.filter),
            applies_bitmask=self.applies_bitmask(part),
        )
        # If nobody samples, neither sums nor draft rows are needed, nor compiled where it is known.
        # Rows that are read in order, or one of each request, are not read in vain.
        if arrays.is_greedy and not rule.reads_one_position:
            return self._verify_greedy(requests, rows)
        is_large = logits.size * logits.dtype.itemsize >= _LARGE
        is_read_at_once = self.reads_ahead and not part.is_split and not rule.reads_one_position
        if not (is_large and is_read_at_once):
            return self._verify(requests, rows, rule)
        samples = any_under_vmap(jnp.any(requests.is_ok & ~requests.greedy))
        return lax.cond(
            samples,
            lambda: self._verify(requests, rows, rule),
            lambda: self._verify_greedy(requests, rows),
        )

    def _verify_greedy(self, requests: Request, rows: LocalRows) -> RejectionSampleOutput:
        """Verifies requests that are all greedy: each draft is compared with an argmax."""
        positions = self.read_argmax(rows, requests, requests.unread(rows.target.size, None))
        # Of a tree, [B, K+1] positions of the path that the tokens take
        token_ids, positions, path = requests.order.along_path(requests.token_ids, positions)
        requests = requests._replace(token_ids=token_ids)
        # [B]: the first position whose row is bad, or whose argmax is not the draft
        goes_on = positions.is_good & accepts_greedy(positions.token_id, positions.argmax)
        num_accepted = first_true(~goes_on)
        # [B]: the argmax there, -1 of a bad row; at all K + 1 positions in the same few operations
        index = lax.broadcasted_iota(jnp.int32, goes_on.shape, 1)
        found = jnp.where(positions.status == Status.OK, positions.argmax, -1)
        token_id = jnp.max(jnp.where(index == num_accepted[:, None], found, -1), axis=1)
        is_bad = requests.is_ok & (num_accepted < requests.num_rows) & (token_id < 0)
        status = jnp.where(is_bad, Status.BAD_TARGET_ROW, requests.status)
        nothing_bad = jnp.zeros_like(requests.greedy)
        return _output(requests, num_accepted, status, token_id, nothing_bad, path)

    def _verify(self, requests: Request, rows: LocalRows, rule: Rule) -> RejectionSampleOutput:
        """Verifies requests, greedy or not."""
        # [B, P]: unread, every position, or the one that the rule chooses
        unread = requests.unread(rows.target.size, rows.num_sums)
        positions = rule.choose(requests, unread)
        # Read, and judged: p, q and status of every draft that may matter
        positions = rule.with_weights(self.read(rows, requests, positions, rule))
        # Of a tree, the positions of the path that the drawn tokens take
        token_ids, positions, path = requests.order.along_path(requests.token_ids, positions)
        requests = requests._replace(token_ids=token_ids)
        sources = requests.sources(positions)
        # Only the block rule takes residual masses, where q is used; else q stands in their place.
        residuals = Residuals(sources, None, positions.q)
        if rule.is_block and not rows.q.is_one_hot:  # the rule takes the mass at every position
            residuals = self.residuals(rows, lax.optimization_barrier(sources))
        # [B]: counted
        num_accepted, status = rule.count(requests, positions, residuals.residual)
        # [B]: the position that the last token is drawn at, of those that were read
        place = num_accepted - positions.offset[:, 0]
        if rule.draws_every_row:
            nothing_bad = jnp.zeros_like(requests.greedy)
            token_id = entry_of(positions.argmax, place)
            return _output(requests, num_accepted, status, token_id, nothing_bad, path)
        # [B]: drawn from the one position that is left of each request
        last, masses = residuals.at(place)
        token_id, bad_draft = self.draw(rows, requests, last, masses)
        return _output(requests, num_accepted, status, token_id, bad_draft, path)

    def draw(
        self, rows: LocalRows, requests: Request, last: Source, known: TileMasses | None
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the last token of each request.

        Args:
          rows: the rows on this device.
          requests: ``[B]``.
          last: ``[B]``, what to draw from.
          known: the masses of its tiles, if the rule has needed them.

        Returns:
          ``[B]`` int32 tokens, and ``[B]`` bool, whether the draft row is bad.
        """
        noise = requests.noise
        # By one race of all ids, or by two levels.
        if isinstance(noise, Races):
            drawn, bad_draft = race(rows, last, noise.exponential)
        else:
            assert isinstance(noise, Uniforms)  # a rule that draws from every row has nothing left
            masses = self.masses(rows, last) if known is None else known
            drawn, bad_draft = self.token(rows, last, masses, noise.recover)
        return jnp.where(requests.greedy, last.argmax, drawn), bad_draft & ~requests.greedy

    # What a backend does as its device does it best: first how rows are kept and read.

    @abc.abstractmethod
    def keeps_sums(self, part: Part, rule: Rule, filter: Filter | None) -> bool:
        """Returns whether the sums of target rows are kept by tile, to draw by them."""

    @abc.abstractmethod
    def applies_bitmask(self, part: Part) -> bool:
        """Returns whether a bitmask is applied once, to a copy of the target rows."""

    @abc.abstractmethod
    def read(self, rows: LocalRows, requests: Request, positions: Position, rule: Rule) -> Position:
        """Returns the positions that a rule has chosen, ``[B, P]``, with what their rows hold."""

    @abc.abstractmethod
    def read_argmax(self, rows: LocalRows, requests: Request, positions: Position) -> Position:
        """Returns positions ``[B, K+1]`` with argmax and status, of those that matter if greedy."""

    # Drawing tokens: masses of tiles, then a token by them. Under the block rule masses come first,
    # of all positions, and the rule counts by them.

    @abc.abstractmethod
    def residuals(self, rows: LocalRows, sources: Source) -> Residuals:
        """Returns the residual masses of positions ``[B, P]``, and what was summed to know them."""

    @abc.abstractmethod
    def masses(self, rows: LocalRows, source: Source) -> TileMasses:
        """Returns the masses of the tiles of every part, of sources ``[n]``."""

    @abc.abstractmethod
    def token(
        self, rows: LocalRows, source: Source, masses: TileMasses, recover: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Returns tokens ``[n]``, and whether their draft rows are bad, by uniforms ``[n, 2]``."""


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
