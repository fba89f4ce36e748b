"""`Drafter`: the protocol between the decoding loop and whatever proposes tokens."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import jax

from jax_specdec._src.config import SpecDecodeConfig
from jax_specdec._src.drafts.store import DraftStore
from jax_specdec.lm.drafting.context import DraftContext


class Proposal(NamedTuple):
    """What a drafter proposes for a batch.

    Attributes:
      token_ids: ``[B, K]`` int32, -1 from the first position without a proposal on.
      store: what they were drawn from; None for drafts without a distribution.
      confidences: ``[B, K]`` float32, the chance that each draft is accepted if those before it
        were, as `plan_drafts` takes it: draft k and those after it must not have been looked at. 0
        where there is no draft, NaN where it is not known; None for a drafter that knows none.
      parents: ``[B, K]`` int32, the node that each draft follows, as in `Drafts`; None for chains.
        The best nodes come first: the first n of them are the best tree of n drafts.

    Example: see `Drafter`.
    """

    token_ids: jax.Array
    store: DraftStore | None = None
    confidences: jax.Array | None = None
    parents: jax.Array | None = None


# Any class with the four methods is a `Drafter`: these attributes it may lack. Only these
# functions read them.


def feature_layers_of(drafter: Drafter | None) -> tuple[int, ...]:
    """The layers whose features a drafter reads; none for most."""
    return getattr(drafter, "feature_layers", ())


def may_abstain(drafter: Drafter | None) -> bool:
    """Whether a drafter often proposes nothing."""
    return getattr(drafter, "may_abstain", False)


def has_history(drafter: Drafter | None) -> bool:
    """Whether a drafter reads what other requests generated."""
    return getattr(drafter, "has_history", False)


def tree_depth_of(drafter: Drafter | None) -> int:
    """The most drafts of a path through the trees that a drafter proposes; 0 for chains."""
    return getattr(drafter, "tree_depth", 0)


class Drafter(Protocol):
    """Proposes up to K tokens per request. Static and hashable; weights are passed as `params`.

    Whatever a drafter proposes, the output is distributed as the target's. Good proposals make it
    fast.

    A drafter that samples from a distribution q stores it in a `DraftStore`. `init_store` makes
    the store; the loop owns it and passes it to every call of `propose`, which writes each row it
    samples from, rounded to the stored dtype first. The loop knows which rows are still valid. If
    `init_store` returns None, drafts have no q and are verified one-hot.

    A drafter may have a method ``check_params(name, params)``, as a model may (see `CausalModel`).

    A drafter that often proposes nothing may have the attribute ``may_abstain = True``. On CPUs,
    `generate` of one request, and an `Engine` with one slot or a `draft_budget`, then compile a
    second target pass, over one token, for steps without a proposal; on other devices a pass over K
    + 1 tokens takes no longer. Float32 sums in passes of different widths differ in their last
    bits, so a tie may go the other way.

    A drafter that reads what other requests generated has the attribute ``has_history = True``, and
    a method ``add(params, token_ids)`` that returns params of the same shapes with one more text,
    ``[A]`` int32 and padded with -1. An `EngineDriver` calls it when a request has ended. An
    `Engine` then serves only requests whose text does not depend on drafts.

    A drafter that proposes trees has the attribute ``tree_depth``, an int: the most drafts of a
    path, above 0. Its proposals then have `parents`. Trees are verified by the agreement rule, for
    models that run them; see `CausalModel`.

    A drafter that reads what the target computes inside names layers in the attribute
    ``feature_layers``, a static tuple as `CausalModel` has it. `prefill` then gets features, and so
    does the context of `propose`, which is called before every verification: each token that the
    target has run comes once in one of them, save that `propose` gets the last row of a prompt that
    has a next token again. A drafter that names none gets none, and nothing is computed.

    Example:
      A drafter that expects the last token to repeat:

      >>> import dataclasses
      >>> import jax, jax.numpy as jnp
      >>> import jax_specdec as sd
      >>> from jax_specdec import lm
      >>> @dataclasses.dataclass(frozen=True)
      ... class Repeat:
      ...     def init_cache(self, batch_size, max_length):
      ...         return ()
      ...     def init_store(self, params, batch_size, config):
      ...         return None
      ...     def prefill(self, params, token_ids, cache):
      ...         return cache
      ...     def propose(self, params, context, cache, store):
      ...         newest = context.lengths[:, None] - 1
      ...         last = jnp.take_along_axis(context.token_ids, newest, axis=1)
      ...         return lm.Proposal(jnp.tile(last, context.config.num_speculative_tokens)), cache
      >>> model, params = lm.load_embedded_pair()[1]  # the smaller one
      >>> output = lm.generate(
      ...     model, params, [lm.encode_bytes("a = [")], drafter=Repeat(),
      ...     config=sd.SpecDecodeConfig(num_speculative_tokens=2), max_new_tokens=4)
      >>> len(output.completions[0])
      4
    """

    def init_cache(self, batch_size: int, max_length: int) -> Any:
        """An empty cache: any pytree of arrays, with the layout of `CausalModel.init_cache`.

        `cache_batch_axis` is as there: the axis that holds the requests, if it is not the first.
        """
        ...

    def init_store(
        self, params: Any, batch_size: int, config: SpecDecodeConfig
    ) -> DraftStore | None:
        """An empty store of `batch_size` slots; None if the drafts have no distribution."""
        ...

    def prefill(
        self, params: Any, token_ids: jax.Array, cache: Any, start: jax.Array | None = None
    ) -> Any:
        """Read the padded prompts ``[B, P]`` into the cache, and return it.

        A drafter that has `feature_layers` is given two keyword arguments more:

        - `features`: ``[B, P, A*H]`` of these tokens.
        - `next_token_ids`: ``[B]`` int32, the prompt's token after the last of these; any id if the
          prompt ends before.

        A preempted request is read again in this way. Whatever `propose` keeps in the cache that
        cannot be computed from the tokens is then lost.

        Args:
          params: the drafter's weights.
          token_ids: ``[B, P]`` int32.
          cache: from `init_cache`, or from the call for the chunk before.
          start: ``[B]`` int32, position of the first token. An `Engine` gives it, because it reads
            prompts in chunks, which may overlap. Between two chunks `propose` may be called for the
            request, with a length of what was read and one token more, no features, and false in
            `DraftContext.active`: what was read must stay. A drafter without this
            argument works with engines that read prompts whole, because their `prefill_sizes` reach
            `max_length`.
        """
        ...

    def propose(
        self, params: Any, context: DraftContext, cache: Any, store: DraftStore | None
    ) -> tuple[Proposal, Any]:
        """Propose tokens for positions ``lengths[b] .. lengths[b] + K - 1``.

        Args:
          params: the drafter's weights.
          context: the sequences so far, and the parameters of their requests.
          cache: from `prefill` or the last call. The tokens emitted since may differ from what that
            call proposed.
          store: from `init_store` or the last call, to write to and return.

        Returns:
          The proposal, which holds the store, and the cache.
        """
        ...


class LookupDrafter:
    """What every `Drafter` does that reads texts alone: no model, no cache, no distribution."""

    @property
    def may_abstain(self) -> bool:
        """Often nothing matches; see `Drafter`."""
        return True

    def init_cache(self, batch_size: int, max_length: int) -> Any:
        """Nothing: the texts are all that the drafter reads."""
        del batch_size, max_length
        return ()

    def init_store(
        self, params: Any, batch_size: int, config: SpecDecodeConfig
    ) -> DraftStore | None:
        """None: the drafts have no distribution."""
        del params, batch_size, config
        return None

    def prefill(
        self, params: Any, token_ids: jax.Array, cache: Any, start: jax.Array | None = None
    ) -> Any:
        """Nothing to read ahead."""
        del params, token_ids, start
        return cache
