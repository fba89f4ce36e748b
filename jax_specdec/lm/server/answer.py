"""From the engine's updates to the answers of OpenAI's API."""

from __future__ import annotations

import dataclasses
import json
import secrets
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import TypedDict

import jax
from pydantic_core import to_json
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from jax_specdec import lm
from jax_specdec.lm.server.limits import ApiError, Json
from jax_specdec.lm.server.request import CheckedRequest
from jax_specdec.lm.server.vocabulary import Vocabulary
from jax_specdec.lm.server.worker import Channel, Worker

ERROR = "jax_specdec.error"
"""Where a scope has the `ApiError` that its client was answered."""

_FIRST_SURROGATE = 0xD800
"""Lone surrogates are in no text, so they can stand for special tokens."""


class Entry(TypedDict):
    """A token with its log-probability, as clients get it."""

    token: str
    logprob: float
    bytes: list[int]  # of the token inside a text


class AnswerToken(Entry):
    """A token of an answer, whose bytes are those that it adds to this text."""

    top_logprobs: list[Entry]  # the likeliest tokens in its place
    begin: int  # bytes of the text before it
    end: int  # and with it
    offset: int  # characters of the text before it


@dataclasses.dataclass
class Piece:
    """What became ready of a choice: text, and tokens with their log-probabilities."""

    text: str
    tokens: list[AnswerToken]
    finish_reason: str | None


