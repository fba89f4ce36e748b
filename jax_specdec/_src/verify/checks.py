"""Shape and dtype checks, at trace time: each error names the argument, the rule and what came."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jax_specdec._src import noise as noise_lib
from jax_specdec._src import sampling as sampling_lib
from jax_specdec._src.config import check_int
from jax_specdec._src.types import (
    ROW_NUMBERS,
    DraftLogits,
    DraftProbs,
    Drafts,
    Noise,
    RaceNoise,
    SamplingParams,
    as_positions,
    described,
    known_values,
)

_LOGITS = ("float32", "bfloat16", "float16")
_SAMPLING = {"temperature": "float32", "min_p": "float32", "top_k": "int32", "top_p": "float32"}


def _check_array(
    name: str, x: Any, shape: tuple[Any, ...], dtypes: tuple[str, ...], why: str
) -> None:
    """Check one array. Entries of `shape` are sizes, or letters for any size."""
    if not isinstance(x, (jax.Array, np.ndarray)):
        raise TypeError(f"{name} must be an array {why}, but it is {described(x)}")
    sizes = [
        want if isinstance(want, int) else got for want, got in zip(shape, x.shape, strict=False)
    ]
    if len(shape) != len(x.shape) or list(x.shape) != sizes:
        raise ValueError(f"{name} must have shape {why}, but its shape is {list(x.shape)}")
    if str(x.dtype) not in dtypes:
        raise TypeError(f"{name} must be {' or '.join(dtypes)}, but it is {x.dtype}")


def as_arrays(drafts: Any, sampling: Any, positions: Any = None) -> tuple[Any, Any]:
    """`sampling` and `positions` as arrays, if they are numbers, lists or NumPy arrays.

    Anything else is left as it is, for the checks that follow.

    Raises:
      TypeError: positions that are not integers.
      ValueError: an integer that int32 does not hold.
    """
    if isinstance(sampling, SamplingParams) and isinstance(drafts, Drafts):
        shape: tuple[int, ...] = getattr(drafts.cu_num_draft_tokens, "shape", ())
        if len(shape) == 1 and shape[0] > 0:
            sampling = sampling_lib.per_request(sampling, shape[0] - 1)
    return sampling, None if positions is None else as_positions(positions)


def check_call(
    target_logits: Any,
    drafts: Any,
    sampling: Any,
    bonus_token_ids: Any,
    active: Any,
    vocab_size: Any,
    token_bitmask: Any = None,
    *,
    vocabulary_parts: int = 1,
    padded_rows: bool = False,
) -> None:
    """Check all arguments of `rejection_sample` but the noise.

    `target_logits` is one of `vocabulary_parts` parts of the vocabulary.

    Raises:
      TypeError: an argument is not an array, or has another dtype.
      ValueError: a shape does not fit the others; or a shared map of ids has known values, and one
        of them is out of range or listed twice.
    """
    if not isinstance(drafts, Drafts):
        raise TypeError(f"drafts must be a Drafts, but it is {described(drafts)}")
    if not isinstance(sampling, SamplingParams):
        raise TypeError(f"sampling must be a SamplingParams, but it is {described(sampling)}")
    cu = drafts.cu_num_draft_tokens
    _check_array("drafts.token_ids", drafts.token_ids, ("N",), ("int32",), "[N]")
    _check_array("drafts.cu_num_draft_tokens", cu, ("B+1",), ("int32",), "[B+1]")
    batch, n = cu.shape[0] - 1, drafts.token_ids.shape[0]
    if batch < 0:
        raise ValueError("drafts.cu_num_draft_tokens must have shape [B+1], but it is empty")

    if bonus_token_ids is None:
        rows, why = n + batch, f"[N+B, V] = [{n}+{batch}, V]"
    else:
        rows, why = n, f"[N, V] = [{n}, V] (bonus_token_ids is given)"
        _check_array("bonus_token_ids", bonus_token_ids, (batch,), ("int32",), f"[B] = [{batch}]")
    if not isinstance(padded_rows, bool):
        raise TypeError(f"padded_rows must be True or False, but it is {described(padded_rows)}")
    if padded_rows:
        why = "[M, V], any M from 1 on (padded_rows is true)"
        _check_array("target_logits", target_logits, ("M", "V"), _LOGITS, why)
        rows = target_logits.shape[0]
        if rows < 1 <= batch:
            raise ValueError(f"target_logits must have shape {why}, but its M is 0")
    else:
        _check_rows(target_logits, rows, why, batch, n)
        _check_array("target_logits", target_logits, (rows, "V"), _LOGITS, why)
    v = target_logits.shape[1]
    if v < 1:
        raise ValueError("target_logits must have at least one column, but its V is 0")
    v *= vocabulary_parts
    if vocab_size is not None:
        check_int("vocab_size", vocab_size, 1, v)

    if token_bitmask is not None:
        words = -(-v // 32)
        why = f"[M, ceil(V/32)] = [{rows}, {words}], M the rows of target_logits"
        _check_array("token_bitmask", token_bitmask, (rows, words), ("int32", "uint32"), why)

    for name, dtype in _SAMPLING.items():
        value = getattr(sampling, name)
        if value is not None or name == "temperature":
            _check_array(f"sampling.{name}", value, (batch,), (dtype,), f"[B] = [{batch}]")
    if active is not None:
        _check_array("active", active, (batch,), ("bool",), f"[B] = [{batch}]")
    if drafts.distribution is not None:
        size = v if vocab_size is None else vocab_size
        _check_distribution(drafts.distribution, batch, n, v, size)


def _check_rows(target_logits: Any, rows: int, why: str, batch: int, n: int) -> None:
    """Raise with advice if the shape of the logits shows which mistake was made.

    Raises:
      ValueError: logits ``[B, K+1, V]``, or for another number of drafts per request.
    """
    shape: tuple[int, ...] = getattr(target_logits, "shape", ())
    must = f"target_logits must have shape {why}, but its shape is {list(shape)}"
    if len(shape) == 3 and shape[0] * shape[1] == rows:
        raise ValueError(f"{must}: pass target_logits.reshape({rows}, {shape[2]})")
    if len(shape) not in (2, 3) or batch < 1 or n % batch:
        return
    given = shape[0] if len(shape) == 2 else shape[0] * shape[1]
    extra, drafts = rows - n, n // batch
    if given == n and extra:
        raise ValueError(
            f"{must}: the bonus rows are missing, one after the draft rows of each request (or "
            "give bonus_token_ids)"
        )
    if given != rows and given % batch == 0 and given > extra:
        per_request = given // batch - extra // batch
        raise ValueError(
            f"{must}: drafts has {drafts} ids per request, but the logits are for {per_request}"
        )


def _check_distribution(distribution: Any, batch: int, n: int, v: int, size: int) -> None:
    dtypes: tuple[str, ...]
    if isinstance(distribution, DraftProbs):
        storage_name, storage, dtypes = "probs", distribution.probs, ("float32",)
    elif isinstance(distribution, DraftLogits):
        storage_name, storage, dtypes = "logits", distribution.logits, _LOGITS
    else:
        raise TypeError(
            "drafts.distribution must be None, a DraftProbs or a DraftLogits, but it is "
            f"{described(distribution)}"
        )
    name = f"drafts.distribution.{storage_name}"
    _check_array(name, storage, ("R", "Vd"), dtypes, "[R, Vd]")
    r, vd = storage.shape
    if not 1 <= vd <= v:
        raise ValueError(f"{name} must have 1 to V = {v} columns, but it has {vd}")
    if distribution.rows is not None:
        rows = distribution.rows
        _check_array("drafts.distribution.rows", rows, (n,), ("int32",), f"[N] = [{n}]")
        if r == 0 and n > 0:
            raise ValueError(f"{name} must have at least one row, but it has none")
    elif r != n:
        raise ValueError(f"{name} must have N = {n} rows if rows is None, but it has {r}")
    if distribution.valid is not None:
        valid = distribution.valid
        _check_array("drafts.distribution.valid", valid, (batch,), ("bool",), f"[B] = [{batch}]")
    if isinstance(distribution, DraftLogits):
        for field in ROW_NUMBERS:
            value = getattr(distribution, field)
            if value is not None:
                _check_array(
                    f"drafts.distribution.{field}", value, (r,), ("float32",), f"[R] = [{r}]"
                )
        if distribution.row_max is not None and distribution.log_normalizer is None:
            raise ValueError(
                "drafts.distribution.row_max must come with the log_normalizer that is relative to "
                "it, but log_normalizer is None"
            )
    if distribution.ids is not None:
        check_ids("drafts.distribution.ids", distribution.ids, (r, vd), size)


def check_ids(name: str, ids: Any, storage: tuple[int, ...], size: int | None = None) -> None:
    """Check which ids the columns of draft storage stand for; of a shared map, the values too.

    Args:
      name: of the argument.
      ids: one map for all rows, or candidates of each row.
      storage: ``(R, Vd)``, the shape of the storage.
      size: ids from it on are padding. If None, no value is checked.

    Raises:
      TypeError: not an array of int32.
      ValueError: neither ``[Vd]`` nor ``[R, Vd]``; or a shared map with known values, of which one
        is out of range or listed twice.
    """
    r, vd = storage
    shape = (vd,) if getattr(ids, "ndim", 2) == 1 else (r, vd)
    why = f"[Vd] = [{vd}] (one map for all rows) or [R, C] = [{r}, {vd}] (candidates of each row)"
    _check_array(name, ids, shape, ("int32",), why)
    known = known_values(ids) if ids.ndim == 1 and size is not None else None
    if known is not None and size is not None:
        check_listed(name, known, size)


def check_listed(name: str, ids: np.ndarray, size: int) -> None:
    """Check the values of one list of ids.

    Raises:
      ValueError: an id is out of range or listed twice.
    """
    outside = np.flatnonzero((ids < 0) | (ids >= size))
    if outside.size:
        j = outside[0]
        raise ValueError(f"{name}[{j}] must be an id in [0, {size}), but it is {ids[j]}")
    listed, counts = np.unique(ids, return_counts=True)
    if counts.size and counts.max() > 1:
        twice = listed[counts.argmax()]
        raise ValueError(
            f"{name} must list each id once, but {twice} is listed {counts.max()} times"
        )


def check_counts(drafts: Drafts, k: int) -> None:
    """Raise if every request is known to have more than K drafts: the drafts are of another K.

    Fewer are a matter of the requests' status. Counts are read only if N shows that some are above
    K, unless N is padded.

    Raises:
      ValueError: they have.
    """
    cu, n = drafts.cu_num_draft_tokens, drafts.token_ids.shape[0]
    known = known_values(cu) if n > (cu.shape[0] - 1) * k else None
    if known is not None and (np.diff(known) > k).all():
        raise ValueError(
            f"drafts must have at most num_speculative_tokens={k} drafts per request, as config "
            f"says, but each request has more, the first one {known[1] - known[0]}"
        )


def check_is_noise(noise: Any) -> None:
    """Raise TypeError for anything but a `Noise` or a `RaceNoise`."""
    if not isinstance(noise, (Noise, RaceNoise)):
        raise TypeError(f"noise must be a Noise or a RaceNoise, but it is {described(noise)}")


def check_noise(
    noise: Noise | RaceNoise, batch: int, k: int, v: int, draws_every_row: bool
) -> None:
    """Check explicit noise. `draws_every_row` is that of the rule.

    Raises:
      TypeError: not float32.
      ValueError: a shape does not fit.
      NotImplementedError: a race, and the rule draws from every row.
    """
    _check_array("noise.accept", noise.accept, (batch, k), ("float32",), f"[B, K] = [{batch}, {k}]")
    if isinstance(noise, Noise):
        shape: tuple[int, ...] = batch, 2
        why = f"[B, 2] = [{batch}, 2]"
        if draws_every_row:
            shape, why = (batch, k + 1, 2), f"[B, K+1, 2] = [{batch}, {k + 1}, 2]"
        _check_array("noise.recover", noise.recover, shape, ("float32",), why)
    elif draws_every_row:
        raise NotImplementedError(
            "rejection_sample_method='agreement' draws from every row, and RaceNoise has noise for "
            "one: pass Noise"
        )
    else:
        exponential = noise.exponential
        why = f"[B, V] = [{batch}, {v}]"
        _check_array("noise.exponential", exponential, (batch, v), ("float32",), why)


def check_keys(keys: Any, batch: int) -> None:
    """Check keys.

    Raises:
      TypeError: not typed keys of two or four words.
      ValueError: not ``[B]``.
    """
    noise_lib.check_keys("keys", keys)
    if keys.shape != (batch,):
        raise ValueError(
            f"keys must have shape [B] = [{batch}], one per request as jax.random.split gives, but "
            f"its shape is {list(keys.shape)}"
        )


def check_positions(positions: Any, batch: int) -> None:
    """Check positions.

    Raises:
      TypeError: not int32.
      ValueError: not ``[B]``.
    """
    _check_array("positions", positions, (batch,), ("int32",), f"[B] = [{batch}]")
