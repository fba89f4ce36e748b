"""Drawing a draft token, from exactly the distribution that is stored for the check."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_specdec._src.config import SpecDecodeConfig
from jax_specdec._src.noise import Stream, check_keys, uniforms
from jax_specdec._src.sampling import Filter, inverse_temperature, per_request
from jax_specdec._src.types import Drafts, Noise, SamplingParams, as_positions
from jax_specdec._src.verify import batched
from jax_specdec._src.verify.api import rejection_sample_with_noise
from jax_specdec._src.verify.sharding import VerifySharding


class DraftSample(NamedTuple):
    """One draft token per request, and what else to keep of the distribution it was drawn from.

    Attributes:
      token_ids: ``[B]`` int32.
      log_normalizer: ``[B]`` float32, as in `DraftLogits`; not meaningful for greedy requests,
        whose q is never read. None where the config drafts greedily: nothing is to be kept.
      threshold: ``[B]`` float32, as in `DraftLogits`; None where nothing can have been left out.

    Example:
      >>> import jax.numpy as jnp
      >>> DraftSample(jnp.array([7])).threshold is None
      True
    """

    token_ids: jax.Array
    log_normalizer: jax.Array | None = None
    threshold: jax.Array | None = None


def sample_draft_tokens(
    logits: jax.Array,
    *,
    sampling: SamplingParams,
    keys: jax.Array,
    positions: jax.Array,
    offset: jax.Array | int,
    config: SpecDecodeConfig | None = None,
    sharding: VerifySharding | None = None,
) -> DraftSample:
    """One draft token per request from ``q = softmax(float32(logits) / temperature)``, filtered.

    Under the min-p, top-k and top-p of the target's tokens more drafts are accepted. Store `logits`
    as they are, with the threshold, and the check computes the same q. Drawn by two-level inverse
    CDF from the draft stream, which shares no bits with the check's. Temperature 0 takes the
    argmax. Where the config says ``draft_sample_method="greedy"``, every request does, nothing
    needs to be stored, and the drafts are verified one-hot.

    Args:
      logits: ``[B, Vd]``, in the dtype in which they are stored.
      sampling: per-request parameters.
      keys: ``[B]`` typed keys of two or four words, the same that `rejection_sample` gets.
      positions: ``[B]`` int32, the same that `rejection_sample` gets: position of the first draft.
      offset: ``[]`` int32, place of this draft in the step, from 0 on.
      config: static settings; None for ``draft_sample_method="probabilistic"``.
      sharding: how `logits` are split, as in `rejection_sample`. They stay where they are, unless
        `sampling` has a min-p, top-k or top-p: then XLA gathers them; inside a `jax.shard_map`,
        where it cannot, nothing is left out.

    Returns:
      `DraftSample`: the tokens, and what `DraftStore.write` or `DraftLogits` take.

    Raises:
      TypeError: `keys` are not typed keys of two or four words, or `positions` not integers.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jax_specdec as sd
      >>> drawn = sd.sample_draft_tokens(
      ...     jnp.eye(2, 8), sampling=sd.SamplingParams(jnp.zeros(2)),
      ...     keys=jax.random.split(jax.random.key(0), 2), positions=jnp.array([7, 3]), offset=0)
      >>> drawn.token_ids.tolist()
      [0, 1]
    """
    check_keys("keys", keys)
    sampling, positions = per_request(sampling, logits.shape[0]), as_positions(positions)
    takes_best = config is not None and config.draft_sample_method == "greedy"
    if sharding is not None and (sharding.mesh is None or Filter.of(sampling) is None):
        temperature = jnp.zeros_like(sampling.temperature) if takes_best else sampling.temperature
        drawn = _sample_split(logits, temperature, keys, positions, offset, sharding)
        return DraftSample(drawn.token_ids) if takes_best else drawn
    if takes_best:
        return DraftSample(jnp.argmax(logits, axis=-1).astype(jnp.int32))
    return _sample_whole(logits, sampling, keys, positions, jnp.asarray(offset, jnp.int32))


@jax.jit
def _sample_whole(
    logits: jax.Array,
    sampling: SamplingParams,
    keys: jax.Array,
    positions: jax.Array,
    offset: jax.Array,
) -> DraftSample:
    drawn = batched.sample(
        logits,
        inverse_temperature(sampling.temperature),
        sampling.temperature == 0,
        Filter.of(sampling),
        _draw(keys, positions, offset),
    )
    return DraftSample(*drawn)


def _draw(keys: jax.Array, positions: jax.Array, offset: jax.Array) -> jax.Array:
    """``[B, 2]`` uniforms of the draft stream."""
    return jax.vmap(lambda key, position: uniforms(key, position, Stream.DRAFT, offset))(
        keys, positions
    )


def _sample_split(
    logits: jax.Array,
    temperature: jax.Array,
    keys: jax.Array,
    positions: jax.Array,
    offset: jax.Array | int,
    sharding: VerifySharding,
) -> DraftSample:
    """The same from split logits, unfiltered: what a verification without drafts emits."""
    size = logits.shape[0]
    output = rejection_sample_with_noise(
        logits,
        Drafts(jnp.zeros((0,), jnp.int32), jnp.zeros((size + 1,), jnp.int32)),
        Noise(
            jnp.zeros((size, 1), jnp.float32),
            _draw(keys, positions, jnp.asarray(offset, jnp.int32)),
        ),
        sampling=SamplingParams(temperature),
        config=SpecDecodeConfig(num_speculative_tokens=1),
        sharding=sharding,
    )
    inv = inverse_temperature(temperature)
    peak = jnp.max(logits, axis=1).astype(jnp.float32)
    axis = sharding.vocab_axis if sharding.mesh is None else None  # else arrays are whole
    peak = peak if axis is None else lax.pmax(peak, axis)
    terms = jnp.exp((logits.astype(jnp.float32) - peak[:, None]) * inv[:, None])
    total = jnp.sum(terms, axis=1)
    total = total if axis is None else lax.psum(total, axis)
    return DraftSample(output.token_ids[:, 0], peak * inv + jnp.log(total))