class ChoiceText:
    """The text of one choice: held back where it may be the beginning of a stop string.

    The text ends before the stop string that is complete first, however it is cut into tokens, but
    not within the first `min_tokens` tokens. A special token has no text, but a stop string that
    spells it ends there too.

    The bytes of the tokens, joined, are the text. Tokens are ready once all of their text is; the
    one that the stop string cuts has bytes up to there.
    """

    def __init__(
        self,
        stream: lm.TextStream,
        words: Vocabulary,
        stops: Sequence[str] = (),
        num_top: int | None = None,  # alternatives of each token; None for no log-probabilities
        min_tokens: int = 0,
    ) -> None:
        self.num_tokens = 0
        self.is_done = False
        self._stream = stream
        self._words = words
        self._num_top = num_top
        self._min_tokens = min_tokens
        self._marks: dict[int, str] = {}  # of special tokens that stop strings spell
        marked = list(stops)
        for token_id, token in words.special_tokens.items() if stops else ():
            if any(token in stop for stop in marked):
                self._marks[token_id] = chr(_FIRST_SURROGATE + len(self._marks))
                marked = [stop.replace(token, self._marks[token_id]) for stop in marked]
        self._stops = list({*stops, *marked})
        self._held = ""  # with the marks
        self._num_skipped = 0  # characters of it where no stop string ends
        self._num_ready = 0  # bytes of the text
        self._tokens: list[AnswerToken] = []  # whose text is held back
        self._group: list[AnswerToken] = []  # whose text is not complete
        self._group_text = ""
        self._num_bytes = 0  # of the text before the group
        self._num_characters = 0

    def add(self, update: lm.RequestUpdate) -> Piece:
        """Returns what an update makes ready."""
        for i, token_id in enumerate(update.token_ids):
            self.num_tokens += 1
            if update.finish_reason == "stop" and i == len(update.token_ids) - 1:
                break  # a stop token has no text
            if self._num_top is not None:
                self._group.append(self._with_logprobs(update, i, token_id))
            self._extend([token_id])
            if token_id in self._marks:
                self._extend([], final=True)  # a mark follows all text before it
                self._held += self._marks[token_id]
            if (end := self._find_stop()) is not None:
                return self._ready(end, "stop", is_cut=True)
        if update.finish_reason is None:
            return self._ready(len(self._held) - self._num_open(), None)
        self._extend([], final=True)
        if (end := self._find_stop()) is not None:
            return self._ready(end, "stop", is_cut=True)
        return self._ready(len(self._held), update.finish_reason)

    def _extend(self, token_ids: list[int], *, final: bool = False) -> None:
        """Decodes tokens, and gives those of the group their text where it is complete."""
        text = self._stream.decode(token_ids, final=final)
        self._held += text
        if self._group:
            self._group_text += text
            if self._stream.is_complete:
                self._share()

    def _share(self) -> None:
        """Gives the group's tokens their parts of its text."""
        text = self._group_text.encode()
        sizes = [len(one["bytes"]) for one in self._group]
        if not b"".join(bytes(one["bytes"]) for one in self._group).startswith(text):
            sizes = [0] * (len(sizes) - 1) + [len(text)]  # broken bytes became U+FFFD
        begin = 0
        for one, size in zip(self._group, sizes, strict=True):
            end = min(begin + size, len(text))
            one["bytes"] = list(text[begin:end])
            one["begin"] = self._num_bytes + begin
            one["end"] = self._num_bytes + end
            one["offset"] = self._num_characters + len(text[:begin].decode(errors="ignore"))
            begin = end
        self._num_bytes += len(text)
        self._num_characters += len(self._group_text)
        self._tokens += self._group
        self._group = []
        self._group_text = ""

    def _ready(self, end: int, finish_reason: str | None, *, is_cut: bool = False) -> Piece:
        """Returns what is held up to a character, and the tokens that end there."""
        text = self._held[:end]
        self._held = self._held[end:]
        self._num_skipped = max(0, self._num_skipped - end)
        for mark in self._marks.values():
            text = text.replace(mark, "")
        self._num_ready += len(text.encode())
        self.is_done = finish_reason is not None
        if self.is_done and self._group:
            self._share()
        ready = self._num_ready
        if is_cut:
            tokens = [one for one in self._tokens if one["begin"] < ready]
            for one in tokens:
                del one["bytes"][ready - one["begin"] :]
        elif self.is_done:
            tokens = self._tokens
        else:  # what has no text waits for what follows
            tokens = [one for one in self._tokens if one["begin"] < ready >= one["end"]]
        self._tokens = self._tokens[len(tokens) :]
        return Piece(text, tokens, finish_reason)

    def _find_stop(self) -> int | None:
        """Returns where the stop string begins that is complete first, past `min_tokens`."""
        if self.num_tokens <= self._min_tokens:
            self._num_skipped = len(self._held)
        found = []
        for stop in self._stops:
            at = self._held.find(stop, max(0, self._num_skipped + 1 - len(stop)))
            if at >= 0:
                found.append((at + len(stop), at))
        return min(found)[1] if found else None

    def _num_open(self) -> int:
        """Returns how many characters at the end a stop string may begin with."""
        longest = max(map(len, self._stops), default=1) - 1
        for count in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-count:]) for stop in self._stops):
                return count
        return 0

    def _with_logprobs(self, update: lm.RequestUpdate, i: int, token_id: int) -> AnswerToken:
        """Returns the i-th token of an update; its place in the text is not known yet."""
        assert update.logprobs is not None
        numbers = update.logprobs
        ids = numbers.top_token_ids[i].tolist()
        values = numbers.top_logprobs[i].tolist()
        top = [self._entry(one, value) for one, value in zip(ids, values, strict=True) if one >= 0]
        top = top[: self._num_top]
        own = self._entry(token_id, float(numbers.logprobs[i]))
        return {**own, "top_logprobs": top, "begin": 0, "end": 0, "offset": 0}

    def _entry(self, token_id: int, logprob: float) -> Entry:
        text, own_bytes = self._words.token(token_id)
        finite = max(logprob, -9999.0)  # JSON has no infinity
        return {"token": text, "logprob": finite, "bytes": list(own_bytes)}


def _logprobs_as_json(tokens: list[AnswerToken], is_chat: bool) -> Mapping[str, Sequence[object]]:
    """Returns log-probabilities in the form of chat completions, or of completions."""
    if is_chat:
        keys = "token", "logprob", "bytes", "top_logprobs"
        return {"content": [{k: x for k, x in one.items() if k in keys} for one in tokens]}
    # Of tokens with one text, the likeliest, which comes last here, is shown.
    tops = [{top["token"]: top["logprob"] for top in reversed(x["top_logprobs"])} for x in tokens]
    return {
        "tokens": [one["token"] for one in tokens],
        "token_logprobs": [one["logprob"] for one in tokens],
        "top_logprobs": tops,
        "text_offset": [one["offset"] for one in tokens],
    }


