"""What an `EngineDriver` does next: read prompts, dispatch a step, mask one for grammars, or wait.

`plan` is a function of what the host knows. It holds no state, calls no program and reads no clock.
"""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

from jax_specdec.lm.decoding.bookkeeping import ServedRequest
from jax_specdec.lm.decoding.engine import Engine
from jax_specdec.lm.decoding.options import RequestOptions


class ChunkedPrefill(NamedTuple):
    """A long prompt that is read chunk by chunk, and the slot that is kept for its request."""

    slot: int
    num_read: int = 0  # tokens, in the calls dispatched so far
    waits: bool = False  # shorter prompts go before the next chunk

    def next_chunk(self, engine: Engine, request: ServedRequest, most: int, usual: int) -> Prompts:
        """Returns the next chunk; the last ends at the prompt's last token but one, or after it.

        Args:
          engine: whose slots are read into; no chunk ends beyond the longest prompt there is.
          request: whose prompt it is.
          most: the most tokens of this call.
          usual: the most while others run, for which there is a program too.
        """
        longest = engine.longest_read
        is_far = request.length - self.num_read > usual and self.num_read + most <= longest
        size = most if is_far else usual
        # The last chunk may begin before the end of the one before it: there is a program for whole
        # chunks only, and nothing may be written beyond the longest prompt.
        start = min(self.num_read, longest - size)
        rest = None
        if start + size < request.length - 1:  # a step reads the last token
            rest = ChunkedPrefill(self.slot, num_read=start + size, waits=True)
        return Prompts({self.slot: request}, start, size, rest)


class Prompts(NamedTuple):
    """What one call reads: several prompts of one size, a part of one prompt, or nothing.

    Attributes:
      group: the requests, by slot.
      start: the position of the first token that is read.
      size: tokens of each prompt that are read, padding included.
      rest: the long prompt that is being read after the call; None if there is none.
    """

    group: Mapping[int, ServedRequest]
    start: int
    size: int
    rest: ChunkedPrefill | None

    @property
    def end(self) -> int:
        """The position after the last token that is read."""
        return self.start + self.size

    @property
    def is_chunk(self) -> bool:
        """Whether it is a part of a prompt."""
        return self.start > 0 or (self.rest is not None and self.rest.slot in self.group)


class Settings(NamedTuple):
    """How a driver divides the time of the device; see `EngineDriver`."""

    max_steps_ahead: int = 1
    max_prefills: int | None = 1
    chunk_size: int = 64
    prompts_in_steps: bool = False


class Traffic(NamedTuple):
    """What a host knows of its requests, and of what it has dispatched."""

    slots: Mapping[int, ServedRequest] = {}  # requests in slots
    returning: Sequence[ServedRequest] = ()  # that wait for a slot before all others
    waiting: Collection[ServedRequest] = ()  # for their first slot, in the order they came in
    client_of: Callable[[int], Hashable] | None = None  # whose a request is, by its id
    prefill: ChunkedPrefill | None = None  # the long prompt that is being read
    ahead: Sequence[Mapping[int, int]] = ()  # ids by slot, of each step that was not read yet
    has_updates: bool = False  # whether there are some to deliver

    @property
    def running(self) -> dict[int, ServedRequest]:
        """The requests, by slot, that the next step emits tokens for."""
        waits = None if self.prefill is None else self.prefill.slot
        return {slot: one for slot, one in self.slots.items() if slot != waits}

    @property
    def is_plain(self) -> bool:
        """Whether no request that runs has a grammar, or failed in its last call."""
        running = self.running.values()
        return not any(one.matching is not None or one.num_failures for one in running)

    @property
    def has_budget(self) -> bool:
        """Whether a request has a budget left after the steps ahead, if each spends one token."""
        return any(
            one.budget_left > sum(ids.get(slot) == one.request_id for ids in self.ahead)
            for slot, one in self.running.items()
        )

    @property
    def queue(self) -> Iterable[ServedRequest]:
        """The requests that wait, in the order in which they get slots."""
        waiting: Iterable[ServedRequest] = self.waiting
        if self.client_of is not None:
            # How many of its client's are before a request, in slots and in the queue.
            counts = collections.Counter(self.client_of(x.request_id) for x in self.slots.values())
            ranks = {}
            for one in waiting:
                client = self.client_of(one.request_id)
                ranks[one.request_id] = counts[client]
                counts[client] += 1
            waiting = sorted(waiting, key=lambda one: ranks[one.request_id])
        # No generator: an interrupt while Python closes one is lost.
        return itertools.chain(self.returning, waiting)


