"""`validate`: checks of values on the host, for those who want errors before jit."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jax_specdec._src.config import SpecDecodeConfig
from jax_specdec._src.types import (
    MAX_LOG_NORMALIZER,
    Array,
    DraftDistribution,
    DraftLogits,
    DraftProbs,
    Drafts,
    Integers,
    SamplingParams,
)
from jax_specdec._src.verify import checks
from jax_specdec._src.verify.api import Implementation, check_call
from jax_specdec._src.verify.mosaic_gpu.plan import KernelConfig
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
    sampling, known = checks.as_arrays(drafts, sampling, positions)
    of_requests = sampling, bonus_token_ids, active
    given: Any = target_logits, drafts, (keys, known), *of_requests, token_bitmask
    static = vocab_size, padded_rows, implementation, kernel_config, sharding
    size, k = check_call(CallArrays(*given), config, *static).size, config.num_speculative_tokens
    cu = np.asarray(drafts.cu_num_draft_tokens)
    batch, n = len(cu) - 1, drafts.token_ids.shape[0]
    slots = np.flatnonzero(np.ones(batch, bool) if active is None else np.asarray(active))

    _check_offsets(cu, k, n)
    _check_sampling(sampling, slots)
    if keys is not None:
        checks.check_keys(keys, batch)
    if known is not None:
        checks.check_positions(known, batch)
        for b in slots:
            if known[b] < 0:
                raise ValueError(f"positions[{b}] must be at least 0, but it is {known[b]}")

    logits, ids = np.asarray(target_logits, np.float32)[:, :size], np.asarray(drafts.token_ids)
    if token_bitmask is not None:
        words = np.asarray(token_bitmask)[:, np.arange(size) // 32]
        logits = np.where(words >> (np.arange(size) % 32).astype(words.dtype) & 1, logits, -np.inf)
    for b in slots:
        for i in range(cu[b], cu[b + 1]):
            if not -1 <= ids[i] < size:
                raise ValueError(
                    f"drafts.token_ids[{i}] must be in [0, {size}), or -1 for no proposal, but "
                    f"it is {ids[i]}"
                )
        first = cu[b] + (b if bonus_token_ids is None else 0)
        last = cu[b + 1] + (b + 1 if bonus_token_ids is None else 0)
        if last > len(logits):
            raise ValueError(
                f"target_logits must have the rows of every active request, but request {b} owns "
                f"rows {first} to {last - 1}, and there are {len(logits)}"
            )
        for row in range(first, last):
            _check_logits("target_logits", row, logits[row])
        if bonus_token_ids is not None and not 0 <= bonus_token_ids[b] < size:
            raise ValueError(
                f"bonus_token_ids[{b}] must be in [0, {size}), but it is {bonus_token_ids[b]}"
            )
    if drafts.distribution is not None:
        _check_distribution(drafts.distribution, cu, slots, size)


_RANGES = {
    "temperature": ("finite and not negative", lambda x: np.isfinite(x) and x >= 0),
    "min_p": ("in [0, 1]", lambda x: 0 <= x <= 1),
    "top_k": ("at least 0", lambda x: x >= 0),
    "top_p": ("in (0, 1]", lambda x: 0 < x <= 1),
}


def _check_sampling(sampling: SamplingParams, slots: Any) -> None:
    for name, (rule, holds) in _RANGES.items():
        if getattr(sampling, name) is None:
            continue
        values = np.asarray(getattr(sampling, name))
        for b in slots:
            if not holds(values[b]):
                raise ValueError(f"sampling.{name}[{b}] must be {rule}, but it is {values[b]}")


def _check_offsets(cu: Any, k: int, n: int) -> None:
    name = "drafts.cu_num_draft_tokens"
    if cu[0] != 0:
        raise ValueError(f"{name} must begin with 0, but it begins with {cu[0]}")
    for b, count in enumerate(np.diff(cu)):
        if count < 0:
            raise ValueError(
                f"{name} must not decrease, but entry {b + 1} is {cu[b + 1]} after {cu[b]}"
            )
        if count > k:
            raise ValueError(
                f"{name} must give each request at most num_speculative_tokens={k} drafts, but "
                f"request {b} has {count}"
            )
    if cu[-1] > n:
        raise ValueError(f"{name} must end at most at N = {n}, but it ends at {cu[-1]}")


def _check_logits(name: str, row: int, values: Any) -> None:
    peak = values.max()
    if not np.isfinite(peak):
        raise ValueError(
            f"{name}[{row}] must have a finite entry and no NaN or +inf, but its maximum is {peak}"
        )


def _check_distribution(distribution: DraftDistribution, cu: Any, slots: Any, size: int) -> None:
    is_probs = isinstance(distribution, DraftProbs)
    name = f"drafts.distribution.{'probs' if is_probs else 'logits'}"
    ids = None if distribution.ids is None else np.asarray(distribution.ids)
    values = np.asarray(storage_of(distribution), np.float32)[:, : size if ids is None else None]
    if isinstance(distribution, DraftLogits) and distribution.threshold is not None:
        values = np.where(values < np.asarray(distribution.threshold)[:, None], -np.inf, values)
    rows = np.arange(cu[-1]) if distribution.rows is None else np.asarray(distribution.rows)
    for b in slots:
        if distribution.valid is not None and not distribution.valid[b]:
            continue
        for i in range(cu[b], cu[b + 1]):
            row = rows[i]
            if not 0 <= row < len(values):
                raise ValueError(
                    f"drafts.distribution.rows[{i}] must be in [0, R) = [0, {len(values)}), but "
                    f"it is {row}"
                )
            if ids is not None and ids.ndim == 2:
                checks.check_listed(f"drafts.distribution.ids[{row}]", ids[row], size)
            if not is_probs:
                _check_logits(name, row, values[row])
            else:
                total = values[row].sum(dtype=np.float64)
                if not (values[row] >= 0).all() or abs(total - 1) > _LARGEST_EXCESS:
                    raise ValueError(
                        f"{name}[{row}] must be probabilities that sum to 1, but it has minimum "
                        f"{values[row].min()} and sum {total:.6g}"
                    )
            _check_scale(distribution, row)


def _check_scale(distribution: DraftDistribution, row: int) -> None:
    if isinstance(distribution, DraftProbs):
        return
    if distribution.threshold is not None and np.isnan(distribution.threshold[row]):
        raise ValueError(f"drafts.distribution.threshold[{row}] must be a number, but it is nan")
    for field in ("log_normalizer", "row_max"):
        if getattr(distribution, field) is None:
            continue
        value = getattr(distribution, field)[row]
        if not np.isfinite(value):
            raise ValueError(
                f"drafts.distribution.{field}[{row}] must be finite, but it is {value}"
            )
        if field == "log_normalizer" and abs(value) >= MAX_LOG_NORMALIZER:
            raise ValueError(
                f"drafts.distribution.log_normalizer[{row}] must be less than "
                f"{MAX_LOG_NORMALIZER:g} in size, but it is {value}: make it relative to the "
                "maximum of the row, and give row_max"
            )
