"""The thread that steps the driver, and the way of its updates to the event loop.

An `EngineDriver` is not safe for several threads, so one thread owns it. The event loop never calls
the driver: it puts functions into a queue, which the thread runs between two steps, in order. The
thread never touches a channel's updates: it schedules `_deliver` in the event loop. So nothing here
has a lock. `app` takes places and a `Channel` for each request, `answer` reads the channel.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import contextlib
import queue
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from jax_specdec import lm
from jax_specdec._src.base.arrays import argument_of
from jax_specdec.lm import terminal
from jax_specdec.lm.server.limits import BUSY, ApiError, Choice, first_line

T = TypeVar("T")

FAILED = "the engine has failed"


class EngineFailed(RuntimeError):
    """The engine has failed, and so the server ends."""


class Channel:
    """The engine's updates of one request, which may have several choices, for its client."""

    def __init__(self, num_choices: int, max_unsent: int) -> None:
        self.request_ids: list[int] = []  # by choice; the worker's
        self.open = {*range(num_choices)}  # choices that have not ended
        self.is_sending = False
        self.is_full = asyncio.Event()  # the client reads too slowly
        self._max_unsent = max_unsent * num_choices
        self._updates: collections.deque[tuple[int, lm.RequestUpdate]] = collections.deque()
        self._arrived = asyncio.Event()

    def put(self, choice: int, update: lm.RequestUpdate) -> None:
        """Adds an update of a choice; in the event loop's thread."""
        if update.finish_reason is not None:
            self.open.discard(choice)
        self._updates.append((choice, update))
        self._arrived.set()
        # Only while `send` waits for the client; at other times the answer itself is behind.
        if self.is_sending and len(self._updates) > self._max_unsent:
            self.is_full.set()

    async def get(self) -> tuple[int, lm.RequestUpdate]:
        """Returns the next update, after its choice."""
        while not self._updates:
            self._arrived.clear()
            await self._arrived.wait()
        return self._updates.popleft()


