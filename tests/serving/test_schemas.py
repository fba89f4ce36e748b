"""JSON schemas of a server's clients: what they may take, and tokenizers of other sizes."""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import json
import signal
import string
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import llguidance
import numpy as np
import pytest
import tokenizers
from upper_floor import ApiError, Limits, Vocabulary, loading, schemas

from jax_specdec.lm import TextStream, Tokenizer, decode_bytes

pytestmark = pytest.mark.newest

SECONDS, MEBIBYTES = Limits().schema_seconds, Limits().schema_mebibytes


def text(pattern: str) -> dict[str, Any]:
    return {"type": "string", "pattern": pattern}


def keys(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"k{i}": {"type": "integer"} for i in range(count)}}


PATTERNS = [{"pattern": f".*{letter}.*"} for letter in string.ascii_lowercase]
TOO_MUCH = "compiling it takes more than 5 s or 48 MiB"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "24 patterns": ({"type": "string", "allOf": PATTERNS[:24]}, TOO_MUCH),
    "a large multiple": ({"type": "integer", "multipleOf": 999983}, TOO_MUCH),
    "a large count": (text("^a{1000000000}$"), TOO_MUCH),
    "many keys": (keys(900), "has 3607 items"),
    "itself": ({"$ref": "#"}, "no text follows it"),
    "itself within": (
        {"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]},
        "Too many items",
    ),
    "no kind": ({"type": "nonsense"}, "Invalid type: nonsense"),
    "half a character": ({"const": "\ud800"}, "line 1 column"),
    "looking ahead": (text("^(?!日本)$"), "日本(?s:.)*look-around"),
    "nothing": ({"enum": []}, "Unsatisfiable schema"),
}
TAKEN: dict[str, dict[str, Any]] = {
    "anything": {},
    "counts in counts": text("^((a{1,100}){1,100}){1,100}$"),
    "many states": text("^(a|b)*a(a|b){20}$"),
    "a long constant": {"const": "a" * 60000},
    "many constants": {"enum": [f"v{i}x" for i in range(6000)]},
    "optional keys": keys(300),
    "required keys": {**keys(900), "required": [f"k{i}" for i in range(900)]},
    "a tree": {
        "type": "object",
        "properties": {"left": {"$ref": "#"}, "right": {"$ref": "#"}},
        "additionalProperties": False,
    },
}


