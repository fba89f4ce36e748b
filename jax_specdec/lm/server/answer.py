"""Makes text, events and JSON of the engine's updates, in the shapes of OpenAI's API.

For each request `app` makes an `Answer` and awaits it in the event loop. The answer reads updates,
the token ids of one choice, from the request's `Channel`, and gives them to the `ChoiceText` of
that choice, which decodes them and looks for stop strings. What is ready is sent at once as an
event of a stream, or kept for one JSON object.
"""

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
        # A special token has no text, so a stop string that spells one is in no text, either. Each
        # special token that a stop string spells has a mark, one character that no text has, which
        # is put into the held text in its place. A stop string is looked for with marks, and as it
        # is: other tokens may spell the same characters.
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
            # A stop token is the last of its request's tokens. It counts in the usage, but has
            # neither text nor log-probabilities in an answer.
            if update.finish_reason == "stop" and i == len(update.token_ids) - 1:
                break
            # Before the text is decoded: `_extend` gives text to the tokens that are in the group.
            if self._num_top is not None:
                self._group.append(self._with_logprobs(update, i, token_id))
            self._extend([token_id])
            if token_id in self._marks:
                self._extend([], final=True)  # a mark follows all text before it
                self._held += self._marks[token_id]
            # After each token, not once per update: `num_tokens` must not count tokens behind the
            # one that completes the stop string.
            if (end := self._find_stop()) is not None:
                return self._ready(end, "stop", is_cut=True)
        # The request goes on: the end of the text that a stop string may begin with waits.
        if update.finish_reason is None:
            return self._ready(len(self._held) - self._num_open(), None)
        # The request has ended: bytes of an incomplete character become U+FFFD, and that may
        # complete a stop string. What may only begin one is text.
        self._extend([], final=True)
        if (end := self._find_stop()) is not None:
            return self._ready(end, "stop", is_cut=True)
        return self._ready(len(self._held), update.finish_reason)

    def _extend(self, token_ids: list[int], *, final: bool = False) -> None:
        """Decodes tokens, and gives those of the group their text where it is complete."""
        text = self._stream.decode(token_ids, final=final)
        self._held += text
        # The group has the tokens since the text was last complete; without log-probabilities none.
        if self._group:
            self._group_text += text
            if self._stream.is_complete:
                self._share()

    def _share(self) -> None:
        """Gives the group's tokens their parts of its text."""
        text = self._group_text.encode()
        # Up to here the `bytes` of a token are those of the vocabulary. If the text is made of
        # them, each token has its own. If not, the last token has all: a decoder drops the space
        # before a text, for example, and broken bytes became U+FFFD.
        sizes = [len(token["bytes"]) for token in self._group]
        if not b"".join(bytes(token["bytes"]) for token in self._group).startswith(text):
            sizes = [0] * (len(sizes) - 1) + [len(text)]
        begin = 0
        for token, size in zip(self._group, sizes, strict=True):
            end = min(begin + size, len(text))
            token["bytes"] = list(text[begin:end])
            token["begin"] = self._num_bytes + begin
            token["end"] = self._num_bytes + end
            # A token that begins inside a character has the offset of that character.
            token["offset"] = self._num_characters + len(text[:begin].decode(errors="ignore"))
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
        # Marks are in no answer: the bytes of the text are counted without them.
        for mark in self._marks.values():
            text = text.replace(mark, "")
        self._num_ready += len(text.encode())
        self.is_done = finish_reason is not None
        # A stop string may be complete while the character after it is not: nothing completes
        # the group any more.
        if self.is_done and self._group:
            self._share()
        ready = self._num_ready
        if is_cut:
            # Tokens that begin behind the cut are dropped, and the one that it divides is cut.
            tokens = [token for token in self._tokens if token["begin"] < ready]
            for token in tokens:
                del token["bytes"][ready - token["begin"] :]
        elif self.is_done:
            tokens = self._tokens
        else:
            # A token at the end without text, whose begin is `ready`, waits for what follows.
            tokens = [token for token in self._tokens if token["begin"] < ready >= token["end"]]
        # In each case these are the first ones: begins and ends do not decrease.
        self._tokens = self._tokens[len(tokens) :]
        return Piece(text, tokens, finish_reason)

    def _find_stop(self) -> int | None:
        """Returns where the stop string begins that is complete first, past `min_tokens`."""
        if self.num_tokens <= self._min_tokens:
            self._num_skipped = len(self._held)
        matches = []  # the end and the begin of each
        for stop in self._stops:
            # It may begin within what is skipped, but has to end behind it.
            at = self._held.find(stop, max(0, self._num_skipped + 1 - len(stop)))
            if at >= 0:
                matches.append((at + len(stop), at))
        # Of those that end at one place, the longest cuts the text.
        return min(matches)[1] if matches else None

    def _num_open(self) -> int:
        """Returns how many characters at the end a stop string may begin with."""
        # Less one character: a whole stop string would have been found.
        longest = max(map(len, self._stops), default=1) - 1
        for count in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-count:]) for stop in self._stops):
                return count
        return 0

    def _with_logprobs(self, update: lm.RequestUpdate, i: int, token_id: int) -> AnswerToken:
        """Returns the i-th token of an update; its place in the text is not known yet."""
        assert update.logprobs is not None
        numbers = update.logprobs
        # [T, n] -> [n], the n likeliest ids in the place of token i, likeliest first. An id is -1
        # where its probability is 0.
        ids = numbers.top_token_ids[i].tolist()
        values = numbers.top_logprobs[i].tolist()
        top = [self._entry(top_id, x) for top_id, x in zip(ids, values, strict=True) if top_id >= 0]
        # n is the server's; a request may have asked for fewer.
        top = top[: self._num_top]
        entry = self._entry(token_id, float(numbers.logprobs[i]))
        return {**entry, "top_logprobs": top, "begin": 0, "end": 0, "offset": 0}

    def _entry(self, token_id: int, logprob: float) -> Entry:
        text, token_bytes = self._words.token(token_id)
        finite = max(logprob, -9999.0)  # JSON has no infinity
        return {"token": text, "logprob": finite, "bytes": list(token_bytes)}


