"""`Decoder`: the one step of every decoding loop: draft, verify, append.

A step is a pure function of a `DecodeState`. Its first half, `draft`, has the drafter propose up to
K tokens of each request. Its second half, `verify`, runs the target over the newest token and the
drafts (`score`), checks the drafts by its logits (`verdict`), and appends what is emitted to the
sequences and their caches (`accept`). `generate` carries the state through a compiled loop. An
`Engine` is a `Decoder` whose requests come and go, and may make a step of some slots alone.

In comments, B are all requests or slots of a state, and R those that take part in a step (B where
all do). n are the drafts that the step has of each (K where nobody asks for fewer), so a pass has
n + 1 rows of each request. D is the most drafts that can be accepted: K, or the depth of trees.
What a verification emits has K + 1 places, and a record D + 1, whatever n is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_specdec._src.base.config import SpecDecodeConfig
from jax_specdec._src.base.platform import HAS_OLD_XLA, Platform, traced_for_platform
from jax_specdec._src.base.tree import TreeRows
from jax_specdec._src.base.types import PLACEHOLDER_TOKEN_ID, Drafts, RejectionSampleOutput
from jax_specdec._src.drafts.store import DraftStore
from jax_specdec._src.logits.logprobs import LogprobsConfig, TokenLogprobs, emitted_logprobs
from jax_specdec._src.stats.acceptance import AcceptanceCounters
from jax_specdec._src.stats.emitted import StepRecord
from jax_specdec._src.verify.api import verify
from jax_specdec._src.verify.call import CallSettings, Static
from jax_specdec._src.verify.requests import CallArrays
from jax_specdec.lm.decoding.batch import Batch, append
from jax_specdec.lm.decoding.state import (
    DecodeState,
    Drafted,
    Features,
    put_slots,
    take_slots,
)
from jax_specdec.lm.drafting.drafter import (
    DraftContext,
    Drafter,
    NoDrafter,
    Proposal,
    checked_proposal,
    with_fewer_drafts,
)
from jax_specdec.lm.models.protocol import (
    Cache,
    CausalModel,
    Output,
    Params,
    Rows,
    Wants,
    apply_groups,
    put_cache,
    run_in_slots,
    take_cache,
)

_CPU_ROWS = 4
"""Exact passes on CPUs have a multiple of so many rows. XLA lets LLVM contract a product and a sum
to one operation, rounded once. Where an array [B, S] of numbers for each row is computed in vectors
over the requests, of S at most 8, LLVM joins vectors of neighbouring rows to wider ones with
AVX-512, and contracts in one kind alone: of S = 3, 5, 6 and 7 the last rows are rounded otherwise.
"""

PLAIN = SpecDecodeConfig(num_speculative_tokens=1)
"""The config of decoding without drafts."""


class Caches(NamedTuple):
    """What both models know of R prompts.

    Attributes:
      target: the target's cache.
      draft: the drafter's cache.
      features: ``[R, 1, A*H]``, of each prompt's last token but one: the first step drafts from it.
        None if the drafter reads none.
    """

    target: Cache
    draft: Cache
    features: jax.Array | None = None


class Verdict(NamedTuple):
    """What the target says of the drafts of a batch.

    Attributes:
      output: tokens, counts and paths.
      num_proposed: ``[B]`` int32, the drafts of each request that could have been accepted.
      logprobs: of the emitted tokens; None unless asked for.
    """

    output: RejectionSampleOutput
    num_proposed: jax.Array
    logprobs: TokenLogprobs | None


@dataclasses.dataclass(frozen=True)
class Decoder:
    """The step of `generate`: pure functions of a `DecodeState`, and settings.

    An `Engine` is one whose requests come and go. The functions take `params`, the target's
    weights; `draft_params`, the drafter's weights; and a state, which is to be donated. Hashable
    and compared by value, so that it can be a static argument of `jax.jit`.

    Attributes:
      model: the target.
      drafter: what proposes tokens; `NoDrafter` for plain decoding.
      config: how drafts are made and verified.
      logprobs: which log-probabilities a step's record has; None for none.
      exact: every pass has as many rows of each request, whatever is drafted; see `generate`.
    """

    drafts_in_first_step: ClassVar[bool] = True
    """Whether a request without output gets drafts."""

    model: CausalModel
    drafter: Drafter
    config: SpecDecodeConfig
    logprobs: LogprobsConfig | None = None
    _: dataclasses.KW_ONLY
    exact: bool = False

    @property
    def num_drafts(self) -> int:
        """K; 0 without a drafter, unless its passes are to be those of one."""
        has_rows = self.exact or not isinstance(self.drafter, NoDrafter)
        return self.config.num_speculative_tokens if has_rows else 0

    def num_rows(self, platform: Platform) -> int:
        """Returns S, the rows of a request in a pass over drafts: K + 1, or more if exact on a CPU.

        Args:
          platform: that the program is compiled for.
        """
        num_rows = self.num_drafts + 1
        if self.exact and platform == "cpu":
            return -(-num_rows // _CPU_ROWS) * _CPU_ROWS
        return num_rows

    @property
    def most_rows(self) -> int:
        """The most rows of a request in a pass over drafts, on any platform."""
        return self.num_rows("cpu")

    @property
    def tree_depth(self) -> int:
        """The most drafts of a path through a tree; 0 for chains."""
        return min(self.drafter.serves.tree_depth, self.num_drafts)

    @property
    def most_accepted(self) -> int:
        """D, the most drafts of a request that a step accepts: K, or the depth of trees."""
        return self.tree_depth or self.config.num_speculative_tokens

    def empty_caches(self, params: Params, num_requests: int, length: int) -> Caches:
        """Returns empty caches; the shapes of `params` are read only if the drafter reads features.

        Raises:
          TypeError: the drafter reads features, and `params` is None.
        """
        features = None
        if self.drafter.serves.aux_hidden_state_layers:
            if params is None:
                raise TypeError(
                    "params must be the target's weights, because the drafter reads features, but "
                    "it is None"
                )
            # A pass over one token, of which only shapes are computed, says A*H and the dtype.
            rows = Rows(jnp.zeros((1, 1), jnp.int32), jnp.zeros((1,), jnp.int32))
            cache = self.model.init_cache(1, 1)
            (like,), _ = jax.eval_shape(lambda p: self.run(p, [rows], cache, 1), params)
            # [1, 1, A*H] -> [R, 1, A*H]
            features = jnp.zeros((num_requests, 1, like.features.shape[2]), like.features.dtype)
        return Caches(
            self.model.init_cache(num_requests, length),
            self.drafter.init_cache(num_requests, length),
            features,
        )

    def state_of(self, draft_params: Params, batch: Batch, caches: Caches) -> DecodeState:
        """Returns a state after prompts were read: no drafts, all counts zero."""
        batch = batch.with_processors(self.model.vocab_size)
        size = batch.lengths.shape[0]
        return DecodeState(
            batch=batch,
            target_cache=caches.target,
            draft_cache=caches.draft,
            store=self.drafter.init_store(draft_params, size, self.config),
            counters=AcceptanceCounters.create(self.most_accepted),
            # [B]: each has one row of features, but a prompt of one token has none
            features=self.first_features(caches.features, jnp.minimum(batch.lengths - 1, 1)),
        )

    def empty_state(self, params: Params, draft_params: Params, batch: Batch) -> DecodeState:
        """Returns `state_of` with empty caches, as if the prompts had been read."""
        return self.state_of(draft_params, batch, self.empty_caches(params, *batch.token_ids.shape))

    def prefilled_state(
        self, params: Params, draft_params: Params, batch: Batch, prompt_size: int
    ) -> DecodeState:
        """Returns a state whose caches hold the prompts: ``batch.token_ids[:, :prompt_size]``."""
        empty = self.empty_caches(params, *batch.token_ids.shape)
        length = batch.token_ids.shape[1]
        zeros = jnp.zeros_like(batch.lengths)
        # [B, L] -> [B, P]: the prompts, last tokens included. The first step runs those again, as
        # each step runs the newest token, and overwrites what the target's cache holds of them.
        max_seen = jnp.asarray(prompt_size, jnp.int32)
        rows = Rows(batch.token_ids[:, :prompt_size], zeros, max_seen=max_seen)
        ((_, features),), target = self.run(params, [rows], empty.target, length)
        # Every prompt ends in these rows, so no token follows them: any id will do.
        next_token_ids = None if features is None else zeros
        draft = self.drafter.prefill(draft_params, rows, empty.draft, features, next_token_ids)
        # [B, P, A*H] -> [B, 1, A*H]
        last = None if features is None else features_before_last(features, batch.lengths, zeros)[0]
        return self.state_of(draft_params, batch, Caches(target, draft, last))

    def run(
        self, params: Params, groups: Sequence[Rows], cache: Cache, max_length: int
    ) -> tuple[list[Output], Cache]:
        """Returns what a pass of the target says of each group of rows, and its cache.

        Outputs have the features that the drafter reads.

        Args:
          groups: drafts of all requests, or parts of prompts for slots, or both.
          cache: of all slots, of `max_length` positions each.
          max_length: L.
        """
        groups = [self.allowed_rows(rows) for rows in groups]
        wants = Wants(self.drafter.serves.aux_hidden_state_layers)
        return apply_groups(self.model, params, groups, cache, wants, max_length)

    def may_follow_load(self, num_requests: int) -> bool:
        """Returns whether last bits of a pass of so many requests may depend on the load.

        It may then leave out rows without drafts, and what no text has reached in the cache. Of one
        request alone, the load is its own.
        """
        return num_requests == 1 and not self.exact

    def allowed_rows(self, rows: Rows) -> Rows:
        """Returns rows, without `max_seen` where last bits must not depend on the load."""
        may_follow = self.may_follow_load(rows.token_ids.shape[0])
        return rows if may_follow else rows._replace(max_seen=None)

    def draft_prompts(
        self,
        draft_params: Params,
        state: DecodeState,
        prompts: Rows,
        features: jax.Array | None,
        next_token_ids: jax.Array,
    ) -> DecodeState:
        """Returns the state after the drafter has read what the target has.

        Args:
          state: after the pass that read the prompts.
          prompts: that were read.
          features: ``[R, P, A*H]``, of these tokens; None if the drafter reads none.
          next_token_ids: ``[R]`` int32, the token after these; any id after the last of a prompt.
        """
        serves = self.drafter.serves
        prompts = self.allowed_rows(prompts)

        def read(rows: Rows, cache: Cache) -> Cache:
            # A drafter pairs features with the next token: without the former it is not given this.
            ids = None if features is None else next_token_ids
            return self.drafter.prefill(draft_params, rows, cache, features, ids)

        # A drafter that serves slots finds them in the cache of all, which is changed in place.
        if serves.slots:
            return dataclasses.replace(state, draft_cache=read(prompts, state.draft_cache))
        # Any other sees the caches of the R slots alone, which are taken out and put back.
        alone = prompts._replace(slots=None)
        draft_cache, _ = run_in_slots(
            self.drafter,
            serves.batch_axis,
            state.draft_cache,
            prompts,
            state.batch.token_ids.shape[1],
            lambda own: (read(alone, own), None),
        )
        return dataclasses.replace(state, draft_cache=draft_cache)

    def first_features(self, last: jax.Array | None, count: jax.Array) -> Features | None:
        """Returns the features that the first steps of R prompts read.

        Args:
          last: ``[R, 1, A*H]``, of each prompt's last token but one; None if none are read.
          count: ``[R]`` int32, 1, or 0 where there is none.
        """
        if last is None:
            return None
        # [R, 1, A*H] -> [R, D+1, A*H], the shape that every step leaves
        return Features(jnp.pad(last, ((0, 0), (0, self.most_accepted), (0, 0))), count)

    def step(
        self,
        params: Params,
        draft_params: Params,
        state: DecodeState,
    ) -> tuple[DecodeState, StepRecord]:
        """Drafts and verifies: at least one token for every request that is not done."""
        return self.verify(params, self.draft(draft_params, state))

    def draft(
        self,
        draft_params: Params,
        state: DecodeState,
        *,
        num_drafts: int | None = None,
        slots: jax.Array | None = None,
    ) -> DecodeState:
        """Does the first half of `step`; see `Engine.draft`."""
        # [B, ...] -> [R, ...]
        batch = take_slots(state.batch, slots)
        size = batch.lengths.shape[0]
        # n, which is static: the target's pass has a row for each draft
        wanted = self.num_drafts if num_drafts is None else num_drafts
        has_memory = state.features is not None or jax.tree.leaves(state.draft_cache)
        if not wanted and not has_memory:
            # [R, 0]; of an exact decoder `_drafts_of` makes it [R, K]
            ids = jnp.zeros((size, 0), jnp.int32)
            drafted = Drafted(
                self._drafts_of(batch, ids), jnp.zeros((size,), jnp.int32), None, slots
            )
            return dataclasses.replace(state, proposal=drafted)
        # A drafter with a memory reads the newest tokens even where no draft is wanted. A config
        # has at least one draft, so it drafts one, which is cut off below.
        config = self.config
        if max(wanted, 1) < self.num_drafts:
            config = with_fewer_drafts(self.config, max(wanted, 1))
        features = take_slots(state.features, slots)
        context = dataclasses.replace(
            batch.context(config),
            features=None if features is None else features.values,
            num_features=None if features is None else features.lengths,
            # The step before may have had all K drafts, however few this one has.
            most_unread=self.num_drafts + 1,
        )
        # The cache of all slots: such a drafter finds those of the context in it.
        if self.drafter.serves.reads_target_cache:
            context = dataclasses.replace(context, target_cache=state.target_cache)
        proposal, draft_cache = self._propose(draft_params, context, state, slots)
        limits = self._max_drafts(batch)
        # [R, max(n, 1)] -> [R, n]: drafts past a request's own limit become none. The best nodes of
        # a tree come first, and parents before children, so those that are left are a tree, too.
        is_allowed = jnp.arange(wanted, dtype=jnp.int32)[None, :] < limits[:, None]
        ids = jnp.where(is_allowed, proposal.token_ids[:, :wanted], PLACEHOLDER_TOKEN_ID)
        parents = proposal.parents
        drafted = Drafted(
            token_ids=self._drafts_of(batch, ids),
            max_drafts=jnp.minimum(limits, wanted),
            parents=parents[:, :wanted] if parents is not None and wanted else None,
            slots=slots,
        )
        return dataclasses.replace(
            state,
            draft_cache=draft_cache,
            # With rows of drafts that were left out, too: nothing reads those, and at the next
            # step's position none is valid.
            store=proposal.store,
            # The drafter has read them, and `committed` brings new ones. In a step of some slots it
            # puts those into their places, and the other slots keep theirs.
            features=None if slots is None else state.features,
            proposal=drafted,
        )

    def _propose(
        self,
        draft_params: Params,
        context: DraftContext,
        state: DecodeState,
        slots: jax.Array | None,
    ) -> tuple[Proposal, Cache]:
        """Returns what the drafter proposes, with the store of all slots, and its whole cache.

        Raises:
          TypeError, ValueError: the drafter returned something that breaks its contract.
        """
        store = state.store
        cache = state.draft_cache
        serves = self.drafter.serves
        if slots is None:
            return checked_proposal(self.drafter, draft_params, context, cache, store)
        # A drafter writes the rows of request b to slot b of a store: of K * R rows, not K * B.
        slots_store = None if store is None else store.empty(slots.shape[0])
        if serves.slots:
            context = dataclasses.replace(context, slots=slots)
            proposal, cache = checked_proposal(
                self.drafter, draft_params, context, cache, slots_store
            )
        else:
            # The caches of R requests, out of that of B, and back
            like = jax.eval_shape(lambda: self.drafter.init_cache(*context.token_ids.shape))
            slots_cache = take_cache(cache, like, slots, serves.batch_axis)
            proposal, slots_cache = checked_proposal(
                self.drafter, draft_params, context, slots_cache, slots_store
            )
            cache = put_cache(cache, slots_cache, slots, serves.batch_axis)
        if store is None or proposal.store is None:
            return proposal, cache
        # K * R rows into K * B, of which the other slots keep theirs
        return proposal._replace(store=store.put(proposal.store, slots)), cache

    def _drafts_of(self, batch: Batch, ids: jax.Array) -> jax.Array:
        """Returns drafts ``[R, n]``; ``[R, K]`` if all passes have as many rows.

        A text that is read again has its own next tokens as drafts. The target then says them
        again, in passes of the shape that said them first.
        """
        if self.exact:
            # [R, n] -> [R, K]
            missing = self.num_drafts - ids.shape[1]
            ids = jnp.pad(ids, ((0, 0), (0, missing)), constant_values=PLACEHOLDER_TOKEN_ID)
        if batch.known_lengths is not None:
            # [R, K]: the tokens after the newest one, as far as they are known. That one is at
            # position `lengths - 1`, so draft i has the position `lengths + i`.
            place = batch.lengths[:, None] + jnp.arange(ids.shape[1], dtype=jnp.int32)[None, :]
            known = jnp.take_along_axis(batch.token_ids, place, axis=1, mode="clip")
            ids = jnp.where(place < batch.known_lengths[:, None], known, ids)
        return ids

    def verify(
        self,
        params: Params,
        state: DecodeState,
        token_bitmask: jax.Array | None = None,
        is_forced: jax.Array | None = None,
    ) -> tuple[DecodeState, StepRecord]:
        """Does the second half of `step`; see `Engine.verify`."""
        state = self.with_proposal(state)
        state, (scored,) = self.score(params, state)
        return self.accept(state, scored, token_bitmask, is_forced)

    def with_proposal(self, state: DecodeState) -> DecodeState:
        """Returns the state with its drafts; with none of each request where `draft` has not run.

        Raises:
          ValueError: the state holds features that the drafter has not read.
        """
        if state.proposal is not None:
            return state
        if state.features is not None:
            raise ValueError(
                f"state must come from draft, because {type(self.drafter).__name__} reads the "
                "features of every target pass, but it holds some that were not read"
            )
        size = state.batch.lengths.shape[0]
        ids = jnp.full((size, self.num_drafts), PLACEHOLDER_TOKEN_ID, jnp.int32)
        drafted = Drafted(ids, jnp.zeros((size,), jnp.int32))
        return dataclasses.replace(state, proposal=drafted)

    def score(
        self, params: Params, state: DecodeState, prompts: Sequence[Rows] = ()
    ) -> tuple[DecodeState, list[Output]]:
        """Returns what the target says of each request's newest token and drafts.

        Args:
          state: with drafts.
          prompts: one group, or none, that is read in the same pass.

        Returns:
          The state, with the cache of the pass; and the outputs of the drafts and of the prompts.
        """
        drafted = state.proposal
        assert drafted is not None
        batch = state.running
        ids = drafted.token_ids
        start = batch.lengths - 1
        # [R, n] -> [R, n+1]: the newest token, which the target has not run, and the drafts. Where
        # there is no draft token 0 is run: verification ends before the logits of its row.
        newest = jnp.take_along_axis(batch.token_ids, start[:, None], axis=1)
        tokens = jnp.concatenate([newest, jnp.maximum(ids, 0)], axis=1)
        # [R, n] -> depths [R, n+1] and masks [R, n+1, 2] of the nodes, node 0 the newest token
        tree = None if drafted.parents is None else TreeRows.of(drafted.parents)
        # []: slots that do not run may hold long texts, which nobody reads
        max_seen = jnp.max(jnp.where(batch.done, 0, start)) + tokens.shape[1]
        groups = [Rows(tokens, start, drafted.slots, tree, max_seen=max_seen), *prompts]
        length = batch.token_ids.shape[1]
        # A pass may be narrow where nobody has drafts.
        may_be_narrow = self.drafter.serves.may_abstain and self.may_follow_load(tokens.shape[0])
        arrays: Any
        if self.exact:
            arrays = params, groups, state.target_cache
            outputs, cache = traced_for_platform(_run_exact, arrays, self, length)
        elif may_be_narrow and ids.size and not prompts:
            arrays = ids, params, groups[0], state.target_cache
            output, cache = traced_for_platform(_run_as_wide_as_needed, arrays, self, length)
            outputs = [output]
        else:
            outputs, cache = self.run(params, groups, state.target_cache, length)
        return dataclasses.replace(state, target_cache=cache), outputs

    def accept(
        self,
        state: DecodeState,
        scored: Output,
        token_bitmask: jax.Array | None = None,
        is_forced: jax.Array | None = None,
    ) -> tuple[DecodeState, StepRecord]:
        """Checks the drafts by what `score` says, and appends: the second half of `verify`."""
        slots = state.slots
        # [B, ...] -> [R, ...]
        batch = state.running
        # Known tokens are drafts that no drafter made: see `_drafts_of`.
        repeats = batch.repeats
        is_forced = repeats if is_forced is None else is_forced | repeats
        drafts = self.proposals(state, is_forced)
        verdict = self.verdict(state, drafts, scored.logits, token_bitmask)
        # `batch` is now after the step. `state.batch` stays before it until the end: `learned` and
        # `committed` take the lengths and the drafts of the pass from there.
        batch, record = append(batch, verdict.output, verdict.num_proposed, verdict.logprobs)
        state = self.learned(state, drafts, verdict.output, record, is_forced)
        state = self.committed(state, scored.features, verdict.output.path, record.num_kept)
        # [R, ...] -> [B, ...]: the other slots stay as they are, and their records are empty
        num_slots = state.batch.done.shape[0]
        batch = put_slots(state.batch, batch, slots)
        state = dataclasses.replace(state, batch=batch, proposal=None)
        return state, _of_all_slots(record, slots, num_slots)

    def proposals(self, state: DecodeState, is_forced: jax.Array) -> Drafts:
        """Returns the drafts of a state, with what each was drawn from; forced ones without."""
        drafted = state.proposal
        assert drafted is not None
        # [R, n] -> [R*n], one request after another; request b owns n + 1 rows of logits
        drafts = Drafts.from_dense(drafted.token_ids, parents=drafted.parents)
        if state.store is None:
            return drafts
        slots = drafted.slots
        batch = state.running
        # [R] -> [B]: their rows are left out here alone, and the state keeps its store. A row is
        # otherwise valid if it was drawn at this length and temperature.
        is_forced = put_slots(jnp.zeros_like(state.batch.done), is_forced, slots)
        sampling = batch.options.sampling
        return state.store.evict(is_forced).attach_rows(drafts, batch.lengths, sampling, slots)

    def verdict(
        self, state: DecodeState, drafts: Drafts, logits: jax.Array, token_bitmask: jax.Array | None
    ) -> Verdict:
        """Returns what the target accepts of the drafts, and emits after them.

        Args:
          state: whose drafts they are.
          drafts: from `proposals`.
          logits: ``[R, n+1, V]``, of each request's newest token and n drafts.
          token_bitmask: ``[R*(n+1), ceil(V/32)]``, as for `Engine.verify`; None for all tokens.
        """
        batch = state.running
        context = batch.context(self.config)
        # [R, n+1, V] -> [R*(n+1), V]: the last row of a request is that of its bonus token
        logits = logits.reshape(-1, logits.shape[-1])
        call = CallArrays(
            target_logits=context.processed(logits, drafts),
            drafts=drafts,
            # Noise belongs to a key and a position: the first draft's is the length.
            randomness=(batch.keys, batch.lengths),
            sampling=context.sampling,
            active=~batch.done,
            token_bitmask=token_bitmask,
        )
        settings = CallSettings(self.config, sharding=self.model.serves.sharding)
        static = Static.of(call, settings)
        # Tokens [R, K+1], with K of the config, whatever n is; of trees also the nodes they follow
        output = verify(call, static)
        logprobs = None
        if self.logprobs is not None:
            # The rows from before the processors, which are those of the model
            if self.logprobs.distribution == "raw":
                call = dataclasses.replace(call, target_logits=logits)
            logprobs = emitted_logprobs(call, static, output, self.logprobs)
        assert state.proposal is not None
        num_proposed = state.proposal.num_proposed(self.model.vocab_size)
        if self.most_accepted < self.num_drafts:
            # [R, K+1] -> [R, D+1]: a path of a tree has at most D drafts
            output, logprobs = _with_fewer_tokens(output, logprobs, self.most_accepted + 1)
            num_proposed = jnp.minimum(num_proposed, self.most_accepted)
        return Verdict(output, num_proposed, logprobs)

    def committed(
        self,
        state: DecodeState,
        features: jax.Array | None,
        path: jax.Array | None,
        num_kept: jax.Array,
    ) -> DecodeState:
        """Returns the state with what the pass left of the tokens that were kept, and no others.

        Args:
          state: with the cache of the pass, and the batch before it.
          features: ``[R, n+1, A*H]``, of the pass; None if the drafter reads none.
          path: ``[R, P]`` int32, the nodes that were accepted; None for chains.
          num_kept: ``[R]`` int32, tokens that were appended.
        """
        slots = state.slots
        # The cache of a chain holds the tokens where they belong already. What was rejected lies at
        # positions that the next pass overwrites. The nodes of a path have to be moved together.
        if path is not None:
            start = state.batch.lengths - 1
            # [R, P] -> [B, P]: no path of the other slots
            no_paths = jnp.full((*start.shape, path.shape[1]), -1, jnp.int32)
            paths = put_slots(no_paths, path, slots)
            cache = self.model.commit(state.target_cache, start, paths)
            state = dataclasses.replace(state, target_cache=cache)
        if features is None:
            return state
        # [R, n+1, A*H] -> [R, D+1, A*H]: for the next `draft`, as many rows as tokens were kept
        values = _kept_features(features, path, num_kept, self.most_accepted + 1)
        new: Features | None = Features(values, num_kept)
        return dataclasses.replace(state, features=put_slots(state.features, new, slots))

    def learned(
        self,
        state: DecodeState,
        drafts: Drafts,
        output: RejectionSampleOutput,
        record: StepRecord,
        is_forced: jax.Array,
    ) -> DecodeState:
        """Returns the state with counters and rates after one more verification.

        Args:
          state: with the drafts, and the batch before the verification.
          drafts: from `proposals`.
          is_forced: ``[R]`` bool, requests whose drafts no drafter made: nothing is learned of it.
        """
        batch = state.running
        # [R]: not of one that is done or has failed, which emits nothing
        has_own_drafts = (output.num_emitted > 0) & ~is_forced
        # [R]: 0 for what is generated again, which was counted before
        is_new = (~batch.repeats).astype(jnp.int32)
        counters = state.counters.update(
            num_proposed=record.num_proposed * is_new,
            num_accepted=record.num_accepted * is_new,
            num_emitted=record.num_emitted * is_new,
            num_kept=record.num_kept * is_new,
            num_fallbacks=DraftStore.count_fallbacks(
                drafts, sampling=batch.options.sampling, active=has_own_drafts
            ),
        )
        state = dataclasses.replace(state, counters=counters)
        if state.draft_rates is None:
            return state
        assert state.proposal is not None
        # [R]: drafts that might have been made, not those that were. So a lookup that finds nothing
        # counts as a rejection at the first place, and its rate says what a draft would bring.
        offered = jnp.where(has_own_drafts, state.proposal.max_drafts, 0)
        rates = state.draft_rates.update(offered, output.num_accepted, output.path)
        return dataclasses.replace(state, draft_rates=rates)

    def _max_drafts(self, batch: Batch) -> jax.Array:
        """Returns ``[B]`` int32, the most drafts of each request in this step.

        Drafts are not looked at.
        """
        has_no_drafts = batch.done
        if not self.drafts_in_first_step:
            # `prompt_lengths` do not count what a request had generated before it left its slot, so
            # one that comes back with tokens of its own has drafts at once.
            has_no_drafts |= batch.lengths == batch.options.prompt_lengths
        return jnp.where(has_no_drafts, 0, batch.options.max_drafts)


def _run_as_wide_as_needed(
    arrays: tuple[jax.Array, Params, Rows, Cache], decoder: Decoder, length: int, platform: Platform
) -> tuple[Output, Cache]:
    """Returns the target's pass over each newest token, and the drafts if any request has some.

    Only on CPUs: elsewhere a narrow pass takes as long, because it reads the same weights, and on a
    GPU the host waits for the condition.
    """
    ids, params, rows, cache = arrays

    def wide(cache: Cache) -> tuple[Output, Cache]:
        (output,), cache = decoder.run(params, [rows], cache, length)
        return output, cache

    def narrow(cache: Cache) -> tuple[Output, Cache]:
        # [R, n+1] -> [R, 1]: node 0 of a tree is a chain
        newest = rows._replace(token_ids=rows.token_ids[:, :1], tree=None)
        (output,), cache = decoder.run(params, [newest], cache, length)
        # [R, 1, ...] -> [R, n+1, ...], as of a wide pass: rows that are not read hold zeros
        num_missing = ids.shape[1]
        padded = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, num_missing), (0, 0))), output)
        return padded, cache

    # With the old XLA a branch that changes the cache of some slots copies that of all.
    if platform != "cpu" or (rows.slots is not None and HAS_OLD_XLA):
        return wide(cache)
    # [R, n] -> []: proposals end at the first -1, so the first place says whether there are any
    has_drafts = jnp.any(ids[:, 0] >= 0)
    result: tuple[Output, Cache] = lax.cond(has_drafts, wide, narrow, cache)
    return result


def _run_exact(
    arrays: tuple[Params, Sequence[Rows], Cache], decoder: Decoder, length: int, platform: Platform
) -> tuple[list[Output], Cache]:
    """Returns what `Decoder.run` does, by a pass with the rows that exact texts need."""
    params, (rows, *prompts), cache = arrays
    num_rows = rows.token_ids.shape[1]
    missing = decoder.num_rows(platform) - num_rows
    # [R, K+1] -> [R, S]: rows that are not read. They write to the cache past the drafts, where the
    # next pass writes before anything is seen.
    padded = rows._replace(token_ids=jnp.pad(rows.token_ids, ((0, 0), (0, missing))))
    outputs, cache = decoder.run(params, [padded, *prompts], cache, length)
    # [R, S, ...] -> [R, K+1, ...], outside of the pass: else XLA leaves rows out in it
    whole = lax.optimization_barrier(outputs[0])
    outputs[0] = jax.tree.map(lambda x: x[:, :num_rows], whole)
    return outputs, cache


def features_before_last(
    features: jax.Array, lengths: jax.Array, start: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the features of the last token but one of R prompts, and how many there are.

    ``[R, 1, A*H]`` and ``[R]`` int32: 1, or 0 and zeros where the token is not among these, as it
    is not before the last chunk of a prompt. A drafter must not put zeros into its cache.

    Args:
      features: ``[R, P, A*H]``, from position `start` on.
      lengths: ``[R]`` int32, of the prompts.
      start: ``[R]`` int32.
    """
    # [R]: the row of the last token but one, whose next token is known
    row = lengths - 2 - start
    is_here = (row >= 0) & (row < features.shape[1])
    place = jnp.maximum(row, 0)[:, None, None]
    # [R, P, A*H] -> [R, 1, A*H]
    last = jnp.take_along_axis(features, place, axis=1, mode="clip")
    return jnp.where(is_here[:, None, None], last, 0), is_here.astype(jnp.int32)


