"""The tokens that one verification emitted: how many of them a request keeps."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_specdec._src.arrays import Sizes, as_int32


def truncate(
    token_ids: jax.Array,
    num_emitted: jax.Array,
    *,
    stop_token_ids: ArrayLike | None = None,
    max_tokens: ArrayLike | None = None,
) -> tuple[jax.Array, jax.Array]:
    """How many of a step's tokens each request keeps: up to a stop token, and within its budget.

    A stop token is kept and ends the request. Pure, for use inside jit or outside, on the
    `RejectionSampleOutput` of a step. A request has ended if it is stopped, if its budget is
    spent, or if its status is not OK. Its caches need no change: the next step starts at the
    length that is kept.

    Args:
      token_ids: ``[B, K+1]`` integers, the emitted tokens of each request.
      num_emitted: ``[B]`` integers, how many of them are tokens; the rest is padding.
      stop_token_ids: ``[M]`` integers for all requests, or ``[B, M]``, padded with -1; None for no
        stop tokens.
      max_tokens: ``[]`` integer or ``[B]``, how many more tokens a request may get; None for any
        number.

    Returns:
      ``num_kept`` ``[B]`` int32, at most `num_emitted`, and ``is_stopped`` ``[B]`` bool, whether
      the last token kept is a stop token.

    Raises:
      TypeError: an argument does not hold integers.
      ValueError: shapes that do not fit.

    Example:
      >>> import jax.numpy as jnp
      >>> import jax_specdec as sd
      >>> num_kept, is_stopped = sd.truncate(
      ...     jnp.array([[5, 6, 7], [5, 9, 7], [8, -1, -1]]), jnp.array([3, 3, 1]),
      ...     stop_token_ids=[9], max_tokens=jnp.array([2, 8, 8]))
      >>> num_kept.tolist(), is_stopped.tolist()
      ([2, 2, 1], [False, True, False])
    """
    sizes: Sizes = {}
    token_ids = as_int32("token_ids", token_ids, "[B, K+1]", sizes)
    b, width = token_ids.shape
    num_kept = as_int32("num_emitted", num_emitted, "[B]", sizes)
    if max_tokens is not None:
        left = as_int32("max_tokens", max_tokens, "[] or [B]", sizes)
        num_kept = jnp.minimum(num_kept, jnp.maximum(left, 0))
    if stop_token_ids is None:
        return num_kept, jnp.zeros((b,), bool)
    stops = as_int32("stop_token_ids", stop_token_ids, "[M] or [B, M]", sizes)
    stops = jnp.broadcast_to(stops, (b, stops.shape[-1]))
    offset = jnp.arange(width, dtype=jnp.int32)[None, :]
    is_stop = jnp.any(token_ids[:, :, None] == stops[:, None, :], axis=2)
    stop_at = jnp.min(jnp.where(is_stop, offset, width), axis=1)
    is_stopped = stop_at < num_kept
    return jnp.where(is_stopped, stop_at + 1, num_kept), is_stopped
