"""Continuous batching as pure functions: requests come and go in a fixed number of slots."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_specdec._src import noise
from jax_specdec._src.config import SpecDecodeConfig, check_int
from jax_specdec._src.drafting.drafter import Drafter
from jax_specdec._src.models.protocol import CausalModel, check_model
from jax_specdec._src.serving import inputs
from jax_specdec._src.serving.batch import Batch, StepRecord
from jax_specdec._src.serving.core import Decoder, DecodeState
from jax_specdec._src.serving.options import (
    BatchOptions,
    LogprobsConfig,
    OptionSizes,
    RequestOptions,
    check_logprobs,
)
from jax_specdec._src.types import Status

_SMALLEST_PREFILL = 32


@dataclasses.dataclass(frozen=True)
class Engine:
    """A serving engine's static half: models, settings and sizes, and pure functions of a state.

    A step drafts for every occupied slot, and verifies all drafts in one pass of the target.
    Between steps requests are admitted to slots and taken out of them. All shapes are
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
      request_options: whether requests may ask for more than a temperature, a budget, stop tokens
        and a seed. What no running request asks for is then not computed.
      option_sizes: the most of each that a request may ask for.
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
      >>> options = engine.options_of(sd.RequestOptions(max_new_tokens=4), prompt_length=7)
      >>> state = admit(
      ...     params, None, engine.init_state(), slot=0, prompt=prompt, length=7,
      ...     key=jax.random.key(0), options=options)
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
    option_sizes: OptionSizes = OptionSizes()
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
            _check_reads_pieces(self.drafter, given[-1])
        object.__setattr__(self, "prefill_sizes", given)

    @property
    def decoder(self) -> Decoder:
        """The step of this engine; a request's first one has no drafts."""
        return Decoder(self.model, self.drafter, self.config, self.logprobs, drafts_at_once=False)

    @property
    def buffer_length(self) -> int:
        """Positions per slot, L; a step writes up to K + 1 tokens past what is kept."""
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

    def options_of(self, options: RequestOptions, prompt_length: int) -> BatchOptions:
        """What `admit` takes for one request, however often it comes back.

        Args:
          options: what it asks for.
          prompt_length: its own prompt's, without what it generated before it was preempted.

        Raises:
          ValueError: an id outside the vocabulary, too many stop tokens, or this engine has no
            `request_options` and more is asked for.
        """
        if not (self.request_options or options.is_neutral):
            raise ValueError(
                f"options need an Engine with request_options=True, but they are {options.asked}"
            )
        return jax.tree.map(lambda x: x[0], self._arrays([options], [prompt_length]))

    def _arrays(self, options: list[RequestOptions], prompt_lengths: list[int]) -> BatchOptions:
        return BatchOptions.create(
            options,
            prompt_lengths,
            self.model.vocab_size,
            max_stop_tokens=self.max_stop_tokens,
            keep_neutral=self.request_options,
            sizes=self.option_sizes,
        )

    def init_state(self, draft_params: Any = None) -> DecodeState:
        """All slots empty.

        Args:
          draft_params: the drafter's weights; their shapes are all that is used.
        """
        s = self.num_slots
        options = self._arrays([RequestOptions()] * s, [1] * s)
        batch = Batch(
            token_ids=jnp.zeros((s, self.buffer_length), jnp.int32),
            lengths=jnp.ones((s,), jnp.int32),  # every slot takes part, so it needs a token
            done=jnp.ones((s,), bool),
            status=jnp.full((s,), int(Status.OK), jnp.int32),
            keys=noise.threefry_keys(jnp.full((s,), jax.random.key(0))),
            options=jax.tree.map(jnp.asarray, options),
        )
        return self.decoder.init_state(draft_params, batch)

    def admit(
        self,
        params: Any,
        draft_params: Any,
        state: DecodeState,
        *,
        slot: jax.Array,
        prompt: jax.Array,
        length: jax.Array,
        key: jax.Array,
        options: BatchOptions,
    ) -> DecodeState:
        """Put a request into a slot, over whatever is there, and let both models read its prompt.

        Its first step has no drafts and emits one token.

        A request that has left its slot comes back with its tokens so far for a prompt. If it has
        emitted some, its next step has drafts, with the same noise: it goes on as if it had never
        left. Its tokens are the same if the logits of both models do not depend on how tokens were
        cut into calls. Float32 sums do in their last bits, so a tie may go the other way. What a
        drafter has learned besides, and cannot rebuild in `prefill`, is lost.

        Args:
          params: the target's weights.
          draft_params: the drafter's weights.
          state: donated.
          slot: ``[]`` int32 in [0, S).
          prompt: ``[P]`` int32, as `pad_prompt` gives it; each P is compiled once.
          length: ``[]`` int32, how many of them there are, at least 1.
          key: ``[]`` typed key of two or four words.
          options: from `options_of`; prompt and budget are at most `max_length` together.

        Returns:
          The state.

        Raises:
          ValueError: shapes that do not fit, or a cache without an axis that holds the requests.
        """
        size, m = self.buffer_length, self.max_stop_tokens
        slot, length = jnp.asarray(slot, jnp.int32), jnp.asarray(length, jnp.int32)
        prompt = jnp.asarray(prompt, jnp.int32)
        if prompt.ndim != 1 or not 1 <= prompt.shape[0] <= size:
            raise ValueError(f"prompt must be [P] with P in [1, {size}], but it is {prompt.shape}")
        stops = jnp.shape(options.stop_token_ids)
        if stops != (m,):
            raise ValueError(
                f"options.stop_token_ids must have shape [{m}], but it has {stops}: options_of "
                "gives what admit takes"
            )
        target_cache, draft_cache = self._read_prompt(params, draft_params, prompt, length)
        new = Batch(
            token_ids=jnp.zeros((size,), jnp.int32).at[: prompt.shape[0]].set(prompt),
            lengths=length,
            done=jnp.bool_(False),
            status=jnp.int32(Status.OK),
            keys=noise.threefry_keys(key),
            options=options,
        )
        here = jnp.arange(self.num_slots, dtype=jnp.int32) == slot
        return dataclasses.replace(
            state.without_drafts(here),
            batch=jax.tree.map(lambda all_, one: all_.at[slot].set(one), state.batch, new),
            target_cache=insert(
                self.model.init_cache, state.target_cache, target_cache, slot, size
            ),
            draft_cache=insert(self.drafter.init_cache, state.draft_cache, draft_cache, slot, size),
        )

    def _read_prompt(
        self, params: Any, draft_params: Any, prompt: jax.Array, length: jax.Array
    ) -> tuple[Any, Any]:
        """Caches of one request, filled by both models with its prompt.

        A prompt longer than the last of `prefill_sizes` is read in pieces of that many tokens, as
        many as hold its `length`. The last piece begins early enough not to reach past P.
        """
        assert self.prefill_sizes is not None
        model, drafter = self.model, self.drafter
        piece = min(self.prefill_sizes[-1], prompt.shape[0])
        target_cache = model.init_cache(1, self.buffer_length)
        draft_cache = drafter.init_cache(1, self.buffer_length)
        last = prompt.shape[0] - piece
        if last <= 0:
            start = jnp.zeros((1,), jnp.int32)
            _, target_cache = model.apply(params, prompt[None, :], start, target_cache)
            return target_cache, drafter.prefill(draft_params, prompt[None, :], draft_cache)

        def read(carry: tuple[jax.Array, Any, Any]) -> tuple[jax.Array, Any, Any]:
            count, target_cache, draft_cache = carry
            start = jnp.minimum(count * piece, last)
            tokens = lax.dynamic_slice(prompt, (start,), (piece,))[None, :]
            _, target_cache = model.apply(params, tokens, start[None], target_cache)
            draft_cache = drafter.prefill(draft_params, tokens, draft_cache, start=start[None])
            return count + 1, target_cache, draft_cache

        _, target_cache, draft_cache = lax.while_loop(
            lambda carry: carry[0] * piece < length,
            read,
            (jnp.int32(0), target_cache, draft_cache),
        )
        return target_cache, draft_cache

    def step(
        self, params: Any, draft_params: Any, state: DecodeState
    ) -> tuple[DecodeState, StepRecord]:
        """`draft`, then `verify`: at least one token for every occupied slot.

        Args:
          params: the target's weights.
          draft_params: the drafter's weights.
          state: donated.

        Returns:
          The state, whose ``batch.done`` and ``batch.status`` say which requests have ended and
          why, and the record of the step.
        """
        return self.decoder.step(params, draft_params, state)

    def draft(self, draft_params: Any, state: DecodeState) -> DecodeState:
        """The first half of `step`: K drafts for every occupied slot, but for new requests.

        Args:
          draft_params: the drafter's weights.
          state: donated.

        Returns:
          The state, with drafts.
        """
        return self.decoder.draft(draft_params, state)

    def verify(self, params: Any, state: DecodeState) -> tuple[DecodeState, StepRecord]:
        """The second half of `step`. Without drafts a slot gets one token.

        Args:
          params: the target's weights.
          state: donated.

        Returns:
          The state, without drafts, and the record of the step.
        """
        return self.decoder.verify(params, state)

    def release(self, state: DecodeState, slots: jax.Array) -> DecodeState:
        """Empty some slots: their requests emit nothing more. Not needed for those that are done.

        Args:
          state: donated.
          slots: ``[S]`` bool.

        Returns:
          The state.
        """
        batch = dataclasses.replace(state.batch, done=state.batch.done | slots)
        return dataclasses.replace(state.without_drafts(slots), batch=batch)


