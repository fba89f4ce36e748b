"""`validate`: checks of values on the host, for those who want errors before jit."""

from __future__ import annotations

import jax
import numpy as np

from jax_specdec._src.base.arrays import (
    as_positions,
    check_entries,
    check_outside_jit,
    check_positions,
    require,
)
from jax_specdec._src.base.config import SpecDecodeConfig
from jax_specdec._src.base.noise import check_keys
from jax_specdec._src.base.sampling import SamplingParams
from jax_specdec._src.base.types import (
    MAX_LOG_NORMALIZER,
    Array,
    DraftDistribution,
    DraftProbs,
    Drafts,
    Integers,
)
from jax_specdec._src.rows.rows import storage_of
from jax_specdec._src.verify.api import check_implementation
from jax_specdec._src.verify.call import Implementation, Settings, checked
from jax_specdec._src.verify.mosaic_gpu.config import KernelConfig
from jax_specdec._src.verify.requests import CallArrays
from jax_specdec._src.verify.sharding import VerifySharding
from jax_specdec._src.verify.values import Owned, check_probs, check_requests, check_stored


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
    """Raises for any input that `rejection_sample` would answer with a status, or would ignore.

    Reads every array on the host, also rows of logits, which a call outside of `jax.jit` does not
    check: use it in tests and while you bring up a new serving loop, not on the hot path. Rows of
    inactive slots are not checked, nor are drafts past the offsets.

    Arguments are all those of `rejection_sample`. ``keys`` and ``positions`` may be left out, as
    for a call with explicit noise.

    Raises:
      TypeError: an argument of the wrong type or dtype, or an array that is traced by `jax.jit`.
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
    check_outside_jit(
        "validate",
        target_logits=target_logits,
        drafts=drafts,
        sampling=sampling,
        keys=keys,
        positions=positions,
        bonus_token_ids=bonus_token_ids,
        active=active,
        token_bitmask=token_bitmask,
    )
    # Shapes and dtypes, as every call checks them. What follows looks at values.
    check_implementation(implementation)
    arrays, static = checked(
        CallArrays.given(
            target_logits, drafts, None, sampling, bonus_token_ids, active, token_bitmask
        ),
        Settings(config, vocab_size, padded_rows, implementation, kernel_config, sharding),
    )
    batch = len(drafts.cu_num_draft_tokens) - 1
    # Noise, if it is given.
    if keys is not None:
        check_keys("keys", keys, {"B": batch})
    at = None if positions is None else np.asarray(as_positions(positions))
    if at is not None:
        check_positions(at, {"B": batch})
    owned = check_requests(arrays, at, static)

    # Target rows that active requests own: one for each draft, and the bonus row.
    rows = owned.drafted
    if bonus_token_ids is None:
        ends = np.asarray(drafts.cu_num_draft_tokens)[1:]
        rows = np.concatenate([rows + owned.owner[rows], ends[owned.slots] + owned.slots])
    least = rows.max(initial=-1) + 1
    must = f"have the {least} rows that active requests own"
    require(least <= len(target_logits), "target_logits", must, target_logits)
    # What is left of each row, if its mask is applied, must have a largest entry.
    size = static.size
    logits = np.asarray(target_logits, np.float32)[:, :size]
    if token_bitmask is not None:
        words = np.asarray(token_bitmask)[:, np.arange(size) // 32]
        logits = np.where(words >> (np.arange(size) % 32).astype(words.dtype) & 1, logits, -np.inf)
    _check_finite("target_logits[{}].max()", logits.max(axis=1), rows)
    if drafts.distribution is not None:
        _check_distribution(drafts.distribution, owned, size)


def _check_finite(name: str, values: np.ndarray, at: np.ndarray) -> None:
    """Checks the values at some places."""
    check_entries(name, values, np.isfinite(values), "be finite", at)


def _check_distribution(distribution: DraftDistribution, owned: Owned, size: int) -> None:
    """Checks the rows of active requests' drafts."""
    path = "drafts.distribution"
    # The rows that drafts of active requests point to.
    visited = check_stored(distribution, owned, size)
    # Column j is id j, so that columns from `size` on are padding, unless the ids are listed.
    columns = size if distribution.ids is None else None
    values = np.asarray(storage_of(distribution), np.float32)[:, :columns]
    # Probabilities must be such; of logits, what is stored beside them must belong to them.
    if isinstance(distribution, DraftProbs):
        check_probs(values, visited)
        return
    if distribution.threshold is not None:
        # [R]: NaN would leave out nothing, and say nothing
        threshold = np.asarray(distribution.threshold)
        is_number = ~np.isnan(threshold)
        check_entries(f"{path}.threshold[{{}}]", threshold, is_number, "be a number", visited)
        values = np.where(values < threshold[:, None], -np.inf, values)
    _check_finite(f"{path}.logits[{{}}].max()", values.max(axis=1), visited)
    if distribution.row_max is not None:
        _check_finite(f"{path}.row_max[{{}}]", np.asarray(distribution.row_max), visited)
    if distribution.log_normalizer is not None:
        normalizer = np.asarray(distribution.log_normalizer)
        most = MAX_LOG_NORMALIZER
        holds = abs(normalizer) < most
        must = f"be in (-{most:g}, {most:g})"
        hint = "make it relative to the maximum of the row, and give row_max"
        check_entries(f"{path}.log_normalizer[{{}}]", normalizer, holds, must, visited, hint)
