"""The drafted tokens of a request, by lane: all that is known of them before whole rows are read.

Lane i of every warp holds the draft of position i: its logit, and its entry in its draft row.
`DraftLoads` are the loads in flight; `DraftedTokens` is what comes of them. How ``q`` of a draft is
found depends on what draft rows hold, which is static:

- nothing (every draft is one-hot), or probabilities: `GivenQ`, known beforehand;
- logits with a log-normalizer: `StoredQ`, also known beforehand;
- logits on a list of candidates: `ListedQ`, each row read whole beforehand;
- logits alone: `SummedQ`, known once the row is read, if its position is reached.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_specdec._src.base.types import MAX_LOG_NORMALIZER
from jax_specdec._src.mosaic.threads import WARP, Threads
from jax_specdec._src.verify.mosaic_gpu.cluster import Cluster
from jax_specdec._src.verify.mosaic_gpu.lists import CandidateRows, LaneCandidates, MappedSlice
from jax_specdec._src.verify.mosaic_gpu.request import KernelRequest, RowNumbers
from jax_specdec._src.verify.mosaic_gpu.rows import (
    Below,
    DraftSlice,
    NoDraftRows,
    TargetSlice,
    limits_of,
)
from jax_specdec._src.verify.mosaic_gpu.statistics import (
    LOG2E,
    Exponent,
    GivenProbability,
    Normalizer,
    Probability,
    RelativeExponent,
    is_finite,
)

_ENTRIES = 8
"""Loads of lists, of 32 candidates each, that are in flight at once."""

KernelDraftRows = DraftSlice | CandidateRows | NoDraftRows
"""A CTA's slice of draft rows; a `MappedSlice` is a `DraftSlice`."""

# From a draft to its q.


class GivenQ(NamedTuple):
    """Draft probabilities that are known as they are."""

    q: jax.Array  # [128] float32

    def by_lane(self, row: Normalizer, factor: jax.Array) -> jax.Array:
        """Returns q of every lane; the row of the position that is visited is not needed."""
        return self.q

    def at(
        self, threads: Threads, position: jax.Array, row: Normalizer, factor: jax.Array
    ) -> Probability:
        """Returns what turns the entries of a position's draft row into probabilities."""
        return GivenProbability()


class SummedQ(NamedTuple):
    """Drafts whose rows must be read to normalize them."""

    entry: jax.Array  # [128] float32, each draft's logit in its row

    def by_lane(self, row: Normalizer, factor: jax.Array) -> jax.Array:
        """Returns q of every lane, right in that of the position whose row was read."""
        return jnp.exp2((self.entry - row.peak) * factor) / row.total

    def at(
        self, threads: Threads, position: jax.Array, row: Normalizer, factor: jax.Array
    ) -> Probability:
        """Returns what turns the entries of a position's draft row into probabilities."""
        return row.exponent(factor)


class StoredQ(NamedTuple):
    """Drafts whose rows have a stored log-normalizer."""

    q: jax.Array  # [128] float32
    log_normalizer: jax.Array  # [128] float32, of each draft's row
    row_max: jax.Array | None  # [128] float32, what it is relative to; None: to nothing

    def by_lane(self, row: Normalizer, factor: jax.Array) -> jax.Array:
        """Returns q of every lane; the row of the position that is visited is not needed."""
        return self.q

    def at(
        self, threads: Threads, position: jax.Array, row: Normalizer, factor: jax.Array
    ) -> Probability:
        """Returns what turns the entries of a position's draft row into probabilities."""
        # []: the numbers of the position's row, from its lane
        log = threads.at(self.log_normalizer, position)
        if self.row_max is None:
            return Exponent(factor=factor, shift=log * LOG2E)
        peak = threads.at(self.row_max, position)
        return RelativeExponent(factor=factor, shift=log * LOG2E, peak=peak)


class ListedQ(NamedTuple):
    """Drafts from rows of candidates' logits."""

    q: jax.Array  # [128] float32
    log: jax.Array  # [128] float32, log2 of each row's mass relative to `peak`
    peak: jax.Array  # [128] float32, each row's largest entry, or what stands for it

    def by_lane(self, row: Normalizer, factor: jax.Array) -> jax.Array:
        """Returns q of every lane; the row of the position that is visited is not needed."""
        return self.q

    def at(
        self, threads: Threads, position: jax.Array, row: Normalizer, factor: jax.Array
    ) -> Probability:
        """Returns what turns the entries of a position's draft row into probabilities."""
        log = threads.at(self.log, position)
        peak = threads.at(self.peak, position)
        return RelativeExponent(factor=factor, shift=log, peak=peak)


TokenQ = GivenQ | SummedQ | StoredQ | ListedQ


