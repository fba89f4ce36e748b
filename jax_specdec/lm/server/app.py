"""The server: who may ask, what for, and the loop around it.

`cli.serve` makes a `Server` of models and a driver, and runs it. uvicorn makes a task for each
request, in one event loop, and calls `Server.__call__` there: host and key are checked, Starlette
finds the path, and `_complete` does what a request for text needs. Whatever takes long is awaited:
JSON and tokenizers in threads, schemas in a process, the engine in the thread of the `Worker`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import ipaddress
import math
import resource
import socket
import time
import traceback
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

import prometheus_client
import pydantic_core
import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import jax_specdec as sd
from jax_specdec import lm
from jax_specdec.lm.loading import TargetText
from jax_specdec.lm.server.answer import ERROR, Answer
from jax_specdec.lm.server.connection import Connection, close_stuck
from jax_specdec.lm.server.limits import CLOSE, ApiError, Json, Limits, first_line
from jax_specdec.lm.server.request import Given, read_parameters, read_request
from jax_specdec.lm.server.vocabulary import Vocabulary
from jax_specdec.lm.server.worker import Channel, EngineFailed, Worker
from jax_specdec.lm.terminal import log

CLIENT_LEFT = 499
"""What is counted in place of a status where nobody is left to answer: nginx's number."""