class Read(NamedTuple):
    """Read prompts between two steps.

    Attributes:
      prompts: what is read.
      left: how many further calls may read prompts before the next step, while somebody runs.
    """

    prompts: Prompts
    left: float


class Step(NamedTuple):
    """Dispatch a step; there is a program for each pair of `all_neutral` and `num_drafts`.

    Attributes:
      running: the requests that take part, by slot.
      prompts: what the step reads beside; there is a program for each shape of these.
      all_neutral: as in `Engine.step`.
      num_drafts: as in `Engine.step`; None for K, or for what a `DraftChoice` chooses.
      limits: the most drafts of each request, where a number is to be chosen.
    """

    running: Mapping[int, ServedRequest]
    prompts: Prompts
    all_neutral: bool
    num_drafts: int | None
    limits: Sequence[int] = ()


class Masked(NamedTuple):
    """Dispatch a step whose rows are masked by grammars.

    Attributes:
      running: the requests that take part, by slot.
      limits: the most drafts, by slot.
    """

    running: Mapping[int, ServedRequest]
    limits: Mapping[int, int]


class Wait(NamedTuple):
    """Dispatch nothing before the oldest step ahead was read."""


Action = Read | Step | Masked | Wait


def plan(engine: Engine, settings: Settings, traffic: Traffic, after: Read | None = None) -> Action:
    """Returns what is to be done next.

    Args:
      engine: whose slots and programs there are.
      settings: of its driver.
      traffic: as it is now.
      after: the call that has just read prompts; None if a step, or nothing, came before. What
        reads prompts is followed by a step, if somebody runs, whoever has begun to run by it.
    """
    left = math.inf if settings.max_prefills is None else settings.max_prefills
    if after is not None:
        left = after.left
    else:
        # Of what fails, less is lost; and masks need the tokens of the step before.
        num_ahead = settings.max_steps_ahead if traffic.is_plain else 0
        # Without updates to deliver, the oldest step is read next, and is no longer ahead.
        if len(traffic.ahead) >= num_ahead + (not traffic.has_updates):
            return Wait()
        if settings.prompts_in_steps and traffic.is_plain and traffic.has_budget:
            size = settings.chunk_size
            prompts = next_prompts(engine, traffic, most=size, usual=size)
            if any(one.num_failures for one in prompts.group.values()):
                return Read(prompts, left=0)  # if it fails again, that concerns nobody else
            return next_step(engine, traffic, prompts)
    if left > 0 or not traffic.running:
        # While nobody runs, nobody waits for a large call.
        most = settings.chunk_size if traffic.running else engine.chunk_size
        prompts = next_prompts(engine, traffic, most, usual=settings.chunk_size)
        if prompts.group:
            return Read(prompts, left - 1)
    if not traffic.has_budget:
        return Wait()
    return next_step(engine, traffic, Prompts({}, 0, 0, rest=traffic.prefill))


def next_step(engine: Engine, traffic: Traffic, prompts: Prompts) -> Step | Masked:
    """Returns the step of all requests that run, by the smallest program that serves them.

    Args:
      engine: whose programs there are.
      traffic: as it is now.
      prompts: what the step reads beside; no group for nothing.
    """
    running = traffic.running
    # A request may be longer on the device, and so have fewer drafts there, but never more.
    limits = {i: engine.most_drafts(one.options, one.length) for i, one in running.items()}
    if any(one.matching is not None for one in running.values()):
        return Masked(running, limits)
    if prompts.group:  # one program is enough for each shape of these
        return Step(running, prompts, all_neutral=False, num_drafts=full_budget(engine))
    all_neutral = engine.request_options and all(x.options.is_neutral for x in running.values())
    all_neutral &= not engine.exact  # one program, whoever is beside a request
    if not any(limits.values()):
        # One program is enough for no drafts, unless a budget has that number for both.
        all_neutral &= 0 in (engine.draft_budget or ())
        return Step(running, prompts, all_neutral, num_drafts=0)
    return Step(running, prompts, all_neutral, num_drafts=None, limits=[*limits.values()])


