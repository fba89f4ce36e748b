"""Prompt lookup: propose the tokens that followed the latest occurrence of the last ones."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jax_specdec._src.base.arrays import check_int
from jax_specdec._src.base.types import PLACEHOLDER_TOKEN_ID
from jax_specdec._src.drafts.store import DraftStore
from jax_specdec.lm.drafting.drafter import DraftContext, Drafter, DrafterServes, Proposal
from jax_specdec.lm.drafting.prediction import look_up_predictions
from jax_specdec.lm.models.protocol import Cache, Params


@dataclasses.dataclass(frozen=True)
class NGramDrafter(Drafter):
    """Drafts by n-gram lookup in the sequence itself; needs no weights.

    The drafter looks for the longest n in ``[min_ngram, max_ngram]`` such that the last n tokens
    occurred before, takes the latest occurrence, and proposes the K tokens that followed it. If
    fewer than K followed, the copy goes on with the tokens just proposed, so that a text which
    repeats goes on repeating.

    What a request expects its text to be (`RequestOptions.prediction`) is searched too, and taken
    where as many tokens match there, at least one.

    If nothing matches, nothing is proposed. On a CPU, `generate` of one request then runs the
    target over a single token. A pass over K + 1 tokens takes up to twice as long there, which
    short matches seldom make up for: hence the defaults. On GPUs, where a wide pass costs no more
    than a narrow one, shorter matches are worth trying.

    Attributes:
      min_ngram: the shortest match.
      max_ngram: the longest match.

    Raises:
      TypeError: not integers.
      ValueError: not ``1 <= min_ngram <= max_ngram``.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jax_specdec as sd
      >>> from jax_specdec import lm
      >>> context = lm.DraftContext(
      ...     token_ids=jnp.array([[1, 2, 3, 4, 1, 2, 3, 0]]), lengths=jnp.array([7]),
      ...     sampling=sd.SamplingParams(jnp.zeros(1)), keys=jax.random.split(jax.random.key(0), 1),
      ...     config=sd.SpecDecodeConfig(num_speculative_tokens=6))
      >>> proposal, _ = jax.jit(lm.NGramDrafter().propose)(None, context, (), None)
      >>> proposal.token_ids.tolist()
      [[4, 1, 2, 3, 4, 1]]

    References:
      Saxena, "Prompt Lookup Decoding", 2023.
    """

    min_ngram: int = 3
    max_ngram: int = 8

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            # Any integer passes here; that both are in order is checked below, in one message.
            value = getattr(self, field.name)
            object.__setattr__(self, field.name, check_int(field.name, value, -(2**31)))
        if not 1 <= self.min_ngram <= self.max_ngram:
            raise ValueError(
                "min_ngram and max_ngram must satisfy 1 <= min_ngram <= max_ngram, but they are "
                f"{self.min_ngram} and {self.max_ngram}"
            )

    @property
    def serves(self) -> DrafterServes:
        """Declares that often nothing matches, and that predictions are looked in."""
        return DrafterServes(may_abstain=True, predictions=True)

    def propose(
        self, params: Params, context: DraftContext, cache: Cache, store: DraftStore | None
    ) -> tuple[Proposal, Cache]:
        """Looks up; see `Drafter.propose`. All -1 where nothing matches."""
        del params, store
        lookup = functools.partial(self._lookup, k=context.config.num_speculative_tokens)
        # [B, L] -> [B, K] drafts, and [B] lengths of the matches
        token_ids, num_matching = jax.vmap(lookup)(context.token_ids, context.lengths)
        predicted = look_up_predictions(context, self.max_ngram)
        if predicted is not None:
            is_predicted = predicted.is_as_long(num_matching)[:, None]
            token_ids = jnp.where(is_predicted, predicted.token_ids, token_ids)
        return Proposal(token_ids), cache

    def _lookup(self, tokens: jax.Array, length: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
        """Returns the K drafts of one sequence ``[L]``, and how many tokens match before them."""
        place = jnp.arange(tokens.shape[0], dtype=jnp.int32)
        # [L]: how many tokens before each place equal the last ones of the sequence, one after
        # another, and whether all that were compared so far do
        matches = jnp.zeros_like(place)
        run = jnp.ones(tokens.shape, bool)
        for back in range(1, self.max_ngram + 1):
            # []: the token `back` from the end; [L]: the one `back` before each place. A roll
            # brings the end of the buffer to the first places, which have no such token. Where
            # `back` is above the length, no place of the text has one.
            suffix = tokens[jnp.maximum(length - back, 0)]
            earlier = jnp.roll(tokens, back)
            run &= (earlier == suffix) & (place >= back)
            matches += run.astype(jnp.int32)
        # The longest match, of equals the latest: one number that both can be read from.
        usable = (place < length) & (matches >= self.min_ngram)
        score = jnp.where(usable, matches * tokens.shape[0] + place, -1)
        best = jnp.max(score)
        source = best % tokens.shape[0]
        # [K]: what followed it. The copy is followed by its own first token, with this period.
        period = jnp.maximum(length - source, 1)
        offset = jnp.arange(k, dtype=jnp.int32) % period
        proposed = tokens.at[source + offset].get(mode="clip")
        num_matching = jnp.where(best >= 0, best // tokens.shape[0], 0)
        return jnp.where(best >= 0, proposed, PLACEHOLDER_TOKEN_ID), num_matching