class DraftLoads:
    """The loads of a request's drafted tokens, by lane; they begin here.

    Attributes:
      request: the request.
      draft: draft rows.
      place: ``[128]`` int32, the id; 0 if none was proposed.
      logit: ``[128]`` float32, its entry in the target row, whether or not the row is visited.
      uses_q: ``[128]`` bool, whether its draft row may be used.
      draft_row: ``[128]`` int32, in range.
      entry: one ``[128]``: float32, its entry in the draft row; of a map int32, its column. None
        where rows hold candidates, or there are no rows.
      lists: the first lists, if rows hold candidates.
      limits: what hides entries of the draft row.
      numbers: what is stored beside it, ``[128]`` float32 each.
    """

    def __init__(self, request: KernelRequest, target: TargetSlice, draft: KernelDraftRows):
        threads = request.threads
        plan = request.plan
        operands = request.operands.draft
        self.request = request
        self.draft = draft
        # One entry of each position's target row, from global memory, whether or not the row will
        # be visited. It is what masses of that row are relative to.
        self.place = jnp.where(request.proposed, request.token_ids, 0)
        # [128]: lane i has the row of position i
        row = jnp.where(request.lane < request.num_rows, request.first_row + request.lane, 0)
        self.logit = target.entry(row, self.place)
        self.uses_q = request.proposed & request.has_stored_q & ~request.greedy
        self.draft_row = self.place
        self.entry = list[jax.Array]()
        self.lists = list[LaneCandidates]()
        self.limits: tuple[Below, ...] = ()
        self.numbers = RowNumbers[jax.Array]()
        # Without rows, every draft is one-hot and nothing else is loaded.
        if operands is None:
            return
        # A row out of range is read somewhere; `DraftedTokens` finds it bad.
        self.draft_row = jnp.clip(request.draft_rows, 0, plan.num_draft_rows - 1)
        match draft:
            case CandidateRows():
                # A list takes a load for every 32 candidates.
                at_once = max(1, _ENTRIES // -(-draft.matrix.shape[1] // WARP))
                self.lists = self.load_lists(draft, 0, min(plan.k, at_once))
            case MappedSlice():
                self.entry = [draft.column(self.place)]
            case DraftSlice():
                column = jnp.minimum(self.place, plan.draft_size - 1)
                self.entry = [draft.entry(self.draft_row, column)]
        # [128] each: what is stored beside each draft's row
        self.limits = limits_of(operands.thresholds, threads, self.draft_row)
        self.numbers = jax.tree.map(
            lambda ref: threads.gather(ref, self.draft_row), operands.numbers
        )

    def prefetch(self, position: jax.Array) -> None:
        """Begins to fetch the draft row of a position into the L2 cache."""
        self.draft.prefetch(self.request.threads.at(self.draft_row, position))

    def load_lists(
        self, draft: CandidateRows, first: jax.Array | int, count: int
    ) -> list[LaneCandidates]:
        """Begins to load the lists of positions from `first` on; undefined past the last one."""
        # Each list is loaded by all lanes of a warp: the row of its position is a scalar.
        places = [jnp.minimum(first + i, WARP - 1) for i in range(count)]
        return [draft.load(self.request.threads.at(self.draft_row, place)) for place in places]


class DraftedTokens:
    """The drafted tokens of a request, by lane, while the kernel is traced.

    Attributes:
      request: the request.
      loads: what was loaded of them.
      uniforms: ``[128]`` float32: K to accept, then two to recover.
      uses_q: ``[128]`` bool, whether the draft row is used.
      q: from a draft to its probability.
      bad: ``[128]`` bool, whether the draft row is found bad without reading all of it.
    """

    def __init__(self, loads: DraftLoads, uniforms: jax.Array):
        request = loads.request
        self.request = request
        self.loads = loads
        self.uniforms = uniforms
        self.uses_q = loads.uses_q
        self.bad = request.lane < 0  # none
        self.q: TokenQ = GivenQ(request.threads.filled(1.0))
        operands = request.operands.draft
        if operands is None:
            return
        # A row out of range is bad, whatever was read in its place.
        num_rows = request.plan.num_draft_rows
        is_outside = (request.draft_rows < 0) | (request.draft_rows >= num_rows)
        log_normalizer, row_max = loads.numbers
        if log_normalizer is not None:
            # By a normalizer as large as this q would not be exact: the draft is one-hot.
            size = jnp.abs(log_normalizer)
            is_large = (size >= MAX_LOG_NORMALIZER) & (size < jnp.inf)
            self.uses_q = self.uses_q & (is_outside | ~is_large)
        self.bad = self.uses_q & is_outside
        for limit in loads.limits:  # a threshold of NaN
            self.bad = self.bad | (self.uses_q & (limit.threshold != limit.threshold))
        if isinstance(loads.draft, CandidateRows):
            self.q, is_bad = _find_listed(loads, loads.draft)
            self.bad = self.bad | (self.uses_q & is_bad)
        else:
            entry = loads.entry[0]
            if isinstance(loads.draft, MappedSlice) and operands.bad is not None:
                entry = loads.draft.entry_in(loads.draft_row, entry)  # it was a column
                self.bad = self.bad | (self.uses_q & (operands.bad[0] != 0))
            self.q = self._q_of(entry)
        # What is stored and not finite, of a row that is used.
        for number in (row_max, log_normalizer):
            if number is not None:
                self.bad = self.bad | (self.uses_q & ~is_finite(number))

    def _q_of(self, entry: jax.Array) -> TokenQ:
        """Returns what gives q, from each draft's entry in its row."""
        loads = self.loads
        if self.request.plan.entries == "probs":
            return GivenQ(entry)
        log_normalizer, row_max = loads.numbers
        if log_normalizer is None:
            return SummedQ(entry)
        # log q, first natural and then to base two
        relative = entry if row_max is None else entry - row_max
        log = relative * self.request.inv_temperature - log_normalizer  # natural
        return StoredQ(jnp.exp2(log * LOG2E), log_normalizer, row_max)

    def probability_at(self, position: jax.Array, row: Normalizer) -> Probability:
        """Returns what turns entries of the draft row of a position into ``q``.

        Args:
          position: ``[]`` int32.
          row: what normalizes the row, if it was read.
        """
        return self.q.at(self.request.threads, position, row, self.request.factor)

    def probabilities(self, target: Normalizer, draft: Normalizer) -> tuple[jax.Array, jax.Array]:
        """Returns p and q of the drafts by lane, right in that of the position of these rows."""
        request = self.request
        plan = request.plan
        logit = self.loads.logit
        # p = exp((logit - peak) / temperature) / total, and 0 of what the filter left out.
        p = jnp.exp2((logit - target.peak) * request.factor) / target.total
        if plan.has_filter:
            p = jnp.where(logit >= target.threshold, p, 0.0)
        # q is 0 past the ids that the drafter could draw, and 1 of a one-hot draft.
        q = self.q.by_lane(draft, request.factor)
        if plan.has_draft_rows:
            q = jnp.where(self.loads.place < plan.draft_size, q, 0.0)
            q = jnp.where(self.uses_q, q, 1.0)  # one-hot
        return p, q

    def has_q(self, position: jax.Array) -> jax.Array:
        """Returns whether a draft of a sampled request has a draft distribution: else one-hot."""
        if self.loads.numbers.log_normalizer is None:
            return self.request.has_stored_q  # of all its drafts, or of none
        return self.request.threads.at(self.uses_q, position)


def _find_listed(loads: DraftLoads, draft: CandidateRows) -> tuple[TokenQ, jax.Array]:
    """Returns what gives q of drafts from rows of candidates, and whether a row is bad.

    Every warp reads all lists, a few at once: a list is spread over the lanes of the warp, and what
    it says of its position's draft goes to the lane of that position.
    """
    request = loads.request
    threads = request.threads
    k = request.plan.k
    count = len(loads.lists)

    def search(first: jax.Array | int, lists: list[LaneCandidates], found: Any) -> list[jax.Array]:
        # Each warp looks for one draft after another, and the draft's lane keeps what is found.
        for i, listed in enumerate(lists):
            # [128]: true in the lane of this draft
            here = request.lane == first + i
            token_id = threads.at(loads.place, jnp.minimum(first + i, WARP - 1))
            of_row = [draft.entry_of(listed, token_id), draft.is_bad(listed)]
            if draft.sums:
                of_row += draft.peak_and_log(listed, request.factor)
            found = [jnp.where(here, x, y) for x, y in zip(of_row, found, strict=True)]
        return found

    def load_and_search(i: jax.Array, found: Any) -> list[jax.Array]:
        first = i * count
        return search(first, loads.load_lists(draft, first, count), found)

    # By lane: entry, whether the row is bad, then its peak and log2 of its mass if it is summed.
    found = [threads.filled(draft.fill), threads.filled(0, jnp.int32)]
    if draft.sums:
        found += [threads.filled(0.0)] * 2
    found = search(0, loads.lists, found)
    if k > count:  # the others, as many at a time
        last = jnp.int32(-(-k // count))
        found = lax.fori_loop(jnp.int32(1), last, load_and_search, found)
    entry = found[0]
    is_bad = found[1] != 0
    if request.plan.entries == "probs":
        return GivenQ(entry), is_bad
    # [128] by lane: what the mass of each row is relative to, and log2 of that mass.
    log_normalizer, row_max = loads.numbers
    if log_normalizer is None:
        _, _, peak, log = found
    else:
        peak = threads.filled(0.0) if row_max is None else row_max
        log = log_normalizer * LOG2E
    # [128]: q of each draft; what gives q of other ids is kept beside it
    q = RelativeExponent(factor=request.factor, shift=log, peak=peak).of(entry)
    return ListedQ(q, log, peak), is_bad | ~is_finite(peak)


class Work(NamedTuple):
    """The objects that one warpgroup works with, while the kernel is traced."""

    request: KernelRequest  # the request
    target: TargetSlice  # target rows
    draft: KernelDraftRows  # draft rows
    drafted: DraftedTokens  # the drafted tokens
    cluster: Cluster  # the CTAs that verify the request
