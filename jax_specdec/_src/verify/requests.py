"""The arrays of a call, and the requests that verification makes of them."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_specdec._src.base import ragged
from jax_specdec._src.base import sampling as sampling_lib
from jax_specdec._src.base.arrays import pytree
from jax_specdec._src.base.config import SpecDecodeConfig
from jax_specdec._src.base.noise import draw_noise, token_exponentials
from jax_specdec._src.base.sampling import Filter, SamplingParams
from jax_specdec._src.base.types import (
    MAX_LOG_NORMALIZER,
    PLACEHOLDER_TOKEN_ID,
    Array,
    DraftDistribution,
    DraftLogits,
    Drafts,
    Integers,
    Noise,
    RaceNoise,
    Status,
)
from jax_specdec._src.rows.tiles import Scale
from jax_specdec._src.verify.order import ChainOrder, TreeOrder
from jax_specdec._src.verify.position import DraftScale, Position, Source

KeysAndPositions = tuple[jax.Array | None, jax.Array | None]
"""Keys ``[B]`` and positions ``[B]``, to draw noise from. Greedy requests alone need neither."""


@pytree(
    drafts=(Drafts,),
    sampling=(SamplingParams,),
    bonus_token_ids="[B] int32",
    active="[B] bool",
)
@dataclasses.dataclass(frozen=True)
class CallArrays:
    """The arrays of a call of `rejection_sample`.

    Attributes:
      target_logits: ``[M, V]``, or this device's part of them.
      drafts: the drafts.
      randomness: explicit noise, or what to draw it from.
      sampling: parameters of each request.
      bonus_token_ids: ``[B]`` int32 or None.
      active: ``[B]`` bool or None.
      token_bitmask: ``[M, ceil(V/32)]`` or None.
    """

    target_logits: jax.Array
    drafts: Drafts
    randomness: Noise | RaceNoise | KeysAndPositions
    sampling: SamplingParams
    bonus_token_ids: jax.Array | None = None
    active: jax.Array | None = None
    token_bitmask: jax.Array | None = None

    @classmethod
    def given(
        cls,
        target_logits: Array,
        drafts: Drafts,
        randomness: Noise | RaceNoise | tuple[jax.Array | None, Integers | None] | None,
        sampling: SamplingParams,
        bonus_token_ids: Array | None = None,
        active: Array | None = None,
        token_bitmask: Array | None = None,
    ) -> CallArrays:
        """Returns what a caller gave, before `call.checked`."""
        values: dict[str, Any] = dict(
            target_logits=target_logits,
            drafts=drafts,
            randomness=randomness,
            sampling=sampling,
            bonus_token_ids=bonus_token_ids,
            active=active,
            token_bitmask=token_bitmask,
        )
        return cls(**values)

    @property
    def num_requests(self) -> int:
        """B."""
        return self.drafts.cu_num_draft_tokens.shape[0] - 1

    @property
    def is_greedy(self) -> bool:
        """Whether every request is known to be greedy."""
        return self.sampling.temperature is None

    def needs_noise(self, config: SpecDecodeConfig) -> bool:
        """Returns whether anything is drawn: not for greedy requests, but by synthetic rates."""
        return not self.is_greedy or config.rejection_sample_method == "synthetic"


class Uniforms(NamedTuple):
    """Noise of a draw by inverse CDF.

    Attributes:
      recover: ``[B, 2]`` float32, for the tile and for the id in it.
    """

    recover: jax.Array


class Races(NamedTuple):
    """Noise of exponential races that was given.

    Attributes:
      exponential: float32, ``[B, V]``; if the rule draws from every row ``[B, K+1, T+L]``, as in
        `RaceNoise`.
    """

    exponential: jax.Array

    def of_rows(self, offset: jax.Array, vocab_size: int) -> jax.Array:
        """Returns ``[B, P, T+L]``, the noise of positions ``offset [B, P]``."""
        return jnp.take_along_axis(self.exponential, offset[:, :, None], axis=1)


class DrawnRaces(NamedTuple):
    """Noise of exponential races that is drawn for the tokens of every row.

    Attributes:
      keys: ``[B]``.
      positions: ``[B]`` int32, of the first token.
    """

    keys: jax.Array
    positions: jax.Array

    def of_rows(self, offset: jax.Array, vocab_size: int) -> jax.Array:
        """Returns ``[B, P, T+L]``, the noise of positions ``offset [B, P]``."""
        # [B, P]: noise belongs to the position of a token, whichever step comes to it
        at = self.positions[:, None] + offset
        return token_exponentials(self.keys[:, None], at, vocab_size)


class Request(NamedTuple):
    """All that verification knows of B requests before any row is read.

    Arrays ``[B, K+1]`` have an entry for each position. No draft is proposed at the last one.

    Attributes:
      first_row: ``[B]`` int32, target row of the first position.
      num_rows: ``[B]`` int32, target rows that each request owns.
      num_drafts: ``[B]`` int32.
      token_ids: ``[B, K+1]`` int32, the drafts; -1 past ``num_drafts``.
      draft_rows: ``[B, K+1]`` int32, row of the draft distribution of each draft.
      has_q: ``[B, K+1]`` bool, whether the draft distribution of the position can be used; if not,
        the draft is one-hot. It depends on the row of the position and on nothing after it:
        otherwise the choice would depend on later drafts, and verification would not be lossless.
      inv_temperature: ``[B]`` float32.
      filter: min-p, top-k and top-p, ``[B]`` each; None if no request is filtered.
      greedy: ``[B]`` bool.
      accept: ``[B, K+1]`` float32 uniforms; the last is not used.
      noise: by which tokens are drawn.
      bonus_token_id: ``[B]`` int32, or None if requests own bonus rows.
      status: ``[B]`` int32.
      is_ok: ``[B]`` bool, whether the status is OK: if not, no row of the request may be read.
      order: which row comes after which.
    """

    first_row: jax.Array
    num_rows: jax.Array
    num_drafts: jax.Array
    token_ids: jax.Array
    draft_rows: jax.Array
    has_q: jax.Array
    inv_temperature: jax.Array
    filter: Filter | None
    greedy: jax.Array
    accept: jax.Array
    noise: Uniforms | Races | DrawnRaces
    bonus_token_id: jax.Array | None
    status: jax.Array
    is_ok: jax.Array
    order: ChainOrder | TreeOrder = ChainOrder()

    @classmethod
    def without_drafts(
        cls,
        temperature: jax.Array,
        filter: Filter | None,
        noise: Uniforms | Races | DrawnRaces,
    ) -> Request:
        """Returns requests that own a bonus row each, and nothing else.

        Args:
          temperature: ``[B]`` float32.
          filter: ``[B]``, or None.
          noise: by which their tokens are drawn.
        """
        # Request b owns row b, from which its token is drawn.
        row = jnp.arange(temperature.shape[0], dtype=jnp.int32)
        none = jnp.zeros_like(row)[:, None]  # [B, 1]: one position, without a draft
        return cls(
            first_row=row,
            num_rows=jnp.ones_like(row),
            num_drafts=jnp.zeros_like(row),
            token_ids=none - 1,
            draft_rows=none,
            has_q=none != 0,
            inv_temperature=sampling_lib.inverse_temperature(temperature),
            filter=filter,
            greedy=temperature == 0,
            accept=none.astype(jnp.float32),
            noise=noise,
            bonus_token_id=None,
            status=jnp.zeros_like(row),
            is_ok=row >= 0,
        )

    def unread(self, size: int, num_sums: int | None) -> Position:
        """Returns all positions ``[B, K+1]``, before a row is read.

        Args:
          size: ids from it on are padding.
          num_sums: tiles of this device, if the sums of target rows are kept by tile, else None.
        """
        # Ids out of range, among them -1 past the last draft, are no proposal.
        token_id = self.token_ids
        shape = token_id.shape
        greedy = self.greedy[:, None]
        proposed = (token_id >= 0) & (token_id < size)
        # [B, K+1]: 0, 1, ..., K of every request
        offset = jnp.broadcast_to(jnp.arange(shape[1], dtype=jnp.int32), shape)
        zero = jnp.zeros(shape, jnp.float32)
        none = jnp.zeros(shape, jnp.int32)
        # What is not read stays as it is here: p = 0, q = 1, weight 1, status OK.
        scale = Scale(zero, zero)
        return Position(
            offset=offset,
            row=self.first_row[:, None] + offset,
            draft_row=self.draft_rows,
            token_id=token_id,
            proposed=proposed,
            uses_q=proposed & self.has_q & ~greedy,
            uniform=jnp.where(greedy, 0.0, self.accept),
            inv_temperature=jnp.broadcast_to(self.inv_temperature[:, None], shape),
            argmax=none,
            scale=scale,
            threshold=None if self.filter is None else zero,
            p_masses=None if num_sums is None else jnp.zeros((*shape, num_sums), jnp.float32),
            draft_scale=DraftScale(scale, jnp.zeros(shape, bool)),
            p=zero,
            q=zero + 1,
            weight=zero + 1,
            status=none,
        )

    def sources(self, positions: Position) -> Source:
        """Returns what positions ``[B, P]`` are drawn from; row -1 where no token can be drawn."""
        # Of a request that samples, a position that has a row and that a prefix can end at.
        may_draw = (self.is_ok & ~self.greedy)[:, None] & (positions.weight > 0)
        may_draw &= positions.offset < self.num_rows[:, None]
        return Source.at(positions)._replace(row=jnp.where(may_draw, positions.row, -1))


def requests_of(arrays: CallArrays, k: int, draws_every_row: bool = False) -> Request:
    """Returns the requests of a call, each with the status that is known before rows are read."""
    # The layout of the batch: which drafts and rows each request owns.
    drafts = arrays.drafts
    sampling = arrays.sampling
    has_bonus_rows = arrays.bonus_token_ids is None
    # [B, K]: the drafts of each request, -1 past its count
    layout = ragged.unpack(drafts, k, has_bonus_rows=has_bonus_rows)
    # What is wrong with a request ends it alone.
    valid_input = layout.in_bounds & sampling_lib.is_valid(sampling)
    # [B]: the rows that each request owns must be there
    num_rows = layout.num_drafts + int(has_bonus_rows)
    end = layout.first_row + num_rows
    # Rows of inactive requests may be left out; an active request must have its own.
    valid_input &= end <= arrays.target_logits.shape[0]  # else its rows were left out
    order: ChainOrder | TreeOrder = ChainOrder()
    if drafts.parents is not None:
        order, is_tree = TreeOrder.of(layout.parents(drafts), layout.token_ids)
        valid_input &= is_tree
    noise: Uniforms | Races | DrawnRaces
    given = arrays.randomness
    if isinstance(given, tuple) and given[1] is not None:
        valid_input &= given[1] >= 0
    # Accept uniforms come from `given`; the last token is drawn by `noise`.
    match given:
        case RaceNoise():
            noise = Races(given.exponential)
        case Noise():
            noise = Uniforms(given.recover)
        case None, _:  # nobody samples
            shape = layout.token_ids.shape  # [B, K]
            given = Noise(jnp.zeros(shape), jnp.zeros((shape[0], 2)))
            noise = Uniforms(given.recover)
        case keys, positions:
            assert positions is not None  # as keys are
            given = draw_noise(keys, positions, k)
            noise = DrawnRaces(keys, positions) if draws_every_row else Uniforms(given.recover)
    # [B]: known before a row is read
    status = jnp.where(valid_input, int(Status.OK), int(Status.BAD_INPUT)).astype(jnp.int32)
    if arrays.active is not None:
        status = jnp.where(arrays.active, status, int(Status.INACTIVE))

    # [B]: of requests that are known to be greedy there is nothing to compute
    temperature = sampling.temperature
    greedy = jnp.ones_like(layout.in_bounds)
    inv_temperature = jnp.ones((arrays.num_requests,), jnp.float32)
    if temperature is not None:
        greedy = temperature == 0
        inv_temperature = sampling_lib.inverse_temperature(temperature)

    # [B, K]: whether the draft distribution of a position can be used
    distribution = drafts.distribution
    has_q = jnp.full(layout.token_ids.shape, distribution is not None)
    # A request without a stored distribution, and a row that is not exact, fall back to one-hot.
    if distribution is not None and distribution.valid is not None:
        has_q &= distribution.valid[:, None]
    usable = usable_normalizers(distribution, layout.draft_rows)
    if usable is not None:
        has_q &= usable
    # [B, K+1]: no draft is proposed at the last position
    last = ((0, 0), (0, 1))
    return Request(
        first_row=layout.first_row,
        num_rows=num_rows,
        num_drafts=layout.num_drafts,
        token_ids=jnp.pad(layout.token_ids, last, constant_values=PLACEHOLDER_TOKEN_ID),
        draft_rows=jnp.pad(layout.draft_rows, last),
        has_q=jnp.pad(has_q, last),
        inv_temperature=inv_temperature,
        filter=None if arrays.is_greedy else Filter.of(sampling),
        greedy=greedy,
        accept=jnp.pad(given.accept, last),
        noise=noise,
        bonus_token_id=arrays.bonus_token_ids,
        status=status,
        is_ok=status == Status.OK,
        order=order,
    )


def usable_normalizers(distribution: DraftDistribution | None, rows: jax.Array) -> jax.Array | None:
    """Returns whether the log-normalizers of `rows` can be used; None without any.

    They must be below `MAX_LOG_NORMALIZER`. True for rows out of range and normalizers that are not
    finite, which are bad instead.
    """
    if not isinstance(distribution, DraftLogits) or distribution.log_normalizer is None:
        return None
    # A large one has lost the bits in which probabilities differ: the draft is one-hot instead.
    count = distribution.log_normalizer.shape[0]
    # The size of each row's normalizer; rows out of range are read in range.
    size = jnp.abs(distribution.log_normalizer[jnp.clip(rows, 0, count - 1)])
    is_large = (size >= MAX_LOG_NORMALIZER) & (size < jnp.inf)
    return (rows < 0) | (rows >= count) | ~is_large
