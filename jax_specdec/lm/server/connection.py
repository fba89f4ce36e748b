"""What uvicorn leaves open about clients that are slow, send too much, or leave.

uvicorn makes a `Connection` for each client; all of it runs in the event loop. httptools parses
what comes, and calls `on_headers_complete`, then `on_body` for each chunk. A request and its answer
are uvicorn's `cycle`, which stays until the next request of the connection begins.
"""

from __future__ import annotations

import asyncio
import time

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_BYTES = 2**21
"""Of the head of a request, and of its body with the sizes of its chunks."""

CHUNK_BYTES = 256
"""What a chunk of a body counts beside its own: each of them takes time, however small it is."""

SPARE = 16
"""Connections beyond those that are served: a request on one is answered with status 503."""


class Connection(HttpToolsProtocol):
    """uvicorn's connection, with a bound on bytes, and without requests before the last answer.

    uvicorn would queue such a request and read no further, so that it would not notice when the
    client leaves. Here it is dropped, and the connection closes after the answer, as HTTP allows.
    """

    _num_bytes = 0  # of this head, or of this body
    _packet_bytes = 0  # of what came last

    @property
    def awaits_answer(self) -> bool:
        """Whether its client does: the whole request has come, and the answer is not complete."""
        cycle = self.cycle
        return cycle is not None and not cycle.more_body and not cycle.response_complete

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begins, unless there are so many connections that a request would be refused."""
        assert isinstance(transport, asyncio.Transport) and self.limit_concurrency is not None
        # First: it adds the connection to `connections`, which `connection_lost` takes it from.
        super().connection_made(transport)
        if len(self.connections) > self.limit_concurrency + SPARE:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        """Reads some of a request, unless it is too much."""
        self._packet_bytes = len(data)
        self._num_bytes += self._packet_bytes
        if self._num_bytes > MAX_BYTES:
            self.transport.abort()
        else:
            super().data_received(data)

    def on_headers_complete(self) -> None:
        """Begins to answer a request, or drops it."""
        # From here on the bytes of the body count, or, after it, those of the next head. What came
        # with the end of the head may be all of the body's.
        self._num_bytes = self._packet_bytes
        if self.awaits_answer:
            # The request gets no cycle, so uvicorn never answers it; the one before it is the last.
            self.cycle.keep_alive = False
        else:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Keeps some of a body, unless its request was dropped; too many chunks are no HTTP."""
        self._num_bytes += CHUNK_BYTES
        if self._num_bytes > MAX_BYTES:
            raise httptools.HttpParserError("too many chunks")  # ends its loop, with status 400
        if not self.awaits_answer:
            super().on_body(body)


async def close_stuck(server: uvicorn.Server, seconds: float) -> None:
    """Closes connections that wait for their client for long; does not end.

    Args:
      server: whose connections have the class `Connection`.
      seconds: for a client to send a whole request, or to read anything of its answer.
    """
    # When a connection was first seen in a state in which it waits for its client. The state is
    # another one as soon as a request begins or ends, or some of the answer is read.
    since: dict[tuple[object, ...], float] = {}
    while True:
        await asyncio.sleep(min(1.0, seconds / 4))
        # A new dictionary in each round: closed connections and old states are forgotten.
        before = since
        since = {}
        now = time.monotonic()
        for connection in server.server_state.connections:
            assert isinstance(connection, Connection)
            # Bytes that the kernel has not taken: its own buffers for the client are full.
            num_unread = connection.transport.get_write_buffer_size()
            # One that waits for the engine, with all read, is left alone.
            if num_unread or not connection.awaits_answer:
                state = connection, connection.cycle, num_unread
                since[state] = before.get(state, now)
                if now - since[state] > seconds:
                    connection.transport.abort()
