"""An `EngineDriver` whose requests may have grammars."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Unpack

import jax
import numpy as np

from jax_specdec._src.grammar import GrammarMatcher, advance_matchers, grammar_bitmask
from jax_specdec._src.serving.bookkeeping import RequestUpdate, StepAhead, StepResult
from jax_specdec._src.serving.core import DecodeState
from jax_specdec._src.serving.driver import EngineDriver, _reading
from jax_specdec._src.serving.engine import Engine
from jax_specdec._src.serving.options import RequestFields, RequestOptions
from jax_specdec._src.types import Drafts


@functools.partial(jax.jit, static_argnums=0, donate_argnames="state")
def _draft(
    engine: Engine,
    draft_params: Any,
    state: DecodeState,
    features: jax.Array | None,
    num_features: jax.Array | None,
) -> DecodeState:
    """Features apart from the state: they end here, so there is nothing to donate them to."""
    state = dataclasses.replace(state, features=features, num_features=num_features)
    return engine.draft(draft_params, state)


@functools.partial(jax.jit, static_argnums=0, donate_argnames="state")
def _verify(
    engine: Engine, params: Any, state: DecodeState, token_bitmask: Any
) -> tuple[DecodeState, StepResult]:
    state, record = engine.verify(params, state, token_bitmask)
    return state, StepResult.of(record, state.batch, state.counters)


@dataclasses.dataclass
class _Grammar:
    """A request's matcher, which has accepted the first `num_tokens` of the request's tokens."""

    matcher: GrammarMatcher
    num_tokens: int = 0


class GrammarDriver(EngineDriver):
    """An `EngineDriver` whose requests may have a grammar: `submit` takes a `matcher`.

    While such a request runs, a step is drafted, its masks are made on the host, and it is then
    verified. The masks need the tokens of the step before, so no step runs ahead. Steps in which
    no request has a grammar are those of `EngineDriver`.

    Example:
      >>> import numpy as np
      >>> import jax_specdec as sd
      >>> class Only:  # a grammar of one token, again and again
      ...     def __init__(self, token_id):
      ...         self.token_id = token_id
      ...     def fill_next_token_bitmask(self, bitmask, index):
      ...         bitmask[index] = 0
      ...         bitmask[index, self.token_id // 32] = 1 << self.token_id % 32
      ...     def accept_token(self, token_id):
      ...         return token_id == self.token_id
      ...     def rollback(self, num_tokens):
      ...         pass
      ...     def is_terminated(self):
      ...         return False
      >>> _, (model, params) = sd.load_embedded_pair()  # the smaller one
      >>> engine = sd.Engine(
      ...     model, sd.NGramDrafter(), sd.SpecDecodeConfig(num_speculative_tokens=2),
      ...     num_slots=2, max_length=32)
      >>> driver = sd.serving.GrammarDriver(engine, params)
      >>> request_id = driver.submit(sd.encode_bytes("x = "), max_new_tokens=4, matcher=Only(49))
      >>> new = []
      >>> while not driver.is_idle:
      ...     for update in driver.step():
      ...         new += update.token_ids
      >>> sd.decode_bytes(new)
      '1111'
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        """An idle driver; the arguments are those of `EngineDriver`."""
        super().__init__(*args, **settings)
        self._grammars: dict[int, _Grammar] = {}

    def warm_up(self, on_progress: Callable[[int, int], None] | None = None) -> None:
        """See `EngineDriver.warm_up`; one more program, for steps with grammars."""

        def report(done: int, total: int) -> None:
            if on_progress is not None:
                on_progress(done, total + 1)

        num_programs = 0

        def count(done: int, total: int) -> None:
            nonlocal num_programs
            num_programs = total
            report(done, total)

        super().warm_up(count)
        self._is_whole = False  # what the step leaves behind is dropped
        self._masked_step()
        self._read_step()
        self._settle()
        self._ready_state([])
        report(num_programs + 1, num_programs)

    def submit(
        self,
        prompt: Sequence[int],
        options: RequestOptions | None = None,
        *,
        matcher: GrammarMatcher | None = None,
        **fields: Unpack[RequestFields],
    ) -> int:
        """See `EngineDriver.submit`.

        Args:
          prompt: token ids, at least one.
          options: what the request asks for.
          matcher: at the beginning of its grammar, and of this request alone; made for the
            target's vocabulary. Where it has terminated, it allows every token: to end the text,
            let it allow a stop token only. None for no grammar.
          **fields: of `RequestOptions`.
        """
        request_id = super().submit(prompt, options, **fields)
        if matcher is not None:
            self._grammars[request_id] = _Grammar(matcher)
        return request_id

    def cancel(self, request_id: int) -> bool:
        """See `EngineDriver.cancel`."""
        self._grammars.pop(request_id, None)
        return super().cancel(request_id)

    def step(self) -> list[RequestUpdate]:
        """See `EngineDriver.step`."""
        updates = super().step()
        for update in updates:
            if update.finish_reason is not None:
                self._grammars.pop(update.request_id, None)
        return updates

    def _dispatch_step(self) -> bool:
        if self._ahead and self._any_grammar:
            return False  # the masks of the next step need the tokens of these
        return super()._dispatch_step()

    @property
    def _any_grammar(self) -> bool:
        return any(one.request_id in self._grammars for one in self._decoding)

    def _step(self, all_neutral: bool) -> None:
        if self._any_grammar:
            self._masked_step()
        else:
            super()._step(all_neutral)

    def _masked_step(self) -> None:
        """Dispatch a step whose rows are masked by the grammars of the requests."""
        requests, (params, draft_params) = self._decoding, self._weights
        state = self._ready_state(requests)
        features = state.features, state.num_features
        state = dataclasses.replace(state, features=None, num_features=None)
        state = self._call(requests, _draft, draft_params, state, *features)
        with _reading(requests):
            draft_token_ids = jax.device_get(state.draft_token_ids)
        mask = self._token_bitmask(draft_token_ids)
        self._state, result = self._call(requests, _verify, params, state, mask)
        self._ahead.append(StepAhead(result, self._decoding_slots))
        with _reading(requests):
            result.copy_to_host()

    def _token_bitmask(self, draft_token_ids: np.ndarray) -> np.ndarray:
        """``[S*(K+1), ceil(V/32)]`` uint32, after every matcher has accepted its new tokens."""
        matchers: list[GrammarMatcher | None] = []
        for request in self._decoding_slots:
            grammar = None if request is None else self._grammars.get(request.request_id)
            if request is not None and grammar is not None:
                new = request.token_ids[request.prompt_length + grammar.num_tokens :]
                advance_matchers([grammar.matcher], [new])
                grammar.num_tokens += len(new)
            matchers.append(None if grammar is None else grammar.matcher)
        drafts = Drafts.from_dense(draft_token_ids)
        return grammar_bitmask(matchers, drafts, vocab_size=self.engine.model.vocab_size)
