"""From the engine's updates to the answers of OpenAI's API."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

import jax_specdec as sd
from jax_specdec._src.cli.server.limits import ApiError, Json
from jax_specdec._src.cli.server.request import Asked
from jax_specdec._src.cli.server.vocabulary import Vocabulary
from jax_specdec._src.cli.server.worker import Channel, Worker


class Piece:
    """What became ready of a choice: text, and tokens with their log-probabilities."""

    def __init__(self, text: str, tokens: list[Json], finish_reason: str | None) -> None:
        self.text, self.tokens, self.finish_reason = text, tokens, finish_reason


class ChoiceText:
    """The text of one choice: held back where it may be the beginning of a stop string.

    The text ends before the stop string that is complete first, however it is cut into tokens.
    """

    def __init__(self, asked: Asked, stream: sd.TextStream, words: Vocabulary) -> None:
        self.num_tokens = 0
        self.is_done = False
        self._asked, self._stream, self._words = asked, stream, words
        self._num_ready = 0  # characters
        self._held = ""
        self._tokens: list[Json] = []  # whose text is held back

    def add(self, update: sd.serving.RequestUpdate) -> Piece:
        """What an update makes ready."""
        for i, token_id in enumerate(update.token_ids):
            self.num_tokens += 1
            if update.finish_reason == "stop" and i == len(update.token_ids) - 1:
                break  # a stop token has no text
            if self._asked.num_top is not None:
                self._tokens.append(self._with_logprobs(update, i, token_id))
            self._held += self._stream.decode([token_id])
            if (end := self._find_stop()) is not None:
                return self._ready(end, "stop")
        if update.finish_reason is None:
            return self._ready(len(self._held) - self._num_open(), None)
        self._held += self._stream.decode([], final=True)
        if (end := self._find_stop()) is not None:
            return self._ready(end, "stop")
        piece = self._ready(len(self._held), update.finish_reason)
        piece.tokens += self._tokens  # those without text
        return piece

    def _ready(self, end: int, finish_reason: str | None) -> Piece:
        text, self._held = self._held[:end], self._held[end:]
        self._num_ready += end
        tokens = [one for one in self._tokens if one["offset"] < self._num_ready]
        del self._tokens[: len(tokens)]
        self.is_done = finish_reason is not None
        return Piece(text, tokens, finish_reason)

    def _find_stop(self) -> int | None:
        """Where the stop string begins that is complete first."""
        stops = self._asked.stops
        found = [(at + len(stop), at) for stop in stops if (at := self._held.find(stop)) >= 0]
        return min(found)[1] if found else None

    def _num_open(self) -> int:
        """Characters at the end that a stop string may begin with."""
        longest = max(map(len, self._asked.stops), default=1) - 1
        for count in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-count:]) for stop in self._asked.stops):
                return count
        return 0

    def _with_logprobs(self, update: sd.serving.RequestUpdate, i: int, token_id: int) -> Json:
        assert update.logprobs is not None
        numbers = update.logprobs
        ids, values = numbers.top_token_ids[i].tolist(), numbers.top_logprobs[i].tolist()
        top = [self._entry(one, value) for one, value in zip(ids, values, strict=True) if one >= 0]
        found = self._entry(token_id, float(numbers.logprobs[i]))
        found["top"] = top[: self._asked.num_top]
        found["offset"] = self._num_ready + len(self._held)
        return found

    def _entry(self, token_id: int, logprob: float) -> Json:
        text, own_bytes = self._words.token(token_id)
        finite = max(logprob, -9999.0)  # JSON has no infinity
        return {"token": text, "logprob": finite, "bytes": own_bytes}


def _logprobs_as_json(tokens: list[Json], is_chat: bool) -> Json:
    """Log-probabilities in the form of chat completions, or of completions."""
    if is_chat:
        keys = "token", "logprob", "bytes"
        content = [{**{k: x[k] for k in keys}, "top_logprobs": x["top"]} for x in tokens]
        return {"content": content, "refusal": None}
    # Of tokens with one text, the likeliest, which comes last here, is shown.
    tops = [{top["token"]: top["logprob"] for top in reversed(x["top"])} for x in tokens]
    return {
        "tokens": [one["token"] for one in tokens],
        "token_logprobs": [one["logprob"] for one in tokens],
        "top_logprobs": tops,
        "text_offset": [one["offset"] for one in tokens],
    }


class Answer:
    """An ASGI response: the choices of a request, as a stream of events or as one object.

    When the client leaves, or reads too slowly, what is left of its request is cancelled.
    """

    def __init__(
        self, asked: Asked, channel: Channel, worker: Worker, words: Vocabulary, model_name: str
    ) -> None:
        self._asked, self._channel, self._worker = asked, channel, worker
        self._texts = [ChoiceText(asked, one, words) for one in asked.streams]
        kind = "chat.completion" if asked.is_chat else "text_completion"
        self._head: Json = {
            "id": ("chatcmpl-" if asked.is_chat else "cmpl-") + secrets.token_hex(12),
            "object": kind + ".chunk" * (asked.is_stream and asked.is_chat),
            "created": int(time.time()),
            "model": model_name,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, unless the client leaves before."""
        work = self._stream(send) if self._asked.is_stream else self._whole(scope, receive, send)
        tasks = [asyncio.create_task(x) for x in (work, _left(receive), self._too_slow())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            self._worker.cancel(self._channel)
        if tasks[0].done():
            tasks[0].result()

    async def _too_slow(self) -> None:
        await self._channel.is_full.wait()

    async def _pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        while not all(text.is_done for text in self._texts):
            choice, update = await self._channel.get()
            if self._texts[choice].is_done:
                continue
            if update.finish_reason == "failed":
                matcher = self._asked.choices[choice].get("matcher")
                if matcher is not None and matcher.error:
                    name, why = "response_format", matcher.error.partition("\n")[0]
                    raise ApiError(f"{name} cannot be followed to its end: {why}", name)
                message = update.error or f"the text cannot be verified: {update.status.name}"
                raise ApiError(message, status=500)
            piece = self._texts[choice].add(update)
            yield choice, piece
            if piece.finish_reason is not None and update.finish_reason is None:
                self._worker.cancel(self._channel, choice)  # a stop string

    def _choice(self, index: int, piece: Piece, content: Json) -> Json:
        logprobs = None
        if self._asked.num_top is not None and (piece.tokens or not self._asked.is_stream):
            logprobs = _logprobs_as_json(piece.tokens, self._asked.is_chat)
        finish_reason = piece.finish_reason
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": finish_reason}

    @property
    def _usage(self) -> Json:
        new = sum(text.num_tokens for text in self._texts)
        old = self._asked.num_prompt_tokens
        return {"prompt_tokens": old, "completion_tokens": new, "total_tokens": old + new}

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        whole = [Piece("", [], None) for _ in self._texts]
        async for index, piece in self._pieces():
            whole[index].text += piece.text
            whole[index].tokens += piece.tokens
            whole[index].finish_reason = piece.finish_reason
        choices = []
        for index, piece in enumerate(whole):
            content: Json = {"text": piece.text}
            if self._asked.is_chat:
                message = {"role": "assistant", "content": piece.text, "refusal": None}
                content = {"message": message}
            choices.append(self._choice(index, piece, content))
        answer = {**self._head, "choices": choices, "usage": self._usage}
        await JSONResponse(answer)(scope, receive, send)

    async def _stream(self, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        usage: Json = {"usage": None} if self._asked.has_usage else {}
        try:
            if self._asked.is_chat:
                for index in range(len(self._texts)):
                    delta = {"delta": {"role": "assistant", "content": ""}}
                    choice = self._choice(index, Piece("", [], None), delta)
                    await self._send(send, {**self._head, "choices": [choice], **usage})
            async for index, piece in self._pieces():
                if piece.text or piece.tokens or piece.finish_reason:
                    content: Json = {"text": piece.text}
                    if self._asked.is_chat:
                        content = {"delta": {"content": piece.text} if piece.text else {}}
                    choice = self._choice(index, piece, content)
                    await self._send(send, {**self._head, "choices": [choice], **usage})
            if self._asked.has_usage:
                await self._send(send, {**self._head, "choices": [], "usage": self._usage})
            await self._send(send, None)
        except ApiError as error:
            await self._send(send, error.content)
        await send({"type": "http.response.body", "body": b""})

    async def _send(self, send: Send, event: Json | None) -> None:
        text = "[DONE]" if event is None else json.dumps(event, ensure_ascii=False)
        body = f"data: {text}\n\n".encode("utf-8", "replace")
        self._channel.is_sending = True
        await send({"type": "http.response.body", "body": body, "more_body": True})
        self._channel.is_sending = False


async def _left(receive: Receive) -> None:
    """Wait until the client has left; one that closes its half of the connection has."""
    while (await receive())["type"] != "http.disconnect":
        pass
