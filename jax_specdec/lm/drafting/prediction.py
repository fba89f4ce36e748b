"""Lookup in what requests expect their texts to be, such as a file before an edit."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_specdec._src.base.types import PLACEHOLDER_TOKEN_ID
from jax_specdec.lm.drafting.drafter import DraftContext

_NO_TOKEN = -2
"""Stands before the first token of a text: nothing in a prediction equals it."""


class Predicted(NamedTuple):
    """What the predictions of B requests say of the next tokens.

    Attributes:
      token_ids: ``[B, K]`` int32, -1 from the first position without a token on.
      num_matching: ``[B]`` int32, how many tokens before these equal the last ones of the text; 0
        where nothing matches.
    """

    token_ids: jax.Array
    num_matching: jax.Array

    def is_as_long(self, num_matching: jax.Array) -> jax.Array:
        """Returns ``[B]`` bool, whether nothing else matches longer than the prediction."""
        return (self.num_matching > 0) & (self.num_matching >= num_matching)


def look_up_predictions(context: DraftContext, most_matching: int) -> Predicted | None:
    """Returns what follows the longest match of the last tokens in each request's prediction.

    A prediction stands behind the prompt, whose last tokens its first ones follow. Lines repeat in
    a file, and an edit shifts what comes after it by little: of equally long matches, that is taken
    which is nearest to how far the text has come. So one token is enough for a match.

    Args:
      most_matching: D, at which a longer match counts no more.

    Returns:
      The tokens; None if the context has no predictions.
    """
    if context.predictions is None or context.prompt_lengths is None:
        return None
    k = context.config.num_speculative_tokens
    look_up = functools.partial(_look_up, most=most_matching, k=k)
    arrays = context.token_ids, context.lengths, context.predictions, context.prompt_lengths
    return Predicted(*jax.vmap(look_up)(*arrays))


def _look_up(
    text: jax.Array,
    length: jax.Array,
    prediction: jax.Array,
    start: jax.Array,
    *,
    most: int,
    k: int,
) -> tuple[jax.Array, jax.Array]:
    """Returns both fields of `Predicted` for one text ``[L]``, its prediction ``[A]``, and K.

    The prediction begins at position `start` of the text.
    """
    size = prediction.shape[0]
    back = jnp.arange(1, most + 1, dtype=jnp.int32)
    # [D]: the last tokens of the text, the newest first
    last = jnp.where(back <= length, text[jnp.maximum(length - back, 0)], _NO_TOKEN)
    # [D + A]: the last tokens of the prompt, in order, and the prediction
    before = jnp.where(back <= start, text[jnp.maximum(start - back, 0)], PLACEHOLDER_TOKEN_ID)
    expected = jnp.concatenate([before[::-1], prediction])
    # [A]: whether all tokens so far before each place are equal, and how many are. A place
    # past the end of the prediction has no token to draft.
    run = prediction >= 0
    matches = jnp.zeros((size,), jnp.int32)
    for i in range(most):
        # [A]: the token i + 1 places before each place of the prediction
        begin = most - 1 - i
        run &= expected[begin : begin + size] == last[i]
        matches += run.astype(jnp.int32)
    # [A]: one number that orders by the match, then by the distance from as many tokens as the
    # text has got since its prompt. If nothing matches, the best is not used.
    distance = jnp.abs(jnp.arange(size, dtype=jnp.int32) - (length - start))
    best = jnp.argmax(matches * size - jnp.minimum(distance, size - 1))
    # [K]: what follows there
    offset = jnp.arange(k, dtype=jnp.int32)
    following = prediction.at[best + offset].get(mode="fill", fill_value=PLACEHOLDER_TOKEN_ID)
    return jnp.where(matches[best] > 0, following, PLACEHOLDER_TOKEN_ID), matches[best]
