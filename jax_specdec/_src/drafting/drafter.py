"""The contract between the decoding loop and whatever proposes tokens."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import jax

from jax_specdec._src.config import SpecDecodeConfig
from jax_specdec._src.types import DraftDistribution, SamplingParams


class Proposal(NamedTuple):
    """What a drafter proposes for a batch.

    Attributes:
      token_ids: ``[B, K]`` int32; -1 from the first position on that has no proposal.
      distribution: what they were drawn from, ``[B*K, Vd]``, or None for one-hot.

    Example:
      >>> import jax.numpy as jnp
      >>> Proposal(jnp.array([[7, -1]]), None).token_ids.shape
      (1, 2)
    """

    token_ids: jax.Array
    distribution: DraftDistribution | None


class Drafter(Protocol):
    """Proposes up to K tokens per request. Static and hashable; weights travel as `params`.

    Whatever a drafter proposes, the output stays the target's; good proposals make it fast.

    Example:
      A drafter that expects the last token to repeat:

      >>> import dataclasses
      >>> import jax, jax.numpy as jnp
      >>> import jax_specdec as sd
      >>> @dataclasses.dataclass(frozen=True)
      ... class Repeat:
      ...     def init_cache(self, batch_size, max_length):
      ...         return ()
      ...     def prefill(self, params, token_ids, cache):
      ...         return cache
      ...     def propose(self, params, token_ids, lengths, cache, *, sampling, keys, config):
      ...         last = jnp.take_along_axis(token_ids, lengths[:, None] - 1, axis=1)
      ...         return sd.Proposal(jnp.tile(last, config.num_speculative_tokens), None), cache
      >>> config = sd.SpecDecodeConfig(num_speculative_tokens=2)
      >>> proposal, _ = Repeat().propose(
      ...     None, jnp.array([[5, 6, 0]]), jnp.array([2]), (), sampling=None, keys=None,
      ...     config=config)
      >>> proposal.token_ids.tolist()
      [[6, 6]]
    """

    def init_cache(self, batch_size: int, max_length: int) -> Any:
        """An empty cache: any pytree whose shapes depend on the arguments alone."""
        ...

    def prefill(self, params: Any, token_ids: jax.Array, cache: Any) -> Any:
        """Read the padded prompts ``[B, P]``; returns the cache."""
        ...

    def propose(
        self,
        params: Any,
        token_ids: jax.Array,
        lengths: jax.Array,
        cache: Any,
        *,
        sampling: SamplingParams,
        keys: jax.Array,
        config: SpecDecodeConfig,
    ) -> tuple[Proposal, Any]:
        """Propose tokens for positions ``lengths[b] .. lengths[b] + K - 1``.

        Args:
          params: the drafter's weights.
          token_ids: ``[B, L]`` int32, the sequences so far; what lies past a length is undefined.
          lengths: ``[B]`` int32, at least 1.
          cache: from `prefill` or the last call; the tokens since may differ from its proposal.
          sampling: per-request parameters.
          keys: ``[B]`` typed keys.
          config: static settings.

        Returns:
          The proposal and the cache.
        """
        ...
