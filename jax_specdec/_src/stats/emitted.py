"""What a step emitted, and how much of it each request keeps."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_specdec._src.base.arrays import Sizes, as_int32, pytree
from jax_specdec._src.logits.logprobs import TokenLogprobs


@pytree(
    token_ids="[B, K+1] int32",
    num_kept="[B] int32",
    num_proposed="[B] int32",
    num_accepted="[B] int32",
    num_emitted="[B] int32",
    logprobs=(TokenLogprobs,),
)
@dataclasses.dataclass(frozen=True)
class StepRecord:
    """What one step did for each request; stacked ``[S, ...]`` over the steps of a generation.

    Drafts and emitted tokens are counted before a stop token or the budget cuts them, so that
    acceptance rates are not biased by where sequences end. Where drafts are trees, the drafts of a
    request are those of one path: K is the most that a path has, and the drafts offered are those
    of the longest path.

    Attributes:
      token_ids: ``[B, K+1]`` int32, the tokens kept, padded with -1.
      num_kept: ``[B]`` int32, tokens added to the sequence.
      num_proposed: ``[B]`` int32, drafts offered to the verification; 0 for finished requests.
      num_accepted: ``[B]`` int32, drafts that were accepted.
      num_emitted: ``[B]`` int32, tokens that were emitted; 0 for finished requests.
      logprobs: `TokenLogprobs` of the tokens kept; None unless asked for.

    Example:
      A step that accepted both drafts, the second of which ends the text:

      >>> import jax, numpy as np
      >>> import jax_specdec as sd
      >>> from jax_specdec import lm
      >>> step = lm.StepRecord(
      ...     token_ids=np.array([[5, 9, -1]]), num_kept=np.array([2]), num_proposed=np.array([2]),
      ...     num_accepted=np.array([2]), num_emitted=np.array([3]))
      >>> stats = sd.AcceptanceStats.from_steps(jax.tree.map(lambda x: x[None], step))
      >>> stats.num_tokens, stats.mean_acceptance_length
      (2, 3.0)
    """

    token_ids: jax.Array
    num_kept: jax.Array
    num_proposed: jax.Array
    num_accepted: jax.Array
    num_emitted: jax.Array
    logprobs: TokenLogprobs | None = None


def truncate(
    token_ids: jax.Array,
    num_emitted: jax.Array,
    *,
    stop_token_ids: ArrayLike | None = None,
    max_tokens: ArrayLike | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns how many of a step's tokens each request keeps: up to a stop, within its budget.

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
    # [B]: no more than the budget, which may be overdrawn
    num_kept = as_int32("num_emitted", num_emitted, "[B]", sizes)
    if max_tokens is not None:
        left = as_int32("max_tokens", max_tokens, "[] or [B]", sizes)
        num_kept = jnp.minimum(num_kept, jnp.maximum(left, 0))
    if stop_token_ids is None:
        return num_kept, jnp.zeros((b,), bool)
    stops = as_int32("stop_token_ids", stop_token_ids, "[M] or [B, M]", sizes)
    # [M] -> [B, M]
    stops = jnp.broadcast_to(stops, (b, stops.shape[-1]))
    # [B, K+1, M] -> [B, K+1]: whether each token is one of them
    offset = jnp.arange(width, dtype=jnp.int32)[None, :]
    is_stop = jnp.any(token_ids[:, :, None] == stops[:, None, :], axis=2)
    # [B]: the first of those; K + 1 if there is none. Padding equals the padding of `stops`, but
    # comes after what is kept.
    stop_at = jnp.min(jnp.where(is_stop, offset, width), axis=1)
    # [B]: a stop token past the budget, or past what was emitted, stops nothing
    is_stopped = stop_at < num_kept
    return jnp.where(is_stopped, stop_at + 1, num_kept), is_stopped
