"""From updates to texts, events and usage: stop strings, `min_tokens`, the bytes of tokens."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers
from upper_floor import (
    CheckedRequest,
    ChoiceText,
    Limits,
    Piece,
    Vocabulary,
    loading,
    read_parameters,
    server_app,
)

import jax_specdec as sd
from jax_specdec import lm

pytestmark = pytest.mark.newest

SPECIAL = ["<sp>", "<sp>more"]


def byte_fallback() -> lm.Tokenizer:
    pieces = [*(f"<0x{byte:02X}>" for byte in range(256)), "▁a", "b", "▁", "\ufffd", "xy"]
    library = tokenizers.Tokenizer(models.BPE({x: i for i, x in enumerate(pieces)}, []))
    replace, strip = decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)
    library.decoder = decoders.Sequence([replace, decoders.ByteFallback(), decoders.Fuse(), strip])
    library.add_special_tokens(SPECIAL)
    return lm.Tokenizer(Path("tokenizer.json"), library, ())


def byte_level() -> lm.Tokenizer:
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
    ((smile, _),) = split("🙂")  # a letter for each byte
    parts = [smile[:2], smile[2:], "a" + smile[:1], "xy"]
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *parts]
    library = tokenizers.Tokenizer(models.BPE({x: i for i, x in enumerate(pieces)}, []))
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(SPECIAL)
    return lm.Tokenizer(Path("tokenizer.json"), library, ())


TOKENIZERS = {"byte fallback": byte_fallback(), "byte level": byte_level()}


def ids_of(tokenizer: lm.Tokenizer, *tokens: str | bytes) -> list[int]:
    """Ids of tokens by their names, and of bytes."""
    find = tokenizer.library_tokenizer.token_to_id
    if find("<0x00>") is not None:
        of_byte = [find(f"<0x{byte:02X}>") for byte in range(256)]
    else:
        own = {tokenizer.token_bytes(i): i for i in range(256)}
        of_byte = [own[bytes([byte])] for byte in range(256)]
    found: list[int] = []
    for token in tokens:
        found += [find(token)] if isinstance(token, str) else [of_byte[byte] for byte in token]
    return found


def vocabulary(tokenizer: lm.Tokenizer) -> Vocabulary:
    size = tokenizer.library_tokenizer.get_vocab_size()
    return Vocabulary(loading.TargetText(tokenizer, size, (), tokenizer.stream, 64), Limits())


def choice_text(
    tokenizer: lm.Tokenizer, *stops: str, prompt: Any = (), min_tokens: int = 0
) -> ChoiceText:
    return ChoiceText(tokenizer.stream(prompt), vocabulary(tokenizer), stops, 1, min_tokens)


def logprobs_of(token_ids: list[int]) -> sd.TokenLogprobs:
    top = np.array(token_ids, np.int32)[:, None]
    zeros = np.zeros(len(token_ids), np.float32)
    return sd.TokenLogprobs(logprobs=zeros, top_token_ids=top, top_logprobs=zeros[:, None])


def answer(text: ChoiceText, token_ids: list[int], sizes: Iterable[int] = ()) -> Piece:
    """All pieces of a choice in one; `sizes` are those of its updates, 1 if there are no more."""
    whole, rest = Piece("", [], None), list(token_ids)
    for count in itertools.chain(sizes, itertools.repeat(1)):
        now, rest = rest[:count], rest[count:]
        update = lm.RequestUpdate(0, now, None if rest else "length", logprobs=logprobs_of(now))
        piece = text.add(update)
        whole.text += piece.text
        whole.tokens += piece.tokens
        whole.finish_reason = piece.finish_reason
        if text.is_done:
            return whole
        assert whole.text.encode().startswith(joined(whole))  # tokens never come before their text
    raise AssertionError


def joined(piece: Piece) -> bytes:
    return b"".join(bytes(one["bytes"]) for one in piece.tokens)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_stop_string_may_be_a_special_token(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    token_ids = ids_of(
        tokenizer, b"one", "<sp>", b"two", "<sp>more", "xy", b"\xe6\x97", "<sp>", b"b"
    )
    for stop, wanted in {
        "<sp>": "one",
        "<sp>more": "onetwo",
        "e<sp>t": "on",
        "<sp>twoX": None,
        "<sp>morexy": "onetwo",
        "sp": None,  # a part of a special token is in no text
        ">": None,
        "two": "one",  # what is not asked for is in no text
        "onetwo": "",
    }.items():
        found = answer(choice_text(tokenizer, stop, "never"), token_ids)
        whole = tokenizer.decode(token_ids)
        assert (found.text, found.finish_reason) == (
            (whole, "length") if wanted is None else (wanted, "stop")
        )
        assert joined(found) == found.text.encode()


def test_a_stop_string_may_spell_a_special_token_in_letters() -> None:
    tokenizer = TOKENIZERS["byte level"]
    found = answer(choice_text(tokenizer, "<sp>"), ids_of(tokenizer, b"one<sp>two"))
    assert (found.text, found.finish_reason) == ("one", "stop")


@pytest.mark.parametrize("sizes", [[], [2, 5], [9]])
def test_min_tokens_holds_for_stop_strings(sizes: list[int]) -> None:
    tokenizer = TOKENIZERS["byte level"]
    token_ids = ids_of(tokenizer, b"ab", "<sp>", b"cabab", "<sp>", b"c")
    for stop, min_tokens, wanted, count in (
        ("ab", 0, "", 2),
        ("ab", 1, "", 2),  # complete with the second token
        ("ab", 2, "abc", 6),
        ("<sp>", 2, "ab", 3),
        ("<sp>", 3, "abcabab", 9),
        ("c", 4, "abcabab", 10),
        ("ab", 8, "abcababc", 10),
        ("c", 10, "abcababc", 10),
    ):
        text = choice_text(tokenizer, stop, min_tokens=min_tokens)
        assert (answer(text, token_ids, sizes).text, text.num_tokens) == (wanted, count)


@pytest.mark.parametrize("name", TOKENIZERS)
@hypothesis.given(data=st.data())
def test_the_bytes_of_tokens_are_the_text(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    size = tokenizer.library_tokenizer.get_vocab_size()
    characters = st.text("aé日🙂 ", max_size=5).map(lambda x: ids_of(tokenizer, x.encode()))
    parts = st.lists(characters | st.lists(st.integers(0, size), max_size=3), max_size=6)
    prompt = data.draw(characters, label="prompt")
    token_ids = [x for part in data.draw(parts, label="token ids") for x in part] or [0]
    stops = data.draw(st.sampled_from([(), ("é",), ("日🙂", "y"), ("<sp>", "a "), ("\ufffd",)]))
    sizes = data.draw(st.lists(st.integers(1, 5)), label="sizes")
    found = answer(choice_text(tokenizer, *stops, prompt=prompt), token_ids, sizes)
    assert joined(found) == found.text.encode()
    for i, one in enumerate(found.tokens):
        before = b"".join(bytes(x["bytes"]) for x in found.tokens[:i])
        assert one["offset"] == len(before.decode(errors="ignore"))
    if not stops:
        assert len(found.tokens) == len(token_ids)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokens_that_are_parts_of_a_character_have_their_own_bytes(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    found = answer(choice_text(tokenizer), ids_of(tokenizer, "🙂日".encode(), "b", b"\xf0\x9f"))
    own = [*"🙂日b".encode()]
    assert [one["bytes"] for one in found.tokens[:8]] == [[byte] for byte in own]
    assert [one["offset"] for one in found.tokens] == [0, 0, 0, 0, 1, 1, 1, 2, 3, 3]
    assert found.tokens[0]["top_logprobs"][0]["bytes"] == [0xF0]
    assert joined(found) == found.text.encode()  # with U+FFFD for what is broken


def test_the_space_that_a_text_loses_is_in_no_token() -> None:
    tokenizer = TOKENIZERS["byte fallback"]
    token_ids = ids_of(tokenizer, "▁a", "▁a")
    for prompt, wanted in {(): "a a", (257,): " a a"}.items():
        found = answer(choice_text(tokenizer, prompt=prompt), token_ids)
        assert found.text == wanted and joined(found) == wanted.encode()
        assert [one["token"] for one in found.tokens] == [" a", " a"]


def test_a_token_that_a_stop_string_cuts_has_bytes_up_to_there() -> None:
    tokenizer = TOKENIZERS["byte level"]
    found = answer(choice_text(tokenizer, "y"), ids_of(tokenizer, b"a", "xy", b"b"))
    assert [(one["token"], one["bytes"]) for one in found.tokens] == [("a", [97]), ("xy", [120])]


@hypothesis.given(
    pieces=st.lists(st.text("ab\u00e9", max_size=4), max_size=8),
    stops=st.lists(st.text("ab\u00e9", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_stop_strings_are_found_however_a_text_is_cut(pieces: list[str], stops: Any) -> None:
    whole = "".join(pieces)
    ends = [n for n in range(len(whole) + 1) if any(whole[:n].endswith(stop) for stop in stops)]
    truth, reason = whole, "length"
    if ends:  # the first end; of several stop strings that end there, the longest
        before = [whole[: ends[0]].removesuffix(s) for s in stops if whole[: ends[0]].endswith(s)]
        truth, reason = min(before, key=len), "stop"

    class Words:
        special_tokens: dict[int, str] = {}

        def decode(self, token_ids: list[int], *, final: bool = False) -> str:
            return "".join(pieces[i] for i in token_ids)

    words: Any = Words()
    text = ChoiceText(words, words, stops)
    shown = ""
    for token_ids, end in [*(([i], None) for i in range(len(pieces))), ([], "length")]:
        piece = text.add(lm.RequestUpdate(0, token_ids, end))
        shown += piece.text
        assert truth.startswith(shown), "what was sent stays"
        if piece.finish_reason:
            break
    assert (shown, piece.finish_reason) == (truth, reason)


ENGINE: Any = SimpleNamespace(max_length=64, logprobs=sd.LogprobsConfig(1))


def answered(
    updates: list[lm.RequestUpdate], is_chat: bool, n: int = 1, **asked: Any
) -> list[dict[str, Any]]:
    """The events of an answer, or its one object, each of `n` choices having these updates."""
    tokenizer = TOKENIZERS["byte level"]
    prompt = {"messages": [{"role": "user", "content": "x"}]} if is_chat else {"prompt": "x"}
    given = read_parameters({**prompt, "n": n, **asked}, is_chat, ENGINE)
    choices: Any = [{"prompt": [1], "options": lm.RequestOptions()}] * n
    parts: list[bytes] = []

    async def send(message: Any) -> None:
        parts.append(message.get("body", b""))

    async def run() -> None:
        channel = server_app.Channel(n, 64)
        for update in updates:
            for choice in range(n):
                channel.put(choice, update)
        worker: Any = SimpleNamespace(finish=lambda channel, choice: None)
        streams = [tokenizer.stream() for _ in range(n)]
        one = server_app.Answer(
            CheckedRequest(given, choices, None, streams, 7),
            channel,
            worker,
            vocabulary(tokenizer),
            "tiny",
        )
        receive: Any = None
        await one({"type": "http"}, receive, send)

    asyncio.run(run())
    bodies = [part.decode().removeprefix("data: ") for part in parts]
    return [json.loads(body) for body in bodies if body.strip() not in ("", "[DONE]")]


@pytest.mark.parametrize("is_chat", [False, True])
@pytest.mark.parametrize(
    ("stop", "last", "texts"),
    [
        # Bytes of a character wait for its end, and what may begin a stop string for what follows.
        ("bd", "length", ["a", "xy", "🙂", "bc", "z", "e", "f"]),
        ("bd", "stop", ["a", "xy", "🙂", "bc", "z", "e", ""]),  # a stop token has no text
        ("e", "length", ["a", "xy", "🙂", "b", "c", "z", ""]),
        ("c", "length", ["a", "xy", "🙂", "b", ""]),
    ],
)
def test_a_stream_has_an_event_for_each_token_if_asked(
    stop: str, last: Any, texts: list[str], is_chat: bool
) -> None:
    (ids, more) = (ids_of(TOKENIZERS["byte level"], x) for x in ("axy🙂bcz".encode(), b"ef"))
    smile = ids_of(TOKENIZERS["byte level"], "xy")
    ids[1:3] = smile
    updates = [
        lm.RequestUpdate(0, one, reason, logprobs=logprobs_of(one))
        for one, reason in ((ids, None), (more, last))
    ]

    def stream(**options: bool) -> tuple[list[list[Any]], Any]:
        """For each choice: text, tokens and finish reason of its events; and the usage."""
        own = {"logprobs": True, "top_logprobs": 1} if is_chat else {"logprobs": 1}
        options["include_usage"] = True
        given: Any = dict(n=2, stop=stop, stream=True, stream_options=options, **own)
        *events, end = answered(updates, is_chat, **given)
        found: list[list[Any]] = [[], []]
        for event in events[2 * is_chat :]:  # a chat's first events have the role
            (choice,) = event["choices"]
            text = choice["delta"].get("content", "") if is_chat else choice["text"]
            numbers = choice["logprobs"] or {"content": [], "tokens": []}
            tokens = [x["token"] for x in numbers["content"]] if is_chat else numbers["tokens"]
            found[choice["index"]].append((text, tokens, choice["finish_reason"]))
        return found, end["usage"]

    together, usage = stream()
    single, same_usage = stream(one_token_per_event=True)
    assert usage == same_usage and len(together[0]) <= 2
    for events, fewer in zip(single, together, strict=True):
        assert [text for text, _, _ in events] == texts
        assert "".join(texts) == "".join(text for text, _, _ in fewer)
        assert [x for _, own, _ in events for x in own] == [x for _, own, _ in fewer for x in own]
        assert all(len(own) == 1 for text, own, _ in events if text and text not in ("🙂", "bc"))
        reasons = [reason for _, _, reason in events]
        assert reasons == [None] * (len(texts) - 1) + [fewer[-1][2]]


@pytest.mark.parametrize("options", [None, {}, {"one_token_per_event": True}])
@pytest.mark.parametrize("is_chat", [False, True])
@pytest.mark.parametrize(
    ("ends", "stop", "accepted", "rejected"),
    [
        # of 4 drafts 3 are tokens of the answer; of the last 4, which were all accepted, 2
        ("length", "never", 5, 3),
        ("stop", "never", 5, 3),
        ("length", "d", 3, 1),  # ends with the first token that no draft proposed
        ("length", "b", 2, 2),
    ],
)
def test_usage_has_what_became_of_drafts_if_asked(
    ends: Any, stop: str, accepted: int, rejected: int, is_chat: bool, options: Any
) -> None:
    first, last = (ids_of(TOKENIZERS["byte level"], x) for x in (b"abcd", b"ef"))
    updates = [
        lm.RequestUpdate(0, first, num_proposed=4, num_accepted=3, num_reused=5),
        lm.RequestUpdate(0, last, ends, num_proposed=4, num_accepted=4),
    ]
    given: Any = dict(n=2, stop=stop)
    if options is not None:
        given |= dict(stream=True, stream_options={"include_usage": True, **options})
    *_, plain = answered(updates, is_chat, **given)
    *_, found = answered(updates, is_chat, include_acceptance=True, **given)
    counts = dict(accepted_prediction_tokens=2 * accepted, rejected_prediction_tokens=2 * rejected)
    assert found["usage"] == {**plain["usage"], "completion_tokens_details": counts}
    assert plain["usage"]["prompt_tokens_details"] == {"cached_tokens": 5}  # of a prompt, once
    assert 2 * accepted <= plain["usage"]["completion_tokens"]
