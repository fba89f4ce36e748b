"""`DraftStore`: keeps the logits that drafts were drawn from until the drafts are verified."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_specdec._src.base.arrays import (
    LOGITS,
    Sizes,
    as_int32,
    check_array,
    check_int,
    check_tree,
    check_type,
    checked_dtype,
    pytree,
    require,
)
from jax_specdec._src.base.config import check_num_speculative_tokens
from jax_specdec._src.base.sampling import Filter, SamplingParams, per_request
from jax_specdec._src.base.types import (
    ROW_NUMBERS,
    Array,
    DraftDistribution,
    DraftLogits,
    Drafts,
    Integers,
    check_drafts,
)
from jax_specdec._src.drafts.sample import DraftRows, DraftSample, of_requests
from jax_specdec._src.verify.requests import usable_normalizers

_EVICTED = -1
"""The position of a row that must not be used."""


@pytree(
    positions="[K, S] int32",  # first: it says what K and S are
    logits=f"[K*S, Vd] {LOGITS}",
    log_normalizer="[K*S] float32",
    row_max="[K*S] float32",
    threshold="[K*S] float32",
    temperature="[K, S] float32",
    ids="[Vd] or [K*S, Vd] int32",
)
@dataclasses.dataclass(frozen=True)
class DraftStore:
    """The draft logits of S request slots, K rows each, read and written in place.

    A drafter writes the rows that it samples from (`write`), and verification reads them by index
    (`attach`). Row ``offset * S + slot`` belongs to draft `offset` of the request in `slot`, so
    that drafting one token for all slots writes one block. Donate the store to the jitted function
    that carries it: then nothing of its size is copied.

    A row is valid only for a verification at the position and temperature that it was drawn at.
    Its threshold says what min-p, top-k and top-p left out. A row that is no longer valid (after a
    step without drafts, a preemption, or another request in the slot) is not used: that request
    alone is verified one-hot, which is lossless too.

    Attributes:
      logits: ``[K*S, Vd]``, float32, bfloat16 or float16: raw logits, rounded to this dtype before
        anything was drawn from them.
      log_normalizer: ``[K*S]`` float32, as in `DraftLogits`.
      row_max: ``[K*S]`` float32, as in `DraftLogits`.
      threshold: ``[K*S]`` float32, as in `DraftLogits`; -inf if nothing was left out.
      positions: ``[K, S]`` int32, absolute position of the first draft of the step that the row was
        drawn in; -1 for a row that must not be used.
      temperature: ``[K, S]`` float32, the temperature that the row was drawn at.
      ids: the target ids that the columns of `logits` stand for, as in `DraftLogits`: ``[Vd]``
        int32 for all rows, ``[K*S, C]`` int32 for rows of C candidates, or None if column ``j`` is
        id ``j``.

    Example:
      Slots 0 and 1 draft one token each. The batch that is verified then has slot 1, slot 0 and a
      request that has just arrived, in this order:

      >>> import jax, jax.numpy as jnp
      >>> import jax_specdec as sd
      >>> store = sd.DraftStore.create(num_slots=2, num_speculative_tokens=1, vocab_size=8)
      >>> logits, sampling = jnp.zeros((2, 8)), sd.SamplingParams(jnp.array([0.5, 1.0]))
      >>> keys, positions = jax.random.split(jax.random.key(0), 2), jnp.array([7, 3])
      >>> drawn = sd.sample_draft_tokens(
      ...     logits, sampling=sampling, keys=keys, positions=positions, offset=0)
      >>> store = store.write(0, logits, drawn, positions=positions, sampling=sampling)
      >>> drafts = sd.Drafts.from_flat(drawn.token_ids[jnp.array([1, 0, 0])], jnp.array([1, 1, 1]))
      >>> drafts = store.attach(
      ...     drafts, slots=jnp.array([1, 0, -1]), positions=jnp.array([3, 7, 9]),
      ...     sampling=sd.SamplingParams(jnp.array([1.0, 0.5, 0.5])))
      >>> drafts.distribution.rows.tolist()[:2], drafts.distribution.valid.tolist()
      ([1, 0], [True, True, False])
    """

    logits: jax.Array
    log_normalizer: jax.Array
    row_max: jax.Array
    threshold: jax.Array
    positions: jax.Array
    temperature: jax.Array
    ids: jax.Array | None = None

    @classmethod
    def create(
        cls,
        num_slots: int,
        num_speculative_tokens: int,
        vocab_size: int,
        dtype: Any = jnp.float32,
        *,
        ids: jax.Array | None = None,
        own_ids: bool = False,
    ) -> DraftStore:
        """Returns an empty store.

        Args:
          num_slots: S.
          num_speculative_tokens: K.
          vocab_size: Vd, the drafter's; C for rows of candidates.
          dtype: of the stored logits.
          ids: ``[Vd]`` int32, the target ids of the columns of all rows; None if column ``j`` is id
            ``j``.
          own_ids: whether each row lists its own ids, which `write` then takes.

        Raises:
          ValueError: a size below 1, or K above 1024; `ids` of another shape, or together with
            `own_ids`.
          TypeError: a size is not an int, `dtype` not float32, bfloat16 or float16, `ids` not
            int32, or `own_ids` no bool.
        """
        check_int("num_slots", num_slots)
        check_num_speculative_tokens(num_speculative_tokens)
        check_int("vocab_size", vocab_size)
        dtype = checked_dtype(dtype, LOGITS)
        check_type("own_ids", own_ids, bool)
        # [K, S] numbers of rows, and [K*S] rows
        per_row = (num_speculative_tokens, num_slots)
        size = num_speculative_tokens * num_slots
        if ids is not None:
            require(not own_ids, "own_ids", "be False if ids are given for all rows", own_ids)
            check_array("ids", ids, "[Vd] int32", {"Vd": vocab_size})
        # [K*S, C]: each row's own, which `write` takes
        if own_ids:
            ids = jnp.zeros((size, vocab_size), jnp.int32)
        return cls(
            logits=jnp.zeros((size, vocab_size), dtype),
            log_normalizer=jnp.zeros((size,), jnp.float32),
            row_max=jnp.zeros((size,), jnp.float32),
            threshold=jnp.full((size,), -jnp.inf, jnp.float32),
            # No row may be used before it is written.
            positions=jnp.full(per_row, _EVICTED, jnp.int32),
            temperature=jnp.zeros(per_row, jnp.float32),
            ids=ids,
        )

    @property
    def has_own_ids(self) -> bool:
        """Whether each row lists its own ids."""
        return self.ids is not None and self.ids.ndim == 2

    @property
    def num_slots(self) -> int:
        """S."""
        return self.positions.shape[1]

    def write(
        self,
        offset: jax.Array | int,
        logits: jax.Array,
        drawn: DraftSample,
        *,
        ids: jax.Array | None = None,
        positions: Integers,
        sampling: SamplingParams,
        slots: Integers | None = None,
    ) -> DraftStore:
        """Stores the rows that draft `offset` of each request was sampled from.

        Rows of greedy requests are marked as not valid, because their q is never read.

        Args:
          offset: ``[]`` int32 in [0, K), index of the draft in the step.
          logits: ``[B, Vd]`` in the stored dtype: the very array that `sample_draft_tokens` got.
          drawn: what `sample_draft_tokens` returned for them. Its token ids are not looked at. A
            sampler of your own makes a `DraftSample`; see `DraftLogits` for the numbers of a row.
          ids: ``[B, C]`` int32, the ids of each row, if rows list their own ids; else None.
          positions: ``[B]`` int32, absolute position of the step's first draft.
          slots: ``[B]`` int32, all different, the slot of each request. A slot out of range writes
            nothing. None if request b has slot b, and B = S.

        Returns:
          The new store. Under jit, with this one donated, it has the same buffers.

        Raises:
          TypeError: `logits` have another dtype (rounding them after sampling would change q),
            `drawn` is not a `DraftSample`, or one of greedy drafts, `sampling` not a
            `SamplingParams`, or `offset`, `positions`, `slots` or `ids` are not integers.
          ValueError: shapes that do not fit; an `offset` known to be out of range; `ids` missing,
            or given for rows that have none.
        """
        check_type("drawn", drawn, DraftSample, hint="pass what sample_draft_tokens returned")
        store, sizes = self._checked()
        slots = _as_slots(slots, sizes)
        if isinstance(offset, jax.Array):
            offset = as_int32("offset", offset, "[]")
        else:
            offset = check_int("offset", offset, 0, sizes["K"] - 1)
        check_array("logits", logits, "[B, Vd]", sizes)
        for name in ROW_NUMBERS:
            x = getattr(drawn, name)
            if x is None and name == "threshold":
                continue
            hint = "a greedy draft has no q to store" if x is None else None
            check_array(f"drawn.{name}", x, "[B] float32", sizes, hint)
        is_stored = logits.dtype == self.logits.dtype
        must = f"be of {self.logits.dtype}"
        require(is_stored, "logits", must, logits, "round them before sampling", TypeError)
        sampling, positions = of_requests(sampling, positions, sizes)
        must = f"be given if and only if own_ids, which is {self.has_own_ids}"
        require(self.has_own_ids == (ids is not None), "ids", must, ids)
        if self.has_own_ids:
            check_array("ids", ids, "[B, Vd] int32", sizes)
        return store.write_rows(DraftRows(logits, sampling, positions, offset, ids), drawn, slots)

    def write_rows(
        self, rows: DraftRows, drawn: DraftSample, slots: jax.Array | None = None
    ) -> DraftStore:
        """Returns what `write` does, of arrays that need no checks."""
        offset = rows.offset
        # By the names that they are stored under: the rows, and [B] numbers of each
        stored = {"logits": rows.logits} | {name: getattr(drawn, name) for name in ROW_NUMBERS}
        # Nothing was left out of any row.
        if drawn.threshold is None:
            stored["threshold"] = jnp.full((len(rows.logits),), -jnp.inf, jnp.float32)
        if self.has_own_ids:
            stored["ids"] = rows.ids
        # [B]: what says for which verification a row is valid; for none if greedy
        temperature = rows.sampling.temperature
        stamped = jnp.where(temperature > 0, rows.positions, _EVICTED)
        if slots is None:
            # Request b is slot b: the S rows of a draft are one block, which is written in place.
            first = jnp.asarray(offset, jnp.int32) * self.num_slots
            written = {
                name: lax.dynamic_update_slice_in_dim(getattr(self, name), x, first, axis=0)
                for name, x in stored.items()
            }
            column: Any = slice(None)
        else:
            # [B]: the row of each request; the number of rows, which is dropped, without a slot
            has_slot = self._has_slot(slots)
            index = jnp.where(has_slot, offset * self.num_slots + slots, self.logits.shape[0])
            written = {
                name: getattr(self, name).at[index].set(x, mode="drop")
                for name, x in stored.items()
            }
            # [B]: the column of `positions` [K, S] likewise
            column = jnp.where(has_slot, slots, self.num_slots)
        return dataclasses.replace(
            self,
            **written,
            positions=self.positions.at[offset, column].set(stamped, mode="drop"),
            temperature=self.temperature.at[offset, column].set(temperature, mode="drop"),
        )

    def empty(self, num_slots: int) -> DraftStore:
        """Returns an empty store of other slots, with rows of the same kind."""
        per_row = len(self.positions)
        width = self.logits.shape[1]
        ids = None if self.has_own_ids else self.ids
        return DraftStore.create(
            num_slots, per_row, width, self.logits.dtype, ids=ids, own_ids=self.has_own_ids
        )

    def put(self, some: DraftStore, slots: Integers) -> DraftStore:
        """Returns the store in which some slots, ``[R]`` int32, hold what a store of R holds.

        A slot out of range holds nothing.

        Raises:
          TypeError: `some` is not a `DraftStore`, or `slots` are not integers.
          ValueError: shapes that do not fit.
        """
        store, sizes = self._checked()
        slots = as_int32("slots", slots, "[R]", sizes)
        k, s = store.positions.shape
        own = {"K": k, "S": sizes["R"], "Vd": sizes["Vd"]}
        check_tree("some", some, (DraftStore,), own)
        if store.has_own_ids:
            check_array("some.ids", some.ids, "[K*S, Vd] int32", own)
        offset = jnp.arange(k, dtype=jnp.int32)[:, None]
        # [K, R] -> [K*R]: the rows of the slots, or the number of rows, which is dropped
        rows = jnp.where(store._has_slot(slots)[None, :], offset * s + slots[None, :], k * s)
        rows = rows.reshape(-1)
        column = jnp.where(store._has_slot(slots), slots, s)
        names = ["logits", *ROW_NUMBERS, *(["ids"] if store.has_own_ids else [])]
        written: dict[str, Any] = {
            name: getattr(store, name).at[rows].set(getattr(some, name), mode="drop")
            for name in names
        }
        for name in ("positions", "temperature"):
            before = getattr(store, name)
            written[name] = before.at[:, column].set(getattr(some, name), mode="drop")
        return dataclasses.replace(store, **written)

    def evict(self, slots: jax.Array) -> DraftStore:
        """Makes the rows of some slots invalid. This writes their positions only.

        Args:
          slots: ``[S]`` bool, true for slots whose request left, was preempted or is new.

        Raises:
          TypeError: not bool.
          ValueError: not ``[S]``.
        """
        sizes: Sizes = {}
        check_array("store.positions", self.positions, "[K, S] int32", sizes)
        check_array("slots", slots, "[S] bool", sizes)
        # [K, S]
        positions = jnp.where(slots[None, :], _EVICTED, self.positions)
        return dataclasses.replace(self, positions=positions)

    def attach(
        self,
        drafts: Drafts,
        *,
        positions: Integers,
        sampling: SamplingParams,
        slots: Integers | None = None,
    ) -> Drafts:
        """Returns the drafts with their distribution: indices into this store. No row is copied.

        Args:
          drafts: of B requests in any order, with any counts from 0 to K.
          positions: ``[B]`` int32, as `rejection_sample` gets them.
          sampling: as `rejection_sample` gets it.
          slots: ``[B]`` int32, the slot of each request; out of range for a request without one.
            None if request b has slot b, and B = S.

        Returns:
          `drafts` with a `DraftLogits`. ``valid[b]`` is true iff request b is sampled and the rows
          of all its drafts were drawn at its position and temperature. Thresholds are included iff
          `sampling` has a min-p, top-k or top-p; without them, rows of which something was left out
          are not valid.

        Raises:
          TypeError: `drafts` is not a `Drafts`, `sampling` not a `SamplingParams`, or `positions`
            or `slots` are not integers.
          ValueError: shapes that do not fit.
        """
        store, sizes = self._checked()
        slots = _as_slots(slots, sizes)
        check_drafts(drafts, sizes)
        sampling, positions = of_requests(sampling, positions, sizes)
        bare = jax.tree.map(jnp.asarray, dataclasses.replace(drafts, distribution=None))
        return store.attach_rows(bare, positions, sampling, slots)

    def attach_rows(
        self, drafts: Drafts, positions: Array, sampling: SamplingParams, slots: jax.Array | None
    ) -> Drafts:
        """Returns what `attach` does, of arrays that need no checks."""
        cu = drafts.cu_num_draft_tokens
        k, s = self.positions.shape
        # [B]: the slot of each request, in range; a request without one is not valid below
        index = jnp.arange(s, dtype=jnp.int32) if slots is None else slots
        column = jnp.clip(index, 0, s - 1)

        # [K, B]: whether the row of draft k was drawn at the request's position and temperature
        drawn_at = self.positions[:, column]
        matches = (drawn_at >= 0) & (drawn_at == positions[None, :])
        matches &= self.temperature[:, column] == sampling.temperature[None, :]
        filter = Filter.of(sampling)
        if not filter:
            # Verified without filters, a row is its draft's distribution only if whole.
            matches &= self.threshold.reshape(k, s)[:, column] == -jnp.inf
        # [K, B] -> [B]: valid if the rows of all its drafts match, and one of its rows does
        offset = jnp.arange(k, dtype=jnp.int32)[:, None]
        unused = offset >= _num_proposed(drafts, k)[None, :]
        valid = jnp.all(matches | unused, axis=0) & jnp.any(matches, axis=0)
        valid &= self._has_slot(index) & (sampling.temperature > 0)

        size = drafts.token_ids.shape[0]
        # [K, B] -> [N]: draft k of request b stands at cu[b] + k, and its row is k * S + slot.
        # Places past a request's drafts become N, which is dropped.
        place = cu[None, :-1] + offset
        place = jnp.where(place < cu[None, 1:], place, size)
        rows = (
            jnp.zeros((size,), jnp.int32).at[place].set(offset * s + column[None, :], mode="drop")
        )
        distribution = DraftLogits(
            self.logits,
            rows=rows,
            valid=valid,
            log_normalizer=self.log_normalizer,
            row_max=self.row_max,
            threshold=self.threshold if filter else None,
            ids=self.ids,
        )
        return dataclasses.replace(drafts, distribution=distribution)

    @staticmethod
    def count_fallbacks(
        drafts: Drafts, *, sampling: SamplingParams, active: jax.Array | None = None
    ) -> jax.Array:
        """Returns how many sampled requests are verified one-hot for want of a usable draft row.

        Such a request had no valid rows in a store, or the `log_normalizer` of one of its drafts is
        too large to be used (see `DraftLogits`). Its tokens are still distributed as the target's,
        but fewer drafts are accepted.

        Args:
          drafts: from `attach`, for example; without a distribution the count is 0.
          active: ``[B]`` bool, or None for all true.

        Returns:
          ``[]`` int32.

        Raises:
          TypeError: an argument of another type or dtype.
          ValueError: shapes that do not fit.

        Example:
          >>> import jax.numpy as jnp
          >>> import jax_specdec as sd
          >>> no_rows = sd.DraftLogits(jnp.zeros((3, 8)), valid=jnp.array([False, False]))
          >>> drafts = sd.Drafts.from_flat(jnp.array([5, 6, 7]), jnp.array([2, 1]), no_rows)
          >>> sampling = sd.SamplingParams(jnp.array([0.0, 1.0]))
          >>> int(sd.DraftStore.count_fallbacks(drafts, sampling=sampling))
          1
        """
        sizes: Sizes = {}
        check_tree("drafts", drafts, (Drafts,), sizes)
        sampling = per_request(sampling, sizes["B"])
        check_tree("sampling", sampling, (SamplingParams,), sizes)
        if active is not None:
            check_array("active", active, "[B] bool", sizes)
        drafts = jax.tree.map(jnp.asarray, drafts)
        distribution: DraftDistribution | None = drafts.distribution
        if distribution is None:
            return jnp.int32(0)
        # [B]: a normalizer is unusable, or the rows are not valid though something is proposed
        falls_back = _has_unusable_row(drafts, distribution)
        if distribution.valid is not None:
            falls_back |= ~distribution.valid & (_num_proposed(drafts, 1) > 0)
        # A greedy request is one-hot in any case.
        falls_back &= sampling.temperature > 0
        if active is not None:
            falls_back &= active
        return jnp.sum(falls_back, dtype=jnp.int32)

    def _checked(self) -> tuple[DraftStore, Sizes]:
        """Returns the store as arrays of JAX, and what the letters of its shapes stand for."""
        sizes: Sizes = {}
        check_tree("store", self, (DraftStore,), sizes)
        return jax.tree.map(jnp.asarray, self), sizes

    def _has_slot(self, slots: jax.Array) -> jax.Array:
        """Returns ``[B]`` bool, whether each slot is in range."""
        return (slots >= 0) & (slots < self.num_slots)


def _as_slots(slots: Integers | None, sizes: Sizes) -> jax.Array | None:
    """Returns slots ``[B]`` as int32, and adds B to `sizes`: S where request b has slot b."""
    if slots is None:
        sizes["B"] = sizes["S"]
        return None
    return as_int32("slots", slots, "[B]", sizes)


def _has_unusable_row(drafts: Drafts, distribution: DraftDistribution) -> jax.Array:
    """Returns ``[B]`` bool, whether the normalizer of a proposed draft is too large to be used."""
    # [N] drafts, of which those of request b are from start[b] to end[b]
    ids = drafts.token_ids
    start = drafts.cu_num_draft_tokens[:-1]
    end = drafts.cu_num_draft_tokens[1:]
    n = ids.shape[0]
    place = jnp.arange(n, dtype=jnp.int32)
    rows = place if distribution.rows is None else distribution.rows
    usable = usable_normalizers(distribution, rows)
    if usable is None or n == 0:
        return jnp.zeros(start.shape, bool)
    # [N]: the first place, from each one on, that ends the proposals (a negative id) or holds such
    # a draft; N if none does
    first = lax.cummin(jnp.where((ids < 0) | ~usable, place, n), reverse=True)
    # [B]: that of each request; such a draft if it is the request's and its id is not negative
    found = first.at[start].get(mode="fill", fill_value=n)
    return (found < end) & (ids[jnp.minimum(found, n - 1)] >= 0)


def _num_proposed(drafts: Drafts, k: int) -> jax.Array:
    """Returns ``[B]`` int32 in [0, K], how many ids each request has before a negative one."""
    # [B, K]: the places of the first K ids from each request's first on
    start = drafts.cu_num_draft_tokens[:-1, None]
    end = drafts.cu_num_draft_tokens[1:, None]
    flat = start + jnp.arange(k, dtype=jnp.int32)[None, :]
    if drafts.token_ids.shape[0] == 0:
        return jnp.zeros((start.shape[0],), jnp.int32)
    # [B, K]: whether an id is the request's and proposed; then those before the first that is not
    ids = drafts.token_ids.at[flat].get(mode="fill", fill_value=-1)
    is_proposed = (flat >= start) & (flat < end) & (ids >= 0)
    return jnp.cumprod(is_proposed.astype(jnp.int32), axis=1).sum(axis=1, dtype=jnp.int32)
