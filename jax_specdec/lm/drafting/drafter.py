"""The contract between the decoding loops and a drafter: a `DraftContext` in, a `Proposal` back.

The loops own all arrays: the sequences, the drafter's cache, and the store of what drafts were
drawn from. A `Drafter` is static and gets them with every call. What it can do beside proposing it
declares in `DrafterServes`; the loops ask for nothing else.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_specdec._src.base.arrays import (
    check_array,
    check_choice,
    check_int,
    check_type,
    pytree,
    require,
)
from jax_specdec._src.base.config import SpecDecodeConfig
from jax_specdec._src.base.sampling import SamplingParams
from jax_specdec._src.base.types import PLACEHOLDER_TOKEN_ID, Drafts
from jax_specdec._src.drafts.store import DraftStore
from jax_specdec._src.logits.process_logits import (
    LogitsProcessors,
    check_processed,
    processed,
)
from jax_specdec.lm.models.protocol import Cache, Params, Rows


@pytree(
    token_ids="[B, L] int32",
    lengths="[B] int32",
    sampling=(SamplingParams,),
    keys="[B]",
    processors=(LogitsProcessors,),
    changes_rows="[] bool",
    active="[B] bool",
    features="[B, S, A*H]",
    num_features="[B] int32",
    slots="[B] int32",
    predictions="[B, A] int32",
    prompt_lengths="[B] int32",
)
@dataclasses.dataclass(frozen=True)
class DraftContext:
    """What a drafter knows of B requests. Its drafts are verified under the same parameters.

    More fields may be added; a drafter reads those that it needs.

    Attributes:
      token_ids: ``[B, L]`` int32, the sequences so far; undefined past their lengths. L is at least
        the length of a sequence plus K + 1, with the most drafts K of any step, so that all rows of
        a step have a position of their own in caches of L positions.
      lengths: ``[B]`` int32, at least 1: absolute position of the first draft.
      sampling: temperatures and filters.
      keys: ``[B]`` typed keys.
      config: static settings.
      processors: the logits processors, up to date with the sequences, or None.
      changes_rows: ``[]`` bool, whether any request uses `processors`; None for yes.
      active: ``[B]`` bool, the requests that run; None for all. What is proposed for the others is
        dropped, and one of them may have a part of its prompt still to be read: what is known of
        it, in the cache before its newest token too, must stay as it is.
      features: ``[B, S, A*H]``, what the target computed for the tokens that it ran last, at the
        layers that the drafter's `aux_hidden_state_layers` names; None if it names none.
      num_features: ``[B]`` int32 in [0, S], how many rows of `features` belong to tokens of the
        sequence; the others were for drafts that were rejected. Row s is at position ``lengths[b] -
        1 - num_features[b] + s``, so the newest token, which the target has not run, has none.
        After a `prefill` there is one row, of those that it got (none for a prompt of one token,
        or one that is not read to its end).
      target_cache: the target's cache, to be read and not returned; None unless the drafter's
        `reads_target_cache` asks for it. It holds the tokens before the newest one; what lies at
        later positions, such as of rejected drafts, is undefined.
      predictions: ``[B, A]`` int32, what each request expects to be generated, then -1; None where
        nobody expects anything. See `RequestOptions`.
      prompt_lengths: ``[B]`` int32, where in each sequence the generated tokens begin; None if that
        is not known.
      most_unread: static, the most tokens that a sequence may have got since the last call; None
        for K + 1. They need not be what the drafter proposed: a lookup beside it or a grammar may
        have drafted them.
      slots: ``[B]`` int32, the requests of the drafter's cache, and of `target_cache`, that these
        are, as `Rows` has them; None for all, in their order. Only for a drafter that `serves`
        slots.

    Example: see `NGramDrafter`.
    """

    token_ids: jax.Array
    lengths: jax.Array
    sampling: SamplingParams
    keys: jax.Array
    config: SpecDecodeConfig = dataclasses.field(metadata=dict(static=True))
    processors: LogitsProcessors | None = None
    changes_rows: jax.Array | None = None
    active: jax.Array | None = None
    features: jax.Array | None = None
    num_features: jax.Array | None = None
    target_cache: Cache | None = None
    predictions: jax.Array | None = None
    prompt_lengths: jax.Array | None = None
    most_unread: int | None = dataclasses.field(default=None, metadata=dict(static=True))
    slots: jax.Array | None = None

    @property
    def num_unread(self) -> int:
        """The most tokens of a sequence that no call has seen: `most_unread`."""
        most = self.most_unread
        return self.config.num_speculative_tokens + 1 if most is None else most

    @property
    def runs(self) -> jax.Array:
        """``[B]`` bool, `active`; all, where it is None."""
        return jnp.ones(self.lengths.shape, bool) if self.active is None else self.active

    def append(self, token_ids: jax.Array) -> DraftContext:
        """Returns the context after one more token of each request, such as a draft.

        Args:
          token_ids: ``[B]`` int32.
        """
        # [B] each: token b goes to position lengths[b] of row b; processors count it likewise
        requests = jnp.arange(token_ids.shape[0], dtype=jnp.int32)
        processors = self.processors
        if processors is not None:
            processors = processors.append(token_ids)
        return dataclasses.replace(
            self,
            # A token past the end of the buffer, which nobody reads, is dropped.
            token_ids=self.token_ids.at[requests, self.lengths].set(token_ids, mode="drop"),
            lengths=self.lengths + 1,
            processors=processors,
        )

    def process_logits(self, logits: jax.Array, drafts: Drafts | None = None) -> jax.Array:
        """Returns each request's rows after its processors, before temperature and filters.

        A drafter that processes its own rows in the same way has more drafts accepted. Whatever it
        does, the emitted tokens are distributed as the target's.

        Args:
          logits: the rows of `drafts`, ``[B*(K+1), V]``. Without drafts ``[B, V]``, or fewer
            columns if the drafter has fewer.
          drafts: from `Drafts.from_dense`. Each row takes account of the drafts before it.

        Returns:
          float32 of the shape of `logits`; `logits` itself if `processors` is None. Without
          drafts, a row in which no token is left stays as it was: a drafter may know none of the
          allowed tokens.

        Raises:
          TypeError, ValueError: as `process_logits`.
        """
        if self.processors is not None:
            check_processed(logits, drafts, self.processors, self.config)
        return self.processed(logits, drafts)

    def processed(self, logits: jax.Array, drafts: Drafts | None = None) -> jax.Array:
        """Returns what `process_logits` does, of rows that need no checks."""
        processors = self.processors
        # Whether there are processors is static; whether any request uses them, the device knows.
        if processors is None:
            return logits
        changes = jnp.bool_(True) if self.changes_rows is None else self.changes_rows

        def process(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            """Returns false, which ends the loop below, and the processed rows."""
            _, rows = carry
            changed = processed(rows, drafts, processors, self.config)
            # [B, 1]: of a drafter's own rows, those without an allowed token stay as they were
            if drafts is None:
                is_empty = jnp.all(changed == -jnp.inf, axis=1, keepdims=True)
                changed = jnp.where(is_empty, rows, changed)
            return jnp.bool_(False), changed

        # Always float32, so that a request's sums do not depend on what its neighbours ask for. A
        # loop that runs at most once leaves the rows in place, where `lax.cond` would copy them.
        start = (changes, logits.astype(jnp.float32))
        _, rows = lax.while_loop(lambda carry: carry[0], process, start)
        return rows


def with_fewer_drafts(config: SpecDecodeConfig, num_drafts: int) -> SpecDecodeConfig:
    """Returns the config of a step with fewer drafts."""
    # [K] -> the first n: P(drafts 0..i all accepted) does not depend on those after them. Rates say
    # what a length says, so they take its place.
    rates = config.unconditional_rates
    return dataclasses.replace(
        config,
        num_speculative_tokens=num_drafts,
        synthetic_acceptance_rates=None if rates is None else rates[:num_drafts],
        synthetic_acceptance_length=None,
    )


class Proposal(NamedTuple):
    """What a drafter proposes for a batch.

    Attributes:
      token_ids: ``[B, K]`` int32, -1 from the first position without a proposal on.
      store: what they were drawn from; None for drafts without a distribution.
      parents: ``[B, K]`` int32, the node that each draft follows, as in `Drafts`; None for chains.
        The best nodes come first: the first n of them are the best tree of n drafts.

    Example: see `Drafter`.
    """

    token_ids: jax.Array
    store: DraftStore | None = None
    parents: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class DrafterServes:
    """What a drafter declares of itself; see `Drafter`.

    Attributes:
      aux_hidden_state_layers: the target's layers whose features it reads, as `Wants` has them;
        none for most drafters, and then nothing is computed.
      reads_target_cache: it reads `DraftContext.target_cache`, and so knows the target's class; it
        then serves `slots`.
      tree_depth: the most drafts of a path through the trees that it proposes, which then have
        `parents`; 0 for chains. Trees are verified by the agreement rule, for models that run them.
      may_abstain: it often proposes nothing. On CPUs, `generate` of one request, and an `Engine`
        with one slot or a `draft_budget`, then compile a second target pass, over one token, for
        steps without a proposal; on other devices a pass over K + 1 tokens takes no longer. Float32
        sums in passes of different widths differ in their last bits, so a tie may go the other way.
      has_history: it reads what other requests generated. An `EngineDriver` calls its `add` when a
        request has ended, and an `Engine` serves only requests whose text does not depend on
        drafts.
      predictions: it looks in what requests expect to be generated.
      chunks: its `prefill` can read a prompt in parts. Without this it works with engines that read
        prompts whole, because their `prefill_sizes` reach `max_length`.
      batch_axis: the axis of every array of its cache that holds the requests.
      kept_rows: what of its cache a later request whose prompt begins with the same tokens may
        begin with, in an `Engine` with `prefix_caching`: "prompts", what `prefill` wrote; "texts",
        also what `propose` did of tokens before the newest, whoever drafted them. Each entry then
        belongs to a position: the token there, those before and the next one decide what it is, and
        `prefill` forgets all else. "none": a request needs an empty cache. Nobody asks a drafter
        without one.
      slots: its `propose` and `prefill` find some requests of a larger cache by the `slots` of the
        context and of the rows, in place; what its cache holds beside positions `prefill` has
        to reset. To others the loops give the caches of these requests alone, which are copied
        twice, and empty where a prompt begins.

    Raises:
      TypeError: `aux_hidden_state_layers` is no tuple of ints, or a number no int.
      ValueError: a number is below 0, or `kept_rows` is none of the three.

    Example:
      >>> from jax_specdec import lm
      >>> lm.NGramDrafter().serves.may_abstain
      True
    """

    aux_hidden_state_layers: tuple[int, ...] = ()
    reads_target_cache: bool = False
    tree_depth: int = 0
    may_abstain: bool = False
    has_history: bool = False
    predictions: bool = False
    chunks: bool = True
    batch_axis: int = 0
    kept_rows: Literal["none", "prompts", "texts"] = "none"
    slots: bool = False

    def __post_init__(self) -> None:
        # A drafter of the user's own declares this: so all fields are checked, where they are made.
        layers = self.aux_hidden_state_layers
        are_layers = isinstance(layers, tuple) and all(type(layer) is int for layer in layers)
        require(
            are_layers,
            "serves.aux_hidden_state_layers",
            "be a tuple of ints",
            layers,
            error=TypeError,
        )
        check_int("serves.tree_depth", self.tree_depth, 0)
        check_int("serves.batch_axis", self.batch_axis, 0)
        check_choice("serves.kept_rows", self.kept_rows, ("none", "prompts", "texts"))
        switches = ("reads_target_cache", "may_abstain", "has_history", "predictions")
        for name in (*switches, "chunks", "slots"):
            check_type(f"serves.{name}", getattr(self, name), bool)
        must = "be true with reads_target_cache, whose requests it has to find"
        require(self.slots or not self.reads_target_cache, "serves.slots", must, self.slots)


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
          rows: ``[B, P]`` tokens, for all requests of the cache, and where each row begins; for
            some of them, if the drafter serves `slots`.
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


def checked_proposal(
    drafter: Drafter,
    draft_params: Params,
    context: DraftContext,
    cache: Cache,
    store: DraftStore | None,
) -> tuple[Proposal, Cache]:
    """Returns what `drafter.propose` returns, checked.

    Raises:
      TypeError, ValueError: it breaks its contract.
    """
    # A drafter may be of anybody. All this is checked when a program is traced: shapes and dtypes
    # are known then, and values are not.
    returned: Any = drafter.propose(draft_params, context, cache, store)
    name = f"{type(drafter).__name__}.propose"
    is_pair = isinstance(returned, tuple) and len(returned) == 2
    must = "be a Proposal and a cache"
    require(is_pair, f"what {name} returns", must, returned, error=TypeError)
    proposal, new_cache = returned
    check_type(f"the proposal of {name}", proposal, Proposal)
    sizes = {"B": context.lengths.shape[0], "K": context.config.num_speculative_tokens}
    check_array(f"the token_ids of {name}", proposal.token_ids, "[B, K] int32", sizes)
    is_tree = proposal.parents is not None
    must = "be there if and only if it has a tree_depth"
    wanted = drafter.serves.tree_depth > 0
    require(is_tree == wanted, f"the parents of {name}", must, proposal.parents, error=TypeError)
    if is_tree:
        check_array(f"the parents of {name}", proposal.parents, "[B, K] int32", sizes)
    # What the state carries keeps its structure, shapes and dtypes: a `while_loop` demands it, and
    # buffers that are donated are used again.
    pairs = ("store", store, proposal.store), ("cache", cache, new_cache)
    for what, given, new in pairs:
        given, new = (
            jax.tree.map(lambda x: f"{jnp.result_type(x)}{list(jnp.shape(x))}", tree)
            for tree in (given, new)
        )
        if jax.tree.flatten(given) != jax.tree.flatten(new):
            raise ValueError(
                f"{name} must return the {what} with the layout it was given, {given!r:.300}, but "
                f"it returned {new!r:.300}"
            )
    return proposal, new_cache


@dataclasses.dataclass(frozen=True)
class NoDrafter(Drafter):
    """Proposes nothing: plain decoding, one token per pass of the target."""

    def propose(
        self, params: Params, context: DraftContext, cache: Cache, store: DraftStore | None
    ) -> tuple[Proposal, Cache]:
        """Returns no drafts."""
        shape = context.lengths.shape[0], context.config.num_speculative_tokens
        return Proposal(jnp.full(shape, PLACEHOLDER_TOKEN_ID, jnp.int32), store), cache
