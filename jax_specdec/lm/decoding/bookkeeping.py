"""Records of what the host of an engine knows: requests, steps and updates.

Nothing here calls a program. A `ServedRequest` is a request between two steps; `HostState` holds
all that have had a slot, with the updates that are still to be delivered. Both are tuples: what
happens makes new ones, and `EngineDriver` puts the new `HostState` in place by one assignment, so
that an interrupt finds the state before a step or after it. Tokens arrive in `after_step`: of the
numbers of a `StepAhead`, which `device.DeviceState` has dispatched, it makes longer requests and a
`RequestUpdate` for each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Hashable, Iterable, Mapping
from typing import Literal, NamedTuple

import jax

from jax_specdec._src.base.types import Status
from jax_specdec._src.drafts.rates import DraftRates
from jax_specdec._src.logits.logprobs import TokenLogprobs
from jax_specdec._src.logits.matchers import GrammarMatcher
from jax_specdec._src.stats.acceptance import AcceptanceCounters
from jax_specdec.lm.decoding.metrics import ServingStats
from jax_specdec.lm.decoding.options import RequestOptions
from jax_specdec.lm.decoding.weights import Weights

_STATUSES = tuple(Status)
FinishReason = Literal["length", "stop", "failed"]


@dataclasses.dataclass(frozen=True)
class RequestUpdate:
    """What one step did for one request.

    Attributes:
      request_id: as `EngineDriver.submit` returned it.
      token_ids: new tokens, a stop token included.
      finish_reason: None while the request goes on. "length": its budget is spent. "stop": it
        emitted a stop token. "failed": it could not be verified (`status` says why), or the device
        failed too often or its matcher did (`error`).
      status: `Status.OK`, or why the request could not be verified.
      num_proposed: drafts offered to the verification; of a tree, those of its longest path.
      num_accepted: drafts that were accepted, counted before a stop token or the budget cuts them:
        the first of `token_ids`, of which there may be fewer.
      logprobs: `TokenLogprobs` of NumPy arrays, one row for each new token; None unless the engine
        has them.
      num_reused: in the first update with tokens, those of the prompt that were not read, because
        an earlier request had left them in a slot; 0 in others. See `Engine.prefix_caching`.
      error: the device's message, if a call failed that this request was in, or its matcher's, if
        that failed. Such an update has no tokens. If it has no finish reason either, the request is
        read again and goes on.
      weights_version: how often `EngineDriver.set_params` had changed the weights that made the new
        tokens.

    Example: see `EngineDriver`.
    """

    request_id: int
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    status: Status = Status.OK
    num_proposed: int = 0
    num_accepted: int = 0
    logprobs: TokenLogprobs | None = None
    num_reused: int = 0
    error: str | None = None
    weights_version: int = 0


@dataclasses.dataclass(eq=False)
class Matching:
    """A matcher, and how many of its request's new tokens it has accepted."""

    matcher: GrammarMatcher
    num_accepted: int = 0


class KeptRows(NamedTuple):
    """What a slot's caches hold that a later request with the same first tokens may begin with.

    Attributes:
      tokens: rows 0 to ``num_rows - 1`` of both caches are those of these tokens. The last of them
        may depend on token `num_rows` too: row p of an EAGLE-3 head reads token p + 1. So a request
        which shares c tokens begins with c - 1 rows, and what it then reads, from position c - 1
        on, gives the features that the next row needs.
      num_rows: how many there are.
      salt: only requests with the same one share them.
    """

    tokens: list[int]  # shared with the request, which changes those from `num_rows + 1` on
    num_rows: int
    salt: Hashable


class Timing(NamedTuple):
    """When what happened to a request, by `time.perf_counter`."""

    submitted: float = 0.0
    admitted: float = 0.0  # when it got its first slot; 0 if it has had none
    last_read: float | None = None  # when a step of it was last read


class Replay(NamedTuple):
    """What a request of an exact engine generates again, when it is read again, as it did."""

    begin: int  # of its tokens, those that are read
    num_known: int = 0  # those that it had when it last left its slot


