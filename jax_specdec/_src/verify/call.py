"""The arguments of a call, checked at trace time against what their classes declare."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from jax_specdec._src.base.arrays import (
    LOGITS,
    Sizes,
    as_positions,
    check_array,
    check_int,
    check_listed,
    check_positions,
    check_tree,
    check_type,
    known_values,
    refuse,
    require,
)
from jax_specdec._src.base.config import SpecDecodeConfig
from jax_specdec._src.base.noise import check_keys
from jax_specdec._src.base.sampling import SamplingParams, per_request
from jax_specdec._src.base.types import DraftDistribution, DraftLogits, Drafts, Noise, RaceNoise
from jax_specdec._src.rows.rows import storage_of
from jax_specdec._src.rows.tiles import TILE, num_tiles
from jax_specdec._src.verify.mosaic_gpu.config import KernelConfig
from jax_specdec._src.verify.requests import CallArrays
from jax_specdec._src.verify.rules import rule_of
from jax_specdec._src.verify.sharding import (
    ArrayLayout,
    VerifySharding,
    resolve,
    vocabulary_parts,
)

Implementation = Literal["xla", "mosaic_gpu"]

NO_LEADING_0 = "vLLM's offsets have no leading 0: put one before them"
"""What helps where offsets do not begin with 0."""


class CallSettings(NamedTuple):
    """The static arguments of a call, as `rejection_sample` describes them, before the checks."""

    config: SpecDecodeConfig
    vocab_size: int | None = None
    padded_rows: bool = False
    implementation: Implementation | None = None
    kernel_config: KernelConfig | None = None
    sharding: VerifySharding | None = None


class Static(NamedTuple):
    """The static side of a call, after the checks.

    Attributes:
      config: of the call.
      size: ids from it on are padding.
      implementation: the one that was named.
      kernel_config: of the call.
      layout: how the arrays are split.
    """

    config: SpecDecodeConfig
    size: int
    implementation: Implementation | None
    kernel_config: KernelConfig | None
    layout: ArrayLayout

    @classmethod
    def of(cls, arrays: CallArrays, settings: CallSettings) -> Static:
        """Returns the static side of a call whose arrays need no checks, or are checked.

        Raises:
          ValueError, NotImplementedError: the arrays cannot be split as `settings` say.
        """
        logits = arrays.target_logits
        sharding = settings.sharding
        return cls(
            config=settings.config,
            size=settings.vocab_size or logits.shape[1] * vocabulary_parts(sharding),
            implementation=settings.implementation,
            kernel_config=settings.kernel_config,
            layout=resolve(sharding, logits, arrays.drafts, arrays.randomness),
        )


def checked(arrays: CallArrays, settings: CallSettings) -> tuple[CallArrays, Static]:
    """Returns the arrays of a call and its static side.

    Without noise it is not to be made: see `validate`.

    Raises:
      TypeError, ValueError, NotImplementedError: as `rejection_sample`.
    """
    config = settings.config
    is_greedy = isinstance(arrays.sampling, SamplingParams) and arrays.is_greedy
    # Shapes and dtypes first, then how arrays are split, then the noise, whose shape may need K.
    arrays, sizes = check_arrays(arrays, settings)
    _check_trees(arrays, config)
    static = Static.of(arrays, settings._replace(vocab_size=sizes["size"]))
    if is_greedy:
        given = arrays.sampling
        # No temperature says that all requests are greedy, to all that is traced.
        greedy = SamplingParams(None, given.min_p, given.top_k, given.top_p)
        arrays = dataclasses.replace(arrays, sampling=greedy)
    if arrays.randomness is not None:
        sizes["K"] = config.num_speculative_tokens
        _check_noise(arrays.randomness, sizes, config, arrays.needs_noise(config))
        _check_counts(arrays.drafts, sizes)
    return arrays, static


def check_arrays(arrays: CallArrays, settings: CallSettings) -> tuple[CallArrays, Sizes]:
    """Returns the arrays of a call, with numbers and lists converted, and what letters stand for.

    V is all of the vocabulary, ``size`` the first id that is padding.

    Raises:
      TypeError: an argument is not an array, or has another dtype.
      ValueError: a shape does not fit the others; or a shared map of ids has known values, and one
        of them is out of range or listed twice.
    """
    vocab_size = settings.vocab_size
    padded_rows = settings.padded_rows
    arrays = _converted(arrays)
    _check_leading_0(arrays)
    parts = vocabulary_parts(settings.sharding)
    check_type("config", settings.config, SpecDecodeConfig)
    check_type("padded_rows", padded_rows, bool)
    check_type("kernel_config", settings.kernel_config, KernelConfig, None)
    # Each letter of a declaration gets its size from the first array that has it.
    sizes: Sizes = {}
    check_tree("", arrays, (CallArrays,), sizes)
    logits = arrays.target_logits
    # How many target rows there must be; with padded rows any number.
    rows = "M" if padded_rows else "N+B" if arrays.bonus_token_ids is None else "N"
    hint = functools.partial(_advice, logits, rows, sizes)
    check_array("target_logits", logits, f"[{rows}, V] {LOGITS}", sizes, hint)
    sizes["M"], v = logits.shape
    # A kernel and a gather need a row, if anybody may own one.
    if v == 0 or (padded_rows and sizes["M"] == 0 and sizes["B"] > 0):
        refuse(ValueError, "target_logits", "have a row and a column", logits)
    # Of a part of the vocabulary, V is that of all parts.
    sizes["V"] = v = v * parts
    sizes["ceil(V/32)"] = -(-v // 32)
    if arrays.token_bitmask is not None:
        declared = "[M, ceil(V/32)] int32 or uint32"
        check_array("token_bitmask", arrays.token_bitmask, declared, sizes)
    sizes["size"] = v if vocab_size is None else check_int("vocab_size", vocab_size, 1, v)
    if arrays.drafts.distribution is not None:
        _check_distribution(arrays.drafts.distribution, sizes)
    return arrays, sizes


def _converted(arrays: CallArrays) -> CallArrays:
    """Returns sampling parameters and positions as arrays, if they are numbers, lists or NumPy's.

    Anything else is left as it is, for the checks that follow.

    Raises:
      TypeError: positions that are not integers.
      ValueError: an integer that int32 does not hold.
    """
    sampling = arrays.sampling
    drafts = arrays.drafts
    noise = arrays.randomness
    if isinstance(sampling, SamplingParams) and isinstance(drafts, Drafts):
        # Offsets say how many requests there are; if they are wrong, the checks will say so.
        shape: tuple[int, ...] = getattr(drafts.cu_num_draft_tokens, "shape", ())
        if len(shape) == 1 and shape[0] > 0:
            sampling = per_request(sampling, shape[0] - 1)
    if isinstance(noise, tuple) and not isinstance(noise[1], jax.Array | None):
        noise = noise[0], as_positions(noise[1])
    return dataclasses.replace(arrays, sampling=sampling, randomness=noise)


def _check_leading_0(arrays: CallArrays) -> None:
    """Refuses offsets that are one for each request, as the other arrays show.

    Raises:
      ValueError: the leading 0 is missing.
    """
    drafts = arrays.drafts
    bonus = arrays.bonus_token_ids
    if not isinstance(drafts, Drafts):
        return
    offsets = drafts.cu_num_draft_tokens
    # As many requests as there are bonus rows, or bonus tokens.
    rows = _length(arrays.target_logits) - _length(drafts.token_ids)
    num_requests = rows if bonus is None else _length(bonus)
    of_requests = jax.tree.leaves((arrays.sampling, arrays.randomness))
    if _length(offsets) == num_requests and num_requests in map(_length, of_requests):
        must = f"have [B+1] = [{num_requests + 1}] entries, the first of them 0"
        refuse(ValueError, "drafts.cu_num_draft_tokens", must, offsets, NO_LEADING_0)


def _length(array: Any) -> int:
    """Returns the size of the first axis; 0 for what has none."""
    shape: tuple[int, ...] = getattr(array, "shape", ())
    return shape[0] if shape else 0


def _advice(target_logits: Any, rows: str, sizes: Sizes) -> str | None:
    """Returns what to do, if the shape of the logits shows which mistake was made."""
    shape: tuple[int, ...] = getattr(target_logits, "shape", ())
    batch = sizes["B"]
    n = sizes["N"]
    extra = {"M": None, "N": 0, "N+B": batch}[rows]
    if len(shape) not in (2, 3) or extra is None:
        return None
    given = shape[0] if len(shape) == 2 else shape[0] * shape[1]
    wanted = n + extra
    if given == wanted and len(shape) == 2:
        return None
    # The rows are right, but in a dense shape; or there are none for a bonus; or K is another.
    if given == wanted:
        return f"pass target_logits.reshape({wanted}, {shape[-1]})"
    if given == n:
        return "each request has a bonus row after its draft rows, unless bonus_token_ids is given"
    if batch and n % batch == 0 and given % batch == 0 and given > extra:
        per_request = given // batch - extra // batch
        return f"drafts has {n // batch} ids per request, but the logits are for {per_request}"
    return None if extra else "there are no bonus rows where bonus_token_ids is given"


def _check_distribution(distribution: DraftDistribution, sizes: Sizes) -> None:
    """Checks what the declarations of a distribution do not say."""
    path = "drafts.distribution"
    storage = storage_of(distribution)
    r = sizes["R"]
    n = sizes["N"]
    has_rows = distribution.rows is not None
    rows = "at least one row" if has_rows else f"N = {n} rows if rows is None"
    # A store may have any number of rows; without row indices, row j is draft j's.
    fits = 1 <= sizes["Vd"] <= sizes["V"] and (r > 0 or n == 0 if has_rows else r == n)
    name = "logits" if isinstance(distribution, DraftLogits) else "probs"
    if not fits:
        must = f"have {rows}, and 1 to V = {sizes['V']} columns"
        refuse(ValueError, f"{path}.{name}", must, storage)
    if isinstance(distribution, DraftLogits) and distribution.log_normalizer is None:
        row_max = distribution.row_max
        require(row_max is None, f"{path}.row_max", "be None if log_normalizer is", row_max)
    ids = distribution.ids
    # A list that all rows share is checked at once, if its values are known at trace time.
    known = None if ids is None or ids.ndim == 2 else known_values(ids)
    if known is not None:
        check_listed(f"{path}.ids", known, sizes["size"])


def _check_trees(arrays: CallArrays, config: SpecDecodeConfig) -> None:
    """Checks that drafts with parents can be verified.

    Raises:
      NotImplementedError: the rule is not agreement, or the bonus tokens are given.
    """
    if arrays.drafts.parents is None:
        return
    name = "config.rejection_sample_method"
    method = config.rejection_sample_method
    must = "be 'agreement' for drafts with parents"
    hint = "the other rules judge chains of drafts alone"
    require(method == "agreement", name, must, method, hint, NotImplementedError)
    bonus = arrays.bonus_token_ids
    must = "be None for drafts with parents"
    hint = "each node of a tree has a row, from which the last token may be drawn"
    require(bonus is None, "bonus_token_ids", must, bonus, hint, NotImplementedError)


def _check_noise(noise: Any, sizes: Sizes, config: SpecDecodeConfig, needs_noise: bool) -> None:
    """Checks keys and positions, or explicit noise. Keys and positions may be None if not needed.

    Raises:
      TypeError: not typed keys, a `Noise` or a `RaceNoise`, or of another dtype.
      ValueError: a shape does not fit.
    """
    if isinstance(noise, tuple):
        keys, positions = noise
        if needs_noise or keys is not None:
            check_keys("keys", keys, sizes)
        if needs_noise or positions is not None:
            check_positions(positions, sizes)
        return
    v = sizes["V"]
    draws_every_row = rule_of(config).draws_every_row
    # Races of tiles and of the ids of one, at each position; or of all ids, once.
    sizes["T+L"] = num_tiles(v) + min(v, TILE)
    check_tree("noise", noise, (RaceNoise,) if draws_every_row else (Noise, RaceNoise), sizes)
    if isinstance(noise, RaceNoise):
        shape = "[B, K+1, T+L]" if draws_every_row else "[B, V]"
        check_array("noise.exponential", noise.exponential, f"{shape} float32", sizes)


def _check_counts(drafts: Drafts, sizes: Sizes) -> None:
    """Raises if every request is known to have more than K drafts: the drafts are of another K.

    Fewer are a matter of the requests' status. Counts are read only if N shows that some are above
    K, unless N is padded.

    Raises:
      ValueError: they have.
    """
    k = sizes["K"]
    may_exceed = sizes["N"] > sizes["B"] * k > 0
    # Read where N shows that some count is too large, and nowhere else.
    known = known_values(drafts.cu_num_draft_tokens) if may_exceed else None
    if known is not None and (np.diff(known) > k).all():
        must = f"have at most num_speculative_tokens = {k} drafts per request, as config says"
        refuse(ValueError, "drafts", must, np.diff(known).tolist())
