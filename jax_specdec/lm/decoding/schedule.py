"""What an `EngineDriver` does next: read prompts, dispatch a step, mask one for grammars, or wait.

`plan` is a function of what the host knows. It holds no state, calls no program and reads no clock.
The driver asks it again and again, carries out each `Action` by `device.DeviceState`, and asks with
the `Traffic` that this leaves, until the answer is `Wait`: then it reads the oldest step ahead. So
all that says why a request waits, and which slot it gets, is in this file; `rehearsal` lists the
actions by which `warm_up` compiles the programs.
"""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

from jax_specdec._src.base.arrays import check_increasing
from jax_specdec.lm.decoding.bookkeeping import KeptRows, ServedRequest
from jax_specdec.lm.decoding.engine import Engine
from jax_specdec.lm.decoding.options import RequestOptions

STEP_WIDTHS = {"cpu": (1, 2, 4, 8, 16), "gpu": (1, 8, 32)}
"""By device, how many requests a step may have rows for, where fewer than all slots are busy. A CPU
computes row by row; on an H100 a step of 8 requests takes a tenth longer than one of 1."""

_FEWEST_SLOTS = 8
"""Of an engine whose steps have several widths, if nobody asks for them."""

_LEAST_REUSED = 32
"""The fewest tokens of a prompt that are worth finding: no call that reads some has fewer."""


class ChunkedPrefill(NamedTuple):
    """A long prompt that is read chunk by chunk, and the slot that is kept for its request."""

    slot: int
    num_read: int = 0  # tokens, in the calls dispatched so far or by earlier requests
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
        # While nobody runs, `most` may be larger than `usual`. So large a chunk is read only where
        # a usual one does not hold what is left, and where it ends within the longest prompt.
        is_far = request.length - self.num_read > usual and self.num_read + most <= longest
        size = most if is_far else usual
        # The last chunk may begin before the end of the one before it: there is a program for whole
        # chunks only, and nothing may be written beyond the longest prompt.
        start = min(self.num_read, longest - size)
        rest = None
        # The newest token of a text is read by the next step, as the first row of its pass: so a
        # prompt is read when all but its last token are.
        if start + size < request.length - 1:
            rest = ChunkedPrefill(self.slot, num_read=start + size, waits=True)
        return Prompts({self.slot: request.with_rows(start + size)}, (start,), size, rest)


class Prompts(NamedTuple):
    """What one call reads: several prompts of one size, a part of one prompt, or nothing.

    Attributes:
      group: the requests, by slot, as they are after the call.
      start: of each of them, the position of the first token that is read.
      size: tokens of each prompt that are read, padding included.
      rest: the long prompt that is being read after the call; None if there is none.
      copies: pairs of slots, one after another: before the call, what the first holds is copied to
        the second.
    """

    group: Mapping[int, ServedRequest]
    start: Sequence[int]
    size: int
    rest: ChunkedPrefill | None
    copies: Sequence[tuple[int, int]] = ()

    @property
    def end(self) -> Sequence[int]:
        """Of each request, the position after the last token that is read."""
        return [start + self.size for start in self.start]

    @property
    def is_chunk(self) -> bool:
        """Whether parts of prompts are read."""
        return any(self.start) or (self.rest is not None and self.rest.slot in self.group)


class Place(NamedTuple):
    """Where a prompt is read, and what of it is not, because an earlier request has left it."""

    slot: int
    start: int = 0  # tokens that are not read
    source: int | None = None  # the slot that holds them, if it is another


class Settings(NamedTuple):
    """How a driver divides the time of the device; see `EngineDriver`."""

    max_steps_ahead: int = 1
    max_prefills: int | None = 1
    chunk_size: int = 64
    largest: int | None = None  # the most tokens of a call while nobody runs; None: the engine's
    prompts_in_steps: bool = False
    step_widths: Sequence[int] = ()  # below the number of slots, increasing