@pytest.mark.parametrize(("schema", "message"), REFUSED.values(), ids=REFUSED)
def test_schemas_that_cannot_be_followed_are_refused(schema: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        schemas.Trial(SECONDS, MEBIBYTES).run(json.dumps(schema))


@pytest.mark.parametrize("schema", TAKEN.values(), ids=TAKEN)
def test_large_schemas_are_taken(schema: dict[str, Any]) -> None:
    schemas.Trial(SECONDS, MEBIBYTES).run(json.dumps(schema))


def test_a_schema_has_only_so_much_processor_time() -> None:
    schema = json.dumps(REFUSED["a large multiple"][0])
    with pytest.raises(ValueError, match="more than 1 s"):
        schemas.Trial(1, 4096).run(schema)


def test_a_process_that_fails_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "llguidance.py").write_text("raise ImportError('no llguidance')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(ValueError, match="^ImportError: no llguidance$"):
        schemas.Trial(SECONDS, MEBIBYTES).run("{}")


# Vocabularies of servers

NUM_BYTES = 256


def byte_level_tokenizer(num_added: int, **parts: Any) -> Any:
    """Bytes; an id that ends a text; and more added tokens."""
    letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    vocab = {letter: i for i, letter in enumerate(sorted(letters))}
    library = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    library.decoder = parts.get("decoder", tokenizers.decoders.ByteLevel())
    library.add_special_tokens([f"<{i}>" for i in range(num_added)])
    return Tokenizer(Path("tokenizer.json"), library, stop_token_ids=())


def vocabulary(size: int, tokenizer: Any = None, stops: tuple[int, ...] = (NUM_BYTES,)) -> Any:
    """Of a model with so many logits."""
    stream = functools.partial(TextStream, decode_bytes)
    return Vocabulary(loading.TargetText(tokenizer, size, stops, stream, 64), Limits())


@pytest.mark.parametrize(("size", "num_added"), [(257, 1), (257, 2), (257, 9), (258, 1), (300, 2)])
def test_a_tokenizer_may_have_more_or_fewer_ids_than_the_model(size: int, num_added: int) -> None:
    words = vocabulary(size, tokenizer := byte_level_tokenizer(num_added))
    (matcher,) = asyncio.run(words.matchers('{"const": "ab"}', [4]))
    library = tokenizer.library_tokenizer
    for token in [*(library.token_to_id(letter) for letter in '"ab"'), NUM_BYTES]:
        bitmask = np.zeros((1, -(-size // 32)), np.int32)
        matcher.fill_next_token_bitmask(bitmask, 0)
        bits = np.unpackbits(bitmask.view(np.uint8), bitorder="little")
        assert np.flatnonzero(bits).tolist() == [token]
        assert matcher.accept_token(token)


NORMALIZERS = tokenizers.normalizers
CHANGED = {"NAME <0>": ["e\u0301 <0> \ufb01", "  x  "], "<1>": "\n<1><0>"}
"""Keys and values that normalizers change, or that spell special tokens."""


@pytest.mark.parametrize(
    "normalizer",
    [
        None,
        NORMALIZERS.NFC(),
        NORMALIZERS.Sequence([NORMALIZERS.NFKC(), NORMALIZERS.Lowercase(), NORMALIZERS.Strip()]),
        NORMALIZERS.Sequence([NORMALIZERS.Prepend("x"), NORMALIZERS.Replace(" ", "")]),
    ],
)
def test_forced_text_is_that_of_the_schema_whatever_the_tokenizer_changes(
    normalizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schemas, "Trial", lambda *given: SimpleNamespace(run=lambda text: None))
    monkeypatch.setattr(schemas, "_MOST_FORCED", 32)
    tokenizer = byte_level_tokenizer(2)
    library = tokenizer.library_tokenizer
    texts = "<think>", "ab", "bcde"
    library.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in texts])
    library.normalizer = normalizer
    words = vocabulary(261, tokenizer)
    many = ['"', *["ab", *"cde"] * 30, '"']
    for wanted, tokens in (("abcde" * 30, many), (CHANGED, None)):
        (matcher,) = asyncio.run(words.matchers(json.dumps({"const": wanted}), [200]))
        ids: list[int] = []
        while NUM_BYTES not in ids:
            bitmask = np.zeros((1, 9), np.int32)
            matcher.fill_next_token_bitmask(bitmask, 0)
            bits = np.unpackbits(bitmask.view(np.uint8), bitorder="little")
            ids.append(int(np.flatnonzero(bits)[0]))
            assert matcher.accept_token(ids[-1])
        assert not {*ids[:-1]} & {*tokenizer.special_tokens}
        assert json.loads(b"".join(map(tokenizer.token_bytes, ids))) == wanted
        assert tokens is None or [library.id_to_token(token) for token in ids[:-1]] == tokens


def test_a_schema_that_forces_more_than_a_budget_holds_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(schemas, "Trial", lambda *given: SimpleNamespace(run=lambda text: None))
    words = vocabulary(256, stops=(0,))
    assert asyncio.run(words.matchers('{"const": "abc"}', [5]))
    message = "^response_format must have a schema whose texts can have 4 tokens, .* forces 5 at"
    with pytest.raises(ApiError, match=message):
        asyncio.run(words.matchers('{"const": "abc"}', [9, 4]))


class Panic(BaseException):
    """As Rust's panics arrive in Python."""


def test_a_server_without_schemas_says_why_and_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(words: Any, match: str) -> None:
        with pytest.raises(ApiError, match=f"^response_format {match}") as error:
            asyncio.run(words.try_schema({}))
        assert error.value.status == 400 and error.value.param == "response_format"

    assert not capsys.readouterr().err
    unknown = byte_level_tokenizer(1, decoder=tokenizers.decoders.WordPiece())
    refuse(vocabulary(257, unknown), "cannot be used: llguidance .* can't determine decoder type")
    assert "response_format cannot be used" in capsys.readouterr().err
    refuse(vocabulary(255, byte_level_tokenizer(1)), "cannot be used: llguidance fails")
    refuse(vocabulary(256, stops=()), "needs a model with a stop token")

    def panic(*args: Any, **named: Any) -> None:
        raise Panic("a panic")

    with monkeypatch.context() as patch:
        patch.setattr(llguidance, "LLTokenizer", panic)
        refuse(vocabulary(257, byte_level_tokenizer(1)), "cannot be used: .*: a panic")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    refuse(vocabulary(256, stops=(0,)), "needs the llguidance library")


def test_schemas_that_take_too_much_are_no_other_clients_concern() -> None:
    words = vocabulary(256, stops=(0,))
    bomb, other = REFUSED["24 patterns"][0], {"type": "integer"}

    async def ask() -> list[Any]:
        asked = (words.try_schema(schema) for schema in (bomb, other, bomb, bomb, other))
        return await asyncio.gather(*asked, return_exceptions=True)

    first, second, third, fourth, fifth = asyncio.run(ask())
    assert second == fifth == json.dumps(other)
    for error in (first, third, fourth):
        assert isinstance(error, ApiError) and TOO_MUCH in str(error)


def test_a_schema_that_was_tried_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    words = vocabulary(256, stops=(0,))
    asyncio.run(words.try_schema({"type": "integer"}))
    monkeypatch.setattr(schemas.subprocess, "Popen", None)
    text = asyncio.run(words.try_schema({"type": "integer"}))
    assert len(asyncio.run(words.matchers(text, [9] * 3))) == 3


def test_nobody_waits_for_a_schema_whose_client_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a signal to all processes end the one in which another's is compiled."""
    words = vocabulary(256, stops=(0,))
    bomb, processes = {"type": "integer", "multipleOf": 999983}, []
    popen = subprocess.Popen

    def noting(*args: Any, **named: Any) -> Any:
        processes.append(popen(*args, **named))
        return processes[-1]

    monkeypatch.setattr(schemas.subprocess, "Popen", noting)

    async def ask() -> str:
        leaving = [asyncio.create_task(words.try_schema({**bomb, "x": i})) for i in range(40)]
        await asyncio.sleep(0.1)
        assert len(processes) == Limits().schema_processes
        for task in leaving:
            task.cancel()
        await asyncio.wait(leaving)
        other = asyncio.create_task(words.try_schema({"type": "integer"}))
        await asyncio.sleep(0)
        for number in (signal.SIGTERM, signal.SIGINT):
            processes[-1].send_signal(number)
        return await other

    assert json.loads(asyncio.run(ask())) == {"type": "integer"}
    *left, last = processes
    assert len(processes) == Limits().schema_processes + 1 and last.returncode == 0
    assert {process.wait(60) for process in left} == {-signal.SIGKILL}
