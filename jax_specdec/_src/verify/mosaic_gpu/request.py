"""What a warpgroup knows of its request: lane i of every warp knows position i."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_specdec._src import noise, ragged
from jax_specdec._src import sampling as sampling_lib
from jax_specdec._src.types import SamplingParams, Status
from jax_specdec._src.verify.mosaic_gpu.threads import WARP

LOG2E = 1.4426950408889634
LARGEST = 3.4028235e38


@dataclasses.dataclass(frozen=True)
class Call:
    """What is static about a launch.

    Attributes:
      k: drafts per request at most.
      size: ids that count.
      has_bonus_rows: whether each request owns a row after those of its drafts.
      num_drafts: length of the flattened draft axis.
      num_rows: target rows where none is left out.
      rates: conditional rates of the synthetic rule, or None.
      block: whether sampled requests follow the block rule.
      is_plain: whether nothing is masked or filtered, nor `block`: registers are left to weigh rows
        as they are read, and to load several tiles at once. (The block rule weighs before each row
        anyway: nothing would keep two mails of masses apart.)
      draft: "none", "probs", "logits" or "normalized".
      draft_rows: rows stored.
      draft_size: ids that the drafter could draw.
    """

    k: int
    size: int
    has_bonus_rows: bool
    num_drafts: int
    num_rows: int
    rates: tuple[float, ...] | None
    block: bool
    is_plain: bool
    draft: str
    draft_rows: int
    draft_size: int


class Request:
    """One request, while the kernel is traced.

    Attributes:
      status: ``[]`` int32, not OK where it must not be looked at.
      first_row: ``[]`` int32.
      num_drafts: ``[]`` int32.
      num_rows: ``[]`` int32, target rows that it owns.
      greedy: ``[]`` bool.
      stored: ``[]`` bool, whether its draft distribution is stored.
      inv: ``[]`` float32, the inverse of its temperature.
      scale: ``[]`` float32, the same for exponentials of base two.
      bonus: ``[]`` int32, the given bonus token.
      filter: what it leaves out of a row, or None where nobody does.
      filters: ``[]`` bool, whether it leaves out anything; None likewise.
      lane: ``[128]`` int32, the place of each thread in its warp.
      token_ids: ``[128]`` int32 by lane, -1 where there is no draft.
      proposed: ``[128]`` bool by lane, whether the id is in range.
      draft_rows: ``[128]`` int32 by lane.
      uniforms: ``[128]`` float32 by lane: K to accept, then two to recover; see `know_noise`.
    """

    def __init__(
        self,
        call: Call,
        threads: Any,
        refs: dict[str, Any],
        index: jax.Array,
        meanwhile: Callable[[], None],
    ):
        self.call, self.threads, self.refs, self.index = call, threads, refs, index
        self.lane = threads.index() & (WARP - 1)
        names = [name for name in ("token_ids", "rows") if name in refs]
        guess = jnp.minimum(index * call.k + self.lane, refs["token_ids"].shape[0] - 1)
        guessed = [threads.gather(refs[name], guess) for name in names]
        start, end = refs["offsets"][index], refs["offsets"][index + 1]
        temperature = refs["temperature"][index]
        filters = {name: refs[name][index] for name in ("min_p", "top_k", "top_p") if name in refs}
        self._key = None
        if "keys" in refs:
            self._key = refs["keys"][index, 0], refs["keys"][index, 1]
            self._position = refs["positions"][index]
        flags = {name: self._flag(name) for name in ("active", "valid") if name in refs}
        self.bonus = refs["bonus"][index] if "bonus" in refs else jnp.int32(0)
        meanwhile()  # loads do not move past its assembly: all of them are under way
        start, self.num_drafts, in_bounds = ragged.locate(
            start, end, index, call.k, call.num_drafts
        )
        self.first_row = start + index if call.has_bonus_rows else start
        self.num_rows = self.num_drafts + (1 if call.has_bonus_rows else 0)

        sampling = SamplingParams(temperature, **filters)
        valid = in_bounds & sampling_lib.is_valid(sampling)
        if self._key is not None:
            valid &= self._position >= 0
        if refs["target"].shape[0] < call.num_rows:
            valid &= self.first_row + self.num_rows <= refs["target"].shape[0]
        self.status = jnp.where(valid, jnp.int32(Status.OK), jnp.int32(Status.BAD_INPUT))
        if "active" in flags:
            self.status = jnp.where(flags["active"] == 0, jnp.int32(Status.INACTIVE), self.status)
        self.greedy = temperature == 0
        self.stored = flags["valid"] != 0 if "valid" in flags else jnp.bool_(call.draft != "none")
        self.inv = sampling_lib.inverse_temperature(temperature)
        self.scale = jnp.minimum(self.inv * LOG2E, LARGEST)
        self.filter = sampling_lib.Filter.of(sampling)
        self.filters = None
        if self.filter is not None:
            self.filters = ~self.greedy & self.filter.limits(call.size)
        is_draft = self.lane < self.num_drafts
        place = jnp.where(is_draft, start + self.lane, 0)
        # Where all before it have K drafts, what was loaded with the offsets is what it needs.
        found = lax.cond(
            start == index * call.k,
            lambda: guessed,
            lambda: [threads.gather(refs[name], place) for name in names],
        )
        self.token_ids = jnp.where(is_draft, found[0], -1)
        self.proposed = (self.token_ids >= 0) & (self.token_ids < call.size)
        self.draft_rows = jnp.where(is_draft, found[1], 0) if "rows" in refs else place

    def know_noise(self) -> None:
        """Draw or look up the uniforms."""
        self.uniforms = self._uniforms()

    def _flag(self, name: str) -> jax.Array:
        """``[]`` int32, 0 where it is false."""
        index = self.threads.filled(0, jnp.int32) + self.index
        return self.threads.scalar(self.threads.gather(self.refs[name], index))

    def _uniforms(self) -> jax.Array:
        k, lane = self.call.k, self.lane
        recovers = lane >= k
        if self._key is None:
            row = self.index + jnp.zeros_like(lane)
            accept = self.threads.gather(self.refs["accept"], row, jnp.minimum(lane, k - 1))
            recover = self.threads.gather(self.refs["recover"], row, jnp.clip(lane - k, 0, 1))
            return jnp.where(recovers, recover, accept)
        stream = jnp.where(recovers, int(noise.Stream.RECOVER), int(noise.Stream.ACCEPT))
        place = noise.counter_of(stream, jnp.where(recovers, 0, lane).astype(jnp.uint32))
        first, second = noise.threefry_bits(self._key, self._position + jnp.zeros_like(lane), place)
        return noise.to_uniform(jnp.where(lane == k + 1, second, first))

    def at(self, values: jax.Array, position: jax.Array) -> jax.Array:
        """What the lane of `position` knows, ``[]``."""
        return self.threads.scalar(self.threads.from_lane(values, position))

    def is_proposed(self, position: jax.Array) -> jax.Array:
        """Whether a proposal was made at `position`, ``[]``; false past the last one."""
        return self.at(self.proposed.astype(jnp.int32), jnp.minimum(position, WARP - 1)) == 1