class ServedRequest(NamedTuple):
    """A request that has not ended, as it is between two steps."""

    request_id: int
    tokens: list[int]  # shared by all that follow from this one
    prompt_length: int
    length: int  # of the prompt and the new tokens: what `tokens` hold after them does not count
    options: RequestOptions
    matching: Matching | None = None
    timing: Timing = Timing()
    num_reread: int = 0  # the most tokens of its prompt that were read in chunks after a failure
    num_failures: int = 0  # failed calls in a row, without a new token or a further chunk
    replay: Replay | None = None  # None: read again, it generates nothing again
    num_rows: int = 0  # of `rows`
    most_rows: int = 0  # the most of these that later requests may begin with
    num_reused: int = 0  # tokens of its prompt that were not read, before its first token

    @property
    def num_known(self) -> int:
        """Of its tokens, those that it had when it last left its slot; 0 without a `replay`."""
        return 0 if self.replay is None else self.replay.num_known

    @property
    def token_ids(self) -> list[int]:
        """The prompt and the new tokens."""
        return self.tokens[: self.length]

    @property
    def new_token_ids(self) -> list[int]:
        """The new tokens."""
        return self.tokens[self.prompt_length : max(self.length, self.num_known)]

    @property
    def rows(self) -> KeptRows:
        """What its slot holds for later requests."""
        return KeptRows(self.tokens, self.num_rows, self.options.cache_salt)

    @property
    def known_token_ids(self) -> list[int]:
        """The tokens that it is to generate again next."""
        return self.tokens[self.length : self.num_known]

    @property
    def seed(self) -> int:
        """The seed of its key."""
        return self.request_id if self.options.seed is None else self.options.seed

    @property
    def budget_left(self) -> int:
        """The most tokens it may still get, as far as the host knows."""
        return self.prompt_length + self.options.max_new_tokens - self.length

    def in_slot(self, now: float) -> ServedRequest:
        """Returns the request in a slot, from now on if it is the first."""
        # One that comes back keeps the time of its first slot, at which the wait after `submit`
        # ended.
        admitted = self.timing.admitted or now
        return self._replace(timing=self.timing._replace(admitted=admitted))

    def with_rows(self, end: int) -> ServedRequest:
        """Returns the request after both models have read its tokens before position `end`.

        Of its newest token no row counts: a drafter may need the token after it.
        """
        return self._replace(num_rows=min(end, self.length - 1, self.most_rows))

    def with_tokens(self, new: list[int], read: float) -> ServedRequest:
        """Returns the request after a step. This one's first `length` tokens stay.

        Of what the step has added, the drafter reads the last tokens in the next one only.
        """
        request = self.with_rows(self.length)
        end = self.length + len(new)
        # Of an exact engine: the same tokens as before, so the list has them, and they were
        # delivered.
        if end <= self.num_known:
            return request._replace(length=end)
        # The list is shared with the request as it was, and changed behind that one's `length`. So
        # the old record means the same as before, also where an interrupt drops the new one.
        self.tokens[self.length :] = new
        timing = self.timing._replace(last_read=read)
        return request._replace(length=end, timing=timing, num_failures=0)

    def requeued(self) -> ServedRequest:
        """Returns the request after it has left its slot, to be read again from its tokens."""
        # All of its tokens are read again, as if they were its prompt.
        if self.replay is None:
            return self
        # Of an exact engine, only those that were its prompt are read: the others are generated
        # again, by the programs that made them first, so that their rows have the same bits. It may
        # leave before it has come to where it was when it left last.
        num_known = max(self.length, self.num_known)
        replay = self.replay._replace(num_known=num_known)
        return self._replace(length=replay.begin, replay=replay)

    def under_new_weights(self) -> ServedRequest:
        """Returns the request whose tokens so far are never generated again, but read."""
        # Also what it was about to generate again: other weights would say something else.
        length = max(self.length, self.num_known)
        replay = None if self.replay is None else Replay(begin=length)
        return self._replace(length=length, replay=replay)

    def after(
        self,
        slot: int,
        numbers: list[int],
        logprobs: TokenLogprobs | None,
        now: float,
        weights_version: int,
    ) -> tuple[ServedRequest, RequestUpdate | None]:
        """Returns the request after a step, and what the step did for it.

        None if it has only generated again what was delivered before.

        Args:
          slot: where it is.
          numbers: of its slot, as `StepResult` has them.
          logprobs: of all slots.
          now: when the step was read.
          weights_version: of the weights that made the step.
        """
        # [K + 6]: the columns of `StepResult.numbers`; of the first K + 1, only `count` are tokens
        *tokens, count, proposed, accepted, done, status = numbers
        request_logprobs = None if logprobs is None else logprobs.of(slot, count)
        new = tokens[:count]
        reason: FinishReason | None = None
        if done:
            # The device has cut the tokens after a stop token, so that one can only be the last.
            stopped = bool(new) and new[-1] in self.options.stop_token_ids
            reason = "stop" if stopped else "length"
            if status != Status.OK:
                reason = "failed"
        after = self.with_tokens(new, now)
        # Tokens that it generates again were delivered when they came first. A step never has some
        # of these and new ones: the device ends it where the known text ends (`Batch.most_new`).
        if reason is None and self.length < self.num_known:
            return after, None
        # A row of logits held NaN, say, and its caches may hold some, too: nobody begins with them.
        if status != Status.OK:
            after = after._replace(num_rows=0)
        return after, RequestUpdate(
            request_id=self.request_id,
            token_ids=new,
            finish_reason=reason,
            status=_STATUSES[status],
            num_proposed=proposed,
            num_accepted=accepted,
            logprobs=request_logprobs,
            num_reused=self.num_reused if self.timing.last_read is None else 0,
            weights_version=weights_version,
        )


