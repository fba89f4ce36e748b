"""An `EngineDriver` whose requests may have grammars."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, Unpack

import jax
import numpy as np

from jax_specdec._src.grammar import (
    GrammarError,
    GrammarMatcher,
    advance_matchers,
    check_matchers,
    grammar_bitmask,
)
from jax_specdec._src.types import Drafts
from jax_specdec.lm.decoding import programs
from jax_specdec.lm.decoding.bookkeeping import Matching, RequestUpdate, ServedRequest
from jax_specdec.lm.decoding.driver import EngineDriver, awaiting
from jax_specdec.lm.decoding.options import RequestFields, RequestOptions


class GrammarDriver(EngineDriver):
    """An `EngineDriver` whose requests may have a grammar: `submit` takes a `matcher`.

    While such a request runs, a step is drafted, its masks are made on the host, and it is then
    verified. The masks need the tokens of the step before, so no step runs ahead. Steps in which
    no request has a grammar are those of `EngineDriver`.

    Matchers are called in a thread, which the first of them starts and `close` ends. A driver is
    its own context manager.

    Example:
      >>> import numpy as np
      >>> import jax_specdec as sd
      >>> from jax_specdec import lm
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
      >>> _, (model, params) = lm.load_embedded_pair()  # the smaller one
      >>> engine = lm.Engine(
      ...     model, lm.NGramDrafter(), sd.SpecDecodeConfig(num_speculative_tokens=2),
      ...     num_slots=2, max_length=32)
      >>> new = []
      >>> with lm.GrammarDriver(engine, params) as driver:
      ...     _ = driver.submit(lm.encode_bytes("x = "), max_new_tokens=4, matcher=Only(49))
      ...     while not driver.is_idle:
      ...         for update in driver.step():
      ...             new += update.token_ids
      >>> lm.decode_bytes(new)
      '1111'
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        """An idle driver; the arguments are those of `EngineDriver`."""
        from concurrent.futures import ThreadPoolExecutor  # most who import the package have none

        super().__init__(*args, **settings)
        # Interrupts reach the main thread only. In a thread of its own, a matcher that has accepted
        # a token is always counted as having done so.
        self._thread = ThreadPoolExecutor(1)

    def close(self) -> None:
        """End the thread of the matchers, once. Afterwards no request with a grammar is served."""
        self._thread.shutdown()

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """`close`."""
        self.close()

    def _calls_of_all_programs(self) -> list[Callable[[], object]]:
        """One more, for steps with grammars."""

        def masked_step() -> None:
            self._dispatch_masked()
            self._read_step()

        return [*super()._calls_of_all_programs(), masked_step]

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
            target's vocabulary. It is called in a thread of the driver's; if it raises, its request
            ends as "failed", with what it said as the `error`, and no other notices. Where it has
            terminated, it allows every token: to end the text, let it allow a stop token only. None
            for no grammar.
          **fields: of `RequestOptions`.

        Raises:
          TypeError: `matcher` is something else.
        """
        check_matchers([matcher])
        return self._submit(prompt, options, fields, None if matcher is None else Matching(matcher))

    def _dispatch_step(self) -> bool:
        if self._ahead and self._any_grammar:
            return False  # the masks of the next step need the tokens of these
        return super()._dispatch_step()

    @property
    def _any_grammar(self) -> bool:
        return any(one.matching is not None for one in self._decoding.values())

    def _dispatch(self, all_neutral: bool, num_drafts: int | None) -> None:
        if self._any_grammar:
            self._dispatch_masked()
        else:
            super()._dispatch(all_neutral, num_drafts)

    def _dispatch_masked(self) -> None:
        """Dispatch a step of K drafts whose rows are masked by the grammars of the requests."""
        slots, (params, draft_params) = self._decoding, self._weights
        requests = slots.values()
        state = self._ready_state(requests)
        features = state.features, state.num_features
        state = dataclasses.replace(state, features=None, num_features=None)
        state = self._call(requests, programs.draft, draft_params, state, *features)
        with awaiting(requests):
            drafts = Drafts.from_dense(jax.device_get(state.draft_token_ids))
        mask, failed = self._thread.submit(self._token_bitmask, slots, drafts).result()
        going_on = {slot: one for slot, one in slots.items() if slot not in failed}
        self._add_step(going_on, *self._call(requests, programs.verify, params, state, mask))
        for slot, reason in failed.items():
            self._fail(slot, f"the matcher has failed: {reason}")

    def _token_bitmask(
        self, slots: Mapping[int, ServedRequest], drafts: Drafts
    ) -> tuple[np.ndarray, dict[int, str]]:
        """The masks, after every matcher has accepted its new tokens, and which have failed.

        Returns:
          ``[S*(K+1), ceil(V/32)]`` uint32; and by slot, why its matcher has failed. The rows of
          such a slot allow everything.
        """
        matchers: list[GrammarMatcher | None] = [None] * self.engine.num_slots
        failed: dict[int, str] = {}
        for slot, request in slots.items():
            if (matching := request.matching) is None:
                continue
            try:
                for token in request.token_ids[request.prompt_length + matching.num_accepted :]:
                    advance_matchers([matching.matcher], [[token]])
                    matching.num_accepted += 1
                matchers[slot] = matching.matcher
            except GrammarError as error:
                failed[slot] = error.reason
            except ValueError as error:  # it refuses a token that it had allowed
                failed[slot] = str(error)
        with awaiting(one for one in slots.values() if one.matching is not None):
            while True:
                try:
                    vocab_size = self.engine.model.vocab_size
                    return grammar_bitmask(matchers, drafts, vocab_size=vocab_size), failed
                except GrammarError as error:
                    failed[error.index] = error.reason
                    matchers[error.index] = None

    def _fail(self, slot: int, message: str) -> None:
        """End a request that runs."""
        host, slots = self._host, dict(self._host.slots)
        update = RequestUpdate(slots.pop(slot).request_id, [], "failed", error=message)
        self._host = host._replace(slots=slots, updates=(*host.updates, update))
        self._empty(slot)
