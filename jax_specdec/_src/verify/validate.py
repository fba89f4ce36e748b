"""`validate`: checks of values on the host, for those who want errors before jit."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jax_specdec._src.arrays import as_positions, check_array, check_entries, check_listed, require
from jax_specdec._src.config import SpecDecodeConfig
from jax_specdec._src.noise import check_keys
from jax_specdec._src.sampling import SAMPLING_PARAMETERS, SamplingParams
from jax_specdec._src.types import (
    MAX_LOG_NORMALIZER,
    Array,
    DraftDistribution,
    DraftProbs,
    Drafts,
    Integers,
)
from jax_specdec._src.verify.api import check_implementation
from jax_specdec._src.verify.call import Implementation, Settings, checked
from jax_specdec._src.verify.mosaic_gpu.config import KernelConfig
from jax_specdec._src.verify.requests import CallArrays
from jax_specdec._src.verify.rows import storage_of
from jax_specdec._src.verify.sharding import VerifySharding

_LARGEST_EXCESS = 1e-4
"""How far a sum of probabilities may be from 1: more than that of a float32 softmax is."""


def validate(
    target_logits: Array,
    drafts: Drafts,
    *,
    sampling: SamplingParams,
    keys: jax.Array | None = None,
    positions: Integers | None = None,
    config: SpecDecodeConfig,
    bonus_token_ids: Array | None = None,
    active: Array | None = None,
    vocab_size: int | None = None,
    token_bitmask: Array | None = None,
    padded_rows: bool = False,
    implementation: Implementation | None = None,
    kernel_config: KernelConfig | None = None,
    sharding: VerifySharding | None = None,
) -> None:
    """Raise for any input that `rejection_sample` would answer with a status, or would ignore.

    Reads every array on the host: use it in tests and while you bring up a new serving loop, not on
    the hot path. Rows of inactive slots are not checked, nor are drafts past the offsets.

    Arguments are all those of `rejection_sample`. ``keys`` and ``positions`` may be left out, as
    for a call with explicit noise.

    Raises:
      TypeError: an argument of the wrong type or dtype.
      NotImplementedError: the named implementation has no device here.
      ValueError: a shape that does not fit, or a value out of its range; the message names the
        argument, the request or row, the rule and the value.

    Example:
      >>> import jax.numpy as jnp
      >>> import jax_specdec as sd
      >>> sd.validate(
      ...     jnp.zeros((3, 4)),
      ...     sd.Drafts.from_flat(jnp.array([1, 9]), jnp.array([2])),
      ...     sampling=sd.SamplingParams(jnp.ones(1)),
      ...     config=sd.SpecDecodeConfig(num_speculative_tokens=2))
      Traceback (most recent call last):
        ...
      ValueError: drafts.token_ids[1] must be in [0, 4), or -1 for no proposal, but it is 9
    """
    # Shapes and dtypes, as every call checks them. What follows looks at values.
    check_implementation(implementation)
    of_requests = sampling, bonus_token_ids, active
    arrays, static = checked(
        CallArrays.given(target_logits, drafts, None, *of_requests, token_bitmask),
        Settings(config, vocab_size, padded_rows, implementation, kernel_config, sharding),
    )
    size, k, sampling = static.size, config.num_speculative_tokens, arrays.sampling
    cu = np.asarray(drafts.cu_num_draft_tokens)
    ids = np.asarray(drafts.token_ids)
    batch = len(cu) - 1
    # Inactive slots may hold anything.
    is_active = _given(active, np.ones(batch, bool))
    slots = np.flatnonzero(is_active)

    # Offsets, then the parameters of requests.
    counts = np.diff(cu)
    name = "drafts.cu_num_draft_tokens"
    require(cu[0] == 0, f"{name}[0]", "be 0", cu[0])
    holds = (counts >= 0) & (counts <= k)
    must = f"be in [0, num_speculative_tokens] = [0, {k}]"
    check_entries(f"{name}, the count of request {{}},", counts, holds, must)
    require(cu[-1] <= len(ids), f"{name}[-1]", f"be at most N = {len(ids)}", cu[-1])
    for one in SAMPLING_PARAMETERS:
        if (given := getattr(sampling, one.name)) is not None:
            values = np.asarray(given)
            holds = one.range.holds(values)
            check_entries(f"sampling.{one.name}[{{}}]", values, holds, one.range.must, slots)
    # Noise, if it is given.
    if keys is not None:
        check_keys("keys", keys, {"B": batch})
    if positions is not None:
        values = np.asarray(as_positions(positions))
        check_array("positions", values, "[B] int32", {"B": batch})
        check_entries("positions[{}]", values, values >= 0, "be at least 0", slots)

    # Drafts: [N], the owner of each, and which of them belong to active requests.
    owner = np.repeat(np.arange(batch), counts)
    drafted = np.flatnonzero(is_active[owner])
    holds, must = (ids >= -1) & (ids < size), f"be in [0, {size}), or -1 for no proposal"
    check_entries("drafts.token_ids[{}]", ids, holds, must, drafted)
    if drafts.parents is not None:
        _check_trees(drafts, owner, drafted[ids[drafted] >= 0])
    # Target rows that active requests own: one for each draft, and the bonus row.
    rows = drafted
    if bonus_token_ids is None:
        rows = np.concatenate([drafted + owner[drafted], cu[1:][slots] + slots])
    else:
        values = np.asarray(bonus_token_ids)
        holds, must = (values >= 0) & (values < size), f"be in [0, {size})"
        check_entries("bonus_token_ids[{}]", values, holds, must, slots)
    least = rows.max(initial=-1) + 1
    must = f"have the {least} rows that active requests own"
    require(least <= len(target_logits), "target_logits", must, target_logits)
    # What is left of each row, if its mask is applied, must have a largest entry.
    logits = np.asarray(target_logits, np.float32)[:, :size]
    if token_bitmask is not None:
        words = np.asarray(token_bitmask)[:, np.arange(size) // 32]
        logits = np.where(words >> (np.arange(size) % 32).astype(words.dtype) & 1, logits, -np.inf)
    _check_finite("target_logits[{}].max()", logits.max(axis=1), rows)
    if drafts.distribution is not None:
        _check_distribution(drafts.distribution, owner, drafted, size)


def _check_trees(drafts: Drafts, owner: np.ndarray, proposed: np.ndarray) -> None:
    """Checks the parents of the drafts that are proposed, of which draft i is ``owner[i]``'s."""
    parents = np.asarray(drafts.parents)
    # [N]: how many drafts of the same request come before each draft
    order = np.arange(len(owner)) - np.asarray(drafts.cu_num_draft_tokens)[owner]
    holds = (parents[: len(owner)] >= 0) & (parents[: len(owner)] <= order)
    must = "be a node before it, from 0 to the number of its request's drafts before it"
    check_entries("drafts.parents[{}]", parents, holds, must, proposed)
    ids = np.asarray(drafts.token_ids)
    siblings = np.stack([owner[proposed], parents[proposed], ids[proposed]])
    first = np.unique(siblings, axis=1, return_index=True)[1]
    is_first = np.ones(len(ids), bool)
    is_first[proposed] = np.isin(np.arange(len(proposed)), first)
    must = "differ from its siblings"
    check_entries("drafts.token_ids[{}]", ids, is_first, must, proposed)


