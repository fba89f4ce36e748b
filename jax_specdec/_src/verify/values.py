"""Values of a call, checked on the host: by `validate`, and by every call outside of `jax.jit`."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import numpy as np

from jax_specdec._src.base.arrays import check_entries, check_listed, require
from jax_specdec._src.base.sampling import SAMPLING_PARAMETERS
from jax_specdec._src.base.types import (
    MAX_LOG_NORMALIZER,
    DraftDistribution,
    DraftLogits,
    Drafts,
)
from jax_specdec._src.rows.rows import storage_of
from jax_specdec._src.verify.call import NO_LEADING_0, Static
from jax_specdec._src.verify.requests import CallArrays

MOST_NUMBERS = 2**18
"""Of a stored array that a call outside of jit reads, in less than a millisecond."""

_PATH = "drafts.distribution"
_LARGEST_EXCESS = 1e-4
"""How far a sum of probabilities may be from 1: more than that of a float32 softmax is."""


class Owned(NamedTuple):
    """The requests and drafts that matter.

    Attributes:
      slots: requests that are active.
      owner: the request of each draft that has one.
      drafted: drafts of active requests.
    """

    slots: np.ndarray
    owner: np.ndarray
    drafted: np.ndarray


def check_known(arrays: CallArrays, static: Static) -> None:
    """Checks what callers write, if no array of a call is traced or on another host.

    What models compute is not checked: a status answers for it. Nor are stored arrays of more than
    `MOST_NUMBERS`.

    Raises:
      ValueError: as `validate`.
    """
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(arrays)):
        return
    distribution = arrays.drafts.distribution
    stored = {name: getattr(distribution, name, None) for name in ("rows", "valid", "ids", "probs")}
    small = {name: x for name, x in stored.items() if x is not None and x.size <= MOST_NUMBERS}
    read = (
        dataclasses.replace(arrays.drafts, distribution=None),
        arrays.randomness[1] if isinstance(arrays.randomness, tuple) else None,
        arrays.sampling,
        arrays.bonus_token_ids,
        arrays.active,
        small,
    )
    jax_arrays = [x for x in jax.tree.leaves(read) if isinstance(x, jax.Array)]
    if not all(x.is_fully_addressable for x in jax_arrays):
        return
    # One transfer, for which an accelerator is waited for once.
    drafts, positions, sampling, bonus, active, small = jax.device_get(read)
    if distribution is not None:
        drafts = dataclasses.replace(
            drafts, distribution=dataclasses.replace(distribution, **small)
        )
    host = CallArrays.given(arrays.target_logits, drafts, None, sampling, bonus, active)
    check_values(host, positions, static, everything=False)


def check_values(
    arrays: CallArrays, positions: np.ndarray | None, static: Static, *, everything: bool
) -> None:
    """Checks the values of a call, on the host.

    Args:
      arrays: of the call, without noise.
      positions: ``[B]``, or None.
      static: its static side.
      everything: whether what models compute is checked too, and stored arrays of any size.

    Raises:
      ValueError: as `validate`.
    """
    owned = _check_requests(arrays, positions, static)
    if everything:
        _check_target(arrays, owned, static.size)
    distribution = arrays.drafts.distribution
    if distribution is None:
        return
    most = np.inf if everything else MOST_NUMBERS
    visited = _check_stored(distribution, owned, static.size, most)
    # Column j is id j, so that columns from `size` on are padding, unless the ids are listed.
    columns = static.size if distribution.ids is None else None
    storage = storage_of(distribution)
    if isinstance(distribution, DraftLogits):
        if everything:
            _check_logits(distribution, np.asarray(storage, np.float32)[:, :columns], visited)
    elif storage.size <= most:
        probs = np.asarray(storage, np.float32)[:, :columns]
        if not everything:
            # A row that is not finite was computed: its status answers for it.
            visited = visited[np.isfinite(probs).all(axis=1)[visited]]
        _check_probs(probs, visited)


def _check_requests(arrays: CallArrays, positions: np.ndarray | None, static: Static) -> Owned:
    """Checks what callers write for each request and draft.

    Returns:
      The requests and drafts that matter.

    Raises:
      ValueError: as `validate`.
    """
    drafts = arrays.drafts
    size = static.size
    k = static.config.num_speculative_tokens
    cu = np.asarray(drafts.cu_num_draft_tokens)
    ids = np.asarray(drafts.token_ids)
    batch = len(cu) - 1
    # Inactive slots may hold anything.
    is_active = np.ones(batch, bool) if arrays.active is None else np.asarray(arrays.active)
    slots = np.flatnonzero(is_active)

    # Offsets, then the parameters of requests.
    counts = np.diff(cu)
    name = "drafts.cu_num_draft_tokens"
    require(cu[0] == 0, f"{name}[0]", "be 0", cu[0], NO_LEADING_0)
    holds = (counts >= 0) & (counts <= k)
    must = f"be in [0, num_speculative_tokens] = [0, {k}]"
    check_entries(f"{name}, the count of request {{}},", counts, holds, must)
    require(cu[-1] <= len(ids), f"{name}[-1]", f"be at most N = {len(ids)}", cu[-1])
    for one in SAMPLING_PARAMETERS:
        if (given := getattr(arrays.sampling, one.name)) is not None:
            values = np.asarray(given)
            holds = one.range.holds(values)
            check_entries(f"sampling.{one.name}[{{}}]", values, holds, one.range.must, slots)
    if positions is not None:
        check_entries("positions[{}]", positions, positions >= 0, "be at least 0", slots)

    # Drafts: [N], the owner of each, and which of them belong to active requests.
    owner = np.repeat(np.arange(batch), counts)
    drafted = np.flatnonzero(is_active[owner])
    holds = (ids >= -1) & (ids < size)
    must = f"be in [0, {size}), or -1 for no proposal"
    check_entries("drafts.token_ids[{}]", ids, holds, must, drafted)
    if drafts.parents is not None:
        _check_trees(drafts, owner, drafted[ids[drafted] >= 0])
    if arrays.bonus_token_ids is not None:
        values = np.asarray(arrays.bonus_token_ids)
        holds = (values >= 0) & (values < size)
        must = f"be in [0, {size})"
        check_entries("bonus_token_ids[{}]", values, holds, must, slots)
    return Owned(slots, owner, drafted)


def _check_trees(drafts: Drafts, owner: np.ndarray, proposed: np.ndarray) -> None:
    """Checks the parents of the drafts that are proposed, of which draft i is ``owner[i]``'s."""
    parents = np.asarray(drafts.parents)
    # [N]: how many drafts of the same request come before each draft
    order = np.arange(len(owner)) - np.asarray(drafts.cu_num_draft_tokens)[owner]
    holds = (parents[: len(owner)] >= 0) & (parents[: len(owner)] <= order)
    must = "be a node before it, from 0 to the number of its request's drafts before it"
    check_entries("drafts.parents[{}]", parents, holds, must, proposed)
    ids = np.asarray(drafts.token_ids)
    # [3, n]: two drafts of one request that follow one node with one id are one column
    siblings = np.stack([owner[proposed], parents[proposed], ids[proposed]])
    first = np.unique(siblings, axis=1, return_index=True)[1]
    is_first = np.ones(len(ids), bool)
    is_first[proposed] = np.isin(np.arange(len(proposed)), first)
    must = "differ from its siblings"
    check_entries("drafts.token_ids[{}]", ids, is_first, must, proposed)


