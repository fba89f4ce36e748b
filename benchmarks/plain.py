"""Rejection sampling written the plain way: what a first version looks like, and what we beat.

Softmax of all N+B rows, Exp(1) noise of all N+B rows, the argmax of every row of both.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp


@functools.partial(jax.jit, static_argnames=("k",))
def rejection_sample(
    target_logits: jax.Array,
    draft_token_ids: jax.Array,
    draft_probs: jax.Array | None,
    temperature: jax.Array,
    key: jax.Array,
    *,
    k: int,
) -> tuple[jax.Array, jax.Array]:
    """Verify K drafts for each of B requests.

    Args:
      target_logits: ``[B*(K+1), V]``.
      draft_token_ids: ``[B*K]``.
      draft_probs: ``[B*K, V]``, or None for one-hot drafts.
      temperature: ``[B]``, 0 is greedy.
      key: one key.
      k: K.

    Returns:
      ``token_ids [B, K+1]`` and ``num_emitted [B]``.
    """
    batch, v = temperature.shape[0], target_logits.shape[1]
    greedy = (temperature == 0)[:, None]
    logits = target_logits.astype(jnp.float32).reshape(batch, k + 1, v)
    logits = logits / jnp.where(greedy, 1, temperature[:, None])[:, :, None]
    p = jax.nn.softmax(logits, axis=-1)
    ids = draft_token_ids.reshape(batch, k)
    if draft_probs is None:
        q = jax.nn.one_hot(ids, v)
    else:
        q = draft_probs.reshape(batch, k, v)

    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    accept_key, race_key = jax.random.split(key)
    u = jax.random.uniform(accept_key, (batch, k))
    p_x = jnp.take_along_axis(p[:, :k], ids[:, :, None], axis=2)[:, :, 0]
    q_x = jnp.take_along_axis(q, ids[:, :, None], axis=2)[:, :, 0]
    accepted = jnp.where(greedy, ids == best[:, :k], u * q_x < p_x)
    count = jnp.cumprod(accepted.astype(jnp.int32), axis=1).sum(axis=1)

    residual = jnp.concatenate([jnp.maximum(p[:, :k] - q, 0), p[:, k:]], axis=1)
    noise = jax.random.exponential(race_key, residual.shape)
    recovered = jnp.argmax(residual / noise, axis=-1).astype(jnp.int32)
    last = jnp.where(greedy, best, recovered)
    position = jnp.arange(k + 1)[None, :]
    drafts = jnp.pad(ids, ((0, 0), (0, 1)))
    token_ids = jnp.where(position == count[:, None], last, -1)
    return jnp.where(position < count[:, None], drafts, token_ids), count + 1


@functools.partial(jax.jit, static_argnames=("k",))
def greedy_sample(
    target_logits: jax.Array, draft_token_ids: jax.Array, *, k: int
) -> tuple[jax.Array, jax.Array]:
    """The same for a batch known to be greedy: the argmax of every row and nothing else.

    Args:
      target_logits: ``[B*(K+1), V]``.
      draft_token_ids: ``[B*K]``.
      k: K.

    Returns:
      ``token_ids [B, K+1]`` and ``num_emitted [B]``.
    """
    best = jnp.argmax(target_logits, axis=-1).astype(jnp.int32).reshape(-1, k + 1)
    accepted = draft_token_ids.reshape(-1, k) == best[:, :k]
    count = jnp.cumprod(accepted.astype(jnp.int32), axis=1).sum(axis=1)
    position = jnp.arange(k + 1)[None, :]
    return jnp.where(position <= count[:, None], best, -1), count + 1
