"""The server of docs/server.md over real sockets: 200 clients, some of whom leave."""

from __future__ import annotations

import asyncio
import json
import random
import re
import socket
from pathlib import Path
from typing import Any

import pytest
import uvicorn

import jax_specdec as sd

pytestmark = pytest.mark.newest

PAGE = Path(__file__).parents[2] / "docs" / "server.md"
PROMPTS = ("import ", "def f(", "class ", "for i in ", "return ", "    if x" * 9)
LONGEST, CLIENTS = 20, 200


def page() -> dict[str, Any]:
    """The names that the page's server defines."""
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    (code,) = (block for block in blocks if "Starlette" in block)
    scope: dict[str, Any] = {}
    exec(compile(code, str(PAGE), "exec"), scope)
    return scope


async def ask(port: int, body: Any, leave: str | None = None) -> tuple[int, bytes]:
    """Status and text; a client that leaves gets what it has read by then."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = "POST /generate HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        await writer.drain()
        if leave == "at once":
            writer.transport.abort()
            return 0, b""
        header = (await reader.readuntil(b"\r\n\r\n")).decode()
        status = int(header.split()[1])
        if "chunked" not in header.lower():
            return status, await reader.read()
        text = b""
        while size := int(await reader.readuntil(b"\r\n"), 16):
            text += (await reader.readexactly(size + 2))[:-2]
            if leave == "after the first text":
                writer.transport.abort()
                return status, text
        return status, text
    finally:
        writer.close()


async def client(port: int, index: int, refusals: list[int]) -> tuple[str | None, bytes]:
    """A client that comes again while the queue is full; how it left, and its text."""
    rng = random.Random(index)
    leave = rng.choice([None, None, "at once", "after the first text"])
    body = dict(
        prompt=PROMPTS[index % len(PROMPTS)], max_new_tokens=LONGEST - index % 3, temperature=0.0
    )
    await asyncio.sleep(rng.random() / 2)
    while True:
        status, text = await ask(port, body, leave)
        if status != 503:
            assert status == (0 if leave == "at once" else 200)
            return leave, text
        refusals.append(index)
        await asyncio.sleep(0.05 + rng.random() / 5)


async def serve(scope: dict[str, Any]) -> tuple[list[tuple[str | None, bytes]], list[int]]:
    listener = socket.create_server(("127.0.0.1", 0))
    port, refusals = listener.getsockname()[1], []
    config = uvicorn.Config(
        scope["app"], log_level="warning", http="h11", ws="none", loop="asyncio"
    )
    server = uvicorn.Server(config)
    running = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:
        await asyncio.sleep(0.01)
    found = await asyncio.gather(*(client(port, i, refusals) for i in range(CLIENTS)))
    for bad in (b"{", b"{}", dict(prompt=""), dict(prompt="x", max_new_tokens=1000)):
        status, text = await ask(port, bad)
        assert status == 400 and json.loads(text)["error"]
    while not scope["driver"].is_idle or scope["queues"]:
        await asyncio.sleep(0.01)
    found.append((None, (await ask(port, dict(prompt=PROMPTS[0], max_new_tokens=LONGEST)))[1]))
    server.should_exit = True
    await running
    return found, refusals


@pytest.mark.long
def test_two_hundred_clients_get_their_texts_and_those_who_leave_leave_nothing() -> None:
    scope = page()
    driver, engine = scope["driver"], scope["engine"]
    driver.max_queue = 8  # so that it is full now and then
    found, refusals = asyncio.run(serve(scope))
    plain = sd.generate_plain(
        engine.model,
        scope["params"],
        [sd.encode_bytes(prompt) for prompt in PROMPTS],
        max_new_tokens=LONGEST,
    )
    texts = [bytes(completion) for completion in plain.completions]
    ways = [leave for leave, _ in found]
    assert all(ways.count(way) > 25 for way in (None, "at once", "after the first text"))
    for index, (leave, text) in enumerate(found[:CLIENTS]):
        whole = texts[index % len(PROMPTS)][: LONGEST - index % 3]
        if leave is None:
            assert text == whole
        else:
            assert whole.startswith(text) and len(text) < len(whole)
    assert found[CLIENTS][1] == texts[0]
    assert refusals, "the queue was full"
    budgets = LONGEST + sum(LONGEST - index % 3 for index in range(CLIENTS))
    assert driver.stats().num_tokens < budgets, "nobody decodes for those who left"
    assert driver.is_idle and driver.num_running == driver.num_queued == 0
    assert driver.serving_stats().num_failed_calls == 0