def insert(
    init_cache: Callable[[int, int], Any], cache: Any, one: Any, slot: jax.Array, max_length: int
) -> Any:
    """`cache` with everything of `slot` replaced by a cache of one request; in place if donated.

    Which axis holds the requests is found by asking for caches of one and of two.

    Args:
      init_cache: of a model or a drafter.
      cache: of S requests.
      one: of one request.
      slot: ``[]`` int32.
      max_length: of both caches.

    Raises:
      ValueError: an array has no such axis, or more than one.
    """
    shapes = [jax.eval_shape(lambda n=n: init_cache(n, max_length)) for n in (1, 2)]

    def put(path: Any, single: Any, double: Any, all_: jax.Array, new: jax.Array) -> jax.Array:
        pairs = enumerate(zip(single.shape, double.shape, strict=True))
        axes = [(axis, size) for axis, (size, larger) in pairs if larger != size]
        if len(axes) != 1 or double.shape[axes[0][0]] != 2 * axes[0][1]:
            raise ValueError(
                f"cache{jax.tree_util.keystr(path)} must have one axis that holds the requests, "
                f"equally much of each, but its shape is {single.shape} for one request and "
                f"{double.shape} for two"
            )
        ((axis, size),) = axes
        start = [jnp.int32(0)] * all_.ndim
        start[axis] = slot * size
        return lax.dynamic_update_slice(all_, new, start)

    return jax.tree.map_with_path(put, *shapes, cache, one)


def _check_reads_pieces(drafter: Drafter, piece: int) -> None:
    """Refuse a drafter that cannot begin to read anywhere but at position 0.

    Raises:
      TypeError: its `prefill` takes no `start`.
    """
    signature = inspect.signature(drafter.prefill)
    try:
        signature.bind(None, None, None, start=None)
    except TypeError:
        raise TypeError(
            f"drafter must have a prefill that takes start, because prompts longer than "
            f"prefill_sizes[-1]={piece} are read in pieces, but {type(drafter).__name__}.prefill "
            f"takes {signature}"
        ) from None