def next_prompts(engine: Engine, traffic: Traffic, most: int, usual: int) -> Prompts:
    """Returns what is to be read next; no group if there is nothing to read.

    Args:
      engine: whose slots are read into.
      traffic: as it is now.
      most: the most tokens of the call; longer prompts are read in chunks.
      usual: the most while others run.
    """
    prefill = traffic.prefill
    # Chunks of a long prompt and groups of shorter prompts take turns.
    if prefill is None or prefill.waits:
        group = _next_group(engine, traffic, most)
        if group:
            slot, first = next(iter(group.items()))
            if first.length > most:
                return ChunkedPrefill(slot).next_chunk(engine, first, most, usual)
            rest = None if prefill is None else prefill._replace(waits=False)
            return Prompts(group, 0, engine.prompt_size(first.length), rest)
    if prefill is None:
        return Prompts({}, 0, 0, rest=None)
    return prefill.next_chunk(engine, traffic.slots[prefill.slot], most, usual)


def _next_group(engine: Engine, traffic: Traffic, most: int) -> dict[int, ServedRequest]:
    """Returns, by free slot, the first in the queue and others whose prompts have its size.

    Long prompts, and requests whose calls keep failing, are read alone. While a long prompt is
    being read, no other one is begun.
    """
    free = [slot for slot in range(engine.num_slots) if slot not in traffic.slots]
    # Only as many as there are free slots are looked at: nobody is overtaken more often than that.
    group = [
        one
        for one in itertools.islice(traffic.queue, len(free))
        if traffic.prefill is None or one.length <= most
    ]
    if group:
        size = engine.prompt_size(group[0].length)
        num_rows = engine.group_size(size)
        if _is_alone(group[0], most) or num_rows * size > most:
            num_rows = 1
        alike = [
            one
            for one in group[1:]
            if not _is_alone(one, most) and engine.prompt_size(one.length) == size
        ]
        group = [group[0], *alike][:num_rows]
    return dict(zip(free, group, strict=False))


def _is_alone(request: ServedRequest, most: int) -> bool:
    return request.length > most or request.num_failures > 1


def full_budget(engine: Engine) -> int | None:
    """Returns, as a step's `num_drafts`, the most of a `draft_budget`; None, for all, without."""
    return None if engine.draft_budget is None else engine.draft_budget[-1]


def placeholders(num_rows: int, size: int, slot: int) -> Prompts:
    """Returns prompts of zeros, for slots from `slot` on: programs are compiled with them."""
    request = ServedRequest(
        request_id=-1, tokens=[0] * size, prompt_length=size, length=size,
        options=RequestOptions(seed=0),
    )  # fmt: skip
    return Prompts({slot + row: request for row in range(num_rows)}, 0, size, rest=None)


def rehearsal(engine: Engine, *, prompts_in_steps: bool, grammars: bool) -> list[Action]:
    """Returns an action for each program there may be, for slots that do not exist.

    Args:
      engine: whose programs they are.
      prompts_in_steps: whether steps read prompts.
      grammars: whether requests have matchers.
    """
    nowhere = engine.num_slots
    prompts = [placeholders(num_rows, size, nowhere) for num_rows, size in engine.admit_shapes]
    actions: list[Action] = [Read(one, left=0) for one in prompts]
    nothing = Prompts({}, 0, 0, rest=None)
    pairs = itertools.product({False, engine.request_options}, engine.draft_budget or (None,))
    for all_neutral, num_drafts in dict.fromkeys(((False, 0), *pairs)):
        actions.append(Step({}, nothing, all_neutral, num_drafts))
    if prompts_in_steps:
        actions += [Step({}, one, False, full_budget(engine)) for one in prompts]
    if grammars:
        most = engine.most_drafts(RequestOptions(), 1)
        actions += [Masked({}, {nowhere: n}) for n in sorted({0, min(1, most)})]
    return actions
