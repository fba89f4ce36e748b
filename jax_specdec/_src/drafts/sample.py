"""Sampling drafts from exactly the distribution that is stored for verification."""

from __future__ import annotations

import functools
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike

from jax_specdec._src.base.arrays import (
    LOGITS,
    Sizes,
    as_int32,
    as_positions,
    check_array,
    check_choice,
    check_positions,
    check_tree,
    check_type,
)
from jax_specdec._src.base.config import SpecDecodeConfig
from jax_specdec._src.base.noise import Stream, check_keys, uniforms
from jax_specdec._src.base.platform import Platform, traced_for_platform
from jax_specdec._src.base.sampling import Filter, SamplingParams, per_request
from jax_specdec._src.base.types import Array, Integers
from jax_specdec._src.mosaic import gpus
from jax_specdec._src.rows.part import part_of
from jax_specdec._src.verify.backends.xla import Xla
from jax_specdec._src.verify.mosaic_gpu import support
from jax_specdec._src.verify.requests import DrawnRaces, Races, Uniforms
from jax_specdec._src.verify.sharding import (
    VerifySharding,
    check_devices,
    over_mesh,
    place_of,
    without_vma,
)

DraftImplementation = Literal["xla", "mosaic_gpu"]


class DraftSample(NamedTuple):
    """One draft per request, and what to store with the logits it was drawn from.

    Attributes:
      token_ids: ``[B]`` int32.
      log_normalizer: ``[B]`` float32, for `DraftLogits`, relative to `row_max`; meaningless for
        greedy requests, whose q is never read. None if the config drafts greedily: then nothing is
        stored. NaN for a row that holds NaN; `row_max` for one whose maximum is infinite.
      row_max: ``[B]`` float32, for `DraftLogits`: the maximum of the row, inf if it holds NaN. None
        if `log_normalizer` is.
      threshold: ``[B]`` float32, for `DraftLogits`; None if `sampling` has no min-p, top-k or
        top-p.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jax_specdec as sd
      >>> logits = jnp.zeros((2, 8))
      >>> drawn = sd.sample_draft_tokens(
      ...     logits, sampling=sd.SamplingParams(jnp.ones(2)),
      ...     keys=jax.random.split(jax.random.key(0), 2), positions=jnp.array([7, 3]), offset=0)
      >>> jnp.exp(drawn.log_normalizer).tolist()  # q(x) = exp(logit of x - row_max) / this
      [8.0, 8.0]
      >>> drafts = sd.Drafts.from_dense(drawn.token_ids[:, None], distribution=sd.DraftLogits(
      ...     logits, log_normalizer=drawn.log_normalizer, row_max=drawn.row_max))
    """

    token_ids: jax.Array
    log_normalizer: jax.Array | None = None
    row_max: jax.Array | None = None
    threshold: jax.Array | None = None


class DraftRows(NamedTuple):
    """A row of each request, and the draft that it is for; see `sample_draft_tokens`.

    Attributes:
      logits: ``[B, Vd]``.
      sampling: of each request.
      positions: ``[B]`` int32.
      offset: ``[]`` or ``[B]`` int32.
      ids: ``[Vd]`` or ``[B, Vd]`` int32; None if column ``j`` is id ``j``.
    """

    logits: jax.Array
    sampling: SamplingParams
    positions: Array
    offset: jax.Array | int
    ids: jax.Array | None = None