class Worker:
    """The thread that owns the driver: it steps while there is work, and runs calls between.

    A request has a place for each of its choices from its parameters to its end: as many as there
    are slots, and `max_queue` more. What it takes before it waits for a slot has a bound by that.

    Attributes:
      num_places: for choices.
      failure: why the thread ended before `stop`.
    """

    def __init__(self, driver: lm.EngineDriver) -> None:
        assert driver.max_queue is not None
        self.num_places = driver.serving_stats().num_slots + driver.max_queue
        self.failure: str | None = None
        self._refusal: tuple[str, int] | None = None  # what all are answered, and the status
        self._open: set[Channel] = set()
        self._driver = driver
        # From here on places bound the queue.
        driver.max_queue = None  # which would count those that are about to get a free slot
        # A free slot goes to the request with the fewest: one of 16 choices does not take all.
        driver.client_of = self._client_of
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._channels: dict[int, tuple[Channel, int]] = {}  # and the choice, by request
        self._num_failed_calls = 0  # when the device was last tried
        self._since: float | None = None  # when the step or the call began that goes on
        # A daemon: a step that does not end must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self, on_failure: Callable[[], None]) -> None:
        """Begins to serve; `on_failure` is called in this event loop if the thread ends early."""
        self._loop = asyncio.get_running_loop()
        self._on_failure = on_failure
        self._thread.start()

    async def stop(self, seconds: float) -> None:
        """Ends after what was asked for so far, or fails if that takes longer."""
        self._calls.put(None)
        # In another thread: answers of the event loop go on meanwhile.
        await asyncio.to_thread(self._thread.join, seconds)
        if self._thread.is_alive():
            self.failure = f"{FAILED}: a step does not end"
        else:
            self._driver.close()

    @property
    def is_refusing(self) -> bool:
        """Whether `refuse_all` was called, and so every answer is its error."""
        return self._refusal is not None

    @property
    def num_open(self) -> int:
        """Choices that have a place."""
        return sum(len(channel.open) for channel in self._open)

    @property
    def seconds_busy(self) -> float:
        """How long the step, or the call between steps, has taken that goes on."""
        since = self._since  # once: the thread sets it
        return 0.0 if since is None else time.monotonic() - since

    def check_room(self, num_choices: int = 1) -> None:
        """Checks that there are places for so many choices.

        Raises:
          ApiError: there are not, now or ever; or the server refuses everybody.
        """
        self.check_open()
        # Never: status 400, so that no client tries again. Now: 429.
        if num_choices > self.num_places:
            message = f"this server has room for {self.num_places} choices at a time"
            raise ApiError(f"{message}, but the request has {num_choices}", "n")
        if (num_open := self.num_open) + num_choices > self.num_places:
            running = f"{num_open} of {self.num_places} choices run or wait already"
            message = f"{running}: try again later"
            raise ApiError(message, status=429, code="queue_full", headers=BUSY)

    def check_open(self) -> None:
        """Raises an `ApiError` if `refuse_all` was called."""
        if self._refusal is not None:
            message, status = self._refusal
            raise ApiError(message, status=status)

    def refuse_all(self, message: str, status: int) -> None:
        """Answers all that is left, and whoever asks from now on, with an error."""
        self._refusal = message, status
        for channel in self._open:
            for choice in [*channel.open]:
                channel.put(choice, lm.RequestUpdate(-1, [], "failed", error=message))

    @contextlib.contextmanager
    def channel(self, num_choices: int, max_unsent: int) -> Iterator[Channel]:
        """Yields a channel with places for its choices, and cancels what is left in the end.

        Raises:
          ApiError: see `check_room`.
        """
        self.check_room(num_choices)
        channel = Channel(num_choices, max_unsent)
        self._open.add(channel)
        try:
            yield channel
        finally:
            # The places are free at once; the slots when the thread runs this, after its step. Of
            # requests that have ended by themselves, `cancel` does nothing.
            self._open.remove(channel)
            self._calls.put(lambda: self._end(lm.EngineDriver.cancel, channel.request_ids))

    async def call(self, function: Callable[[lm.EngineDriver], T]) -> T:
        """Returns what `function` does, called with the driver between two steps."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():  # the client may have left
                try:
                    if self.failure is not None:
                        raise ApiError(self.failure, status=500)
                    future.set_result(function(self._driver))
                except BaseException as error:  # a panic of a library too, or the client would wait
                    future.set_exception(error)

        if self.failure is None:
            self._calls.put(run)
        else:
            # The thread has ended, and would never run it: the failure is raised here.
            run()
        # If the caller is cancelled, so is the future, and `run` does nothing when its turn comes.
        return await asyncio.wrap_future(future)

    async def submit(self, channel: Channel, choices: Sequence[Choice]) -> None:
        """Queues every choice of a request, or none.

        Raises:
          ApiError: the driver refuses a choice.
        """

        def submit(driver: lm.EngineDriver) -> None:
            for choice, arguments in enumerate(choices):
                try:
                    request_id = driver.submit(**arguments)
                except (TypeError, ValueError) as error:  # those before it end with the channel
                    raise ApiError(str(error), argument_of(error)) from error
                channel.request_ids.append(request_id)
                self._channels[request_id] = channel, choice

        await self.call(submit)

    def finish(self, channel: Channel, choice: int) -> None:
        """Ends a choice whose text is complete; does not wait."""
        # Its place is free at once.
        channel.open.discard(choice)
        finish = lm.EngineDriver.finish
        # Read when it is called, which is after `submit`; nothing if that was refused.
        self._calls.put(lambda: self._end(finish, channel.request_ids[choice : choice + 1]))

    def _end(self, end: Callable[[lm.EngineDriver, int], bool], request_ids: Sequence[int]) -> None:
        """Ends requests, also those whose `submit` was given up, because calls are in order."""
        for request_id in request_ids if self.failure is None else ():
            # The driver gives no more updates of it, so nobody looks for its channel.
            self._channels.pop(request_id, None)
            end(self._driver, request_id)

    def _client_of(self, request_id: int) -> Channel:
        return self._channels[request_id][0]

    def _run(self) -> None:
        """Steps until `stop`, or until the engine fails; what the thread does."""
        try:
            while self._run_calls():
                # The channel, the choice and the update of each request that took part in a step.
                updates = [(*self._channels[x.request_id], x) for x in self._driver.step()]
                for _, _, update in updates:
                    if update.finish_reason is not None:
                        del self._channels[update.request_id]
                # One call for a whole step: each wakes the event loop.
                if updates:
                    self._loop.call_soon_threadsafe(self._deliver, updates)
                if any(update.finish_reason == "failed" for _, _, update in updates):
                    self._try_device()
        except BaseException as error:  # not of a request: those end in updates
            # Updates of the last step come first: both are scheduled by this thread.
            self._loop.call_soon_threadsafe(self._fail)
            is_known = isinstance(error, EngineFailed)
            terminal.log(str(error) if is_known else traceback.format_exc())

    def _try_device(self) -> None:
        """Calls every program for no request, if calls have failed since this was last done.

        A device that has failed differs from requests that it cannot serve by this. A call that
        fails leaves nobody in a slot: where somebody runs, the device works.

        Raises:
          EngineFailed: a program fails without a request, too.
        """
        num_failed_calls = self._driver.serving_stats().num_failed_calls
        if num_failed_calls > self._num_failed_calls and not self._driver.num_running:
            try:
                self._driver.warm_up(grammars=True)
            except Exception as error:
                raise EngineFailed(f"{FAILED}: {first_line(error)}") from error
        self._num_failed_calls = num_failed_calls

    def _run_calls(self) -> bool:
        """Runs what waits, and waits while there is nothing to do. Returns whether to go on."""
        while True:
            # Asked again after each call, which may have brought work or ended the last of it.
            is_idle = self._driver.is_idle
            self._since = None if is_idle else time.monotonic()
            try:
                call = self._calls.get(block=is_idle)
            except queue.Empty:
                # There is work, and no call waits: a step is next.
                return True
            # From `stop`.
            if call is None:
                return False
            self._since = time.monotonic()
            call()

    def _deliver(self, updates: list[tuple[Channel, int, lm.RequestUpdate]]) -> None:
        """Puts the updates of a step into their channels; in the event loop's thread."""
        for channel, choice, update in updates:
            channel.put(choice, update)

    def _fail(self) -> None:
        """Answers all with the failure, after the thread has ended; in the event loop's thread."""
        # From here on calls are run here, by `call` itself, and no request is ended.
        self.failure = FAILED
        self.refuse_all(FAILED, 500)
        self._on_failure()
        # What was put into the queue since the thread ended: each caller waits for its future.
        while not self._calls.empty():
            call = self._calls.get_nowait()
            if call is not None:
                call()