class Traffic(NamedTuple):
    """What a host knows of its requests, and of what it has dispatched."""

    slots: Mapping[int, ServedRequest] = {}  # requests in slots
    returning: Sequence[ServedRequest] = ()  # that wait for a slot before all others
    waiting: Collection[ServedRequest] = ()  # for their first slot, in the order they came in
    client_of: Callable[[int], Hashable] | None = None  # whose a request is, by its id
    prefill: ChunkedPrefill | None = None  # the long prompt that is being read
    kept: Mapping[int, KeptRows] = {}  # of free slots, those that are longest unused first
    ahead: Sequence[Mapping[int, int]] = ()  # ids by slot, of each step that was not read yet
    has_updates: bool = False  # whether there are some to deliver

    @property
    def running(self) -> dict[int, ServedRequest]:
        """The requests, by slot, that the next step emits tokens for."""
        # A request whose prompt is read in chunks has its slot from the first chunk on.
        reading = None if self.prefill is None else self.prefill.slot
        return {slot: request for slot, request in self.slots.items() if slot != reading}

    @property
    def is_plain(self) -> bool:
        """Whether no request that runs has a grammar, or failed in its last call."""
        running = self.running.values()
        return not any(one.matching is not None or one.num_failures for one in running)

    @property
    def has_budget(self) -> bool:
        """Whether a request has a budget left after the steps ahead, if each spends one token."""
        # A step emits at least one token for each of its requests, so where the steps ahead are as
        # many as the tokens that are left, a further step would emit nothing. Ids are compared
        # because a slot may have had another request when the step was dispatched.
        return any(
            request.budget_left > sum(ids.get(slot) == request.request_id for ids in self.ahead)
            for slot, request in self.running.items()
        )

    @property
    def queue(self) -> Iterable[ServedRequest]:
        """The requests that wait, in the order in which they get slots."""
        waiting: Iterable[ServedRequest] = self.waiting
        if self.client_of is not None:
            # How many of its client's are before a request, in slots and in the queue. By these
            # ranks clients take turns; the sort is stable, so of equals the first to come is first.
            counts = collections.Counter(self.client_of(x.request_id) for x in self.slots.values())
            ranks = {}
            for request in waiting:
                client = self.client_of(request.request_id)
                ranks[request.request_id] = counts[client]
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
      max_drafts: the most drafts of each request, where a number is to be chosen.
      slots: those that have rows, running or not; None for all.
    """

    running: Mapping[int, ServedRequest]
    prompts: Prompts
    all_neutral: bool
    num_drafts: int | None
    max_drafts: Sequence[int] = ()
    slots: tuple[int, ...] | None = None


class Masked(NamedTuple):
    """Dispatch a step whose rows are masked by grammars.

    Attributes:
      running: the requests that take part, by slot.
      max_drafts: the most drafts, by slot.
      slots: as in `Step`.
    """

    running: Mapping[int, ServedRequest]
    max_drafts: Mapping[int, int]
    slots: tuple[int, ...] | None = None


class Wait(NamedTuple):
    """Dispatch nothing before the oldest step ahead was read."""


Action = Read | Step | Masked | Wait


def plan(engine: Engine, settings: Settings, traffic: Traffic, after: Read | None = None) -> Action:
    """Returns what is to be done next.

    Args:
      engine: whose slots and programs there are.
      settings: of its driver.
      after: the call that has just read prompts; None if a step, or nothing, came before. What
        reads prompts is followed by a step, if somebody runs, whoever has begun to run by it.
    """
    # How many calls may still read prompts before the next step, while somebody runs: each of them
    # makes those who run wait. The driver hands back the last `Read`, which has what is left.
    left = math.inf if settings.max_prefills is None else settings.max_prefills
    if after is not None:
        left = after.left
    else:
        # A round begins: prompts, if any, and then a step. No step runs ahead while a request runs
        # whose last call has failed, because less is lost when the next one fails, too; nor while
        # one with a grammar does, because masks need the tokens of the step before.
        num_ahead = settings.max_steps_ahead if traffic.is_plain else 0
        # Without updates to deliver, the oldest step is read next, and is no longer ahead.
        if len(traffic.ahead) >= num_ahead + (not traffic.has_updates):
            return Wait()
        # One action reads prompts and makes a step, where somebody needs one. Prompts of requests
        # whose calls have failed get a call of their own.
        if settings.prompts_in_steps and traffic.is_plain and traffic.has_budget:
            size = settings.chunk_size
            prompts = next_prompts(engine, traffic, most=size, usual=size)
            if any(request.num_failures for request in prompts.group.values()):
                return Read(prompts, left=0)
            return next_step(engine, settings, traffic, prompts)
    if left > 0 or not traffic.running:
        # While nobody runs, nobody waits for a large call.
        most = settings.chunk_size if traffic.running else settings.largest or engine.chunk_size
        prompts = next_prompts(engine, traffic, most, usual=settings.chunk_size)
        if prompts.group:
            return Read(prompts, left - 1)
    # Nobody runs, or the steps ahead spend all budgets.
    if not traffic.has_budget:
        return Wait()
    # No prompts; a long one that is being read stays noted.
    return next_step(engine, settings, traffic, Prompts({}, (), 0, rest=traffic.prefill))


def default_widths(platform: str, num_slots: int) -> tuple[int, ...]:
    """Returns the `step_widths` that pay on a device, for an engine of so many slots."""
    if num_slots < _FEWEST_SLOTS:
        return ()
    return tuple(n for n in STEP_WIDTHS.get(platform, ()) if 2 * n <= num_slots)


def widths_of(engine: Engine, platform: str, given: Sequence[int] | None) -> tuple[int, ...]:
    """Returns the `step_widths` of a driver.

    Args:
      platform: where steps run.
      given: by whoever made the driver; None for those that pay.

    Raises:
      TypeError: they are no integers.
      ValueError: they do not increase, or one is not below the number of slots.
    """
    if given is None:
        widths = default_widths(platform, engine.num_slots)
    elif isinstance(given, Sequence) and not given:
        widths = ()
    else:
        widths = check_increasing("step_widths", given, 1, engine.num_slots - 1)
    # Steps of an exact engine have all slots.
    return () if engine.exact else widths


def narrow_slots(
    num_slots: int, widths: Iterable[int], running: Collection[int]
) -> tuple[int, ...] | None:
    """Returns the slots that a step has rows for: as many as the least width that serves all.

    Those that run and the first others, whose rows are dropped; None for all slots.
    """
    width = next((n for n in widths if n >= len(running)), None)
    if width is None:
        return None
    # Slots that fill the rows must be others, for a step puts its rows back where they were taken:
    # of a slot that was there twice, one row would undo the other.
    others = (slot for slot in range(num_slots) if slot not in running)
    return tuple(sorted([*running, *itertools.islice(others, width - len(running))]))


def next_step(
    engine: Engine, settings: Settings, traffic: Traffic, prompts: Prompts
) -> Step | Masked:
    """Returns the step of all requests that run, by the smallest program that serves them.

    Args:
      engine: whose programs there are.
      settings: of its driver.
      prompts: what the step reads beside; no group for nothing.
    """
    running = traffic.running
    max_drafts = {slot: engine.max_drafts(one.options) for slot, one in running.items()}
    slots = narrow_slots(engine.num_slots, settings.step_widths, running)
    if any(one.matching is not None for one in running.values()):
        return Masked(running, max_drafts, slots)
    # Each choice below is a program that `rehearsal` compiles: one for each shape of prompts.
    if prompts.group:
        return Step(running, prompts, all_neutral=False, num_drafts=full_budget(engine))
    all_neutral = has_neutral_steps(engine) and all(x.options.is_neutral for x in running.values())
    if not any(max_drafts.values()):
        # Nobody may have a draft. One program is enough for that, with all options and all slots,
        # unless a budget has the number 0, and so programs for each.
        is_chosen = 0 in (engine.draft_budget or ())
        all_neutral &= is_chosen
        return Step(running, prompts, all_neutral, 0, slots=slots if is_chosen else None)
    # The driver's `DraftChoice` puts a number in the place of None, if there is a budget.
    return Step(running, prompts, all_neutral, None, [*max_drafts.values()], slots)


def next_prompts(engine: Engine, traffic: Traffic, most: int, usual: int) -> Prompts:
    """Returns what is to be read next; no group if there is nothing to read.

    Args:
      engine: whose slots are read into.
      most: the most tokens of the call; longer prompts are read in chunks.
      usual: the most while others run.
    """
    prefill = traffic.prefill
    # Chunks of a long prompt and groups of shorter prompts take turns.
    if prefill is None or prefill.waits:
        group, places = _next_group(engine, traffic, most)
        if group:
            copies = [(place.source, place.slot) for place in places if place.source is not None]
            first = group[0]
            slot, start, _ = places[0]
            left = first.length - start
            # Too long for a call: `_next_group` has taken it alone, and no other long prompt is
            # being read. From now on it is what `Traffic.prefill` says.
            if left > most:
                chunked = ChunkedPrefill(slot, start)
                return chunked.next_chunk(engine, first, most, usual)._replace(copies=copies)
            # Whole prompts, or what is left of them, all padded to one size. A long prompt that is
            # being read has the next turn.
            return Prompts(
                {place.slot: request for place, request in zip(places, group, strict=True)},
                [place.start for place in places],
                engine.prompt_size(left),
                rest=None if prefill is None else prefill._replace(waits=False),
                copies=copies,
            )
    # It is the long prompt's turn, or no shorter one can be read.
    if prefill is None:
        return Prompts({}, (), 0, rest=None)
    return prefill.next_chunk(engine, traffic.slots[prefill.slot], most, usual)


def _next_group(
    engine: Engine, traffic: Traffic, most: int
) -> tuple[list[ServedRequest], list[Place]]:
    """Returns the first in the queue and others of whose prompts as much is to be read; and where.

    Long prompts, and requests whose calls keep failing, are read alone. While a long prompt is
    being read, no other one is begun. Of many that share a prefix, one reads it, and others wait.
    """
    # Those without rows first, then the longest unused.
    empty = set(range(engine.num_slots)) - traffic.slots.keys() - traffic.kept.keys()
    free = [*sorted(empty), *traffic.kept]
    # A running request's slot has rows that others may begin with, too; the slot is then copied.
    rows = {**traffic.kept, **{slot: one.rows for slot, one in traffic.slots.items()}}
    # What slots will hold when the prompts have been read that are chosen here, and the long one
    # that is being read. No row of these is there yet, so nobody begins with them in this call.
    coming = {}
    if traffic.prefill is not None:
        slot = traffic.prefill.slot
        coming[slot] = traffic.slots[slot].with_rows(traffic.slots[slot].length).rows
    group: list[ServedRequest] = []
    places: list[Place] = []
    # The first of the group decides the size that all are padded to, and how many rows the call
    # has.
    size, num_rows = 0, 1
    # Only as many as there are free slots are looked at: nobody is overtaken more often than that.
    for request in itertools.islice(traffic.queue, len(free)):
        if len(group) == num_rows:
            break
        place = _find_place(engine, request, rows, free)
        left = request.length - place.start
        # It waits where it would share enough more with a prompt that is read before it.
        _, later = _longest_prefix(engine, request, coming)
        if later >= place.start + _LEAST_REUSED:
            continue
        is_alone = left > most or request.num_failures > 1
        if group and (is_alone or engine.prompt_size(left) != size):
            continue
        if not group:
            if traffic.prefill is not None and left > most:
                continue
            size = engine.prompt_size(left)
            num_rows = engine.group_size(size)
            # There are two programs of a size: for one prompt, and for `group_size` of them.
            if is_alone or num_rows * size > most:
                num_rows = 1
        # Of one that was preempted in its prompt, what it has read itself does not count.
        reused = min(place.start, request.num_reused) if request.timing.admitted else place.start
        request = request._replace(most_rows=_most_rows(engine, request), num_reused=reused)
        # The slot's other rows are overwritten by this call. Those before `start` are there as soon
        # as copies are made, and others of the group may begin with them: copies are made in this
        # order.
        rows[place.slot] = request.with_rows(place.start).rows
        coming[place.slot] = request.with_rows(request.length).rows
        free.remove(place.slot)
        places.append(place)
        group.append(request.with_rows(request.length))
    return group, places


def _most_rows(engine: Engine, request: ServedRequest) -> int:
    """Returns the most rows of a request, when it gets a slot, that later ones may begin with.

    That is the prompt, with what a request had generated before it left its slot; and new tokens,
    if the drafter says so.
    """
    if not engine.prefix_caching:
        return 0
    prompt = request.length - 1
    # Of an exact engine only rows that `admit` wrote, in whole chunks, have the bits that another
    # request would get: the first step runs the prompt's last token again, in another program.
    if engine.exact:
        return prompt - prompt % engine.chunk_size
    # Steps have written the rows of new tokens. Those of the target always count; those of the
    # drafter if it declares so, or has none.
    keeps_new = engine.drafter.serves.kept_rows == "texts" or not engine.drafter_has_cache
    return engine.max_length if keeps_new else prompt


def _find_place(
    engine: Engine, request: ServedRequest, rows: Mapping[int, KeptRows], free: Sequence[int]
) -> Place:
    """Returns the free slot for a request that leaves most of what it needs not to be read.

    A text that goes on stays in its slot. Of one that only begins alike, that slot or the one that
    is longest unused is taken, to which the first is copied: where fewer rows of others are lost.
    That slot comes first in `free`; `rows` are of all slots.
    """
    source, start = _longest_prefix(engine, request, rows)
    left = request.length - start
    # One call reads what is left, padded to one of the sizes; the padding is written, too, and must
    # not end beyond the longest prompt. So a few tokens more are read than need be.
    if left <= engine.chunk_size:
        start = min(start, engine.longest_read - engine.prompt_size(left))
    if source is None or start < _LEAST_REUSED:
        return Place(free[0])
    # Fewer rows than anybody would begin with are no loss.
    others = rows[free[0]].num_rows if free[0] in rows else 0
    most_lost = max(others, _LEAST_REUSED - 1)
    # Always so if `source` is the first of them: it has no more rows than it would lose.
    if source in free and rows[source].num_rows - start <= most_lost:
        return Place(source, start)
    return Place(free[0], start, source)


def _longest_prefix(
    engine: Engine, request: ServedRequest, rows: Mapping[int, KeptRows]
) -> tuple[int | None, int]:
    """Returns the slot that most tokens of a request need not be read from, and how many these are.

    The last token but one is read in any case: the first step drafts from its features.
    """
    source, best = None, 0
    unit = engine.chunk_size if engine.exact else 1
    tokens = request.tokens
    for slot, kept in rows.items():
        # Who shares c tokens begins with c - 1 rows, as `KeptRows` says: of n rows, n + 1 tokens
        # count.
        limit = min(request.length - 1, kept.num_rows + 1)
        # What is to be longer than the best has a token in common with it there.
        if kept.salt != request.options.cache_salt or limit <= best + 1:
            continue
        if tokens[best + 1] != kept.tokens[best + 1]:
            continue
        start = common_prefix(tokens, kept.tokens, limit) - 1
        # An exact engine begins with whole chunks.
        start -= start % unit
        if start > best:
            source, best = slot, start
    return source, best


def common_prefix(one: Sequence[int], other: Sequence[int], most: int) -> int:
    """Returns how many tokens two texts begin with alike, at most `most`, by bisection."""
    # The first `low` tokens are equal, and no more than `high` are. Slices of lists are compared in
    # C, where a loop over tokens would be one of Python.
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def has_neutral_steps(engine: Engine) -> bool:
    """Returns whether steps in which nobody asks for options have a program of their own."""
    # An exact engine has one program, whoever is beside a request.
    return engine.request_options and not engine.exact


def full_budget(engine: Engine) -> int | None:
    """Returns, as a step's `num_drafts`, the most of a `draft_budget`; None, for all, without."""
    return None if engine.draft_budget is None else engine.draft_budget[-1]


