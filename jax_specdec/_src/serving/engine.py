"""Continuous batching as pure functions: requests come and go in a fixed number of slots."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_specdec._src import noise
from jax_specdec._src.config import SpecDecodeConfig, check_int
from jax_specdec._src.drafting.drafter import Drafter, Proposal
from jax_specdec._src.models.protocol import CausalModel, check_model
from jax_specdec._src.serving import inputs
from jax_specdec._src.serving import step as step_lib
from jax_specdec._src.serving.admission import check_reads_pieces, draft_if, read_prompt
from jax_specdec._src.serving.batch import Batch, StepRecord
from jax_specdec._src.serving.engine_state import EngineState, forget_drafts
from jax_specdec._src.serving.metrics import AcceptanceCounters
from jax_specdec._src.serving.options import (
    BatchOptions,
    LogprobsConfig,
    RequestOptions,
    check_logprobs,
)
from jax_specdec._src.serving.slots import insert, insert_rows
from jax_specdec._src.types import PLACEHOLDER_TOKEN_ID, Status

_SMALLEST_PREFILL = 32


@dataclasses.dataclass(frozen=True)
class Engine:
    """A serving engine's static half: models, settings and sizes, and pure functions of a state.

    A step verifies the drafts of every occupied slot in one pass of the target, and drafts for the
    next step. Between steps requests are admitted to slots and taken out of them. All shapes are
    fixed, so each function is compiled once (`admit` once per length that `pad_prompt` gives). A
    request's tokens depend on its prompt, parameters and key alone: not on its slot, nor on who
    else is there, nor on whether it left its slot and came back (`admit` says when).

    Hashable, compared by value: give it to `jax.jit` as a static argument. `EngineDriver` is a
    small host loop around it.

    Attributes:
      model: the target.
      drafter: what proposes tokens.
      config: how they are verified.
      num_slots: S, requests served at a time.
      max_length: the most tokens of a request, prompt and new ones together; at least 2.
      prefill_sizes: lengths to which prompts are padded, increasing, at most `max_length`; None for
        powers of two from 32 on, and `max_length`. A longer prompt, or a request that comes back
        longer, is read in pieces of the last size.
      max_stop_tokens: M, the most stop tokens of a request.
      request_options: whether requests may have `RequestOptions`. If so every step makes room for
        them, whether or not a request asks for any.
      logprobs: which log-probabilities the record of a step has; None for none.

    Raises:
      TypeError: a field of another type, or the drafter cannot read in pieces where it has to.
      ValueError: a size is too small, or `prefill_sizes` not as described.

    Example:
      One request through the functions, by hand; `EngineDriver` does this for you:

      >>> import jax, jax.numpy as jnp
      >>> import jax_specdec as sd
      >>> _, (model, params) = sd.load_embedded_pair()  # the smaller one
      >>> engine = sd.Engine(
      ...     model, sd.NGramDrafter(), sd.SpecDecodeConfig(num_speculative_tokens=2),
      ...     num_slots=2, max_length=32)
      >>> admit = jax.jit(engine.admit, donate_argnums=2)
      >>> step = jax.jit(engine.step, donate_argnums=2)
      >>> prompt = engine.pad_prompt(sd.encode("import "))
      >>> state = admit(
      ...     params, None, engine.init_state(), slot=0, prompt=prompt, prompt_length=7,
      ...     max_new_tokens=4, temperature=0.0, key=jax.random.key(0),
      ...     stop_token_ids=jnp.full((8,), -1))
      >>> while not state.batch.done.all():
      ...     state, record = step(params, None, state)
      >>> int(state.batch.lengths[0])
      11
    """

    model: CausalModel
    drafter: Drafter
    config: SpecDecodeConfig
    _: dataclasses.KW_ONLY
    num_slots: int
    max_length: int
    prefill_sizes: tuple[int, ...] | None = None
    max_stop_tokens: int = 8
    request_options: bool = False
    logprobs: LogprobsConfig | None = None

    def __post_init__(self) -> None:
        check_model("model", self.model)
        inputs.drafting(self.drafter, self.config)
        check_logprobs(self.logprobs)
        check_int("num_slots", self.num_slots, 1)
        longest = check_int("max_length", self.max_length, 2)
        check_int("max_stop_tokens", self.max_stop_tokens, 0)
        if self.prefill_sizes is None:
            sizes = [_SMALLEST_PREFILL]
            while sizes[-1] < longest:
                sizes.append(2 * sizes[-1])
            sizes[-1] = longest
            object.__setattr__(self, "prefill_sizes", tuple(sizes))
            return
        given = tuple(
            check_int(f"prefill_sizes[{i}]", size, 1) for i, size in enumerate(self.prefill_sizes)
        )
        if not given or list(given) != sorted(set(given)) or given[-1] > longest:
            raise ValueError(
                f"prefill_sizes must increase up to at most max_length={longest}, but they are "
                f"{given}"
            )
        if given[-1] < longest:
            check_reads_pieces(self.drafter, given[-1])
        object.__setattr__(self, "prefill_sizes", given)

    @property
    def buffer_length(self) -> int:
        """L, positions per slot: a step writes up to K + 1 tokens past what is kept."""
        return self.max_length + self.config.num_speculative_tokens + 1

    @property
    def prompt_sizes(self) -> tuple[int, ...]:
        """Lengths of padded prompts, for each of which `admit` is compiled once."""
        assert self.prefill_sizes is not None
        return tuple(sorted({*self.prefill_sizes, self.max_length}))

    def pad_prompt(self, prompt: list[int]) -> np.ndarray:
        """The prompt ``[P]`` int32, padded to the least of `prompt_sizes` that holds it.

        Raises:
          ValueError: longer than `max_length`.
        """
        size = next((n for n in self.prompt_sizes if n >= len(prompt)), None)
        if size is None:
            raise ValueError(
                f"prompt must hold at most max_length={self.max_length} tokens, but it holds "
                f"{len(prompt)}"
            )
        return np.array(prompt + [0] * (size - len(prompt)), np.int32)

    def _options(
        self, options: list[RequestOptions], prompt_lengths: list[int]
    ) -> BatchOptions | None:
        if not self.request_options:
            return None
        v = self.model.vocab_size
        return BatchOptions.create(options, prompt_lengths, v, keep_neutral=True)

    def options_of(self, options: RequestOptions, prompt_length: int) -> BatchOptions | None:
        """What `admit` takes for one request.

        Args:
          options: what it asks for.
          prompt_length: its own prompt's, without what it generated before it was preempted.

        Raises:
          ValueError: an allowed id outside the vocabulary, or this engine has no
            `request_options` and something is asked for.
        """
        if not (self.request_options or options.is_neutral):
            raise ValueError(
                f"options need an Engine with request_options=True, but they are {options}"
            )
        return jax.tree.map(lambda x: x[0], self._options([options], [prompt_length]))

    def init_state(self, draft_params: Any = None) -> EngineState:
        """All slots empty.

        Args:
          draft_params: the drafter's weights; their shapes are all that is used.
        """
        s, k = self.num_slots, self.config.num_speculative_tokens
        one = jnp.ones((s,), jnp.int32)
        batch = Batch(
            token_ids=jnp.zeros((s, self.buffer_length), jnp.int32),
            lengths=one,  # every slot takes part in every pass, so it needs a token
            ends=one + 0,
            done=jnp.ones((s,), bool),
            temperature=jnp.zeros((s,), jnp.float32),
            keys=noise.threefry_keys(jnp.full((s,), jax.random.key(0))),
            stop_token_ids=jnp.full((s, self.max_stop_tokens), PLACEHOLDER_TOKEN_ID, jnp.int32),
            status=jnp.full((s,), int(Status.OK), jnp.int32),
            options=jax.tree.map(jnp.asarray, self._options([RequestOptions()] * s, [1] * s)),
        )
        return EngineState(
            batch=batch,
            target_cache=self.model.init_cache(s, self.buffer_length),
            draft_cache=self.drafter.init_cache(s, self.buffer_length),
            draft_token_ids=jnp.full((s, k), PLACEHOLDER_TOKEN_ID, jnp.int32),
            store=self.drafter.init_store(draft_params, s, self.config),
            counters=AcceptanceCounters.create(k),
        )

    def admit(
        self,
        params: Any,
        draft_params: Any,
        state: EngineState,
        *,
        slot: jax.Array,
        prompt: jax.Array,
        prompt_length: jax.Array,
        max_new_tokens: jax.Array,
        temperature: jax.Array,
        key: jax.Array,
        stop_token_ids: jax.Array,
        options: BatchOptions | None = None,
        resume: jax.Array | bool = False,
    ) -> EngineState:
        """Put a request into a slot, over whatever is there, and let both models read its prompt.

        Its first step has no drafts; it emits one token and drafts for the next.

        A request that has left its slot comes back with its tokens so far for a prompt. Once it has
        emitted some, say `resume`: it drafts again for the position where it stands, with the same
        noise, and goes on as if it had never left. Its tokens are the same if the logits of both
        models do not depend on how tokens were cut into calls. Float32 sums do in their last bits,
        so a tie may go the other way. What a drafter has learned besides, and cannot rebuild in
        `prefill`, is lost.

        Args:
          params: the target's weights.
          draft_params: the drafter's weights.
          state: donated.
          slot: ``[]`` int32 in [0, S).
          prompt: ``[P]`` int32, as `pad_prompt` gives it; each P is compiled once.
          prompt_length: ``[]`` int32, at least 1.
          max_new_tokens: ``[]`` int32, at least 1; with the prompt at most `max_length`.
          temperature: ``[]`` float32.
          key: ``[]`` typed key of two or four words.
          stop_token_ids: ``[M]`` int32, padded with -1.
          options: from `options_of`; None for an engine without `request_options`.
          resume: ``[]`` bool, whether to draft at once.

        Returns:
          The state.

        Raises:
          ValueError: shapes that do not fit, or a cache without an axis that holds the requests.
        """
        size, m = self.buffer_length, self.max_stop_tokens
        slot = jnp.asarray(slot, jnp.int32)
        prompt, length = jnp.asarray(prompt, jnp.int32), jnp.asarray(prompt_length, jnp.int32)
        stops = jnp.asarray(stop_token_ids, jnp.int32)
        if prompt.ndim != 1 or not 1 <= prompt.shape[0] <= size:
            raise ValueError(f"prompt must be [P] with P in [1, {size}], but it is {prompt.shape}")
        if stops.shape != (m,):
            raise ValueError(f"stop_token_ids must have shape [{m}], but it has {stops.shape}")

        assert self.prefill_sizes is not None
        target_cache, draft_cache = read_prompt(
            self.model,
            self.drafter,
            params,
            draft_params,
            prompt,
            length,
            piece=min(self.prefill_sizes[-1], prompt.shape[0]),
            max_length=size,
        )
        row = jnp.zeros((size,), jnp.int32)
        new = Batch(
            token_ids=lax.dynamic_update_slice(row, prompt, (jnp.int32(0),)),
            lengths=length,
            ends=length + jnp.asarray(max_new_tokens, jnp.int32),
            done=jnp.bool_(False),
            temperature=jnp.asarray(temperature, jnp.float32),
            keys=noise.threefry_keys(key),
            stop_token_ids=stops,
            status=jnp.int32(Status.OK),
            options=options,
        )
        resume = jnp.asarray(resume, bool)
        proposal, draft_cache = draft_if(
            resume,
            self.drafter,
            draft_params,
            new,
            draft_cache,
            self.config,
            self.model.vocab_size,
        )
        here = jnp.arange(self.num_slots, dtype=jnp.int32) == slot
        state = dataclasses.replace(
            forget_drafts(state, here),
            batch=jax.tree.map(lambda all_, one: all_.at[slot].set(one), state.batch, new),
            target_cache=insert(
                self.model.init_cache, state.target_cache, target_cache, slot, size
            ),
            draft_cache=insert(self.drafter.init_cache, state.draft_cache, draft_cache, slot, size),
        )
        ids = jnp.where((here & resume)[:, None], proposal.token_ids, state.draft_token_ids)
        store = state.store
        if store is not None and proposal.store is not None:
            store = insert_rows(store, proposal.store, slot, resume)
        return dataclasses.replace(state, draft_token_ids=ids, store=store)

    def step(
        self, params: Any, draft_params: Any, state: EngineState
    ) -> tuple[EngineState, StepRecord]:
        """`verify`, then `draft`: at least one token for every occupied slot.

        Args:
          params: the target's weights.
          draft_params: the drafter's weights.
          state: donated.

        Returns:
          The state, whose ``batch.done`` and ``batch.status`` say which requests have ended and
          why, and the record of the step.
        """
        state, record = self.verify(params, state)
        return self.draft(draft_params, state), record

    def verify(self, params: Any, state: EngineState) -> tuple[EngineState, StepRecord]:
        """Verify the drafts at hand, and keep what was emitted.

        Args:
          params: the target's weights.
          state: donated.

        Returns:
          The state, without drafts, and the record of the step.
        """
        batch, target_cache, record, num_fallbacks = step_lib.verify(
            self.model,
            params,
            state.batch,
            state.target_cache,
            Proposal(state.draft_token_ids, state.store),
            self.config,
            self.logprobs,
        )
        counters = state.counters.update(
            num_proposed=record.num_proposed,
            num_accepted=record.num_accepted,
            num_emitted=record.num_emitted,
            num_fallbacks=num_fallbacks,
        )
        state = dataclasses.replace(
            state,
            batch=batch,
            target_cache=target_cache,
            draft_token_ids=jnp.full_like(state.draft_token_ids, PLACEHOLDER_TOKEN_ID),
            counters=counters,
        )
        return state, record

    def draft(self, draft_params: Any, state: EngineState) -> EngineState:
        """Draft for the next step. A step may do without: then it emits one token per request.

        Args:
          draft_params: the drafter's weights.
          state: donated.

        Returns:
          The state, with drafts.
        """
        proposal, draft_cache = step_lib.draft(
            self.drafter,
            draft_params,
            state.batch,
            state.draft_cache,
            state.store,
            self.config,
            self.model.vocab_size,
        )
        state = dataclasses.replace(
            state,
            draft_cache=draft_cache,
            draft_token_ids=proposal.token_ids,
            store=proposal.store,
        )
        return forget_drafts(state, state.batch.done)

    def release(self, state: EngineState, slots: jax.Array) -> EngineState:
        """Empty some slots: their requests emit nothing more. Not needed for those that are done.

        Args:
          state: donated.
          slots: ``[S]`` bool.

        Returns:
          The state.
        """
        batch = dataclasses.replace(state.batch, done=state.batch.done | slots)
        return forget_drafts(dataclasses.replace(state, batch=batch), slots)
