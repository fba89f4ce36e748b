"""When the programs of a driver are compiled: before it serves, or in a thread while it does.

`schedule.rehearsal` says which programs there are. Those that any request may need are compiled
first, each by a call for nobody. On a CPU, the others can be compiled behind: in a thread, while
requests that do not need them are served.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable

from jax_specdec.lm.decoding import schedule, stopwatch
from jax_specdec.lm.decoding.bookkeeping import HostState, ServedRequest
from jax_specdec.lm.decoding.device import DeviceState, Rehearsal
from jax_specdec.lm.decoding.engine import Engine
from jax_specdec.lm.decoding.exact import check_rows
from jax_specdec.lm.decoding.schedule import Action, Masked, Read, Settings, Step
from jax_specdec.lm.decoding.state import DecodeState
from jax_specdec.lm.decoding.step_costs import StepCosts

KINDS = "options", "long prompts", "grammars"
"""What requests may be that need programs of their own; what most of them are comes first."""


def served_later(engine: Engine, action: Action) -> str | None:
    """Returns which of `KINDS` an action of `schedule.rehearsal` is for; None for any request.

    Args:
      engine: whose program it is, with `request_options`.
      action: what is rehearsed.
    """
    match action:
        case Read(prompts):
            # Any prompt can be read in calls of the least size, of one request each: until there
            # are programs for more, all prompts are, as `most_read` has it.
            is_least = len(prompts.group) == 1 and prompts.size == engine.chunk_sizes[0]
            return None if is_least else "long prompts"
        case Step(prompts=prompts, all_neutral=all_neutral):
            # A request without options runs in steps that leave all of them out. Steps that read
            # prompts serve requests of all kinds, so they are compiled now.
            return None if prompts.group or all_neutral else "options"
        case Masked():
            return "grammars"
    return None


def needs(engine: Engine, request: ServedRequest) -> set[str]:
    """Returns which of `KINDS` a request is, but for the length of its prompt."""
    kinds = set()
    if not request.options.is_neutral:
        kinds.add("options")
    # Without drafts, a step that is for all requests serves those, too: see `schedule.next_step`.
    if not engine.max_drafts(request.options) and 0 not in (engine.draft_budget or ()):
        kinds.add("options")
    if request.matching is not None:
        kinds.add("grammars")
    return kinds


@dataclasses.dataclass(frozen=True)
class WarmUp:
    """Compiles the programs of a driver, and says who is served until all of them are there.

    Attributes:
      engine: whose programs they are.
      device: what calls them; it has the thread of those that are compiled behind.
    """

    engine: Engine
    device: DeviceState

    # Before the driver serves

    def actions(
        self, settings: Settings, *, grammars: bool, behind: bool
    ) -> tuple[list[Action], list[tuple[str, Action]]]:
        """Returns actions that call each program once: those for now, and those for later.

        Each of those for later comes after that of `KINDS` which it is for.

        Args:
          settings: whether steps read prompts, and of how many slots they may be.
          grammars: whether requests will have matchers.
          behind: whether some are for later, where that can be.
        """
        # Where there is a thread, narrow steps are not compiled ahead. The first of each width has
        # the thread compile it, and nobody waits: until it is there, `DeviceState` dispatches steps
        # of all slots. On a GPU there is no thread: XLA chooses products by timing them, which
        # would be wrong while other programs run.
        has_thread = self.device.behind is not None
        actions = schedule.rehearsal(
            self.engine,
            prompts_in_steps=settings.prompts_in_steps,
            grammars=grammars,
            step_widths=() if has_thread else settings.step_widths,
        )
        if not (behind and self._can_wait):
            return actions, []
        kinds = [served_later(self.engine, action) for action in actions]
        pairs = [*zip(kinds, actions, strict=True)]
        first_actions = [action for kind, action in pairs if kind is None]
        later_actions = [(kind, action) for kind, action in pairs if kind is not None]
        # What most requests are comes first, until some wait: see `served_now`.
        return first_actions, sorted(later_actions, key=lambda pair: KINDS.index(pair[0]))

    @property
    def _can_wait(self) -> bool:
        """Whether there are programs that only some requests need, and a thread for them."""
        engine = self.engine
        # Shapes stand for the arrays of what is compiled behind, and have no place on a mesh.
        sharding = engine.model.serves.sharding
        is_on_mesh = sharding is not None and sharding.mesh is not None
        # Long prompts wait for no program if calls of the least size can read them, too.
        has_chunks = engine.drafter.serves.chunks
        has_thread = self.device.behind is not None
        # Without neutral steps, one step serves all requests.
        is_for_some = schedule.has_neutral_steps(engine)
        return has_thread and not is_on_mesh and is_for_some and has_chunks

    def calls(
        self, actions: Iterable[Action], rehearse: Callable[[Action], None], host: HostState
    ) -> list[Callable[[], object]]:
        """Returns calls for requests in slots that do not exist: nothing has to be undone.

        Args:
          actions: those for now.
          rehearse: carries one out, and reads its result.
          host: for whose weights an exact engine is checked.
        """
        calls: list[Callable[[], object]] = []
        # If this fails, all else is for nothing.
        if self.engine.exact:
            calls.append(functools.partial(self._check_rows, host))
        calls += [functools.partial(rehearse, action) for action in actions]
        # No action has these: a request leaves its slot early, and a text is kept for drafting. The
        # slot that is emptied does not exist; the text is empty.
        calls.append(functools.partial(self.device.empty, self.engine.num_slots, ()))
        if self.engine.drafter.serves.has_history:
            calls.append(functools.partial(self.device.remember, [[]]))
        return calls

    def _check_rows(self, host: HostState) -> None:
        """Checks that an exact engine's model gives a token the same bits in every row."""
        # There may be no room for two caches.
        self.device.drop(host)
        params, _ = self.device.weights
        check_rows(self.engine, params, self.engine.num_slots, self.engine.buffer_length)

    def measure_chunk_size(self, host: HostState, *, in_steps: bool) -> int:
        """Measures steps and prompts; returns the most tokens that one call should read.

        Args:
          host: with whose weights they are measured; the device drops its state.
          in_steps: whether prompts are read in steps.
        """
        # The measurement makes a state of its own; there may be no room for two.
        self.device.drop(host)
        params, draft_params = self.device.weights
        costs = stopwatch.measure_chunks(self.engine, params, draft_params, in_steps=in_steps)
        return costs.largest

    def measure_steps(self) -> StepCosts:
        """Measures a step with each number of drafts; returns what it costs."""
        params, draft_params = self.device.weights
        return stopwatch.measure_steps(self.engine, params, draft_params)

    # While it serves

    def compile_later(
        self, later: Iterable[tuple[str, Action]], host: HostState, state: DecodeState
    ) -> None:
        """Has the programs for later compiled in a thread, for arrays like those of a state.

        Args:
          later: actions that call them, each after its kind.
          host: whose weights they get.
          state: the one that the next step of the device donates.
        """
        # The thread has shapes alone: the arrays are donated while it compiles.
        device = Rehearsal(self.engine, host, state)
        assert self.device.behind is not None
        calls = [(kind, functools.partial(device.compile, action)) for kind, action in later]
        self.device.behind.compile_later(calls)

    @property
    def lacking(self) -> set[str]:
        """Those of `KINDS` for which programs are still to be compiled behind."""
        behind = self.device.behind
        return set() if behind is None else behind.lacking

    @property
    def most_read(self) -> int | None:
        """The most tokens of prompts in one call, as long as there are no programs for more.

        So nobody waits for a program because a prompt is long. None if all programs are there.
        """
        return self.engine.chunk_sizes[0] if "long prompts" in self.lacking else None

    def compiling_for(self, waiting: Collection[ServedRequest]) -> list[str]:
        """Returns those of `KINDS` of which a request that waits lacks programs."""
        lacking = self.lacking
        needed = set().union(*(needs(self.engine, request) for request in waiting))
        return [kind for kind in KINDS if kind in needed & lacking]

    def served_now(self, waiting: Collection[ServedRequest]) -> Collection[ServedRequest]:
        """Returns which requests of those that wait for their first slot have their programs."""
        lacking = self.lacking
        if not lacking:
            return waiting
        # The others stay in the queue, and are overtaken: a call for them would compile here, for
        # seconds in which those who run would wait, too.
        needed = {request.request_id: needs(self.engine, request) & lacking for request in waiting}
        # What somebody waits for is compiled before what nobody has asked for yet.
        assert self.device.behind is not None
        self.device.behind.put_first(set().union(*needed.values()))
        return [request for request in waiting if not needed[request.request_id]]
