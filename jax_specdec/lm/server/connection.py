"""Connections, with bounds on how many there are and on how long a client may take.

uvicorn has no setting, in any of its protocols, for the time that a request may take to arrive or
an answer to be read, and its `limit_concurrency` lets connections without a request grow in number.
Hypercorn only times connections that are idle.
"""

from __future__ import annotations

import asyncio
import json

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from jax_specdec.lm.server.limits import ApiError, Limits


class Connection(H11Protocol):
    """uvicorn's connection, with bounds on how many there are and on how long a client may take.

    What a client sends before its answer is complete waits here: h11 would stop reading, and then
    nobody would notice that the client leaves.
    """

    _request_timer: asyncio.TimerHandle | None = None
    _send_timer: asyncio.TimerHandle | None = None
    _early = b""  # what came before the answer was complete

    @property
    def _limits(self) -> Limits:
        limits: Limits = self.config.app.limits  # type: ignore[union-attr]
        return limits

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Refuse one too many."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # so that any unread answer pauses writing
        if len(self.connections) > self._limits.connections:
            body = json.dumps(ApiError("too many connections", status=503).content)
            transport.write(
                "HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
                f"{body}".encode()
            )
            transport.close()
        else:
            self._time_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clocks."""
        super().connection_lost(exc)
        for timer in (self._request_timer, self._send_timer):
            if timer is not None:
                timer.cancel()

    @property
    def _is_answering(self) -> bool:
        """Whether a whole request has come, and its answer is not complete."""
        cycle = self.cycle
        return cycle is not None and not cycle.more_body and not cycle.response_complete

    def data_received(self, data: bytes) -> None:
        """Read it, or keep it for after the answer."""
        if not self._is_answering:
            return super().data_received(data)
        self._early += data
        if len(self._early) > self._limits.early_bytes:
            self.transport.abort()

    def on_response_complete(self) -> None:
        """Go on with what came meanwhile."""
        super().on_response_complete()
        early, self._early = self._early, b""
        if early and not self.transport.is_closing():
            self.data_received(early)

    def handle_events(self) -> None:
        """Read what has come, and time the rest of the request."""
        if self.transport.is_closing():
            return
        super().handle_events()
        if self._is_answering:
            self.flow.resume_reading()
        self._time_request()

    def send_400_response(self, msg: str) -> None:
        """Say that it is no HTTP, unless an answer was begun."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()

    def _time_request(self) -> None:
        """A clock runs exactly while a request, or the rest of it, is awaited."""
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            if self._request_timer is not None:
                self._request_timer.cancel()
            self._request_timer = None
        elif self._request_timer is None:
            seconds = self._limits.request_seconds
            self._request_timer = self.loop.call_later(seconds, self.transport.abort)

    def pause_writing(self) -> None:
        """The client does not read what it was sent."""
        super().pause_writing()
        self._send_timer = self.loop.call_later(self._limits.send_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """It has read everything."""
        super().resume_writing()
        if self._send_timer is not None:
            self._send_timer.cancel()
