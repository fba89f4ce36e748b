"""The thread that steps the driver, and the way of its updates to the event loop."""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import queue
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import TypeVar

from jax_specdec import lm
from jax_specdec.lm.cli import terminal
from jax_specdec.lm.server.limits import BUSY, ApiError, Json, first_line, named

T = TypeVar("T")


FAILED = "the engine has failed"


class EngineFailed(RuntimeError):
    """The engine has failed, and so the server ends."""


class Channel:
    """The engine's updates of one request, which may have several choices, for its client."""

    def __init__(self, max_unsent: int) -> None:
        self.request_ids: list[int] = []  # by choice; the worker's
        self.is_sending = False
        self.is_full = asyncio.Event()  # the client reads too slowly
        self._max_unsent = max_unsent
        self._updates: collections.deque[tuple[int, lm.RequestUpdate]] = collections.deque()
        self._arrived = asyncio.Event()

    def put(self, choice: int, update: lm.RequestUpdate) -> None:
        """Called in the event loop's thread."""
        self._updates.append((choice, update))
        self._arrived.set()
        if self.is_sending and len(self._updates) > self._max_unsent:
            self.is_full.set()

    async def get(self) -> tuple[int, lm.RequestUpdate]:
        """The next update, and its choice."""
        while not self._updates:
            self._arrived.clear()
            await self._arrived.wait()
        return self._updates.popleft()


class Worker:
    """The thread that owns the driver: it steps while there is work, and runs calls between."""

    def __init__(self, driver: lm.EngineDriver) -> None:
        self.failure: str | None = None  # why the thread ended before `stop`
        self._driver = driver
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._channels: dict[int, tuple[Channel, int]] = {}  # and the choice, by request
        self._num_failed_calls = 0  # when the device was last tried
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self, on_failure: Callable[[], None]) -> None:
        """Begin to serve; `on_failure` is called in this event loop if the thread ends early."""
        self._loop, self._on_failure = asyncio.get_running_loop(), on_failure
        self._thread.start()

    async def stop(self) -> None:
        """End after what was asked for so far."""
        self._calls.put(None)
        await asyncio.to_thread(self._thread.join)
        self._driver.close()

    async def call(self, function: Callable[[lm.EngineDriver], T]) -> T:
        """What `function` returns, called with the driver between two steps."""
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
            run()
        return await asyncio.wrap_future(future)

    async def submit(self, channel: Channel, choices: Sequence[Json]) -> None:
        """Queue every choice of a request, or none.

        Raises:
          ApiError: the queue is full, or the driver refuses a choice.
        """

        def submit(driver: lm.EngineDriver) -> None:
            assert driver.max_queue is not None
            if driver.num_queued + len(choices) > driver.max_queue:
                message = f"{driver.num_queued} requests wait already: try again later"
                raise ApiError(message, status=429, code="queue_full", headers=BUSY)
            for choice, arguments in enumerate(choices):
                try:
                    request_id = driver.submit(**arguments)
                except (TypeError, ValueError) as error:
                    raise ApiError(str(error), named(error)) from error
                channel.request_ids.append(request_id)
                self._channels[request_id] = channel, choice

        await self.call(submit)

    def cancel(self, channel: Channel, choice: int | None = None) -> None:
        """End what is left of a request, or of one choice; does not wait.

        Calls are in order, so that this ends a request, too, whose `submit` was given up.
        """

        def cancel() -> None:
            if self.failure is not None:
                return
            ids = channel.request_ids
            for request_id in ids if choice is None else [ids[choice]]:
                self._channels.pop(request_id, None)
                self._driver.cancel(request_id)

        self._calls.put(cancel)

    def _run(self) -> None:
        try:
            while self._run_calls():
                updates = [(*self._channels[one.request_id], one) for one in self._driver.step()]
                for _, _, update in updates:
                    if update.finish_reason is not None:
                        del self._channels[update.request_id]
                if updates:
                    self._loop.call_soon_threadsafe(self._deliver, updates)
                if any(update.finish_reason == "failed" for _, _, update in updates):
                    self._try_device()
        except BaseException as error:  # not of a request: those end in updates
            self._loop.call_soon_threadsafe(self._fail)
            is_known = isinstance(error, EngineFailed)
            terminal.log(str(error) if is_known else traceback.format_exc())

    def _try_device(self) -> None:
        """Call every program for no request, if calls have failed since this was last done.

        So a device that has failed is told from requests that it cannot serve.

        Raises:
          EngineFailed: a program fails without a request, too.
        """
        num_failed_calls = self._driver.serving_stats().num_failed_calls
        if num_failed_calls > self._num_failed_calls:
            try:
                self._driver.warm_up(grammars=True)
            except Exception as error:
                raise EngineFailed(f"{FAILED}: {first_line(error)}") from error
        self._num_failed_calls = num_failed_calls

    def _run_calls(self) -> bool:
        """Run what waits, and wait while there is nothing else to do; whether to go on."""
        while True:
            try:
                call = self._calls.get(block=self._driver.is_idle)
            except queue.Empty:
                return True
            if call is None:
                return False
            call()

    def _deliver(self, updates: list[tuple[Channel, int, lm.RequestUpdate]]) -> None:
        for channel, choice, update in updates:
            channel.put(choice, update)

    def _fail(self) -> None:
        self.failure = FAILED
        for request_id, (channel, choice) in self._channels.items():
            channel.put(choice, lm.RequestUpdate(request_id, [], "failed", error=self.failure))
        self._on_failure()
        while not self._calls.empty():  # what is asked for now is answered with the failure
            call = self._calls.get_nowait()
            if call is not None:
                call()
