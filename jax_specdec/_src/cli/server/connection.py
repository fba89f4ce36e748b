"""Connections, with bounds on how many there are and on how long a client may take."""

from __future__ import annotations

import asyncio
import json

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from jax_specdec._src.cli.server.limits import ApiError, Limits


class Connection(H11Protocol):
    """uvicorn's connection, with bounds on how many there are and on how long a client may take."""

    _request_timer: asyncio.TimerHandle | None = None
    _send_timer: asyncio.TimerHandle | None = None

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

    def handle_events(self) -> None:
        """Read what has come, and time the rest of the request."""
        if not self.transport.is_closing():
            super().handle_events()
            self._time_request()

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
