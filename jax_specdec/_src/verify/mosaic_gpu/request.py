"""A request as a warpgroup holds it: its parameters, its drafted tokens, and its output.

Lane i of every warp holds position i: the drafted token, and all that can be computed of it before
whole rows are read.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_specdec._src import noise, ragged
from jax_specdec._src import sampling as sampling_lib
from jax_specdec._src.sampling import SamplingParams
from jax_specdec._src.types import MAX_LOG_NORMALIZER, PLACEHOLDER_TOKEN_ID, Status
from jax_specdec._src.verify.mosaic_gpu.cluster import Cluster
from jax_specdec._src.verify.mosaic_gpu.lists import Candidates, Listed, MappedSlice
from jax_specdec._src.verify.mosaic_gpu.plan import Plan
from jax_specdec._src.verify.mosaic_gpu.ptx import WARP, Threads
from jax_specdec._src.verify.mosaic_gpu.rows import DraftSlice, TargetSlice
from jax_specdec._src.verify.mosaic_gpu.statistics import (
    LARGEST,
    LOG2E,
    Exponent,
    Normalizer,
    is_finite,
)

_ROUNDS = 8
"""Loads of offsets, of 32 requests each, that are in flight at once."""

_ENTRIES = 8
"""Loads of lists, of 32 candidates each, that are in flight at once."""


class KernelRequest:
    """One request, while the kernel is traced.

    Attributes:
      status: ``[]`` int32. If it is not OK, none of the request's rows may be read.
      first_row: ``[]`` int32.
      num_drafts: ``[]`` int32.
      num_rows: ``[]`` int32, target rows that it owns.
      greedy: ``[]`` bool.
      stored: ``[]`` bool, whether its draft distribution is stored.
      inv: ``[]`` float32, the inverse of its temperature.
      scale: ``[]`` float32, the same for exponentials of base two.
      bonus: ``[]`` int32, the bonus token that the caller gave.
      filter: its min-p, top-k and top-p; None if the call has none of them.
      filters: ``[]`` bool, whether its filter may leave out anything; None without filters.
      lane: ``[128]`` int32, the index of each thread in its warp.
      token_ids: ``[128]`` int32 by lane, -1 for lanes without a draft.
      proposed: ``[128]`` bool by lane, whether the id is in range.
      draft_rows: ``[128]`` int32 by lane.
      uniforms: ``[128]`` float32 by lane: K to accept, then two to recover; see `draw_noise`.
    """

    def __init__(
        self,
        plan: Plan,
        threads: Threads,
        refs: dict[str, Any],
        index: jax.Array,
        meanwhile: Callable[[], None],
    ):
        self.plan, self.threads, self.refs, self.index = plan, threads, refs, index
        self.lane = threads.index() & (WARP - 1)
        self.uniforms = threads.filled(0.0)
        names = [name for name in ("token_ids", "rows") if name in refs]
        guess = jnp.minimum(index * plan.k + self.lane, refs["token_ids"].shape[0] - 1)
        guessed = [threads.gather(refs[name], guess) for name in names]
        start, end = refs["offsets"][index], refs["offsets"][index + 1]
        temperatures = refs["temperature"]
        temperature = temperatures[index]
        filters = {name: refs[name][index] for name in ("min_p", "top_k", "top_p") if name in refs}
        self._key = None
        if "keys" in refs:
            self._key = refs["keys"][index, 0], refs["keys"][index, 1]
            self._position = refs["positions"][index]
        flags = {name: self._flag(name) for name in ("active", "valid") if name in refs}
        rounds = -(-temperatures.shape[0] // WARP)
        before = [self._offsets(i) for i in range(min(rounds, _ROUNDS))]
        self.bonus = refs["bonus"][index] if "bonus" in refs else jnp.int32(0)
        meanwhile()  # its PTX keeps the loads above in place: all of them are in flight
        start, self.num_drafts, in_bounds = ragged.locate(
            start, end, index, plan.k, plan.num_drafts
        )
        reached = functools.reduce(jnp.maximum, [self._end(*offsets) for offsets in before])
        if rounds > _ROUNDS:
            reached = lax.fori_loop(
                _ROUNDS,
                lax.div(index + WARP - 1, WARP),
                lambda i, reached: jnp.maximum(reached, self._end(*self._offsets(i))),
                reached,
            )
        in_bounds &= start >= -threads.scalar(threads.warp_min(-reached))
        self.first_row = start + index if plan.has_bonus_rows else start
        self.num_rows = self.num_drafts + (1 if plan.has_bonus_rows else 0)

        sampling = SamplingParams(temperature, **filters)
        valid = in_bounds & sampling_lib.is_valid(sampling)
        if self._key is not None:
            valid &= self._position >= 0
        if refs["target"].shape[0] < plan.num_rows:
            valid &= self.first_row + self.num_rows <= refs["target"].shape[0]
        self.status = jnp.where(valid, jnp.int32(Status.OK), jnp.int32(Status.BAD_INPUT))
        if "active" in flags:
            self.status = jnp.where(flags["active"] == 0, jnp.int32(Status.INACTIVE), self.status)
        self.greedy = temperature == 0
        self.stored = flags["valid"] != 0 if "valid" in flags else jnp.bool_(plan.draft != "none")
        self.inv = sampling_lib.inverse_temperature(temperature)
        self.scale = jnp.minimum(self.inv * LOG2E, LARGEST)
        self.filter = sampling_lib.Filter.of(sampling)
        self.filters = None
        if self.filter is not None:
            self.filters = ~self.greedy & self.filter.limits(plan.size)
        is_draft = self.lane < self.num_drafts
        place = jnp.where(is_draft, start + self.lane, 0)
        # If all requests before it have K drafts, what was loaded with the offsets is right.
        found = lax.cond(
            start == index * plan.k,
            lambda: guessed,
            lambda: [threads.gather(refs[name], place) for name in names],
        )
        self.token_ids = jnp.where(is_draft, found[0], -1)
        self.proposed = (self.token_ids >= 0) & (self.token_ids < plan.size)
        self.draft_rows = jnp.where(is_draft, found[1], 0) if "rows" in refs else place

    def _flag(self, name: str) -> jax.Array:
        """``[]`` int32, 0 for false."""
        index = self.threads.filled(0, jnp.int32) + self.index
        return self.threads.scalar(self.threads.gather(self.refs[name], index))

    def _offsets(self, round: jax.Array | int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """By lane, 32 a round: a request before this one, perhaps repeated, and its two offsets."""
        index = jnp.minimum(round * WARP + self.lane, jnp.maximum(self.index - 1, 0))
        start, end = (self.threads.gather(self.refs["offsets"], index + i) for i in range(2))
        return index, start, end

    def _end(self, index: jax.Array, start: jax.Array, end: jax.Array) -> jax.Array:
        """By lane: where that request's drafts end; 0 if its offsets are out of range."""
        _, _, in_bounds = ragged.locate(start, end, index, self.plan.k, self.plan.num_drafts)
        return jnp.where(in_bounds & (index < self.index), end, 0)

    def draw_noise(self) -> None:
        """Draw or look up the uniforms."""
        k, lane = self.plan.k, self.lane
        recovers = lane >= k
        if self._key is None:
            row = self.index + jnp.zeros_like(lane)
            accept = self.threads.gather(self.refs["accept"], row, jnp.minimum(lane, k - 1))
            recover = self.threads.gather(self.refs["recover"], row, jnp.clip(lane - k, 0, 1))
            self.uniforms = jnp.where(recovers, recover, accept)
            return
        stream = jnp.where(recovers, int(noise.Stream.RECOVER), int(noise.Stream.ACCEPT))
        place = noise.counter_of(stream, jnp.where(recovers, 0, lane).astype(jnp.uint32))
        first, second = noise.threefry_bits(self._key, self._position + jnp.zeros_like(lane), place)
        self.uniforms = noise.to_uniform(jnp.where(lane == k + 1, second, first))

    def at(self, values: jax.Array, position: jax.Array | int) -> jax.Array:
        """The value of the lane of `position`, ``[]``."""
        return self.threads.scalar(self.threads.shuffle(values, position))

    def is_proposed(self, position: jax.Array) -> jax.Array:
        """Whether a token was proposed at `position`, ``[]``; false past the last draft."""
        return self.at(self.proposed.astype(jnp.int32), jnp.minimum(position, WARP - 1)) == 1

    def write(
        self,
        num_accepted: jax.Array,
        token_id: jax.Array,
        status: jax.Array,
        is_writer: jax.Array,
    ) -> None:
        """Write the accepted drafts and one more token, or no tokens if the status is not OK.

        Args:
          num_accepted: ``[]`` int32.
          token_id: ``[]`` or ``[128]`` int32, the last token.
          status: ``[]`` int32.
          is_writer: ``[128]`` bool, true in one warp of the cluster.
        """
        lane, ok = self.lane, status == Status.OK
        emitted = jnp.where(lane == num_accepted, token_id, self.token_ids)
        token_ids = jnp.where(ok & (lane <= num_accepted), emitted, PLACEHOLDER_TOKEN_ID)
        place = self.index * (self.plan.k + 1) + lane
        is_place = is_writer & (lane < self.plan.k + 1)
        self.threads.scatter(self.refs["token_ids_out"], place, token_ids, is_place)
        for name, value in (
            ("num_accepted", jnp.where(ok, num_accepted, 0)),
            ("num_emitted", jnp.where(ok, num_accepted + 1, 0)),
            ("status", status),
        ):
            everywhere = jnp.zeros_like(lane)
            once = is_writer & (lane == 0)
            self.threads.scatter(self.refs[name], everywhere + self.index, everywhere + value, once)