class StepResult(NamedTuple):
    """What the host reads of a step. No later call donates its buffers, as those of the state are.

    Attributes:
      numbers: ``[S, K+6]`` int32, or of trees fewer columns: the tokens kept, their number, drafts
        proposed and accepted, whether the request is done, and its status. One array, for one copy
        to the host.
      logprobs: of the tokens kept, `TokenLogprobs.as_bits`; None unless asked for.
      rates: ``[K]`` float32, the values of `draft_rates`; None without these.
      counters: acceptance of all steps so far.
      draft_rates: of the state.
    """

    numbers: jax.Array
    logprobs: TokenLogprobs | None
    rates: jax.Array | None
    counters: AcceptanceCounters
    draft_rates: DraftRates | None

    @property
    def for_host(self) -> tuple[jax.Array, TokenLogprobs | None, jax.Array | None]:
        """What is copied to the host after every step."""
        return self.numbers, self.logprobs, self.rates


class StepAhead(NamedTuple):
    """A step that was dispatched and whose result the host has not read."""

    result: StepResult
    request_ids: Mapping[int, int]  # of the requests that take part, by slot
    num_drafts: int | None  # of a request at most; None for K


class HostState(NamedTuple):
    """What the host knows of all requests that have had a slot. One assignment replaces it."""

    weights: Weights  # of the target and of the drafter; on the device
    counters: AcceptanceCounters  # of the steps that were read; on the device
    draft_rates: DraftRates | None  # of these; None without a draft budget
    stats: ServingStats  # of these
    slots: Mapping[int, ServedRequest] = {}  # those in slots, also while their prompts are read
    returning: tuple[ServedRequest, ...] = ()  # those that ran and wait for a slot, before others
    updates: tuple[RequestUpdate, ...] = ()  # that have not been delivered
    kept: Mapping[int, KeptRows] = {}  # of free slots, those that are longest unused first

    @property
    def begun(self) -> list[ServedRequest]:
        """All requests that have had a slot."""
        return [*self.slots.values(), *self.returning]

    def slot_of(self, request_id: int) -> int | None:
        """Returns the slot of a request; None if it does not run."""
        return next((i for i, one in self.slots.items() if one.request_id == request_id), None)

    def queued_first(self, leaving: Iterable[int]) -> HostState:
        """Returns the state after some left their slots, and are first in the queue, in order."""
        slots = dict(self.slots)
        left = {slot: slots.pop(slot) for slot in leaving}
        first = [request.requeued() for request in left.values()]
        returning = (*first, *self.returning)
        # The slots are free, and keep their rows: who comes back soon begins with its own.
        return self._replace(slots=slots, returning=returning, kept=self._kept_after(left))

    def _kept_after(self, left: Mapping[int, ServedRequest]) -> dict[int, KeptRows]:
        """Returns what free slots keep, after requests have left theirs."""
        # A dict keeps its order: those that are longest unused come first, those that are left now
        # last.
        before = {slot: rows for slot, rows in self.kept.items() if slot not in left}
        return before | {slot: one.rows for slot, one in left.items() if one.num_rows}

    def without_kept(self) -> HostState:
        """Returns the state in which no later request begins with rows that there are now.

        For rows that the device has lost, or that are not those of the weights any more.
        """
        slots = {i: one._replace(num_rows=0, most_rows=0) for i, one in self.slots.items()}
        return self._replace(slots=slots, kept={})

    def with_weights(
        self,
        weights: Weights,
        counters: AcceptanceCounters,
        draft_rates: DraftRates | None,
    ) -> HostState:
        """Returns the state under other weights, with counters and rates that begin anew."""
        # Rows of the old weights are in all slots: nobody begins with them.
        host = self.without_kept()
        return host._replace(
            weights=weights,
            counters=counters,
            draft_rates=draft_rates,
            stats=dataclasses.replace(self.stats, weights_version=self.stats.weights_version + 1),
            slots={slot: one.under_new_weights() for slot, one in host.slots.items()},
            returning=tuple(one.under_new_weights() for one in self.returning),
        )

    def with_new(self, group: Mapping[int, ServedRequest]) -> HostState:
        """Returns the state after requests got slots, or were changed in theirs."""
        # They may come from `returning`, from the driver's requests that wait, or be there already.
        # What their slots kept for others is overwritten.
        ids = {request.request_id for request in group.values()}
        returning = tuple(one for one in self.returning if one.request_id not in ids)
        kept = {slot: rows for slot, rows in self.kept.items() if slot not in group}
        return self._replace(slots={**self.slots, **group}, returning=returning, kept=kept)

    def after_chunk(self, slot: int, num_read: int) -> HostState:
        """Returns the state after a chunk was read: a further one is as good as a new token."""
        # Noted only while calls of it fail. What is read again after a failure is no progress.
        request = self.slots[slot]
        if not request.num_failures or num_read <= request.num_reread:
            return self
        return self.with_new({slot: request._replace(num_reread=num_read, num_failures=0)})

    def after_step(
        self,
        step: StepAhead,
        rows: list[list[int]],
        logprobs: TokenLogprobs | None,
        *,
        now: float,
        waited: float,
        num_ahead: int,
    ) -> HostState:
        """Returns the state after a step was read: longer requests, those that ended left out.

        Args:
          step: whose counters count from now on.
          rows: its `numbers`, on the host.
          logprobs: of the tokens kept, on the host.
          now: when it was read.
          waited: seconds that the host waited for it.
          num_ahead: the steps that are still ahead.
        """
        slots = dict(self.slots)
        left = {}  # by slot, those that end
        updates = []
        grown = []  # requests as they were, and how many tokens they got
        for slot, request_id in sorted(step.request_ids.items()):
            # The step was dispatched before the host knew what earlier steps had done: the slot may
            # be empty by now, or have another request, for which this step has emitted nothing.
            request = slots.get(slot)
            if request is None or request.request_id != request_id:
                continue
            slots[slot], update = request.after(
                slot, rows[slot], logprobs, now, self.stats.weights_version
            )
            if update is None:
                continue
            if update.finish_reason is not None:
                left[slot] = slots.pop(slot)
            updates.append(update)
            grown.append((request, len(update.token_ids)))
        # Times are those before the step. Without a `last_read` it was the first of its request:
        # its tokens came after the wait from `submit` on, all others after the step before.
        times = [(request.timing, n) for request, n in grown]
        new = [request for request, _ in grown if request.timing.last_read is None]
        stats = self.stats.after_step(
            num_busy=len(step.request_ids),
            num_ahead=num_ahead,
            waited=waited,
            prompt_tokens=sum(request.prompt_length for request in new),
            reused_tokens=sum(request.num_reused for request in new),
            queued=[request.timing.admitted - request.timing.submitted for request in new],
            first=[(now - one.submitted, 1) for one, n in times if n and one.last_read is None],
            between=[((now - one.last_read) / n, n) for one, n in times if n and one.last_read],
        )
        # Counters stay on the device until somebody asks for `stats`.
        return self._replace(
            counters=step.result.counters,
            draft_rates=step.result.draft_rates,
            stats=stats,
            slots=slots,
            updates=(*self.updates, *updates),
            kept=self._kept_after(left),
        )

    def failed(self, slot: int, error: str) -> HostState:
        """Returns the state after a running request has failed and has left its slot."""
        slots = dict(self.slots)
        request = slots.pop(slot)
        update = RequestUpdate(request.request_id, [], "failed", error=error)
        updates = (*self.updates, update)
        return self._replace(slots=slots, updates=updates, kept=self._kept_after({slot: request}))

    def after_failed_call(
        self, request_ids: Container[int], error: str, max_retries: int
    ) -> HostState:
        """Returns the state after a failed call: updates for its requests, and some end by it."""
        # The driver then puts all who are left in slots into the queue: see
        # `EngineDriver._changes`.
        slots = dict(self.slots)
        updates = [*self.updates]
        for slot, request in sorted(slots.items()):
            if request.request_id not in request_ids:
                continue
            slots[slot] = request = request._replace(num_failures=request.num_failures + 1)
            reason: FinishReason | None = None
            if request.num_failures > max_retries:
                reason = "failed"
                del slots[slot]
            updates.append(RequestUpdate(request.request_id, [], reason, error=error))
        num_failed_calls = self.stats.num_failed_calls + 1
        stats = dataclasses.replace(self.stats, num_failed_calls=num_failed_calls)
        return self._replace(slots=slots, updates=tuple(updates), stats=stats)

    def after_ends(self, reasons: Iterable[str | None]) -> HostState:
        """Returns the state that counts requests which have ended; None has not."""
        return self._replace(stats=self.stats.after_ends(reasons))

    def without(self, request_id: int) -> HostState:
        """Returns the state that knows nothing of a request."""
        # It is in a slot, or among those that return, or in neither; and may have updates beside
        # that.
        left = {i: one for i, one in self.slots.items() if one.request_id == request_id}
        return self._replace(
            slots={i: one for i, one in self.slots.items() if i not in left},
            kept=self._kept_after(left),
            returning=tuple(one for one in self.returning if one.request_id != request_id),
            updates=tuple(one for one in self.updates if one.request_id != request_id),
        )