class Server:
    """The ASGI application, and the loop around it."""

    def __init__(
        self,
        text: TargetText,
        driver: lm.EngineDriver,
        *,
        model_name: str,
        key: str | None = None,
        is_local: bool = True,
        limits: Limits | None = None,
    ) -> None:
        """Makes a server that does not listen yet.

        Args:
          text: how texts become the target's tokens.
          driver: warmed up, with a `max_queue`; the server's alone from now on.
          model_name: what clients call the model.
          key: what clients have to send; None for none.
          is_local: whether it will listen on a loopback address only.
          limits: of requests; None for the default.
        """
        limits = limits or Limits()
        self.limits = limits
        self.model_name = model_name
        self.words = Vocabulary(text, limits)
        self.worker = Worker(driver)
        # Requests whose schemas are compiled, which may take 48 MiB each: those in slots, and some
        # that are about to get one.
        self._compiled = asyncio.Semaphore(driver.serving_stats().num_slots + 4)
        self._engine = driver.engine
        self._is_local = is_local
        self._key = None if key is None else _digest(key.encode())
        self._created = int(time.time())
        self._num_requests = 0
        self._metrics = prometheus_client.CollectorRegistry()
        self._exporter = lm.PrometheusExporter(self._metrics, labels={"model_name": model_name})
        self._answers = prometheus_client.Counter(
            "jax_specdec:serving_answers",
            f"Answers by status; {CLIENT_LEFT}: the client had left.",
            ["model_name", "status"],
            registry=self._metrics,
        )
        self._descriptors_logged = -math.inf  # when they were last used up
        self._app = Starlette(
            routes=[
                Route("/v1/chat/completions", self._complete, methods=["POST"]),
                Route("/v1/completions", self._complete, methods=["POST"]),
                Route("/v1/models", self._models),
                Route("/v1/models/{name:path}", self._model),
                Route("/health", self._health),
                Route("/metrics", self._read_metrics),
            ],
            exception_handlers=dict.fromkeys(
                (ApiError, ClientDisconnect, HTTPException, Exception), _answer_error
            ),
        )
        self._app.router.redirect_slashes = False  # to http://, which a proxy's clients do not use
        max_descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        config = uvicorn.Config(
            self,
            http=Connection,
            ws="none",
            loop="asyncio",
            lifespan="off",
            # Some descriptors are for files, and for processes that compile schemas. uvicorn
            # refuses from this number on, and counts the connection that asks.
            limit_concurrency=min(limits.connections, max(8, max_descriptors - 128)) + 1,
            timeout_keep_alive=int(limits.client_seconds),
            # Nothing here depends on the client's address, or on the scheme.
            proxy_headers=False,
            server_header=False,
            # Errors that are the server's fault are logged below; uvicorn logs nothing.
            access_log=False,
            log_config=None,
            log_level="critical",
        )
        self._uvicorn = uvicorn.Server(config)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers who may ask, and counts and logs answers."""
        status = CLIENT_LEFT  # where no answer begins

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            self._check_caller(Headers(scope=scope), scope["path"])
            await self._app(scope, receive, send_and_note)
        except ApiError as error:  # of the caller: Starlette answers those of a request
            await error.response(scope, receive, send_and_note)
        except BaseException as error:
            # Starlette has answered by `_answer_error`, and raises the error again: uvicorn closes
            # the connection, or the client would wait for the rest of an answer that has begun. Of
            # a panic of a library in Rust, which is no Exception, Starlette knows nothing; uvicorn
            # answers it.
            if not isinstance(error, Exception | asyncio.CancelledError):
                _note_fault(scope, error)
            raise
        finally:
            # A stream that ends with an error has begun with status 200; its error counts.
            failed = scope.get(ERROR)
            status = status if failed is None else failed.status
            self._answers.labels(self.model_name, status).inc()
            # Once the server refuses everybody, one line has said why.
            if failed is not None and failed.status >= 500 and not self.worker.is_refusing:
                why = "" if failed.reason is None else f": {first_line(failed.reason)}"
                log(f"{failed.status} {scope['method']} {scope['path'][:100]}: {failed}{why}")

    def _check_caller(self, headers: Headers, path: str) -> None:
        """Raises an `ApiError` unless the client, and its name for this server, are right."""
        if "upgrade" in headers:  # the parser takes its body for another protocol
            raise ApiError("HTTP/1.1 is spoken here, without Upgrade", headers=CLOSE)
        if self._is_local and not _is_loopback(headers.get("host", "")):
            # Or a page of a browser could send requests here, through a name of its own.
            raise ApiError(
                "Host must be localhost or a loopback address", status=403, headers=CLOSE
            )
        # Whoever looks whether the server works needs no key.
        if self._key is None or path == "/health":
            return
        scheme, _, sent_key = headers.get("authorization", "").partition(" ")
        is_key = hmac.compare_digest(_digest(sent_key.strip().encode()), self._key)
        if scheme.lower() != "bearer" or not is_key:
            message = "Authorization must be Bearer and the server's key"
            headers_ = {"WWW-Authenticate": "Bearer", **CLOSE}
            raise ApiError(message, status=401, code="invalid_api_key", headers=headers_)

    async def _complete(self, request: Request) -> ASGIApp:
        """Returns an answer, which ends when its client leaves or reads too slowly."""
        body = await self._body(request)
        self.worker.check_room()  # before anything is done for a request that has no place
        given = await asyncio.to_thread(self._parameters, body, "chat" in request.scope["path"])

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            num_choices = len(given.prompts) * given.n
            # From here on the request has its places; the end of the block cancels in the driver
            # what has not ended, whichever of the three below is first.
            with self.worker.channel(num_choices, self.limits.unsent_updates) as channel:
                work = self._do(given, channel, scope, receive, send)
                # The body was read before, so `_left` alone waits for `receive`.
                await _until_first(work, _left(receive), channel.is_full.wait())

        return answer

    async def _do(
        self, given: Given, channel: Channel, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Does what a request asks for: tokens, its schema, the queue, and the answer.

        Each `await` is a place at which a client that leaves ends all of it.
        """
        asked = await read_request(given, self._engine, self.words)
        async with contextlib.AsyncExitStack() as stack:
            if asked.schema is not None:
                # What is compiled takes its memory until the answer has ended. The schema was tried
                # before, so who waits here gets an error of the schema at once.
                await stack.enter_async_context(self._compiled)
                budgets = [choice["options"].max_new_tokens for choice in asked.choices]
                matchers = await self.words.matchers(asked.schema, budgets)
                for choice, matcher in zip(asked.choices, matchers, strict=True):
                    choice["matcher"] = matcher
            await self.worker.submit(channel, asked.choices)
            self._num_requests += 1
            answer = Answer(asked, channel, self.worker, self.words, self.model_name)
            await answer(scope, receive, send)

    async def _body(self, request: Request) -> bytearray:
        """Returns the body, if it is said to be JSON and is not too large."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # which a page of a browser cannot send without asking
            raise ApiError("Content-Type must be application/json", status=415, headers=CLOSE)
        body = bytearray()
        # Raises `ClientDisconnect` if the client leaves before the end.
        async for chunk in request.stream():
            body += chunk
            if len(body) > self.limits.body_bytes:
                message = f"the body must have at most {self.limits.body_bytes} bytes"
                raise ApiError(message, status=413, headers=CLOSE)
        return body

    def _parameters(self, body: bytearray, is_chat: bool) -> Given:
        """Returns what a request asks for, or raises an `ApiError`; runs in a thread."""
        # Python takes .1 s for 300,000 lists, in which no other thread runs. A text has fewer.
        max_brackets = max(2**16, 64 * self._engine.max_length)
        if body.count(b"[") + body.count(b"{") > max_brackets:
            raise ApiError(f"the body must have at most {max_brackets} brackets")
        try:
            values = pydantic_core.from_json(body, allow_inf_nan=False)
        except ValueError as error:
            raise ApiError(f"the body must be JSON, without lone surrogates: {error}") from error
        if not isinstance(values, dict):
            raise ApiError("the body must be a JSON object")
        name = values.get("model")
        if name is not None and name != self.model_name:
            self._refuse_model(name)
        return read_parameters(values, is_chat, self._engine)

    def _refuse_model(self, name: object) -> NoReturn:
        asked_name = name if isinstance(name, str) else str(type(name))
        message = f"there is no model {asked_name!r:.100}: this server has {self.model_name!r}"
        raise ApiError(message, "model", status=404, code="model_not_found")

    @property
    def _description(self) -> Json:
        model = {"id": self.model_name, "created": self._created}
        return {**model, "object": "model", "owned_by": "jax_specdec"}

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._description]})

    async def _model(self, request: Request) -> Response:
        if (name := request.path_params["name"]) != self.model_name:
            self._refuse_model(name)
        return JSONResponse(self._description)

    async def _health(self, request: Request) -> Response:
        # Answered in the event loop alone: a step that does not end does not keep it waiting.
        self.worker.check_open()
        if (seconds := self.worker.seconds_busy) > self.limits.step_seconds:
            raise ApiError(f"a step of the engine goes on for {seconds:.0f} s", status=500)
        return JSONResponse({"status": "ok"})

    async def _read_metrics(self, request: Request) -> Response:
        with contextlib.suppress(TimeoutError):  # or as they were: Prometheus waits for 10 s
            async with asyncio.timeout(self.limits.status_seconds):
                self._exporter.publish(*await self.worker.call(_both_stats))
        text = prometheus_client.generate_latest(self._metrics)
        return Response(text, media_type=prometheus_client.CONTENT_TYPE_LATEST)

    async def run(self, listener: socket.socket, on_ready: Callable[[], None]) -> None:
        """Serves until `stop` is called, and then until all answers are given.

        Args:
          listener: bound; it may listen already.
          on_ready: called once clients are accepted; if it raises, there are no status lines.

        Raises:
          EngineFailed: it has, and the log says why.
        """
        self.worker.start(on_failure=self._stop_soon)
        asyncio.get_running_loop().set_exception_handler(self._on_error)
        # They end when they are cancelled, or else the log says why.
        tasks = [
            asyncio.create_task(self._drain()),
            asyncio.create_task(self._report(on_ready)),
            asyncio.create_task(close_stuck(self._uvicorn, self.limits.client_seconds)),
        ]
        for task in tasks:
            task.add_done_callback(_log_end)
        try:
            # uvicorn handles signals in the main thread only. A command runs in another, and
            # `cli.process` calls `stop`. Then this closes the listener and idle connections, and
            # returns when the last connection has closed.
            await self._uvicorn.serve(sockets=[listener])
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            # After the connections and `_report`, which call the worker.
            await self.worker.stop(self.limits.stop_seconds)
        if self.worker.failure is not None:
            raise EngineFailed(self.worker.failure)

    def stop(self) -> None:
        """Accepts nobody any more, and finishes what runs or waits; at any time, in any thread."""
        self._uvicorn.should_exit = True

    async def _drain(self) -> None:
        """Answers with an error what takes too long once the server is stopped."""
        # A flag in place of an event: `stop` may be called by a signal in another thread.
        while not self._uvicorn.should_exit:
            await asyncio.sleep(0.05)
        if self.worker.is_refusing:
            return  # all were answered when the engine failed
        seconds = self.limits.drain_seconds
        log(
            f"finishing what runs or waits: {self.worker.num_open} choices, within {seconds:g} s; "
            "Ctrl-C again ends at once"
        )
        # `run` cancels this task where all answers are given before.
        await asyncio.sleep(seconds)
        log(f"not finished: {self.worker.num_open} choices")
        self.worker.refuse_all("the server has stopped", 503)
        # Time to send the errors.
        await asyncio.sleep(self.limits.failed_seconds)
        for connection in [*self._uvicorn.server_state.connections]:  # whose clients do not read
            connection.transport.abort()

    def _on_error(self, loop: asyncio.AbstractEventLoop, context: Json) -> None:
        """Logs an error of the event loop; those of accepting connections come by the thousand."""
        if "socket.accept() out of system resource" not in context["message"]:
            loop.default_exception_handler(context)
        elif loop.time() - self._descriptors_logged > 60:
            self._descriptors_logged = loop.time()
            log(f"clients wait for connections: {context['exception']}")

    def _stop_soon(self) -> None:
        """Stops once those who are about to ask have been answered that the engine has failed."""
        asyncio.get_running_loop().call_later(self.limits.failed_seconds, self.stop)

    async def _report(self, on_ready: Callable[[], None]) -> None:
        """Logs the status line, while there is something to report."""
        while not self._uvicorn.started:
            await asyncio.sleep(0.01)
        on_ready()
        last_stats, serving = await self.worker.call(_both_stats)
        last_state = None
        since = time.monotonic()
        self._exporter.publish(last_stats, serving)
        while True:
            await asyncio.sleep(self.limits.status_seconds)
            # Answered between two steps, maybe late: the interval is measured.
            stats, serving, kinds = await self.worker.call(_stats_and_compiling)
            self._exporter.publish(stats, serving)
            now = time.monotonic()
            new = stats - last_stats
            compiling = f"; compiling for {' and '.join(kinds)}" if kinds else ""
            state = serving.num_running, serving.num_queued, compiling
            is_busy = bool(new.num_tokens or serving.num_running or serving.num_queued)
            # While all that goes on is that requests wait for a program, one line says so.
            is_told = compiling and state == last_state and not new.num_tokens
            if is_busy and not is_told:
                log(
                    f"{serving.num_running} running, {serving.num_queued} queued, "
                    f"{self._num_requests} requests so far; {new.num_tokens / (now - since):.1f} "
                    f"tokens/s, acceptance length {new.length_text}, "
                    f"{new.tokens_per_target_pass:.2f} tokens per target pass"
                    f"{compiling}{await self.worker.call(_on_drafts)}"
                )
            last_state = state
            last_stats = stats
            since = now


def _log_end(task: asyncio.Task[None]) -> None:
    """Logs why a task of the loop has ended, unless that is no fault of its own."""
    error = None if task.cancelled() else task.exception()
    # An `ApiError` is the engine's failure, which one line has said.
    if error is not None and not isinstance(error, ApiError):
        log("".join(traceback.format_exception(error)))


def _both_stats(driver: lm.EngineDriver) -> tuple[sd.AcceptanceStats, lm.ServingStats]:
    return driver.stats(), driver.serving_stats()


def _stats_and_compiling(
    driver: lm.EngineDriver,
) -> tuple[sd.AcceptanceStats, lm.ServingStats, list[str]]:
    return *_both_stats(driver), driver.compiling_for


def _on_drafts(driver: lm.EngineDriver) -> str:
    """Returns what a status line says where drafts cost more than they bring."""
    choice = driver.draft_choice
    if choice is None or not choice.is_loss:
        return ""
    what = "try --draft none" if choice.is_fixed else "so there are none"
    return f"; drafts do not pay, {what}"


def _digest(text: bytes) -> bytes:
    """Returns bytes whose comparison takes as long whatever the length of the text is."""
    return hashlib.sha256(text).digest()


def _is_loopback(host: str) -> bool:
    """Returns whether a Host header, with or without a port, names this machine."""
    # [::1]:8000, 127.0.0.1:8000 or localhost:8000
    name = host[: host.rfind("]") + 1] if host.startswith("[") else host.partition(":")[0]
    if name.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False


async def _until_first(work: Coroutine[Any, Any, None], *ends: Coroutine[Any, Any, Any]) -> None:
    """Does some work, unless one of the others ends before; what has not ended is cancelled.

    Raises:
      Exception: the work did.
    """
    tasks = [asyncio.create_task(coroutine) for coroutine in (work, *ends)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        # Also where this task is cancelled itself. All have ended before anybody goes on: the
        # caller takes the channel back next, which the work may be reading.
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    if not tasks[0].cancelled():
        tasks[0].result()


async def _left(receive: Receive) -> None:
    """Waits until the client has left; one that closes its half of the connection has.

    uvicorn says so also when the answer is complete.
    """
    # Empty parts of the body come too: a request that `Connection` drops wakes this one.
    while (await receive())["type"] != "http.disconnect":
        pass


async def _answer_error(request: Request, error: Exception) -> Response:
    """Returns the answer to a request that raised an error; an unexpected one is logged."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=CLIENT_LEFT)  # nobody reads it
    if isinstance(error, ApiError):
        request.scope[ERROR] = error
        return error.response
    if isinstance(error, HTTPException):
        # Starlette's: no such path (404), or not by this method (405).
        message = f"{error.detail}: {request.method} {request.scope['path'][:100]}"
        if error.status_code == 404:
            paths = [route.path for route in request.app.routes if "{" not in route.path]
            message += f"; there are {', '.join(paths)}"
        headers = None if error.headers is None else dict(error.headers)
        return ApiError(message, status=error.status_code, headers=headers).response
    return _note_fault(request.scope, error).response


def _note_fault(scope: Scope, error: BaseException) -> ApiError:
    """Logs a fault of this program; returns what its client gets, which learns nothing of it."""
    log("".join(traceback.format_exception(error)))
    scope[ERROR] = ApiError("the server has an error", status=500)
    return scope[ERROR]