class DraftedTokens:
    """The drafted tokens of a request, by lane, while the kernel is traced.

    Attributes:
      place: ``[128]`` int32, the id; 0 if none was proposed.
      logit: ``[128]`` float32, its entry in the target row, whether or not the row is visited.
      uses_q: ``[128]`` bool, whether its draft row is used.
      draft_row: ``[128]`` int32, in range.
      entry: ``[128]`` float32, its entry in the draft row.
      log_normalizer: ``[128]`` float32, if they are stored.
      row_max: ``[128]`` float32, what they are relative to; None for 0.
      q: ``[128]`` float32, its draft probability; 1 if a whole row must be read to compute it.
      bad: ``[128]`` bool, whether the draft row is found bad without reading all of it.
    """

    def __init__(
        self, request: KernelRequest, target: TargetSlice, draft: DraftSlice | Candidates | None
    ):
        self.request, self.draft = request, draft
        threads, plan = request.threads, request.plan
        used = request.proposed
        self.place = jnp.where(used, request.token_ids, 0)
        row = jnp.where(request.lane < request.num_rows, request.first_row + request.lane, 0)
        self.logit = target.entry(row, self.place)
        self.uses_q = used & request.stored & ~request.greedy
        self.q, self.bad = threads.filled(1.0), request.lane < 0
        self.draft_row, self.entry, self.log_normalizer = self.place, self.logit, self.logit
        self.row_max: jax.Array | None = None
        if draft is None:
            return
        self.draft_row = jnp.clip(request.draft_rows, 0, plan.draft_rows - 1)
        if isinstance(draft, Candidates):
            at_once = max(1, _ENTRIES // -(-draft.rows.shape[1] // WARP))
            self._lists = self._load_lists(draft, 0, min(plan.k, at_once))
        elif isinstance(draft, MappedSlice):
            self._column = draft.column(self.place)
        else:
            self.entry = draft.entry(self.draft_row, jnp.minimum(self.place, plan.draft_size - 1))
        if draft.thresholds is not None:
            self._threshold = threads.gather(draft.thresholds, self.draft_row)
        if "normalizer" in request.refs:
            self.log_normalizer = threads.gather(request.refs["normalizer"], self.draft_row)
        if "row_max" in request.refs:
            self.row_max = threads.gather(request.refs["row_max"], self.draft_row)

    def find_q(self) -> None:
        """Compute `q` and `bad`. This waits for the loads that `__init__` began."""
        request, plan = self.request, self.request.plan
        if self.draft is None:
            return
        rows, normalizer = request.draft_rows, self.log_normalizer
        is_outside = (rows < 0) | (rows >= plan.draft_rows)
        if "normalizer" in request.refs:
            size = jnp.abs(normalizer)
            is_large = (size >= MAX_LOG_NORMALIZER) & (size < jnp.inf)
            self.uses_q = self.uses_q & (is_outside | ~is_large)
        self.bad = self.uses_q & is_outside
        if self.draft.thresholds is not None:
            self.bad = self.bad | (self.uses_q & (self._threshold != self._threshold))
        if isinstance(self.draft, Candidates):
            self._find_listed(self.draft)
        if isinstance(self.draft, MappedSlice):
            self.entry = self.draft.entry_in(self.draft_row, self._column)
            self.bad = self.bad | (self.uses_q & (request.refs["bad_map"][0] != 0))
        if plan.draft == "probs":
            self.q = self.entry
        if plan.draft == "normalized":
            entry = self.entry if self.row_max is None else self.entry - self.row_max
            self.q = jnp.exp2((entry * request.inv - normalizer) * LOG2E)
        for stored in (self.row_max, normalizer if "normalizer" in request.refs else None):
            if stored is not None:
                self.bad = self.bad | (self.uses_q & ~is_finite(stored))

    def _find_listed(self, draft: Candidates) -> None:
        """`find_q` for rows of candidates, a few positions at once."""
        request, threads, k = self.request, self.request.threads, self.request.plan.k
        found = [threads.filled(draft.fill), threads.filled(0, jnp.int32)]
        if draft.sums:
            found += [threads.filled(0.0)] * 2

        def look(first: jax.Array | int, lists: list[Listed], found: Any) -> list[jax.Array]:
            for i, listed in enumerate(lists):
                here = request.lane == first + i
                token_id = request.at(self.place, jnp.minimum(first + i, WARP - 1))
                of_row = draft.find(listed, token_id, request.scale)
                found = [jnp.where(here, *x) for x in zip(of_row, found, strict=True)]
            return found

        count = len(self._lists)
        found = look(0, self._lists, found)
        if k > count:
            found = lax.fori_loop(
                jnp.int32(1),
                jnp.int32(-(-k // count)),
                lambda i, found: look(i * count, self._load_lists(draft, i * count, count), found),
                found,
            )
        self.q, is_bad = found[0], found[1] != 0
        if not request.plan.holds_probs:
            peak = threads.filled(0.0) if self.row_max is None else self.row_max
            stored = peak, self.log_normalizer * LOG2E
            self._peak, self._log = found[2:] if draft.sums else stored
            self.q = jnp.exp2(Exponent(request.scale, self._log, self._peak)(found[0]))
            is_bad = is_bad | ~is_finite(self._peak)
        self.bad = self.bad | (self.uses_q & is_bad)

    def _load_lists(self, draft: Candidates, first: jax.Array | int, count: int) -> list[Listed]:
        """Begin to load the lists of `count` positions; undefined past the last position."""
        places = [jnp.minimum(first + i, WARP - 1) for i in range(count)]
        return [draft.load(self.request.at(self.draft_row, place)) for place in places]

    def exponent(self, position: jax.Array) -> Exponent | None:
        """What turns entries of a row of candidates into `q`; None if they are probabilities."""
        if self.request.plan.holds_probs:
            return None
        log, peak = (self.request.at(x, position) for x in (self._log, self._peak))
        return Exponent(self.request.scale, log, peak)

    def probabilities(self, target: Normalizer, draft: Normalizer) -> tuple[jax.Array, jax.Array]:
        """By lane: p and q of the drafted token, by the normalizers of one position's rows."""
        request, plan = self.request, self.request.plan
        p = jnp.exp2((self.logit - target.peak) * request.scale) / target.total
        if request.filters is not None:
            p = jnp.where(self.logit >= target.threshold, p, 0.0)
        q = self.q
        if plan.draft == "logits":
            q = jnp.exp2((self.entry - draft.peak) * request.scale) / draft.total
        if plan.draft != "none":
            q = jnp.where(self.uses_q, jnp.where(self.place < plan.draft_size, q, 0.0), 1.0)
        return p, q

    def counts_q(self, position: jax.Array) -> jax.Array:
        """Whether the draft row of a position is used, ``[]``."""
        return self.request.at(self.uses_q.astype(jnp.int32), position) == 1

    def has_q(self, position: jax.Array) -> jax.Array:
        """Whether a draft of a sampled request has a draft distribution, ``[]``: else one-hot."""
        if "normalizer" in self.request.refs:
            return self.counts_q(position)
        return self.request.stored

    def prefetch(self, position: jax.Array) -> None:
        """Begin to fetch the draft row of a position into the L2 cache."""
        if self.draft is not None:
            self.draft.prefetch(self.request.at(self.draft_row, position))


class Work(NamedTuple):
    """The objects that one warpgroup works with, while the kernel is traced.

    Attributes:
      request: the request.
      target: target rows.
      draft: draft rows, or None if the call has none.
      drafted: the drafted tokens.
      cluster: the blocks that verify the request.
    """

    request: KernelRequest
    target: TargetSlice
    draft: DraftSlice | Candidates | None
    drafted: DraftedTokens
    cluster: Cluster