def _given(values: Any, default: np.ndarray) -> np.ndarray:
    """Returns the values that were given, or the default."""
    return default if values is None else np.asarray(values)


def _check_finite(name: str, values: np.ndarray, at: np.ndarray) -> None:
    """Checks the values at some places."""
    check_entries(name, values, np.isfinite(values), "be finite", at)


def _check_distribution(
    distribution: DraftDistribution, owner: np.ndarray, drafted: np.ndarray, size: int
) -> None:
    """Checks the rows of active requests' drafts, of which draft i is ``owner[i]``'s."""
    path = "drafts.distribution"
    if distribution.valid is not None:
        drafted = drafted[np.asarray(distribution.valid)[owner[drafted]]]
    # Column j is id j, so that columns from `size` on are padding, unless the ids are listed.
    ids = distribution.ids
    values = np.asarray(storage_of(distribution), np.float32)[:, : size if ids is None else None]
    rows = _given(distribution.rows, np.arange(len(owner)))
    holds, must = (rows >= 0) & (rows < len(values)), f"be in [0, R) = [0, {len(values)})"
    check_entries(f"{path}.rows[{{}}]", rows, holds, must, drafted)
    # What is wrong with a row that no draft points to matters to nobody.
    visited = np.unique(rows[drafted])
    # Lists of ids of rows that drafts point to.
    if ids is not None and ids.ndim == 2:
        for row in visited:
            check_listed(f"{path}.ids[{row}]", np.asarray(ids[row]), size)
    # Probabilities must be such; of logits, what is stored beside them must belong to them.
    if isinstance(distribution, DraftProbs):
        least, total = values.min(axis=1), values.sum(axis=1, dtype=np.float64)
        is_one = abs(total - 1) <= _LARGEST_EXCESS
        check_entries(f"{path}.probs[{{}}].min()", least, least >= 0, "be at least 0", visited)
        check_entries(f"{path}.probs[{{}}].sum()", total, is_one, "be 1", visited)
        return
    if distribution.threshold is not None:
        threshold = np.asarray(distribution.threshold)
        is_number = ~np.isnan(threshold)
        check_entries(f"{path}.threshold[{{}}]", threshold, is_number, "be a number", visited)
        values = np.where(values < threshold[:, None], -np.inf, values)
    _check_finite(f"{path}.logits[{{}}].max()", values.max(axis=1), visited)
    if distribution.row_max is not None:
        _check_finite(f"{path}.row_max[{{}}]", np.asarray(distribution.row_max), visited)
    if distribution.log_normalizer is not None:
        normalizer, most = np.asarray(distribution.log_normalizer), MAX_LOG_NORMALIZER
        holds, must = abs(normalizer) < most, f"be in (-{most:g}, {most:g})"
        hint = "make it relative to the maximum of the row, and give row_max"
        check_entries(f"{path}.log_normalizer[{{}}]", normalizer, holds, must, visited, hint)