def sample_draft_tokens(
    logits: Array,
    *,
    sampling: SamplingParams,
    keys: jax.Array,
    positions: Integers,
    offset: ArrayLike,
    config: SpecDecodeConfig | None = None,
    sharding: VerifySharding | None = None,
    ids: jax.Array | None = None,
    implementation: DraftImplementation | None = None,
) -> DraftSample:
    """Samples one draft per request from ``q = softmax(float32(logits) / temperature)``, filtered.

    The filter is the min-p, top-k and top-p of `sampling`. Give the target's: more drafts are then
    accepted. Store `logits` as they are, with the threshold, so that verification computes the same
    q. The token is drawn by two-level inverse CDF. Its uniforms share no bits with those of
    verification, except under the agreement rule: then they are those that the target's own token
    at this position is drawn with, which makes the two equal more often. Never verify such a draft
    by another rule. A request with temperature 0 takes the argmax. With
    ``draft_sample_method="greedy"`` every request does, nothing needs to be stored, and the drafts
    are verified one-hot. All derivatives are zero.

    Args:
      logits: ``[B, Vd]``, in the dtype that they are stored in.
      keys: ``[B]`` typed keys of two or four words, those that `rejection_sample` gets.
      positions: ``[B]`` int32, position of the step's first draft, as `rejection_sample` gets it.
      offset: ``[]`` or ``[B]`` int32, index of this draft in the step, from 0 on.
      config: static settings; None for ``draft_sample_method="probabilistic"``.
      sharding: how `logits` are split, as for `rejection_sample`. They stay where they are.
      ids: the target ids that the columns of `logits` stand for: ``[Vd]`` int32 for all requests,
        ``[B, C]`` int32 for logits ``[B, C]`` of each request's candidates, or None if column ``j``
        is id ``j``. See `DraftProbs`.
      implementation: "mosaic_gpu", the kernel that verifies, in one launch (the default on Hopper
        GPUs), "xla", or None for the first that supports the call. A named one never falls back to
        another. Greedy drafting, the agreement rule and logits that are split over a vocabulary
        axis are served by "xla" only, and so by default are logits that are known to be split when
        no `sharding` is given.

    Returns:
      `DraftSample`: target ids, and what `DraftStore.write` or `DraftLogits` need besides `logits`.

    Raises:
      TypeError: an argument of another type or dtype; `keys` are not typed keys of two or four
        words, or `positions` or `offset` not integers.
      ValueError: an argument of another shape.
      NotImplementedError: the named implementation cannot serve this call.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jax_specdec as sd
      >>> drawn = sd.sample_draft_tokens(
      ...     jnp.eye(2, 8), sampling=sd.SamplingParams(jnp.zeros(2)),
      ...     keys=jax.random.split(jax.random.key(0), 2), positions=jnp.array([7, 3]), offset=0)
      >>> drawn.token_ids.tolist()
      [0, 1]
    """
    check_choice("implementation", implementation, (*get_args(DraftImplementation), None))
    why_not = gpus.no_device() if implementation == "mosaic_gpu" else None
    if why_not:
        raise NotImplementedError(why_not)
    check_type("config", config, SpecDecodeConfig, None)
    check_type("sharding", sharding, VerifySharding, None)
    sizes: Sizes = {}
    check_array("logits", logits, f"[B, Vd] {LOGITS}", sizes)
    logits = jnp.asarray(logits)
    check_keys("keys", keys, sizes)
    check_devices(sharding or VerifySharding(), logits)
    sampling, positions = of_requests(sampling, positions, sizes)
    offset = as_int32("offset", offset, "[] or [B]", sizes)
    if ids is not None:
        check_array("ids", ids, "[Vd] or [B, Vd] int32", sizes)
        ids = jnp.asarray(ids)
    rows = DraftRows(logits, sampling, positions, offset, ids)
    config = config or SpecDecodeConfig(num_speculative_tokens=1)  # the number is not read
    return sample(rows, keys, config, sharding, implementation)


def of_requests(
    sampling: SamplingParams, positions: Integers, sizes: Sizes
) -> tuple[SamplingParams, Array]:
    """Returns parameters and positions of B requests as arrays ``[B]``, which are checked."""
    sampling = per_request(sampling, sizes["B"])
    check_tree("sampling", sampling, (SamplingParams,), sizes)
    positions = as_positions(positions)
    check_positions(positions, sizes)
    return sampling, positions


def sample(
    rows: DraftRows,
    keys: jax.Array,
    config: SpecDecodeConfig,
    sharding: VerifySharding | None,
    implementation: DraftImplementation | None = None,
) -> DraftSample:
    """Returns what `sample_draft_tokens` does, of arrays that need no checks."""
    logits, sampling, positions, offset, ids = rows
    takes_argmax = config.draft_sample_method == "greedy"
    shares_noise = config.rejection_sample_method == "agreement"
    # No requests: the shapes that a batch would have, without a program.
    if logits.shape[0] == 0:
        nothing = jnp.zeros((0,), jnp.float32)
        threshold = nothing if Filter.of(sampling) else None
        token_ids = jnp.zeros((0,), jnp.int32)
        if takes_argmax:
            return DraftSample(token_ids)
        return DraftSample(token_ids, nothing, nothing, threshold)
    # By default the kernel, where it serves the call and gains from it.
    # It would gather logits that are split where XLA computes on the parts.
    is_whole = sharding is not None or place_of(logits)[1:] == (None, None)
    by_default = not implementation and is_whole and not gpus.not_by_default()
    is_named = implementation == "mosaic_gpu"
    static = takes_argmax, shares_noise, sharding or VerifySharding(), is_named, by_default
    drawn = _sample(logits, sampling, keys, positions, offset, *static)
    if ids is None:
        return drawn
    # [B]: the target ids of the drawn columns, from ids [Vd] of all rows or [B, C] of each
    columns = drawn.token_ids
    if ids.ndim == 1:
        return drawn._replace(token_ids=ids[columns])
    own = jnp.take_along_axis(ids, columns[:, None], 1)[:, 0]
    return drawn._replace(token_ids=own)


