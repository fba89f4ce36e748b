"""`Drafter`: what proposes tokens to the decoding loop, and what one declares that it can do."""

from __future__ import annotations

import abc
import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_specdec._src.arrays import check_int, check_type, require
from jax_specdec._src.config import SpecDecodeConfig
from jax_specdec._src.drafts.store import DraftStore
from jax_specdec._src.types import PLACEHOLDER_TOKEN_ID
from jax_specdec.lm.drafting.context import DraftContext
from jax_specdec.lm.models.rows import Cache, Params, Rows


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


@dataclasses.dataclass(frozen=True)
class DrafterServes:
    """What a drafter declares of itself; see `Drafter`.

    Attributes:
      feature_layers: the target's layers whose features it reads, as `Wants` has them; none for
        most drafters, and then nothing is computed.
      tree_depth: the most drafts of a path through the trees that it proposes, which then have
        `parents`; 0 for chains. Trees are verified by the agreement rule, for models that run them.
      may_abstain: it often proposes nothing. On CPUs, `generate` of one request, and an `Engine`
        with one slot or a `draft_budget`, then compile a second target pass, over one token, for
        steps without a proposal; on other devices a pass over K + 1 tokens takes no longer. Float32
        sums in passes of different widths differ in their last bits, so a tie may go the other way.
      has_history: it reads what other requests generated. An `EngineDriver` calls its `add` when a
        request has ended, and an `Engine` serves only requests whose text does not depend on
        drafts.
      chunks: its `prefill` can read a prompt in parts. Without this it works with engines that read
        prompts whole, because their `prefill_sizes` reach `max_length`.
      batch_axis: the axis of every array of its cache that holds the requests.

    Raises:
      TypeError: `feature_layers` is no tuple of ints, or a number no int.
      ValueError: a number is below 0.

    Example:
      >>> from jax_specdec import lm
      >>> lm.NGramDrafter().serves.may_abstain
      True
    """

    feature_layers: tuple[int, ...] = ()
    tree_depth: int = 0
    may_abstain: bool = False
    has_history: bool = False
    chunks: bool = True
    batch_axis: int = 0

    def __post_init__(self) -> None:
        layers = self.feature_layers
        are_layers = isinstance(layers, tuple) and all(type(layer) is int for layer in layers)
        require(are_layers, "serves.feature_layers", "be a tuple of ints", layers, error=TypeError)
        check_int("serves.tree_depth", self.tree_depth, 0)
        check_int("serves.batch_axis", self.batch_axis, 0)
        for name in ("may_abstain", "has_history", "chunks"):
            check_type(f"serves.{name}", getattr(self, name), bool)


class Drafter(abc.ABC):
    """Proposes up to K tokens per request. Static and hashable; weights are passed as `params`.

    Whatever a drafter proposes, the output is distributed as the target's. Good proposals make it
    fast.

    A drafter of your own derives from this class and has a method `propose`. What it has not is
    that of a drafter which reads texts alone: no cache, no draft distribution, no weights.

    Example:
      A drafter that expects the last token to repeat:

      >>> import dataclasses
      >>> import jax.numpy as jnp
      >>> import jax_specdec as sd
      >>> from jax_specdec import lm
      >>> @dataclasses.dataclass(frozen=True)
      ... class Repeat(lm.Drafter):
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

    @property
    def serves(self) -> DrafterServes:
        """Declares what the drafter can do and needs: here, nothing beside the texts."""
        return DrafterServes()

    def check_params(self, name: str, params: Params) -> None:
        """Raises a TypeError or ValueError that begins with `name` if weights are not its own.

        The decoding loops call it once, where weights enter, so that `propose` need not check them.
        """
        del name, params

    def init_cache(self, batch_size: int, max_length: int) -> Cache:
        """Returns an empty cache: a pytree of arrays, laid out as that of `CausalModel.init_cache`.

        `DrafterServes.batch_axis` is the axis that holds the requests.
        """
        del batch_size, max_length
        return ()

    def init_store(
        self, params: Params, batch_size: int, config: SpecDecodeConfig
    ) -> DraftStore | None:
        """Returns an empty store of `batch_size` slots; None if the drafts have no distribution.

        A drafter that samples from a distribution q writes each row it samples from to the store,
        rounded to the stored dtype first. The loop owns the store, passes it to every call of
        `propose`, and knows which rows are still valid. Without one, drafts are verified one-hot.
        """
        del params, batch_size, config
        return None

    def prefill(
        self,
        params: Params,
        rows: Rows,
        cache: Cache,
        features: jax.Array | None = None,
        next_token_ids: jax.Array | None = None,
    ) -> Cache:
        """Reads the padded prompts, or a chunk of them, into the cache, and returns it.

        An `Engine` reads long prompts in chunks, which may overlap. Between two of them `propose`
        may be called for the request, with a length of what was read and one token more, no
        features, and false in `DraftContext.active`: what was read must stay. A preempted request
        is read again in this way. Whatever `propose` keeps in the cache that cannot be computed
        from the tokens is then lost.

        Args:
          params: the drafter's weights.
          rows: ``[B, P]`` tokens, for all requests of the cache, and where each row begins.
          cache: from `init_cache`, or from the call for the chunk before.
          features: ``[B, P, A*H]`` of these tokens, at the layers that `DrafterServes` names; None
            if it names none. Each token that the target has run comes once, here or in the context
            of `propose`, save that `propose` gets the last row of a prompt that has a next token
            again.
          next_token_ids: ``[B]`` int32, the prompt's token after the last of these; any id if the
            prompt ends before. None as `features` are.
        """
        del params, rows, features, next_token_ids
        return cache

    @abc.abstractmethod
    def propose(
        self, params: Params, context: DraftContext, cache: Cache, store: DraftStore | None
    ) -> tuple[Proposal, Cache]:
        """Proposes tokens for positions ``lengths[b] .. lengths[b] + K - 1``.

        It is called before every verification.

        Args:
          params: the drafter's weights.
          context: the sequences so far, and the parameters of their requests.
          cache: from `prefill` or the last call. The tokens emitted since may differ from what that
            call proposed.
          store: from `init_store` or the last call, to write to and return.

        Returns:
          The proposal, which holds the store, and the cache.
        """

    def add(self, params: Params, token_ids: jax.Array) -> Params:
        """Returns params of the same shapes with one more text in the history.

        Args:
          params: the drafter's weights, which hold the history that `DrafterServes` declares.
          token_ids: ``[A]`` int32, padded with -1: what a request generated.
        """
        del token_ids
        return params


@dataclasses.dataclass(frozen=True)
class NoDrafter(Drafter):
    """Proposes nothing: plain decoding, one token per pass of the target."""

    def propose(
        self, params: Params, context: DraftContext, cache: Cache, store: DraftStore | None
    ) -> tuple[Proposal, Cache]:
        """Returns no drafts."""
        shape = context.lengths.shape[0], context.config.num_speculative_tokens
        return Proposal(jnp.full(shape, PLACEHOLDER_TOKEN_ID, jnp.int32), store), cache