class Answer:
    """An ASGI response: the choices of a request, as a stream of events or as one object."""

    def __init__(
        self,
        asked: CheckedRequest,
        channel: Channel,
        worker: Worker,
        words: Vocabulary,
        model_name: str,
    ) -> None:
        given = asked.given
        self._asked = asked
        self._given = given
        self._channel = channel
        self._worker = worker
        self._num_proposed = 0  # drafts of all choices
        self._num_accepted = 0  # those that are tokens of the answer
        self._num_reused = [0] * len(asked.choices)  # tokens of each choice's prompt
        self._texts = [
            ChoiceText(stream, words, given.stop, given.num_top, choice["options"].min_tokens)
            for stream, choice in zip(asked.streams, asked.choices, strict=True)
        ]
        kind = "chat.completion" if given.is_chat else "text_completion"
        self._head: Json = {
            "id": ("chatcmpl-" if given.is_chat else "cmpl-") + secrets.token_hex(12),
            "object": kind + ".chunk" * (given.stream and given.is_chat),
            "created": int(time.time()),
            "model": model_name,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers, as ASGI asks for it."""
        if self._given.stream:
            await self._stream(scope, send)
        else:
            await (await self._whole())(scope, receive, send)

    async def _pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """Yields what becomes ready, with the index of its choice.

        Raises:
          ApiError: a choice cannot be finished.
        """
        while not all(text.is_done for text in self._texts):
            choice, update = await self._channel.get()
            text = self._texts[choice]
            if text.is_done:
                continue
            if update.finish_reason == "failed":
                self._worker.check_open()
                matcher = self._asked.choices[choice].get("matcher")
                if matcher is not None and matcher.error:
                    why = matcher.error.partition("\n")[0]
                    message = f"response_format cannot be followed to its end: {why}"
                    raise ApiError(message, "response_format")
                if update.error is None:
                    message = f"the text cannot be verified: {update.status.name}"
                    raise ApiError(message, status=500)
                message = "the engine cannot go on with this request"
                raise ApiError(message, status=500, reason=update.error)
            num_before = text.num_tokens
            by_token = self._given.stream_options.one_token_per_event
            for part in _by_token(update) if by_token else [update]:
                try:
                    piece = text.add(part)
                except ValueError as error:  # the tokenizer's decoder failed
                    message = "the text cannot be decoded"
                    raise ApiError(message, status=500, reason=error) from error
                yield choice, piece
                if text.is_done:
                    break
            # Accepted drafts come first of an update's tokens, of which the text may have fewer.
            self._num_reused[choice] += update.num_reused
            self._num_proposed += update.num_proposed
            self._num_accepted += min(update.num_accepted, text.num_tokens - num_before)
            if text.is_done and update.finish_reason is None:
                self._worker.finish(self._channel, choice)  # a stop string

    def _choice(self, index: int, piece: Piece, content: Json) -> Json:
        logprobs = _logprobs_as_json(piece.tokens, self._given.is_chat) if piece.tokens else None
        finish_reason = piece.finish_reason
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": finish_reason}

    @property
    def _usage(self) -> Json:
        new = sum(text.num_tokens for text in self._texts)
        old = self._asked.num_prompt_tokens
        usage: Json = {"prompt_tokens": old, "completion_tokens": new, "total_tokens": old + new}
        n = self._given.n  # choices of a prompt, of which one may have read what others did not
        each = [self._num_reused[i : i + n] for i in range(0, len(self._num_reused), n)]
        usage["prompt_tokens_details"] = {"cached_tokens": sum(map(min, each))}
        if self._given.include_acceptance or self._given.prediction is not None:
            usage["completion_tokens_details"] = {
                "accepted_prediction_tokens": self._num_accepted,
                "rejected_prediction_tokens": self._num_proposed - self._num_accepted,
            }
        return usage

    async def _whole(self) -> Response:
        """Returns one object. Long lists are encoded as they come, so that no step waits."""
        is_chat = self._given.is_chat
        texts = [""] * len(self._texts)
        reasons: list[str | None] = [None] * len(self._texts)
        names = [] if self._given.num_top is None else [*_logprobs_as_json([], is_chat)]
        encoded: list[dict[str, list[bytes]]] = [{name: [] for name in names} for _ in texts]
        async for index, piece in self._pieces():
            texts[index] += piece.text
            reasons[index] = piece.finish_reason
            if piece.tokens:
                for name, values in _logprobs_as_json(piece.tokens, is_chat).items():
                    encoded[index][name].append(to_json(values)[1:-1])
        choices = []
        for index, text in enumerate(texts):
            content: Json = {"text": text}
            if is_chat:
                content = {"message": {"role": "assistant", "content": text, "refusal": None}}
            choice = {"index": index, "finish_reason": reasons[index], **content}
            lists = [b'"%s":[%s]' % (k.encode(), b",".join(x)) for k, x in encoded[index].items()]
            logprobs = b"{%s}" % b",".join(lists) if lists else b"null"
            choices.append(b'%s,"logprobs":%s}' % (to_json(choice)[:-1], logprobs))
        rest = to_json({**self._head, "usage": self._usage})[:-1]
        body = b'%s,"choices":[%s]}' % (rest, b",".join(choices))
        return Response(body, media_type="application/json")

    async def _events(self, scope: Scope) -> AsyncIterator[bytes]:
        """Yields the events of a stream; an error is the last one."""
        usage: Json = {"usage": None} if self._given.stream_options.include_usage else {}
        try:
            if self._given.is_chat:
                for index in range(len(self._texts)):
                    delta = {"delta": {"role": "assistant", "content": ""}}
                    choice = self._choice(index, Piece("", [], None), delta)
                    yield _event({**self._head, "choices": [choice], **usage})
            async for index, piece in self._pieces():
                if piece.text or piece.tokens or piece.finish_reason:
                    content: Json = {"text": piece.text}
                    if self._given.is_chat:
                        content = {"delta": {"content": piece.text} if piece.text else {}}
                    choice = self._choice(index, piece, content)
                    yield _event({**self._head, "choices": [choice], **usage})
            if self._given.stream_options.include_usage:
                yield _event({**self._head, "choices": [], "usage": self._usage})
            yield b"data: [DONE]\n\n"
        except ApiError as error:
            scope[ERROR] = error
            yield _event(error.content)

    async def _stream(self, scope: Scope, send: Send) -> None:
        """Sends the events, and lets the channel know while the client does not read."""

        async def send_and_note(message: Message) -> None:
            self._channel.is_sending = True
            await send(message)
            self._channel.is_sending = False

        response = StreamingResponse(
            self._events(scope),
            headers={"cache-control": "no-cache"},
            media_type="text/event-stream",
        )
        await response.stream_response(send_and_note)


def _by_token(update: lm.RequestUpdate) -> Iterator[lm.RequestUpdate]:
    """Yields an update for each token of one; the last one ends what the update ends."""
    last = max(0, len(update.token_ids) - 1)
    for i in range(last + 1):
        yield dataclasses.replace(
            update,
            token_ids=update.token_ids[i : i + 1],
            finish_reason=update.finish_reason if i == last else None,
            logprobs=jax.tree.map(lambda x, i=i: x[i : i + 1], update.logprobs),
        )


def _event(content: Json) -> bytes:
    """Returns an event; clients that split at every line end of Unicode find none inside it."""
    text = json.dumps(content, ensure_ascii=False).translate(_LINE_ENDS)
    return f"data: {text}\n\n".encode("utf-8", "replace")


_LINE_ENDS = {ord(x): f"\\u{ord(x):04x}" for x in "\u0085\u2028\u2029"}