_Arrays = tuple[jax.Array, SamplingParams, Uniforms | Races | DrawnRaces]
"""Logits, sampling parameters, and the noise as `Gather.sample` takes it."""


def sample_by_races(
    logits: jax.Array, sampling: SamplingParams, exponential: jax.Array
) -> DraftSample:
    """Samples as `sample_draft_tokens` does under the agreement rule, with noise that is given.

    Args:
      logits: ``[B, V]``.
      sampling: parameters of each row.
      exponential: ``[B, T+L]`` float32, from `token_exponentials`.
    """
    arrays = logits, sampling, Races(exponential[:, None])  # of one position each

    def on_whole(arrays: _Arrays) -> DraftSample:
        """Returns drafts of whole rows: not by the kernel, which draws by inverse CDF."""
        return traced_for_platform(_sample_part, arrays, False, None, False, False)

    return without_vma(on_whole, arrays, None)


@functools.partial(
    jax.jit,
    static_argnames=("takes_argmax", "shares_noise", "sharding", "is_named", "by_default"),
)
def _sample(
    logits: jax.Array,
    sampling: SamplingParams,
    keys: jax.Array,
    positions: jax.Array,
    offset: jax.Array,
    takes_argmax: bool,
    shares_noise: bool,
    sharding: VerifySharding,
    is_named: bool,
    by_default: bool,
) -> DraftSample:
    """Samples, after the checks: finds the noise, and splits the rows over a mesh if there is one.

    One program for every offset: a drafter calls it K times a step.
    """
    # All derivatives are zero: a drawn token has none.
    logits, sampling = jax.tree.map(lax.stop_gradient, (logits, sampling))
    # Under agreement, the noise of the position that the target draws this very token at; else
    # [B, 2] uniforms of a stream that verification does not read.
    noise: Uniforms | DrawnRaces = DrawnRaces(keys, positions + offset)
    if not shares_noise:
        noise = Uniforms(uniforms(keys, positions, Stream.DRAFT, offset))
    arrays = logits, sampling, noise
    axis = sharding.vocab_axis

    def on_part(arrays: _Arrays) -> DraftSample:
        """Returns drafts of rows, or of this device's part of them."""
        # The kernel alone, without a program of another platform, if it is named
        only = "cuda" if is_named else None
        static = takes_argmax, axis, is_named, by_default
        return traced_for_platform(_sample_part, arrays, *static, only=only)

    if sharding.mesh is None:
        return without_vma(on_part, arrays, axis)
    # Logits are split over both axes, all else over requests.
    own = P(sharding.batch_axis)
    specs = P(sharding.batch_axis, axis), own, own
    return over_mesh(on_part, sharding.mesh, specs, own, arrays)


def _sample_part(
    arrays: _Arrays,
    takes_argmax: bool,
    axis: str | None,
    is_named: bool,
    by_default: bool,
    platform: Platform,
) -> DraftSample:
    """Samples from rows, or from this device's part of them.

    By the kernel alone if it is named, and by default if it serves the call.
    """
    logits, sampling, noise = arrays
    # Races are of the agreement rule, which the kernel does not draw by.
    if is_named or (by_default and platform == "cuda"):
        why_not = _unserved(logits, takes_argmax, not isinstance(noise, Uniforms), axis)
        if not why_not:
            # Imported only where a call uses it: see the package's docstring.
            from jax_specdec._src.verify.mosaic_gpu import launch

            assert isinstance(noise, Uniforms)
            return DraftSample(*launch.sample(logits, sampling, noise.recover))
        if is_named:
            raise NotImplementedError(why_not)
    # By XLA; of a part of the vocabulary, devices exchange maxima, masses and tokens.
    part = part_of(axis, logits.shape[1])
    backend = Xla().on(platform)
    if takes_argmax:
        return DraftSample(backend.argmax(logits, part))
    return DraftSample(*backend.sample(logits, sampling, noise, part))


def _unserved(
    logits: jax.Array, takes_argmax: bool, shares_noise: bool, axis: str | None
) -> str | None:
    """Returns why the kernel cannot serve a call, as a sentence; None if it can."""
    if takes_argmax:
        return (
            "implementation='mosaic_gpu' samples, but draft_sample_method='greedy' takes the "
            "argmax: give 'xla' or None"
        )
    if shares_noise:
        return (
            "implementation='mosaic_gpu' draws by inverse CDF, but "
            "rejection_sample_method='agreement' draws by races: give 'xla' or None"
        )
    if axis:
        return (
            "implementation='mosaic_gpu' samples from whole rows, but the vocabulary is split: "
            "give 'xla' or None"
        )
    batch, size = logits.shape
    return support.unsupported(logits, None, is_race=False, num_requests=batch, k=0, size=size)