def _check_target(arrays: CallArrays, owned: Owned, size: int) -> None:
    """Checks the target rows that active requests own: one for each draft, and the bonus row."""
    logits = arrays.target_logits
    rows = owned.drafted
    if arrays.bonus_token_ids is None:
        ends = np.asarray(arrays.drafts.cu_num_draft_tokens)[1:]
        rows = np.concatenate([rows + owned.owner[rows], ends[owned.slots] + owned.slots])
    least = rows.max(initial=-1) + 1
    must = f"have the {least} rows that active requests own"
    require(least <= len(logits), "target_logits", must, logits)
    # What is left of each row, if its mask is applied, must have a largest entry.
    entries = np.asarray(logits, np.float32)[:, :size]
    if arrays.token_bitmask is not None:
        words = np.asarray(arrays.token_bitmask)[:, np.arange(size) // 32]
        allowed = words >> (np.arange(size) % 32).astype(words.dtype) & 1
        entries = np.where(allowed, entries, -np.inf)
    _check_finite("target_logits[{}].max()", entries.max(axis=1), rows)


def _check_stored(
    distribution: DraftDistribution, owned: Owned, size: int, most: float
) -> np.ndarray:
    """Checks row indices, and the lists of ids of the rows that drafts point to.

    Lists of more than `most` numbers are not read.

    Returns:
      Those rows. What is wrong with another one matters to nobody.

    Raises:
      ValueError: as `validate`.
    """
    drafted = owned.drafted
    # Drafts of requests whose rows are stored, and the rows that they point to.
    if distribution.valid is not None:
        drafted = drafted[np.asarray(distribution.valid)[owned.owner[drafted]]]
    rows = np.arange(len(owned.owner)) if distribution.rows is None else distribution.rows
    rows = np.asarray(rows)
    count = len(storage_of(distribution))
    holds = (rows >= 0) & (rows < count)
    must = f"be in [0, R) = [0, {count})"
    check_entries(f"{_PATH}.rows[{{}}]", rows, holds, must, drafted)
    visited = np.unique(rows[drafted])
    given = distribution.ids
    if given is not None and given.ndim == 2 and given.size <= most:
        ids = np.asarray(given)
        # [R]: whether a list has an id twice, or one out of range
        listed = np.sort(ids, axis=1)
        is_wrong = (listed[:, :-1] == listed[:, 1:]).any(axis=1)
        is_wrong |= (listed[:, 0] < 0) | (listed[:, -1] >= size)
        for row in visited[is_wrong[visited]]:
            check_listed(f"{_PATH}.ids[{row}]", ids[row], size)
    return visited


def _check_logits(distribution: DraftLogits, logits: np.ndarray, visited: np.ndarray) -> None:
    """Checks rows of stored logits, and that what is stored beside them belongs to them."""
    if distribution.threshold is not None:
        # [R]: NaN would leave out nothing, and say nothing
        threshold = np.asarray(distribution.threshold)
        is_number = ~np.isnan(threshold)
        check_entries(f"{_PATH}.threshold[{{}}]", threshold, is_number, "be a number", visited)
        logits = np.where(logits < threshold[:, None], -np.inf, logits)
    _check_finite(f"{_PATH}.logits[{{}}].max()", logits.max(axis=1), visited)
    if distribution.row_max is not None:
        _check_finite(f"{_PATH}.row_max[{{}}]", np.asarray(distribution.row_max), visited)
    if distribution.log_normalizer is not None:
        normalizer = np.asarray(distribution.log_normalizer)
        most = MAX_LOG_NORMALIZER
        holds = abs(normalizer) < most
        must = f"be in (-{most:g}, {most:g})"
        hint = "make it relative to the maximum of the row, and give row_max"
        check_entries(f"{_PATH}.log_normalizer[{{}}]", normalizer, holds, must, visited, hint)


def _check_finite(name: str, values: np.ndarray, at: np.ndarray) -> None:
    """Checks that the values at some places are finite."""
    check_entries(name, values, np.isfinite(values), "be finite", at)


def _check_probs(probs: np.ndarray, visited: np.ndarray) -> None:
    """Checks that rows of stored probabilities are such."""
    least = probs.min(axis=1)
    total = probs.sum(axis=1, dtype=np.float64)
    check_entries(f"{_PATH}.probs[{{}}].min()", least, least >= 0, "be at least 0", visited)
    is_one = abs(total - 1) <= _LARGEST_EXCESS
    check_entries(f"{_PATH}.probs[{{}}].sum()", total, is_one, "be 1", visited)