def placeholders(num_rows: int, size: int, slot: int) -> Prompts:
    """Returns prompts of zeros, for slots from `slot` on: programs are compiled with them."""
    request = ServedRequest(
        request_id=-1, tokens=[0] * size, prompt_length=size, length=size,
        options=RequestOptions(seed=0),
    )  # fmt: skip
    group = {slot + row: request for row in range(num_rows)}
    return Prompts(group, (0,) * num_rows, size, rest=None)


def rehearsal(
    engine: Engine, *, prompts_in_steps: bool, grammars: bool, step_widths: Sequence[int] = ()
) -> list[Action]:
    """Returns an action for each program there may be, for slots that do not exist.

    Args:
      engine: whose programs they are.
      prompts_in_steps: whether steps read prompts.
      grammars: whether requests have matchers.
      step_widths: of narrow steps; those with masks are not among them.
    """
    # The first slot that does not exist: no sequence of the batch begins by these calls.
    nowhere = engine.num_slots
    prompts = [placeholders(num_rows, size, nowhere) for num_rows, size in engine.admit_shapes]
    actions: list[Action] = [Read(one, left=0) for one in prompts]
    if engine.prefix_caching:
        # The program that copies a slot; no other action has it.
        actions.append(Read(prompts[0]._replace(copies=[(nowhere, nowhere)]), left=0))
    # Steps without prompts: one for no drafts, then each number of a budget, for any options and,
    # where there are such steps, for neutral ones. `dict.fromkeys` leaves out what is there twice,
    # and keeps the order.
    nothing = Prompts({}, (), 0, rest=None)
    neutral = {False, has_neutral_steps(engine)}
    pairs = [*itertools.product(neutral, engine.draft_budget or (None,))]
    for all_neutral, num_drafts in dict.fromkeys(((False, 0), *pairs)):
        actions.append(Step({}, nothing, all_neutral, num_drafts))
    for (all_neutral, num_drafts), width in itertools.product(pairs, step_widths):
        slots = tuple(range(nowhere, nowhere + width))
        actions.append(Step({}, nothing, all_neutral, num_drafts, slots=slots))
    if prompts_in_steps:
        actions += [Step({}, one, False, full_budget(engine)) for one in prompts]
    # A step with masks and no drafts, and one whose requests may have some, unless none may.
    if grammars:
        most = engine.max_drafts(RequestOptions())
        actions += [Masked({}, {nowhere: n}) for n in sorted({0, min(1, most)})]
    return actions
