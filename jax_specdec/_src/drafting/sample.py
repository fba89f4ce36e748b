"""Drawing a draft token, from exactly the distribution that is stored for the check."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jax_specdec._src.config import SpecDecodeConfig
from jax_specdec._src.noise import Stream, uniforms
from jax_specdec._src.sampling import inverse_temperature
from jax_specdec._src.types import SamplingParams
from jax_specdec._src.verify.resample import Source, resample
from jax_specdec._src.verify.rows import DraftScale, TargetRows


def sample_draft_tokens(
    logits: jax.Array,
    *,
    sampling: SamplingParams,
    keys: jax.Array,
    positions: jax.Array,
    offset: jax.Array | int,
    config: SpecDecodeConfig | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """One draft token per request from ``q = softmax(float32(logits) / temperature)``.

    Store `logits` as they are and the check computes the same q. Drawn by two-level inverse CDF
    from the draft stream, which shares no bits with the check's. Temperature 0 takes the argmax.
    Where the config says ``draft_sample_method="greedy"``, every request does, nothing needs to be
    stored, and the drafts are verified one-hot.

    Args:
      logits: ``[B, Vd]``, in the dtype in which they are stored.
      sampling: per-request parameters.
      keys: ``[B]`` typed keys, the same that `rejection_sample` gets.
      positions: ``[B]`` int32, the same that `rejection_sample` gets: position of the first draft.
      offset: ``[]`` int32, place of this draft in the step, from 0 on.
      config: static settings; None for ``draft_sample_method="probabilistic"``.

    Returns:
      ``token_ids [B]`` int32, and ``log_normalizer [B]`` float32 for `DraftStore.write` or
      `DraftLogits` (not meaningful for greedy requests, whose q is never read); None where the
      config drafts greedily.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jax_specdec as sd
      >>> token_ids, log_normalizer = sd.sample_draft_tokens(
      ...     jnp.array([[0.0, 9.0, 1.0]]), sampling=sd.SamplingParams(jnp.zeros(1)),
      ...     keys=jax.random.split(jax.random.key(0), 1), positions=jnp.array([4]), offset=0)
      >>> token_ids.tolist()
      [1]
    """
    if config is not None and config.draft_sample_method == "greedy":
        return jnp.argmax(logits, axis=-1).astype(jnp.int32), None
    rows = TargetRows(logits, logits.shape[1], chunk=None)
    inv_temperature, greedy = inverse_temperature(sampling.temperature), sampling.temperature == 0

    def one_request(
        row: jax.Array, inv: jax.Array, greedy: jax.Array, key: jax.Array, position: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        stats = rows.stats(row, inv, greedy)

        def draw() -> tuple[jax.Array, jax.Array]:
            one, no = jnp.float32(1), jnp.bool_(False)
            source = Source(row, row, row, stats, DraftScale.unit(), one, no, no, inv)
            return resample(source, rows, None, uniforms(key, position, Stream.DRAFT, offset, 2))

        token_id = lax.cond(greedy, lambda: rows.best(row, stats), lambda: draw()[0])
        return token_id, stats.peak * inv + stats.scale(inv).log_scale

    index = jnp.arange(logits.shape[0], dtype=jnp.int32)
    return jax.vmap(one_request)(index, inv_temperature, greedy, keys, positions)
