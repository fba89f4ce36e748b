"""The arguments of a call, checked at trace time against what their classes declare."""

from __future__ import annotations

from typing import Any

import numpy as np

from jax_specdec._src import noise as noise_lib
from jax_specdec._src.arrays import (
    LOGITS,
    Sizes,
    as_positions,
    check_array,
    check_int,
    check_listed,
    check_tree,
    check_type,
    known_values,
    require,
)
from jax_specdec._src.sampling import SamplingParams, per_request
from jax_specdec._src.types import DraftDistribution, DraftLogits, Drafts, Noise, RaceNoise
from jax_specdec._src.verify.rows import storage_of
from jax_specdec._src.verify.tiles import TILE, num_tiles


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
            sampling = per_request(sampling, shape[0] - 1)
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
) -> Sizes:
    """Check all arguments of `rejection_sample` but the noise; returns B, N, M, V and others.

    `target_logits` is one of `vocabulary_parts` parts of the vocabulary; V is all of it.

    Raises:
      TypeError: an argument is not an array, or has another dtype.
      ValueError: a shape does not fit the others; or a shared map of ids has known values, and one
        of them is out of range or listed twice.
    """
    sizes: Sizes = {}
    check_type("padded_rows", padded_rows, bool)
    check_tree("drafts", drafts, (Drafts,), sizes)
    check_tree("sampling", sampling, (SamplingParams,), sizes)
    of_requests = ("bonus_token_ids", bonus_token_ids, "[B] int32"), ("active", active, "[B] bool")
    for name, value, declared in of_requests:
        if value is not None:
            check_array(name, value, declared, sizes)
    rows = "M" if padded_rows else "N+B" if bonus_token_ids is None else "N"
    hint = _advice(target_logits, rows, sizes)
    check_array("target_logits", target_logits, f"[{rows}, V] {LOGITS}", sizes, hint)
    sizes["M"], v = target_logits.shape
    has_row = sizes["M"] > 0 or sizes["B"] == 0 or not padded_rows
    require(has_row and v > 0, "target_logits", "have a row and a column", target_logits)
    sizes["V"] = v = v * vocabulary_parts
    sizes["ceil(V/32)"] = -(-v // 32)
    if token_bitmask is not None:
        declared = "[M, ceil(V/32)] int32 or uint32"
        check_array("token_bitmask", token_bitmask, declared, sizes)
    size = v if vocab_size is None else check_int("vocab_size", vocab_size, 1, v)
    if drafts.distribution is not None:
        _check_distribution(drafts.distribution, sizes, size)
    return sizes


def _advice(target_logits: Any, rows: str, sizes: Sizes) -> str | None:
    """What to do if the shape of the logits shows which mistake was made."""
    shape: tuple[int, ...] = getattr(target_logits, "shape", ())
    batch, n = sizes["B"], sizes["N"]
    extra = {"M": None, "N": 0, "N+B": batch}[rows]
    if len(shape) not in (2, 3) or extra is None:
        return None
    given, wanted = shape[0] if len(shape) == 2 else shape[0] * shape[1], n + extra
    if given == wanted and len(shape) == 2:
        return None
    if given == wanted:
        return f"pass target_logits.reshape({wanted}, {shape[-1]})"
    if given == n:
        return "each request has a bonus row after its draft rows, unless bonus_token_ids is given"
    if batch and n % batch == 0 and given % batch == 0 and given > extra:
        per_request = given // batch - extra // batch
        return f"drafts has {n // batch} ids per request, but the logits are for {per_request}"
    return None if extra else "there are no bonus rows where bonus_token_ids is given"


def _check_distribution(distribution: DraftDistribution, sizes: Sizes, size: int) -> None:
    """Check what the declarations of a distribution do not say; ids from `size` on are padding."""
    path, storage = "drafts.distribution", storage_of(distribution)
    r, n, has_rows = sizes["R"], sizes["N"], distribution.rows is not None
    rows = "at least one row" if has_rows else f"N = {n} rows if rows is None"
    fits = 1 <= sizes["Vd"] <= sizes["V"] and (r > 0 or n == 0 if has_rows else r == n)
    name = "logits" if isinstance(distribution, DraftLogits) else "probs"
    require(fits, f"{path}.{name}", f"have {rows}, and 1 to V = {sizes['V']} columns", storage)
    if isinstance(distribution, DraftLogits) and distribution.log_normalizer is None:
        row_max = distribution.row_max
        require(row_max is None, f"{path}.row_max", "be None if log_normalizer is", row_max)
    ids = distribution.ids
    known = None if ids is None or ids.ndim == 2 else known_values(ids)
    if known is not None:
        check_listed(f"{path}.ids", known, size)


def check_counts(drafts: Drafts, k: int) -> None:
    """Raise if every request is known to have more than K drafts: the drafts are of another K.

    Fewer are a matter of the requests' status. Counts are read only if N shows that some are above
    K, unless N is padded.

    Raises:
      ValueError: they have.
    """
    cu, n = drafts.cu_num_draft_tokens, drafts.token_ids.shape[0]
    known = known_values(cu) if n > (cu.shape[0] - 1) * k else None
    if known is not None:
        must = f"have at most num_speculative_tokens = {k} drafts per request, as config says"
        counts = np.diff(known)
        require((counts <= k).any(), "drafts", must, counts.tolist())


def check_noise(noise: Any, sizes: Sizes, draws_every_row: bool) -> None:
    """Check explicit noise for B, K and V. `draws_every_row` is that of the rule.

    Raises:
      TypeError: not a `Noise` or a `RaceNoise`, or not float32.
      ValueError: a shape does not fit.
    """
    v = sizes["V"]
    sizes["T+L"] = num_tiles(v) + min(v, TILE)
    check_tree("noise", noise, (RaceNoise,) if draws_every_row else (Noise, RaceNoise), sizes)
    if isinstance(noise, RaceNoise):
        shape = "[B, K+1, T+L]" if draws_every_row else "[B, V]"
        check_array("noise.exponential", noise.exponential, f"{shape} float32", sizes)


def check_keys(keys: Any, batch: int) -> None:
    """Check keys.

    Raises:
      TypeError: not typed keys of two or four words.
      ValueError: not ``[B]``.
    """
    noise_lib.check_keys("keys", keys)
    check_array("keys", keys, "[B]", {"B": batch}, "jax.random.split gives one per request")


def check_positions(positions: Any, batch: int) -> None:
    """Check positions.

    Raises:
      TypeError: not int32.
      ValueError: not ``[B]``.
    """
    check_array("positions", positions, "[B] int32", {"B": batch})