def _kept_features(
    features: jax.Array, path: jax.Array | None, num_kept: jax.Array, most: int
) -> jax.Array:
    """Returns ``[R, most, A*H]``, features of the rows whose tokens were kept; zeros after them.

    Of ``features [R, n+1, A*H]`` these are the rows of ``path [R, P]``, or without it the first
    ``num_kept [R]``; most is D + 1.
    """
    if path is not None:
        # [R, n+1, A*H] -> [R, P, A*H]: -1 after the end of a path reads row 0, which is not kept
        features = jnp.take_along_axis(features, jnp.maximum(path, 0)[:, :, None], axis=1)
    # [R, P or n+1, A*H] -> [R, most, A*H], the same for every n
    missing = most - features.shape[1]
    if missing < 0:  # no tree: tokens past the first `most` were left out
        features = features[:, :missing]
    if missing > 0:
        features = jnp.pad(features, ((0, 0), (0, missing), (0, 0)))
    # [1, most, 1] < [R, 1, 1]: rows that were not kept may be NaN
    row = jnp.arange(most, dtype=jnp.int32)[None, :, None]
    return jnp.where(row < num_kept[:, None, None], features, 0)


def _with_fewer_tokens(
    output: RejectionSampleOutput, found: TokenLogprobs | None, most: int
) -> tuple[RejectionSampleOutput, TokenLogprobs | None]:
    """Returns the output and log-probabilities of the first `most` tokens of each request.

    No tree is so deep, but a chain of drafts that a grammar forces may be. Under the agreement rule
    the next step draws the same tokens.
    """
    short = RejectionSampleOutput(
        token_ids=output.token_ids[:, :most],
        num_accepted=jnp.minimum(output.num_accepted, most - 1),
        num_emitted=jnp.minimum(output.num_emitted, most),
        status=output.status,
        path=None if output.path is None else output.path[:, :most],
    )
    return short, jax.tree.map(lambda x: x[:, :most], found)


def _of_all_slots(record: StepRecord, slots: jax.Array | None, num_slots: int) -> StepRecord:
    """Returns the record of all slots, of that of some: the others have kept nothing."""
    if slots is None:
        return record
    # [R, ...] -> [B, ...]: counts of 0 where nothing was done
    nothing = jax.tree.map(lambda x: jnp.zeros((num_slots, *x.shape[1:]), x.dtype), record)
    full = put_slots(nothing, record, slots)
    # [B, D+1]: but 0 is an id, and a log-probability, so these become -1 and NaN
    offset = jnp.arange(full.token_ids.shape[1], dtype=jnp.int32)[None, :]
    is_kept = offset < full.num_kept[:, None]
    return dataclasses.replace(
        full,
        token_ids=jnp.where(is_kept, full.token_ids, PLACEHOLDER_TOKEN_ID),
        logprobs=None if full.logprobs is None else full.logprobs.where(is_kept),
    )