def _logprobs_as_json(tokens: list[AnswerToken], is_chat: bool) -> Mapping[str, Sequence[object]]:
    """Returns log-probabilities in the form of chat completions, or of completions."""
    if is_chat:
        # Without the token's place in the text, which OpenAI's chats do not have.
        keys = "token", "logprob", "bytes", "top_logprobs"
        return {"content": [{k: x for k, x in token.items() if k in keys} for token in tokens]}
    # Completions have an object from texts to log-probabilities: of alternatives with one text,
    # the likeliest, which comes last here, is shown.
    tops = [{top["token"]: top["logprob"] for top in reversed(x["top_logprobs"])} for x in tokens]
    return {
        "tokens": [token["token"] for token in tokens],
        "token_logprobs": [token["logprob"] for token in tokens],
        "top_logprobs": tops,
        "text_offset": [token["offset"] for token in tokens],
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
        parameters = asked.given
        self._asked = asked
        self._given = parameters
        self._channel = channel
        self._worker = worker
        self._num_proposed = 0  # drafts of all choices
        self._num_accepted = 0  # those that are tokens of the answer
        self._num_reused = [0] * len(asked.choices)  # tokens of each choice's prompt
        self._texts = [
            ChoiceText(
                stream, words, parameters.stop, parameters.num_top, choice["options"].min_tokens
            )
            for stream, choice in zip(asked.streams, asked.choices, strict=True)
        ]
        kind = "chat.completion" if parameters.is_chat else "text_completion"
        # What all events of a stream have alike. As in OpenAI's API, the events of a chat are
        # "chat.completion.chunk", and those of a completion have the name of the whole.
        self._head: Json = {
            "id": ("chatcmpl-" if parameters.is_chat else "cmpl-") + secrets.token_hex(12),
            "object": kind + ".chunk" * (parameters.stream and parameters.is_chat),
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
            # A stop string has ended it, and steps were under way before the driver knew.
            if text.is_done:
                continue
            if update.finish_reason == "failed":
                # `refuse_all` puts such an update into every channel; its own error is raised here.
                self._worker.check_open()
                # A grammar that llguidance gives up is the request's fault: status 400.
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
            # Decoded here, in the event loop: an update has few tokens.
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
        # As in OpenAI's API, a prompt counts once, however many choices it has.
        usage: Json = {"prompt_tokens": old, "completion_tokens": new, "total_tokens": old + new}
        n = self._given.n  # choices of a prompt, of which one may have read what others did not
        by_prompt = [self._num_reused[i : i + n] for i in range(0, len(self._num_reused), n)]
        usage["prompt_tokens_details"] = {"cached_tokens": sum(map(min, by_prompt))}
        # They show what the server drafts: for those alone that ask for them, or for a prediction.
        if self._given.include_acceptance or self._given.prediction is not None:
            usage["completion_tokens_details"] = {
                "accepted_prediction_tokens": self._num_accepted,
                "rejected_prediction_tokens": self._num_proposed - self._num_accepted,
            }
        return usage

    async def _whole(self) -> Response:
        """Returns one JSON object, once all choices have ended.

        Lists of log-probabilities are encoded piece by piece: one call for a long one would keep
        Python's lock, and the thread that steps the driver would wait for it.
        """
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
                    # Entries without the brackets of their list, to be joined to one list below.
                    encoded[index][name].append(to_json(values)[1:-1])
        # Objects are put together as bytes: each but for its closing brace, then what is encoded.
        choices = []
        for index, text in enumerate(texts):
            content: Json = {"text": text}
            if is_chat:
                content = {"message": {"role": "assistant", "content": text, "refusal": None}}
            choice = {"index": index, "finish_reason": reasons[index], **content}
            lists = [b'"%s":[%s]' % (k.encode(), b",".join(x)) for k, x in encoded[index].items()]
            logprobs = b"{%s}" % b",".join(lists) if lists else b"null"
            choices.append(b'%s,"logprobs":%s}' % (to_json(choice)[:-1], logprobs))
        head = to_json({**self._head, "usage": self._usage})[:-1]
        body = b'%s,"choices":[%s]}' % (head, b",".join(choices))
        return Response(body, media_type="application/json")

    async def _events(self, scope: Scope) -> AsyncIterator[bytes]:
        """Yields the events of a stream; an error is the last one.

        With `include_usage` every event has a `usage`, as in OpenAI's API: null, but for that of a
        last event without choices. `[DONE]` says that the stream is whole: after an error it does
        not come. The status is 200 by then, so the error also goes into `scope`, for the counter
        and the log of `app`.
        """
        usage: Json = {"usage": None} if self._given.stream_options.include_usage else {}
        try:
            # The first event of each choice of a chat has its role; later ones have text alone.
            if self._given.is_chat:
                for index in range(len(self._texts)):
                    delta = {"delta": {"role": "assistant", "content": ""}}
                    choice = self._choice(index, Piece("", [], None), delta)
                    yield _event({**self._head, "choices": [choice], **usage})
            async for index, piece in self._pieces():
                # An update may make nothing ready: its text is held back, or it has no tokens.
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
        # Calling the response would wait for the client's leaving, too: `app` does that already.
        await response.stream_response(send_and_note)


def _by_token(update: lm.RequestUpdate) -> Iterator[lm.RequestUpdate]:
    """Yields an update for each token of one; the last one ends what the update ends.

    One without tokens is yielded as it is. Counts of drafts are those of the whole update in each.
    """
    last = max(0, len(update.token_ids) - 1)
    for i in range(last + 1):
        yield dataclasses.replace(
            update,
            token_ids=update.token_ids[i : i + 1],
            finish_reason=update.finish_reason if i == last else None,
            logprobs=jax.tree.map(lambda x, i=i: x[i : i + 1], update.logprobs),
        )


def _event(content: Json) -> bytes:
    """Returns a server-sent event.

    Line ends of Unicode are escaped in it, for clients that split lines there. (JSON itself escapes
    those of ASCII.) No text has lone surrogates, which UTF-8 does not hold: decoders make none, the
    marks of `ChoiceText` are taken out, and names and messages are made without.
    """
    text = json.dumps(content, ensure_ascii=False).translate(_LINE_ENDS)
    return f"data: {text}\n\n".encode()


_LINE_ENDS = {ord(x): f"\\u{ord(x):04x}" for x in "\u0085\u2028\u2029"}
