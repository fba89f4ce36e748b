"""`Engine`: continuous batching as pure functions of a state with a fixed number of slots.

`admit` reads prompts (`NewRequests`) into slots, `step` drafts and verifies for all requests in
slots, and `release` empties slots. Every shape is fixed by the engine's sizes, so each function is
compiled once for each shape that it is called with. The step itself is that of `Decoder`. What is
added here is who is in which slot, and what may be read when. `programs` has the compiled forms,
`EngineDriver` the loop on the host, and `schedule.plan` says what that calls next.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jax_specdec._src.base import noise
from jax_specdec._src.base.arrays import (
    check_array,
    check_increasing,
    check_int,
    check_type,
    pytree,
    require,
)
from jax_specdec._src.base.types import Status
from jax_specdec._src.drafts.rates import DraftRates
from jax_specdec._src.stats.emitted import StepRecord
from jax_specdec.lm.decoding import inputs
from jax_specdec.lm.decoding.batch import Batch, round_up
from jax_specdec.lm.decoding.core import Decoder, features_before_last
from jax_specdec.lm.decoding.exact import check_exact, check_free_text
from jax_specdec.lm.decoding.options import OptionSizes, RequestOptions
from jax_specdec.lm.decoding.packing import BatchOptions
from jax_specdec.lm.decoding.state import DecodeState
from jax_specdec.lm.models.protocol import (
    Params,
    Rows,
    check_batch_axis,
    check_cache,
    check_model,
    check_params,
)

# Without `prefill_sizes`: the least size of prompts, and the one size of an exact engine.
_SMALLEST_PREFILL = 32
_EXACT_PREFILL = 128
_MAX_GROUP_TOKENS = 512
"""A call with more than a few hundred tokens (300 on an H100, in bfloat16) is bound by arithmetic,
not by reading the weights: reading prompts together then gains little."""


@pytree(
    slots="[R] int32",
    prompts="[R, P] int32",
    lengths="[R] int32",
    keys="[R]",
    options=(BatchOptions,),
    start="[R] int32",
    next_token_ids="[R] int32",
    known_token_ids="[R, T] int32",
)
@dataclasses.dataclass(frozen=True)
class NewRequests:
    """R requests that go into slots. Their shapes, R and P, are compiled for once.

    To admit fewer than R requests, repeat one of them, with its slot.

    Attributes:
      slots: ``[R]`` int32 in [0, S).
      prompts: ``[R, P]`` int32, from `Engine.pad_prompt`; or P tokens of each prompt from `start`
        on, with padding after its last.
      lengths: ``[R]`` int32, tokens of each whole prompt without its padding; at least 1.
      keys: ``[R]`` typed keys of two or four words; or ``[R]`` uint32 seeds, for which the keys
        are ``jax.random.key(seed)``.
      options: from `Engine.options_of`. Prompt and budget together are at most `max_length`.
      start: ``[R]`` int32, the position of each prompt's first token in `prompts`: all before it
        were read by earlier calls, for the same slots. None for 0.
      next_token_ids: ``[R]`` int32, the token that follows `prompts`; any id where none does. None
        where the prompts are whole.
      known_token_ids: ``[R, T]`` int32, T = `max_length`: of an exact engine, the prompt and what
        was generated before, then -1; None for others, and where nothing was.

    Example: see `Engine`.
    """

    slots: jax.Array
    prompts: jax.Array
    lengths: jax.Array
    keys: jax.Array
    options: BatchOptions
    start: jax.Array | None = None
    next_token_ids: jax.Array | None = None
    known_token_ids: jax.Array | None = None

    @property
    def rows(self) -> Rows:
        """The tokens that are read, and where they go."""
        token_ids = jnp.asarray(self.prompts, jnp.int32)
        start = jnp.asarray(self._or_zeros(self.start), jnp.int32)
        return Rows(
            token_ids=token_ids,
            start=start,
            slots=jnp.asarray(self.slots, jnp.int32),
            max_seen=jnp.max(start) + token_ids.shape[1],
        )

    def _or_zeros(self, values: jax.Array | None) -> jax.Array:
        """Returns values ``[R]``; zeros if they are None."""
        return jnp.zeros(jnp.shape(self.slots), jnp.int32) if values is None else values


@dataclasses.dataclass(frozen=True)
class Engine(Decoder):
    """The static half of a serving engine: models, settings, sizes, and pure functions of a state.

    A step drafts for every occupied slot and verifies all drafts in one pass of the target.
    Between steps, requests enter slots and leave them. All shapes are fixed, so each function is
    compiled once (`admit` once for each of `admit_shapes`). A request's tokens depend only on its
    prompt, parameters and key: not on its slot, not on its neighbours, and not on whether it left
    its slot and came back (`admit` has the details), near ties of float32 sums aside where steps
    are of some slots alone.

    Hashable and compared by value, so that it can be a static argument of `jax.jit`.
    `EngineDriver` is a host loop around it.

    Attributes:
      model: the target.
      drafter: what proposes tokens.
      config: how they are verified.
      num_slots: S, the most requests that are served at a time.
      max_length: the most tokens of a request, prompt and new ones together; at least 2.
      prefill_sizes: lengths that prompts are padded to, increasing, at most `max_length`. None
        stands for powers of two from 32 on, and `max_length`. The last of them is the most tokens
        that one call reads; a longer prompt is read in chunks of that size, and while other
        requests run, of `EngineDriver.chunk_size`.
      max_prefill_requests: the most prompts of one size that a call of `admit` reads.
      max_stop_tokens: M, the most stop tokens of a request.
      request_options: whether requests may ask for more than a temperature, a budget, stop tokens,
        a seed and a limit of drafts. What no running request asks for is not computed.
      option_sizes: the most of each option that a request may ask for.
      logprobs: which log-probabilities the record of a step has; None for none.
      draft_budget: numbers of drafts per request that a step may have, increasing, from 0 to K,
        such as ``(0, 1, 2, 4)``. A step is compiled for each, and `EngineDriver` chooses the one
        that pays best (see `StepCosts`). How a text is divided into steps then depends on the load,
        so greedy text stays as it is, and sampled text is another sample of the same distribution.
        The rows of a pass follow the load, too, and on a CPU how much of the cache attention reads:
        near ties of float32 sums may be decided otherwise.
        None for K drafts in every step. Of a drafter that proposes trees, a step has the so many
        best drafts of each tree, such as ``(0, 8, 16, 32)``, and all text stays as it is, because
        only the agreement rule verifies trees.
      exact: texts are functions of the prompt, options and key alone, to the last bit of their
        log-probabilities, for one such engine: whatever is drafted, also nothing, whoever is beside
        a request, in whatever slot, preempted or not. Requests must be greedy, or the rule
        agreement. All passes over drafts have as many rows, and prompts are read by one program,
        `prefill_sizes` of one size, in chunks that begin at its multiples.
      prefix_caching: a slot that becomes free keeps what both caches hold, and an `EngineDriver`
        reads of a new prompt only what follows the longest beginning that it shares with a text in
        a slot. A text that goes on stays in its slot; of one that only begins alike, also of a
        request that runs, the slot is copied. Nothing is taken over below 32 tokens. Texts are the
        same, near ties of float32 sums aside; of an exact engine to the last bit, because it takes
        over whole chunks of prompts alone. The drafter must declare what of its cache another
        request may begin with (`DrafterServes.kept_rows`). The time to a first token then shows
        whether somebody asked for the same: `RequestOptions.cache_salt` keeps clients apart.

    Raises:
      TypeError: a field has another type, or the drafter cannot read prompts in chunks where it
        has to, or keeps no rows where `prefix_caching` are on.
      ValueError: a size is too small, or `prefill_sizes` are not as described; `exact` with trees,
        with the synthetic rule, with logits that are split over devices, or with several
        `prefill_sizes`; `prefix_caching` with a model whose cache has arrays that hold fewer
        positions than a text, or none.

    Example:
      One request, step by step; `EngineDriver` does this for you:

      >>> import jax, jax.numpy as jnp
      >>> import jax_specdec as sd
      >>> from jax_specdec import lm
      >>> _, (model, params) = lm.load_embedded_pair()  # the smaller one
      >>> engine = lm.Engine(
      ...     model, lm.NGramDrafter(), sd.SpecDecodeConfig(num_speculative_tokens=2),
      ...     num_slots=2, max_length=32)
      >>> admit = jax.jit(engine.admit, donate_argnums=2)
      >>> step = jax.jit(engine.step, donate_argnums=2)
      >>> prompt = engine.pad_prompt(lm.encode_bytes("import "))
      >>> options = engine.options_of([lm.RequestOptions(max_new_tokens=4)], prompt_lengths=[7])
      >>> requests = lm.NewRequests(
      ...     slots=jnp.array([0]), prompts=prompt[None], lengths=jnp.array([7]),
      ...     keys=jax.random.split(jax.random.key(0), 1), options=options)
      >>> state = admit(params, None, engine.init_state(), requests)
      >>> while not state.batch.done.all():
      ...     state, record = step(params, None, state)
      >>> int(state.batch.lengths[0])
      11
    """

    drafts_in_first_step: ClassVar[bool] = False
    """The first step after a prompt only draws a token, since engines once verified before they
    drafted. Nothing needs it any more. It stays because sampled texts, which are others of the same
    law, and counts of acceptance depend on it. `generate` drafts at once, up to a step less."""

    _: dataclasses.KW_ONLY
    num_slots: int
    max_length: int
    prefill_sizes: tuple[int, ...] | None = None
    max_prefill_requests: int = 4
    max_stop_tokens: int = 8
    request_options: bool = False
    option_sizes: OptionSizes = OptionSizes()
    draft_budget: tuple[int, ...] | None = None
    prefix_caching: bool = False

    def __post_init__(self) -> None:
        check_model("model", self.model)
        inputs.check_drafter(self.drafter, self.config)
        inputs.check_trees(self.model, self.drafter, self.config)
        check_batch_axis("drafter", self.drafter, self.drafter.serves.batch_axis)
        # A drafter with a history drafts by what others generated. Under the synthetic rule every
        # text depends on its drafts, also a greedy one, so the rule is refused. Under the standard
        # and block rules only a sampled text does: `check_options` refuses such requests.
        method = self.config.rejection_sample_method
        depends = self.drafter.serves.has_history and method == "synthetic"
        must = "be a rule whose text does not depend on drafts, because the drafter has a history"
        require(not depends, "config.rejection_sample_method", must, method)
        inputs.check_logprobs(self.logprobs, self.model)
        check_type("option_sizes", self.option_sizes, OptionSizes)
        check_int("num_slots", self.num_slots, 1)
        longest = check_int("max_length", self.max_length, 2)
        check_int("max_prefill_requests", self.max_prefill_requests, 1)
        check_int("max_stop_tokens", self.max_stop_tokens, 0)
        if self.draft_budget is not None:
            k = self.config.num_speculative_tokens
            numbers = check_increasing("draft_budget", self.draft_budget, 0, k)
            # A list that was given becomes a tuple, which has a hash.
            object.__setattr__(self, "draft_budget", numbers)
        if self.prefill_sizes is not None:
            sizes = check_increasing("prefill_sizes", self.prefill_sizes, 1, longest)
            object.__setattr__(self, "prefill_sizes", sizes)
        check_type("exact", self.exact, bool)
        # A longer prompt, or one that comes back with its tokens, is read in chunks.
        if self.chunk_size < longest:
            name = "chunk_size" if self.prefill_sizes is None else "prefill_sizes[-1]"
            inputs.check_reads_chunks(self.drafter, name, self.chunk_size)
        check_type("prefix_caching", self.prefix_caching, bool)
        if self.prefix_caching:
            has_cache = self.drafter_has_cache
            length = self.buffer_length
            inputs.check_keeps_rows(self.model, self.drafter, length, has_cache=has_cache)
        if self.exact:
            check_exact(self.model, self.drafter, self.config)
            must = "be one size if exact"
            require(len(self.chunk_sizes) == 1, "prefill_sizes", must, self.prefill_sizes)

    @functools.cached_property
    def drafter_has_cache(self) -> bool:
        """Whether the drafter remembers anything of a text."""
        return bool(jax.tree.leaves(jax.eval_shape(lambda: self.drafter.init_cache(1, 8))))

    @property
    def buffer_length(self) -> int:
        """L, positions per slot; a step writes all rows of a pass past the last one it keeps."""
        # K + 1 also without drafts, as a `DraftContext` says of its L. Drafters rely on it: they
        # write a row for each token that a step may have kept.
        num_rows = max(self.config.num_speculative_tokens + 1, self.most_rows)
        return round_up(max(self.max_length + num_rows, self.longest_read))

    @property
    def longest_read(self) -> int:
        """The position that no chunk of a prompt ends beyond; of an exact engine whole chunks."""
        if not self.exact:
            return self.max_length
        # The least multiple of C that is at least `max_length`: chunks begin at multiples of C.
        return -(-self.max_length // self.chunk_size) * self.chunk_size

    @property
    def chunk_sizes(self) -> tuple[int, ...]:
        """Tokens of a prompt that one call may read: `prefill_sizes`, or what None stands for."""
        if self.prefill_sizes is not None:
            return self.prefill_sizes
        if self.exact:
            return (min(_EXACT_PREFILL, self.max_length),)
        # 32, 64, 128, ... below `max_length`, and `max_length` itself
        powers = (_SMALLEST_PREFILL << i for i in itertools.count())
        return *itertools.takewhile(lambda n: n < self.max_length, powers), self.max_length

    @property
    def chunk_size(self) -> int:
        """C, the most tokens of a prompt that one call reads: the last of `chunk_sizes`."""
        return self.chunk_sizes[-1]

    @property
    def prompt_sizes(self) -> tuple[int, ...]:
        """Lengths of padded prompts: `chunk_sizes`, and `max_length` where C is less."""
        return tuple(sorted({*self.chunk_sizes, self.max_length}))

    def group_size(self, size: int) -> int:
        """Returns R, how many prompts that are padded to `size` one call of `admit` reads.

        At most `max_prefill_requests`, and no more than there are slots. Several prompts have at
        most C tokens together, and at most 512.
        """
        num_prompts = min(self.chunk_size, _MAX_GROUP_TOKENS) // size
        return max(1, min(self.max_prefill_requests, self.num_slots, num_prompts))

    @property
    def admit_shapes(self) -> tuple[tuple[int, int], ...]:
        """The shapes ``[R, P]`` of prompts for which `admit` is compiled."""
        # One prompt, or a full group: `programs.pack` repeats requests to fill it.
        return tuple((r, n) for n in self.chunk_sizes for r in sorted({1, self.group_size(n)}))

    def prompt_size(self, length: int) -> int:
        """Returns P, the least of `prompt_sizes` that holds a prompt.

        Raises:
          ValueError: longer than `max_length`.
        """
        size = next((n for n in self.prompt_sizes if n >= length), None)
        if size is None:
            raise ValueError(
                f"prompt must hold at most max_length={self.max_length} tokens, but it holds "
                f"{length}"
            )
        return size

    def pad_prompt(self, prompt: list[int]) -> np.ndarray:
        """Returns the prompt ``[P]`` int32, padded to its `prompt_size`.

        Raises:
          ValueError: longer than `max_length`.
        """
        return np.array(prompt + [0] * (self.prompt_size(len(prompt)) - len(prompt)), np.int32)

    def max_drafts(self, options: RequestOptions) -> int:
        """Returns the most drafts that a step has of a request."""
        if self.draft_budget == (0,):
            return 0
        k = self.config.num_speculative_tokens
        return k if options.max_drafts is None else options.max_drafts

    def check_options(self, options: RequestOptions) -> None:
        """Checks that a request may ask for this.

        Raises:
          ValueError: an id outside the vocabulary, more of something than there is room for, more
            drafts than K, a prediction where the drafter looks in no text, options that need
            `request_options` in an engine without them, or a temperature above 0 where the rule is
            not agreement, and the engine is exact or the drafter has a history.
        """
        if not (self.request_options or options.is_neutral):
            raise ValueError(
                "options need an Engine with request_options=True, but they are "
                f"{options.non_neutral}"
            )
        # `RequestOptions` has checked each field by itself. Here is what depends on the engine.
        options.check(self.model.vocab_size)
        options.check_drafts(self.config.num_speculative_tokens)
        inputs.check_prediction(self.drafter, options.prediction)
        self.option_sizes.check(options)
        if self.exact:
            check_free_text(self.config, options)
        if self.drafter.serves.has_history:
            # Agreement alone emits the same sampled tokens whatever is drafted.
            is_free = self.config.rejection_sample_method == "agreement"
            must = 'be 0 unless rejection_sample_method is "agreement"'
            hint = "the drafter has a history, so other requests would change what is sampled"
            require(
                is_free or options.temperature == 0, "temperature", must, options.temperature, hint
            )
        count = len(options.stop_token_ids)
        limit = self.max_stop_tokens
        must = f"be at most max_stop_tokens = {limit}"
        require(count <= limit, "stop_token_ids, counted,", must, count)

    def options_of(
        self, options: Sequence[RequestOptions], prompt_lengths: Sequence[int]
    ) -> BatchOptions:
        """Returns the options of R requests as arrays, for `NewRequests`.

        Args:
          options: what the requests ask for.
          prompt_lengths: lengths of their prompts, without what they had generated before they
            were preempted.

        Raises:
          ValueError: `check_options` refuses one of them.
        """
        for request_options in options:
            self.check_options(request_options)
        return BatchOptions.create(
            options,
            prompt_lengths,
            self.model.vocab_size,
            max_stop_tokens=self.max_stop_tokens,
            keep_neutral=self.request_options,
            sizes=self.option_sizes,
        )

    def init_state(self, draft_params: Params = None, params: Params = None) -> DecodeState:
        """Returns a state whose slots are empty.

        Args:
          draft_params: the drafter's weights; their shapes are used, and a map of ids.
          params: the target's weights, for a drafter that reads features; their shapes are used.

        Raises:
          TypeError: the drafter reads features, and `params` is None; weights are missing, or of
            another dtype.
          ValueError: weights have another shape than the model's.
        """
        if params is not None:
            check_params("params", self.model, params)
        check_params("draft_params", self.drafter, draft_params)
        s = self.num_slots
        # Neutral options, laid out as those that `admit` gets, because a state keeps its layout
        options = self.options_of([RequestOptions()] * s, [1] * s)
        batch = Batch(
            token_ids=jnp.zeros((s, self.buffer_length), jnp.int32),
            lengths=jnp.ones((s,), jnp.int32),  # every slot takes part, so it needs a token
            done=jnp.ones((s,), bool),
            status=jnp.full((s,), int(Status.OK), jnp.int32),
            keys=noise.threefry_keys(jnp.full((s,), jax.random.key(0))),
            options=jax.tree.map(jnp.asarray, options),
            known_lengths=jnp.zeros((s,), jnp.int32) if self.exact else None,
        )
        state = self.empty_state(params, draft_params, batch)
        return dataclasses.replace(state, draft_rates=self.new_draft_rates())

    def may_follow_load(self, num_requests: int) -> bool:
        """Returns what `Decoder.may_follow_load` does; true with a budget, which follows it."""
        has_budget = self.draft_budget is not None and not self.exact
        return has_budget or super().may_follow_load(num_requests)

    def new_draft_rates(self) -> DraftRates | None:
        """Returns rates that have seen nothing; None without a `draft_budget`."""
        if self.draft_budget is None:
            return None
        has_trees = self.tree_depth > 0
        return DraftRates.create(self.config.num_speculative_tokens, has_trees=has_trees)

    def admit(
        self, params: Params, draft_params: Params, state: DecodeState, requests: NewRequests
    ) -> DecodeState:
        """Reads prompts of R requests, or a part of each, with both models, into their slots.

        Whatever was in those slots is replaced. A request whose prompt has been read to its end
        runs from now on; its first step has no drafts and emits one token. Of a longer prompt, the
        parts are read one after another, the first from position 0 on; steps may come between.

        A request that left its slot comes back with its tokens so far as its prompt. If it had
        emitted some, its next step has drafts, with the same noise as if it had never left. So its
        tokens are the same, provided that the logits of both models do not depend on how tokens
        were cut into calls. Sums of float32 numbers do in their last bits, so a near tie may be
        decided otherwise. Whatever else a drafter has learned, and `prefill` cannot rebuild, is
        lost.

        Args:
          state: donated.
          requests: with at most C tokens of each prompt (`chunk_size`).

        Returns:
          The state.

        Raises:
          TypeError: weights or caches of another dtype.
          ValueError: shapes that do not fit.
        """
        check_params("params", self.model, params)
        check_params("draft_params", self.drafter, draft_params)
        self._check_requests(requests)
        self._check_target_cache(state)
        # [R, P] tokens into the caches of R slots. Of the output only features are read: the first
        # step runs the last token of a prompt again, for its logits.
        outputs, cache = self.run(
            params, [requests.rows], state.target_cache, state.batch.token_ids.shape[1]
        )
        state = dataclasses.replace(state, target_cache=cache)
        return self._enter(draft_params, state, requests, outputs[0].features)

    def _check_requests(self, requests: NewRequests) -> None:
        """Checks the shapes of new requests, and that tokens are known of an exact engine alone."""
        # What `pad_prompt` returns may be longer than C: then it comes in parts. Options of another
        # engine show in M, the number of stop tokens.
        shape = jnp.shape(requests.prompts)
        stops = jnp.shape(requests.options.stop_token_ids)
        if len(shape) != 2 or not 1 <= shape[1] <= self.chunk_size:
            raise ValueError(
                f"prompts must be [R, P] with P in [1, {self.chunk_size}], but they are "
                f"{list(shape)}"
            )
        if stops != (shape[0], self.max_stop_tokens):
            raise ValueError(
                f"options.stop_token_ids must have shape [{shape[0]}, {self.max_stop_tokens}], but "
                f"it has {list(stops)}: options_of gives what admit takes"
            )
        is_known = requests.known_token_ids is not None
        must = "be None, because the engine is not exact"
        require(self.exact or not is_known, "known_token_ids", must, requests.known_token_ids)

    def _enter(
        self,
        draft_params: Params,
        state: DecodeState,
        requests: NewRequests,
        features: jax.Array | None,
    ) -> DecodeState:
        """Returns the state with R requests, whose tokens the target has read, in their slots.

        Until a prompt is read to its end, its slot does not run, is as long as what was read and
        one token more, and has no features. So what steps write there comes after what was read.
        """
        self._check_draft_cache(state)
        rows = requests.rows
        slots = jnp.asarray(requests.slots, jnp.int32)
        next_token_ids = jnp.asarray(requests._or_zeros(requests.next_token_ids), jnp.int32)
        state = self.draft_prompts(draft_params, state, rows, features, next_token_ids)
        # [R]: the position after the last row, padding included; past the prompt if that ends here
        lengths = jnp.asarray(requests.lengths, jnp.int32)
        end = rows.start + rows.token_ids.shape[1]
        is_read = end >= lengths - 1  # a step reads the last token, as it does in every sequence
        # [R] seeds of uint32, as a driver sends them, or [R] keys
        keys = jnp.asarray(requests.keys)
        if not jnp.issubdtype(keys.dtype, jax.dtypes.prng_key):
            keys = jax.vmap(jax.random.key)(keys)
        # [R, L]: what the slots hold, with these tokens and the next one, which a step may read.
        # A slot that does not exist, as in calls that warm up, reads what another holds, and what
        # is written to it below is dropped.
        token_ids = state.batch.token_ids.at[slots].get(mode="clip")
        # [R, P] and [R] -> [R, P+1]
        added = jnp.concatenate([rows.token_ids, next_token_ids[:, None]], axis=1)
        place = rows.start[:, None] + jnp.arange(added.shape[1], dtype=jnp.int32)[None, :]
        requests_axis = jnp.arange(token_ids.shape[0])[:, None]
        token_ids = token_ids.at[requests_axis, place].set(added)
        # Of an exact engine 0: nothing is known, unless the next lines say so.
        known_lengths = jnp.zeros_like(lengths) if self.exact else None
        if requests.known_token_ids is not None:
            # [R, T] -> [R]: as many as are known; they take the place of padding after the prompt
            known = jnp.asarray(requests.known_token_ids, jnp.int32)
            known_lengths = jnp.sum(known >= 0, axis=1, dtype=jnp.int32)
            held = token_ids[:, : known.shape[1]]
            token_ids = token_ids.at[:, : known.shape[1]].set(jnp.where(known >= 0, known, held))
        # Of a prompt that goes on, the length is `end + 1`: its newest token, which steps run for
        # nothing, is the one at position `end`, where the next chunk begins, if not before.
        new = Batch(
            token_ids=token_ids,
            lengths=jnp.where(is_read, lengths, end + 1),
            done=~is_read,
            status=jnp.full_like(lengths, int(Status.OK)),
            keys=noise.threefry_keys(keys),
            options=requests.options,
            known_lengths=known_lengths,
        ).with_processors(self.model.vocab_size)
        new_features = None
        if features is not None:
            # [R, P, A*H] -> [R, 1, A*H] -> [R, D+1, A*H]
            new_features = self.first_features(*features_before_last(features, lengths, rows.start))
        # [R, ...] -> [S, ...], of every array of the batch and the features. A request that is
        # there twice, to fill the call, writes the same twice.
        batch, all_features = jax.tree.map(
            lambda array, entries: array.at[slots].set(entries),
            (state.batch, state.features),
            (new, new_features),
        )
        # [S, 1] and [1, R] -> [S, R] -> [S]: slots whose drafts and draft rows were of others
        slot = jnp.arange(self.num_slots, dtype=jnp.int32)[:, None]
        return dataclasses.replace(
            state.without_drafts((slot == slots[None, :]).any(axis=1)),
            batch=batch,
            features=all_features,
        )

    def _check_target_cache(self, state: DecodeState) -> None:
        """Checks that a state has a cache of this target, for S requests and L positions."""
        sizes = state.batch.token_ids.shape
        check_cache("state.target_cache", self.model, state.target_cache, *sizes)

    def _check_draft_cache(self, state: DecodeState) -> None:
        """Checks that a state has a cache of this drafter, for S requests and L positions."""
        sizes = state.batch.token_ids.shape
        check_cache("state.draft_cache", self.drafter, state.draft_cache, *sizes)

    def step(
        self,
        params: Params,
        draft_params: Params,
        state: DecodeState,
        requests: NewRequests | None = None,
        *,
        num_drafts: int | None = None,
        all_neutral: bool = False,
        slots: jax.Array | None = None,
    ) -> tuple[DecodeState, StepRecord]:
        """Drafts and verifies: at least one token for every occupied slot.

        Args:
          state: donated.
          requests: whose prompts, or parts of them, this step reads too, as `admit` does. A model
            that serves `groups` reads them in the pass that verifies the drafts, which costs little
            more than that pass; see `CausalModel`. Float32 sums in such a step may
            differ from those of a step without prompts in their last bits. None for none.
          num_drafts: static; as for `draft`.
          all_neutral: static; true says that no running request asks for anything that needs
            `request_options`, and leaves out all that serves it. The tokens are the same, near
            ties of float32 sums aside.
          slots: ``[R]`` int32 in [0, S), all different, the slots that take part; a request in
            another waits. Such a step costs what one of an engine of R slots does: it is another
            program, so near ties of float32 sums may be decided otherwise. Not one that
            `requests` go into. None for all.

        Returns:
          The state, whose ``batch.done`` and ``batch.status`` say which requests have ended and
          why, and the record of the step.

        Raises:
          TypeError, ValueError: as `draft`, `verify` and `admit` do.
        """
        # What is None in the options is not computed. After the step it comes back as it was: it
        # has not counted the step's tokens, but they are all of requests that need no counts. It is
        # back before `_enter`, which writes all options of the new requests.
        options = state.batch.options
        if all_neutral:
            state = _with_options(state, options.neutral)
        state = self.draft(draft_params, state, num_drafts=num_drafts, slots=slots)
        check_params("params", self.model, params)
        self._check_target_cache(state)
        # Groups of one pass: tokens [S, n+1] of the slots, and tokens [R, P] of prompts
        prompts = []
        if requests is not None:
            self._check_requests(requests)
            prompts.append(requests.rows)
        state, outputs = self.score(params, state, prompts)
        state, record = self.accept(state, outputs[0])
        if all_neutral:
            state = _with_options(state, options)
        # Last: `accept` writes features of all slots, those of the new requests too.
        if requests is not None:
            state = self._enter(draft_params, state, requests, outputs[1].features)
        return state, record

    def draft(
        self,
        draft_params: Params,
        state: DecodeState,
        *,
        num_drafts: int | None = None,
        slots: jax.Array | None = None,
    ) -> DecodeState:
        """Drafts K tokens for every occupied slot: the first half of `step`.

        New requests get none. A drafter that reads features needs this before every
        `verify`, even if the drafts are then dropped with `DecodeState.without_drafts`.

        Args:
          state: donated.
          num_drafts: static, from 0 to K, drafts of each request; None for K. The target's pass in
            `verify` then has as many rows, and one more. It must be chosen before the drafts are
            drawn. With 0, a drafter that has a cache drafts one token all the same, which is
            dropped: it reads the tokens that were emitted since.
          slots: as for `step`; `verify` then verifies these.

        Raises:
          TypeError, ValueError: the drafter returned something that breaks its contract,
            `num_drafts` is not from 0 to K, or weights or the drafter's cache do not fit.
        """
        if num_drafts is not None:
            check_int("num_drafts", num_drafts, 0, self.config.num_speculative_tokens)
        check_params("draft_params", self.drafter, draft_params)
        self._check_draft_cache(state)
        return super().draft(draft_params, state, num_drafts=num_drafts, slots=slots)

    def verify(
        self,
        params: Params,
        state: DecodeState,
        token_bitmask: jax.Array | None = None,
        is_forced: jax.Array | None = None,
    ) -> tuple[DecodeState, StepRecord]:
        """Verifies the drafts in the state and appends what is emitted: the second half of `step`.

        A request without drafts gets one token. Rows of the store that were drawn at another
        position or temperature are not used.

        Args:
          state: with drafts, from `draft`.
          token_bitmask: ``[B*(n+1), ceil(V/32)]`` int32 or uint32, the tokens that each row may
            emit, from `grammar_bitmask`; None for all. n is K, or what `draft` got as `num_drafts`;
            of an exact engine it is always K. B is the number of slots that `draft` got.
          is_forced: ``[B]`` bool, requests with drafts in `DecodeState.proposal` that are not
            from `draft`, as from `forced_drafts`. All their drafts are verified one-hot. This must
            not depend on what was drafted for a sampled request. None for no request.

        Returns:
          The state, without drafts, and the record of the step.

        Raises:
          TypeError: weights, the target's cache, a mask or `is_forced` of another dtype.
          ValueError: the state holds features that the drafter has not read, or shapes do not fit.
        """
        check_params("params", self.model, params)
        self._check_target_cache(state)
        # `Decoder.verify` does this too. Here the drafts say what shape a mask must have.
        state = self.with_proposal(state)
        assert state.proposal is not None
        batch, num_drafts = state.proposal.token_ids.shape
        # A bit for each id: 32 in a word
        num_words = -(-self.model.vocab_size // 32)
        sizes = {"B": batch, "M": batch * (num_drafts + 1), "ceil(V/32)": num_words}
        if token_bitmask is not None:
            declared = "[M, ceil(V/32)] int32 or uint32"
            check_array("token_bitmask", token_bitmask, declared, sizes)
        if is_forced is not None:
            check_array("is_forced", is_forced, "[B] bool", sizes)
        return super().verify(params, state, token_bitmask, is_forced)

    def release(self, state: DecodeState, slots: jax.Array) -> DecodeState:
        """Empties slots whose requests have not ended: they emit nothing more.

        Args:
          state: donated.
          slots: ``[S]`` bool.

        Returns:
          The state.
        """
        # Caches stay: the next request overwrites what they hold, or begins with it.
        batch = dataclasses.replace(state.batch, done=state.batch.done | slots)
        return dataclasses.replace(state.without_drafts(slots), batch=batch)


def _with_options(state: DecodeState, options: BatchOptions) -> DecodeState:
    """Returns the state with other options in its batch."""
    return dataclasses.replace(state, batch=dataclasses.replace(state.batch, options=options))
