"""`jax-specdec serve`, over real sockets: OpenAI's own client, and clients that mean no good."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import io
import itertools
import json
import logging
import os
import queue
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import openai
import pytest
from formats.checkpoints import copy, expected
from passes import run as run_pass
from scipy import special
from upper_floor import (
    Connection,
    EngineFailed,
    Limits,
    Server,
    cli_prompts,
    close_stuck,
    load_served,
    make_driver,
    parse,
    programs,
)
from upper_floor import cli_process as process
from upper_floor import cli_serve as serve_lib
from upper_floor import cli_terminal as terminal
from upper_floor import server_app as app_lib

import jax_specdec as sd
from jax_specdec import lm
from jax_specdec.__main__ import main

from . import sampled

pytestmark = [pytest.mark.long, pytest.mark.newest]

LENGTH, QUEUE, TOP = 64, 16, 3
PROMPT, TEXT = (str(expected("qwen2")[key]) for key in ("prompt", "greedy_text"))
NUM_PROMPT_TOKENS = len(expected("qwen2")["prompt_token_ids"])
NUM_NEW = len(expected("qwen2")["greedy_token_ids"])
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
CLOSE = "Connection: close\r\n"
KEY = "secret-of-this-test-0123456789"
SCHEMA = {
    "type": "object",
    "properties": {"size": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["size"],
    "additionalProperties": False,
}


def following(schema: Any) -> dict[str, Any]:
    """A `response_format`."""
    return {"type": "json_schema", "json_schema": {"name": "size", "schema": schema}}


FORMAT = following(SCHEMA)
POST = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
OPTIONS: dict[str, dict[str, Any]] = {
    "frequency": {"frequency_penalty": 1.5},
    "presence": {"presence_penalty": 1.0},
    "repetition": {"repetition_penalty": 1.7},
    "bias": {"logit_bias": {"40": 5.0, "41": -100.0}},
    "min_tokens": {"min_tokens": 4, "logit_bias": {"281": 100.0}},
}
PLAIN: dict[str, tuple[str, dict[str, Any]]] = {
    "other": ("Other", {"max_new_tokens": 12}),
    "if": ("    if x" * 3, {"max_new_tokens": 9}),
    "chat": ("system: No.\nuser: Hi\nassistant:", {"max_new_tokens": 8}),
    "chat of one": (f"user: {PROMPT}\nassistant:", {"max_new_tokens": 8}),
    **{name: (PROMPT, {"max_new_tokens": NUM_NEW, **own}) for name, own in OPTIONS.items()},
}


def until(holds: Callable[[], Any]) -> None:
    while not holds():
        time.sleep(0.01)


@dataclasses.dataclass
class Running:
    """A server that listens, and what is behind it."""

    server: Server
    driver: lm.EngineDriver
    port: int
    lines: list[str]
    clients: contextlib.ExitStack

    def client(self, key: str = "none") -> openai.OpenAI:
        url = f"http://127.0.0.1:{self.port}/v1"
        client = openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=60)
        return self.clients.enter_context(client)

    def ask(self, function: Callable[[lm.EngineDriver], Any]) -> Any:
        """What a function returns of the driver, which belongs to the worker's thread."""
        worker = self.server.worker
        return asyncio.run_coroutine_threadsafe(worker.call(function), worker._loop).result(60)

    @property
    def num_tokens(self) -> int:
        return int(self.ask(lambda driver: driver.stats().num_tokens))

    def wait_until_running(self) -> None:
        until(lambda: self.ask(lambda driver: driver.num_running))

    def wait_until_idle(self) -> None:
        """Until nothing runs, and nobody is left who would be answered."""
        tasks = self.server._uvicorn.server_state.tasks
        until(lambda: not tasks and self.ask(lambda driver: driver.is_idle))
        assert self.server.worker._channels == {}

    @property
    def connections(self) -> set[Any]:
        return self.server._uvicorn.server_state.connections


class Site:
    """Models that are loaded once; servers of them share what is compiled."""

    def __init__(self, directory: Path) -> None:
        self.arguments = ["--target", str(directory), "--max-length", str(LENGTH), "-k", "2"]
        self.arguments += ["--max-queue", str(QUEUE), "--max-logprobs", str(TOP)]
        self.options = parse(["serve", *self.arguments], "0")
        self.models = load_served(self.options)
        self.tokenizer = self.models.text.tokenizer
        make_driver(self.options, self.models).warm_up(grammars=True)
        self._apply = jax.jit(run_pass, static_argnums=0)

    def logits(self, token_ids: list[int]) -> np.ndarray:
        """``[S, V]``, of the model alone."""
        model, params = self.models.target
        row, zero = np.zeros((1, LENGTH), np.int32), np.zeros(1, np.int32)
        row[0, : len(token_ids)] = token_ids
        output = self._apply(model, params, row, zero, model.init_cache(1, LENGTH))
        return np.asarray(output.logits, np.float32)[0, : len(token_ids)]

    @contextlib.contextmanager
    def serve(
        self, *, key: str | None = None, is_local: bool = True, send_buffer: int = 0, **limits: Any
    ) -> Iterator[Any]:
        driver = make_driver(self.options, self.models)
        who: dict[str, Any] = dict(model_name="tiny", key=key, is_local=is_local)
        server = Server(self.models.text, driver, **who, limits=Limits(**limits))
        ready, errors, lines = threading.Event(), [], []
        listener = socket.socket()
        if send_buffer:  # connections inherit it
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        listener.bind(("127.0.0.1", 0))

        def run() -> None:
            try:
                asyncio.run(server.run(listener, ready.set))
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as clients:
            patch.setattr(app_lib, "log", lines.append)
            thread.start()
            try:
                assert ready.wait(60)
                yield Running(server, driver, listener.getsockname()[1], lines, clients)
            finally:
                server.stop()
                thread.join(60)
        assert not thread.is_alive()
        if errors:
            raise errors[0]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    directory = copy("qwen2", tmp_path_factory.mktemp("site") / "tiny")
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return Site(directory)


@pytest.fixture(scope="module")
def running(site: Site) -> Iterator[Running]:
    with site.serve() as running:
        yield running


@pytest.fixture(scope="module")
def slow(site: Site) -> Iterator[Running]:
    """A server whose steps take a while, so that a client can leave before the end of its text."""
    with site.serve() as running:
        stalled(running.driver)
        yield running


@pytest.fixture(scope="module")
def plain(site: Site) -> dict[str, list[int]]:
    """The tokens of plain decoding, each from a pass over the whole text."""
    library, stops = site.tokenizer.library_tokenizer, site.tokenizer.stop_token_ids
    found: dict[str, list[int]] = {}
    for name, (prompt, fields) in PLAIN.items():
        ids = library.encode(prompt, add_special_tokens=not name.startswith("chat")).ids
        options, output = lm.RequestOptions(stop_token_ids=stops, **fields), []
        while len(output) < options.max_new_tokens and not {*output} & {*stops}:
            row = site.logits([*ids, *output])[-1]
            chances = sampled.processed(row, ids, output, 0.0, options, stops)
            output.append(int(chances.argmax()))
        found[name] = output
    return found


def text_of(site: Site, token_ids: list[int]) -> str:
    return site.tokenizer.stream().decode(token_ids, final=True)


def greedy(running: Running, prompt: Any = PROMPT, **asked: Any) -> Any:
    asked = {"max_tokens": NUM_NEW, "temperature": 0} | asked
    return running.client().completions.create(model="tiny", prompt=prompt, **asked)


def chat(running: Running, **asked: Any) -> Any:
    asked = {"max_tokens": 8, "temperature": 0} | asked
    messages = asked.pop("messages", [{"role": "user", "content": PROMPT}])
    return running.client().chat.completions.create(model="tiny", messages=messages, **asked)


# Texts


def test_a_completion_is_the_greedy_text_that_transformers_wrote(running: Running) -> None:
    answer = greedy(running)
    (choice,) = answer.choices
    assert choice.text == TEXT and choice.finish_reason == "length" and choice.logprobs is None
    assert answer.object == "text_completion" and answer.model == "tiny"
    usage = answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens
    assert usage == (NUM_PROMPT_TOKENS, NUM_NEW, NUM_PROMPT_TOKENS + NUM_NEW)


def test_a_stream_is_the_same_text_and_its_usage(running: Running) -> None:
    chunks = list(greedy(running, stream=True, stream_options={"include_usage": True}))
    *texts, last = chunks
    assert "".join(chunk.choices[0].text for chunk in texts) == TEXT and len(texts) > 2
    assert [chunk.choices[0].finish_reason for chunk in texts][-2:] == [None, "length"]
    assert all(chunk.usage is None for chunk in texts) and not last.choices
    assert last.usage.completion_tokens == NUM_NEW
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in greedy(running, stream=True))


def test_a_client_sees_its_drafts_if_it_asks(running: Running) -> None:
    def asked(**fields: Any) -> list[Any]:
        again = {"40": 100.0}  # a token that is always next, as lookup will soon guess
        return list(greedy(running, max_tokens=16, stream=True, logit_bias=again, **fields))

    before = running.ask(lambda driver: driver.stats())
    usage: dict[str, Any] = {"include_usage": True}
    *together, _ = asked(stream_options=usage)
    *single, end = asked(
        stream_options={**usage, "one_token_per_event": True},
        extra_body={"include_acceptance": True},
    )
    running.wait_until_idle()
    after = running.ask(lambda driver: driver.stats())
    texts = ["".join(x.choices[0].text for x in chunks) for chunks in (together, single)]
    assert texts[0] == texts[1] and len(together) < len(single) == end.usage.completion_tokens == 16
    details = end.usage.completion_tokens_details
    accepted, rejected = details.accepted_prediction_tokens, details.rejected_prediction_tokens
    assert 2 * (accepted + rejected) == after.num_draft_tokens - before.num_draft_tokens
    most = after.num_accepted_tokens - before.num_accepted_tokens
    assert 0 <= most - 2 * accepted <= 4 < accepted  # some may be accepted behind the end


def test_prompts_are_texts_or_tokens_and_several_make_several_choices(
    running: Running, site: Site, plain: dict[str, list[int]]
) -> None:
    token_ids = site.tokenizer.encode(PROMPT)
    other = text_of(site, plain["other"][:8])
    texts = [choice.text for choice in greedy(running, [PROMPT, "Other"], max_tokens=8).choices]
    assert TEXT.startswith(texts[0]) and texts[1] == other
    assert greedy(running, token_ids).choices[0].text == TEXT
    answer = greedy(running, [token_ids, token_ids], n=2)
    assert [choice.text for choice in answer.choices] == [TEXT] * 4
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]


def test_a_conversation_goes_through_the_chat_template(
    running: Running, site: Site, plain: dict[str, list[int]]
) -> None:
    truth = text_of(site, plain["chat"])
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    messages = [{"role": "system", "content": "No."}, {"role": "user", "content": parts}]
    answer = chat(running, messages=messages, max_tokens=None, max_completion_tokens=8)
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.content == truth
    assert answer.choices[0].message.role == "assistant"
    chunks = list(chat(running, messages=messages, stream=True))
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == truth
    assert chunks[-1].choices[0].finish_reason == "length"


def test_a_seed_repeats_its_choices_which_differ(running: Running, site: Site) -> None:
    texts = [
        [x.text for x in greedy(running, n=3, seed=seed, temperature=1.0).choices]
        for seed in (7, 7, 8)
    ]
    assert texts[0] == texts[1] != texts[2] and len({*texts[0], *texts[2]}) == 6
    free = {greedy(running, temperature=1.0).choices[0].text for _ in range(3)}
    assert len(free) == 3, "without a seed, texts differ"


def test_a_request_limits_its_drafts(running: Running) -> None:
    def proposed() -> np.ndarray:
        return np.array(running.ask(lambda driver: driver.stats().offered_per_position))

    texts = set()
    for most, is_offered in ((0, [False, False]), (1, [True, False]), (None, [True, True])):
        before = proposed()
        answer = greedy(running, "    if x" * 3, extra_body={"max_drafts": most})
        running.wait_until_idle()
        assert (proposed() > before).tolist() == is_offered
        texts.add(answer.choices[0].text)
    assert len(texts) == 1


def test_a_prediction_is_drafted_and_its_usage_counted(running: Running, site: Site) -> None:
    # Of ASCII alone, so that the text is encoded as it was generated.
    ids = site.tokenizer.encode(":;G4I", add_special_tokens=False)

    def answer(**extra: Any) -> Any:
        fields = {k: extra.pop(k) for k in ("stream", "stream_options") if k in extra}
        given = {"logit_bias": {str(one): 100 for one in ids}, **extra}
        return greedy(running, max_tokens=10, extra_body=given, **fields)

    def predicting(content: str, **fields: Any) -> Any:
        return answer(prediction={"type": "content", "content": content}, **fields)

    truth = answer()
    assert truth.usage.completion_tokens_details is None
    right, wrong = (predicting(x) for x in (truth.choices[0].text, "no such text"))
    assert right.choices[0].text == wrong.choices[0].text == truth.choices[0].text
    details, other = (x.usage.completion_tokens_details for x in (right, wrong))
    # The first token has no drafts, and of each later step, two of three are drafts.
    assert details.accepted_prediction_tokens >= 6 > other.accepted_prediction_tokens
    assert details.rejected_prediction_tokens <= 2
    *_, end = predicting("x", stream=True, stream_options={"include_usage": True})
    assert end.usage.completion_tokens_details is not None


def test_a_missing_budget_is_what_fits(running: Running) -> None:
    answer = greedy(running, max_tokens=None)
    found = answer.usage.completion_tokens
    assert found == LENGTH - NUM_PROMPT_TOKENS or answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].text.startswith(TEXT)


@pytest.mark.parametrize("name", OPTIONS)
def test_options_change_the_text_as_they_change_plain_decoding(
    running: Running, site: Site, plain: dict[str, list[int]], name: str
) -> None:
    extra = {k: v for k, v in OPTIONS[name].items() if k in ("repetition_penalty", "min_tokens")}
    others = {k: v for k, v in OPTIONS[name].items() if k not in extra}
    text = greedy(running, extra_body=extra, **others).choices[0].text
    assert text == text_of(site, plain[name]) != TEXT


def test_sampling_parameters_narrow_the_choice_to_the_greedy_token(running: Running) -> None:
    for extra in ({"top_k": 1}, {"min_p": 1.0}):
        answer = greedy(running, temperature=1.0, extra_body=extra)
        assert answer.choices[0].text == TEXT
    assert greedy(running, temperature=1.0, top_p=1e-6).choices[0].text == TEXT


def test_a_prompt_is_read_once_for_all_of_one_salt(running: Running) -> None:
    def cached(**asked: Any) -> int:
        answer = greedy(running, prompt=[*range(200, 240)], max_tokens=3, **asked)
        return int(answer.usage.prompt_tokens_details.cached_tokens)

    before = running.ask(lambda driver: driver.serving_stats())
    salted = [{"cache_salt": salt} for salt in ("x", "y", "x")]
    found = [cached(extra_body=one) for one in salted]
    assert found == [0, 0, 32]  # 32 tokens are read, up to the end of the longest prompt
    assert cached(n=3) == 0 and cached(n=2) == 32
    assert (running.ask(lambda driver: driver.serving_stats()) - before).num_reused_tokens == 32 * 5


def test_an_answer_may_be_sent_back(running: Running) -> None:
    first = {"role": "user", "content": "Hi"}
    message = chat(running, messages=[first]).choices[0].message
    content = message.content
    truth = chat(running, messages=[first, {"role": "assistant", "content": content}, first])
    forms = [message, message.model_dump(), message.model_dump(exclude_unset=True)]
    for form in [*forms, {**forms[1], "annotations": [], "tool_calls": [], "refusal": ""}]:
        answer = chat(running, messages=[first, form, first])
        assert answer.usage.total_tokens == truth.usage.total_tokens
        assert answer.choices[0].message == truth.choices[0].message


def test_a_stream_names_its_charset(running: Running) -> None:
    status, headers, _ = raw(running.port, request_bytes(CLOSE, stream=True, max_tokens=1))
    assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")


# Stop strings


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_text_ends_before_a_stop_string_wherever_tokens_end(
    running: Running, is_stream: bool
) -> None:
    before = running.driver.serving_stats()
    for begin, end in ((3, 4), (5, 9), (0, 2), (len(TEXT) - 3, len(TEXT))):
        stop = TEXT[begin:end]
        answer = greedy(running, stop=[stop, "never \u2603"], stream=is_stream)
        choices = [chunk.choices[0] for chunk in answer] if is_stream else answer.choices
        assert "".join(choice.text for choice in choices) == TEXT[: TEXT.index(stop)]
        assert choices[-1].finish_reason == "stop"
        if not is_stream:
            assert 0 < answer.usage.completion_tokens <= NUM_NEW
    kept = greedy(running, stop=TEXT[-2:] + "never")  # the beginning of one, held back
    assert kept.choices[0].text == TEXT and kept.choices[0].finish_reason == "length"
    running.wait_until_idle()
    # Of a text that the engine ended before its stop string was found, it counts that.
    length, stop, failed, cancelled = (running.driver.serving_stats() - before).num_ended
    assert (length + stop, failed, cancelled) == (5, 0, 0) and stop


# Log-probabilities


def test_logprobs_are_those_of_the_model_in_both_forms(
    running: Running, site: Site, plain: dict[str, list[int]]
) -> None:
    prompt = site.tokenizer.encode(PROMPT)
    new = [int(x) for x in expected("qwen2")["greedy_token_ids"]]
    rows = special.log_softmax(site.logits(prompt + new), axis=1)[len(prompt) - 1 : -1]
    truth = [row[token] for row, token in zip(rows, new, strict=True)]

    found = greedy(running, logprobs=TOP).choices[0].logprobs
    np.testing.assert_allclose(found.token_logprobs, truth, atol=1e-4)
    assert found.tokens == [site.tokenizer.decode([token]) for token in new]
    for i, offset in enumerate(found.text_offset):  # 3 bytes of a character may be held back
        assert 0 <= len("".join(found.tokens[:i])) - offset <= 3
    for row, top in zip(rows, found.top_logprobs, strict=True):
        likeliest = np.argsort(-row)[:TOP]
        texts = [site.tokenizer.decode([token]) for token in likeliest]
        best = {text: row[likeliest[texts.index(text)]] for text in texts}  # some share a text
        assert top == pytest.approx(best, abs=1e-4)

    chunks = [x.choices[0].logprobs for x in greedy(running, logprobs=TOP, stream=True)]
    chunks = [x for x in chunks if x is not None]
    assert [token for x in chunks for token in x.tokens] == found.tokens
    assert [offset for x in chunks for offset in x.text_offset] == found.text_offset

    answer = chat(running, logprobs=True, top_logprobs=2)
    content = answer.choices[0].logprobs.content
    tokens = plain["chat of one"]
    assert [x.token for x in content] == [site.tokenizer.decode([token]) for token in tokens]
    assert all(x.top_logprobs[0].logprob == x.logprob for x in content)  # greedy
    assert all(len(x.top_logprobs) == 2 for x in content)
    text = "".join(chr(byte) for x in content for byte in x.bytes).encode("latin-1").decode()
    assert text == answer.choices[0].message.content
    stream = [x.choices[0].logprobs for x in chat(running, logprobs=True, stream=True)]
    tokens = [x.token for one in stream if one is not None for x in one.content]
    assert tokens == [x.token for x in content]


def test_tokens_of_a_stop_string_have_no_logprobs(running: Running) -> None:
    stop = TEXT[4:6]
    found = greedy(running, logprobs=0, stop=stop).choices[0]
    assert found.text == TEXT[: TEXT.index(stop)]
    assert all(offset < len(found.text) for offset in found.logprobs.text_offset)
    assert "".join(found.logprobs.tokens).startswith(found.text)


# JSON


@pytest.mark.parametrize("is_chat", [False, True])
def test_a_text_follows_its_json_schema(running: Running, is_chat: bool) -> None:
    for temperature in (0, 1.0):
        asked = dict(n=2, max_tokens=16, temperature=temperature, seed=3)
        ask = chat if is_chat else greedy
        answer = ask(running, **asked, extra_body={"response_format": FORMAT})
        for choice in answer.choices:
            text = choice.message.content if is_chat else choice.text
            assert choice.finish_reason == "stop"
            value = json.loads(text)
            assert value.keys() == {"size"} and 0 <= value["size"] <= 99
    other = greedy(running)  # neighbours of a grammar, and what comes after it
    assert other.choices[0].text == TEXT


def test_a_schema_that_cannot_be_used_is_refused(running: Running) -> None:
    for schema, match in (
        ({"type": "nonsense"}, "cannot be used: Invalid type"),
        ({"enum": ["x" * 2**16]}, "at most 65536 bytes"),
        ({"type": "integer", "multipleOf": 999983}, "takes more than 5 s or 48 MiB"),
    ):
        with pytest.raises(openai.BadRequestError, match=match) as error:
            chat(running, response_format=following(schema))
        assert error.value.param == "response_format"


def test_schemas_are_compiled_for_those_that_are_about_to_get_a_slot(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, counts = running.driver, []
    step = driver.step

    def noting() -> list[lm.RequestUpdate]:
        counts.append(driver.num_running + driver.num_queued)
        return step()

    monkeypatch.setattr(driver, "step", noting)
    monkeypatch.setattr(running.server, "_compiled", asyncio.Semaphore(1))
    asked = {"max_tokens": 16, "extra_body": {"response_format": FORMAT}}
    with futures.ThreadPoolExecutor(3) as pool:
        (text,) = {*pool.map(lambda _: greedy(running, **asked).choices[0].text, range(3))}
    assert json.loads(text)["size"] >= 0
    assert {*counts} == {1}, "one after another"


def test_a_schema_that_fails_in_the_middle_of_a_text_is_an_error(running: Running) -> None:
    """Its limits are exceeded there; the text must not end as if it were complete."""
    keys = {"type": "object", "properties": {f"k{i}": {} for i in range(900)}}
    late = {"type": "array", "prefixItems": [{"enum": [1, 2]}, keys], "minItems": 2}
    asked = {"max_tokens": 30, "extra_body": {"response_format": following(late)}}
    match = "response_format cannot be followed to its end: .* items; max is 2000"
    with futures.ThreadPoolExecutor() as pool:
        other = pool.submit(greedy, running)
        with pytest.raises(openai.BadRequestError, match=match) as error:
            greedy(running, **asked)
    assert error.value.param == "response_format" and other.result().choices[0].text == TEXT
    with pytest.raises(openai.APIError, match=match):
        list(greedy(running, stream=True, **asked))


# What is refused


def raw(port: int, data: bytes) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of what comes back for some bytes; status 0 for nothing."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(data)
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := connection.recv(65536):
                answer += piece
    head, _, body = answer.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines[1:])
    return int(lines[0].split()[1]) if answer else 0, headers, body


def get(running: Running, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    given = {"Host": "localhost", "Connection": "close"} | headers
    lines = "".join(f"{name}: {value}\r\n" for name, value in given.items())
    return raw(running.port, f"GET /{path} HTTP/1.1\r\n{lines}\r\n".encode())


def answers(running: Running) -> dict[str, int]:
    """How many answers were counted, by status; the one that says so is not counted yet."""
    metrics = get(running, "metrics")[2].decode()
    counted = re.findall(r'serving_answers_total{.*status="(.*)"} (.*)', metrics)
    return {status: int(float(count)) for status, count in counted}


def post(
    port: int, body: bytes | dict[str, Any], path: str = "/v1/completions", **headers: str
) -> tuple[int, dict[str, str], dict[str, Any]]:
    """Status, headers and error of a request with `Connection: close`."""
    body = json.dumps(body).encode() if isinstance(body, dict) else body
    given = {"Host": "localhost", "Content-Type": "application/json", "Connection": "close"}
    given |= {name.replace("_", "-"): value for name, value in headers.items()}
    if "Transfer-Encoding" not in given:
        given.setdefault("Content-Length", str(len(body)))
    lines = "".join(f"{name}: {value}\r\n" for name, value in given.items() if value)
    status, found, answer = raw(port, f"POST {path} HTTP/1.1\r\n{lines}\r\n".encode() + body)
    error = json.loads(answer)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return status, found, error


# Those that need the engine or the vocabulary; `test_server_requests.py` has the others.
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"prompt": [288]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [2**70]}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"max_tokens": 64}, "prompt"),
    ({"max_drafts": 3}, "max_drafts"),
    ({"min_tokens": 9, "max_tokens": 4}, "min_tokens"),
    ({"logit_bias": {"288": 1}}, "logit_bias"),
    ({"logprobs": TOP + 1}, "logprobs"),
    ({"top_p": 1e-45}, "top_p"),
    ({"repetition_penalty": 1e-38}, "repetition_penalty"),
    ({"frequency_penalty": -3e38}, "frequency_penalty"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
]


USER = {"role": "user", "content": "x"}


def test_a_wrong_parameter_is_named(running: Running) -> None:
    for changes, param in WRONG:
        status, _, error = post(running.port, {"prompt": "x", **changes})
        assert (status, error["type"], error["param"]) == (400, "invalid_request_error", param)
        assert len(error["message"]) < 500
    messages = [USER, {**USER, "role": "tool"}]
    status, _, error = post(running.port, {"messages": messages}, "/v1/chat/completions")
    assert (status, error["param"]) == (400, "messages[1].role")


def test_a_body_that_is_no_json_object_is_refused(running: Running) -> None:
    for body in (
        b"",
        b"{",
        b"\xff\xfe",
        b'{"prompt": NaN}',
        b'{"prompt": "\\ud800"}',
        b"[" * 200_000,
        b'{"n": ' + b"9" * 5000 + b"}",
        b'{"prompt": "x", "metadata": [' + b"[]," * 2**16 + b"[]]}",
    ):
        status, _, error = post(running.port, body)
        assert status == 400 and error["type"] == "invalid_request_error"


def test_a_refusal_names_no_path(running: Running, site: Site) -> None:
    directory = site.tokenizer.path.parent
    file = directory / "chat_template.jinja"
    for template, message in (
        ("{{ raise_exception('roles must alternate') }}", ": roles must alternate."),
        ("{% for %}", "has a chat template that cannot be parsed"),
        (None, "the checkpoint has no chat template, neither "),
    ):
        try:
            file.unlink() if template is None else file.write_text(template)
            status, _, error = post(running.port, {"messages": [USER]}, "/v1/chat/completions")
        finally:
            file.write_text(TEMPLATE)
        assert (status, error["param"]) == (400, "messages")
        assert message in error["message"] and str(directory) not in error["message"]


def test_a_file_that_is_gone_is_the_servers_mistake(running: Running, site: Site) -> None:
    file = site.tokenizer.path.with_name("chat_template.jinja")
    try:
        file.unlink()
        file.mkdir()
        status, _, error = post(running.port, {"messages": [USER]}, "/v1/chat/completions")
    finally:
        file.rmdir()
        file.write_text(TEMPLATE)
    assert (status, error["message"]) == (500, "the server has an error")
    assert str(file) in "".join(running.lines)


def test_who_may_not_ask_is_refused_before_anything_is_read(running: Running) -> None:
    good = {"prompt": "x", "max_tokens": 1}
    assert post(running.port, good, Content_Type="text/plain")[0] == 415
    assert post(running.port, good, Content_Type="")[0] == 415
    for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "10.0.0.1", "[::2]"):
        assert post(running.port, good, Host=host)[0] == 403
    for host in ("localhost:1", "LOCALHOST", "127.0.0.1", "[::1]:8000"):
        assert post(running.port, b"{", Host=host)[0] == 400
    for path in ("/v1/nothing", "/v1/completions/"):
        status, _, error = post(running.port, good, path)
        there = "; there are /v1/chat/completions, /v1/completions, /v1/models, /health, /metrics"
        assert status == 404 and there in error["message"]
    assert post(running.port, good, "/v1/models")[0] == 405
    assert post(running.port, {"prompt": "x", "model": "gpt"})[0] == 404
    with pytest.raises(openai.NotFoundError) as error:
        running.client().completions.create(model="gpt", prompt="x")
    assert error.value.code == "model_not_found"
    _, headers, _ = post(running.port, b"{", Origin="http://evil.example")
    assert not [name for name in headers if name.startswith("access-control")]
    assert raw(running.port, b"\x16\x03\x01 no HTTP\r\n\r\n")[0] == 400
    assert post(running.port, good, Connection="Upgrade", Upgrade="h2c")[0] == 400


@pytest.mark.parametrize(
    ("path", "asked", "param"),
    [
        ("/v1/completions", {"prompt": ["hello world " * 5_000] * 16}, "prompt"),
        ("/v1/chat/completions", {"messages": [{**USER, "content": "x" * 900_000}]}, "messages"),
    ],
    ids=["prompts", "conversation"],
)
def test_a_text_of_too_many_tokens_is_refused(
    running: Running, path: str, asked: dict[str, Any], param: str
) -> None:
    status, _, error = post(running.port, asked, path)
    assert (status, error["param"]) == (400, param)
    assert error["code"] == "context_length_exceeded" and len(error["message"]) < 200


def test_a_large_body_is_refused_before_its_end(running: Running) -> None:
    large = 2**20 + 1
    assert post(running.port, b" " * large)[0] == 413
    begin = b" " * 70_000  # chunks without an end
    chunks = b"11170\r\n" + begin + b"\r\n"
    assert post(running.port, chunks * 16, Transfer_Encoding="chunked")[0] == 413
    tiny = b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 20_000
    assert raw(running.port, POST.encode() + tiny)[0] in (0, 400)
    head = b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 2**21
    assert raw(running.port, head)[0] == 0


@pytest.mark.parametrize(("most", "begin"), [(1600, b"HTTP/1.1 200"), (1300, b"HTTP/1.1 400")])
def test_what_comes_with_the_end_of_a_head_counts(
    running: Running, monkeypatch: pytest.MonkeyPatch, most: int, begin: bytes
) -> None:
    """A request of 1,000 bytes, in two packets; each of the two counts 256 more."""
    monkeypatch.setattr("jax_specdec.lm.server.connection.MAX_BYTES", most)
    empty = len(request_bytes(CLOSE, max_tokens=1, user=100 * "x")) - 100
    asked = request_bytes(CLOSE, max_tokens=1, user=(1000 - empty) * "x")
    assert len(asked) == 1000
    with socket.create_connection(("127.0.0.1", running.port), timeout=30) as connection:
        connection.sendall(asked[:900])
        time.sleep(0.1)
        connection.sendall(asked[900:])
        assert connection.recv(len(begin)) == begin


def test_a_key_is_needed_and_never_shown(site: Site) -> None:
    with site.serve(key=KEY, status_seconds=0.05) as running:
        for wrong in ("none", KEY[:-1], KEY + "x"):
            with pytest.raises(openai.AuthenticationError) as refusal:
                running.client(wrong).models.list()
            assert KEY not in str(refusal.value) and refusal.value.code == "invalid_api_key"
        status, headers, error = post(running.port, b"{}")
        assert status == 401 and headers["www-authenticate"] == "bearer" and KEY not in str(error)
        assert get(running, "metrics")[0] == 401
        assert get(running, "metrics", Authorization=f"bearer {KEY}")[0] == 200
        assert get(running, "health")[0] == 200
        client = running.client(KEY)
        assert [model.id for model in client.models.list()] == ["tiny"]
        assert client.models.retrieve("tiny").owned_by == "jax_specdec"
        assert client.completions.create(model="tiny", prompt="x", max_tokens=2).choices[0].text
        assert KEY not in repr(vars(running.server)) and KEY not in "".join(running.lines)


def test_other_host_names_are_for_servers_with_a_key(site: Site) -> None:
    with site.serve(key=KEY, is_local=False) as running:
        asked = functools.partial(get, running, "v1/models", Host="models.example")
        assert asked()[0] == 401 and asked(Authorization=f"Bearer {KEY}")[0] == 200


# Clients that are many, slow, or leave


@pytest.mark.long
def test_a_hundred_clients_get_their_texts_or_leave_nothing(
    running: Running, site: Site, plain: dict[str, list[int]]
) -> None:
    count, refusals = 100, []
    tasks = [(PROMPT, NUM_NEW), (PLAIN["other"][0], 12), (PLAIN["if"][0], 9)]
    truth = [TEXT, text_of(site, plain["other"]), text_of(site, plain["if"])]

    async def client(api: openai.AsyncOpenAI, index: int) -> tuple[str, str]:
        rng = random.Random(index)
        prompt, budget = tasks[index % len(tasks)]
        way = rng.choice(["whole", "stream", "leave"])
        asked = dict(model="tiny", prompt=prompt, max_tokens=budget, temperature=0)
        while True:
            try:
                if way == "whole":
                    answer = await api.completions.create(**asked)
                    return way, answer.choices[0].text
                text = ""
                async with await api.completions.create(**asked, stream=True) as stream:
                    async for chunk in stream:
                        text += chunk.choices[0].text
                        if way == "leave":
                            break
                return way, text
            except openai.RateLimitError as error:
                assert error.code == "queue_full" and error.response.headers["Retry-After"] == "1"
                refusals.append(index)
                await asyncio.sleep(0.05 + rng.random() / 5)

    async def all_at_once() -> list[tuple[str, str]]:
        url = f"http://127.0.0.1:{running.port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=0, timeout=60) as api:
            return await asyncio.gather(*(client(api, i) for i in range(count)))

    found = asyncio.run(all_at_once())
    for index, (way, text) in enumerate(found):
        whole = truth[index % len(tasks)]
        assert text == whole if way != "leave" else whole.startswith(text)
    ways = [way for way, _ in found]
    assert all(ways.count(way) > 20 for way in ("whole", "stream", "leave"))
    assert refusals, "the queue was full"
    running.wait_until_idle()
    stats = running.ask(lambda driver: driver.serving_stats())
    assert stats.num_running == stats.num_queued == stats.num_failed_calls == 0


def request_bytes(header: str = "", **asked: Any) -> bytes:
    body = json.dumps({"prompt": PROMPT, "temperature": 0, **asked}).encode()
    return f"{POST}{header}Content-Length: {len(body)}\r\n\r\n".encode() + body


def stalled(driver: lm.EngineDriver, seconds: float = 0.02) -> None:
    """Steps that take a while, so that a client can leave before the end of its text."""
    step = driver.step
    driver.step = lambda: (time.sleep(seconds), step())[1]  # type: ignore[method-assign]


HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
WAYS_TO_LEAVE: dict[str, dict[str, Any]] = {
    "reset": {"is_reset": True},
    "half-close": {"is_half": True},
    "reset within a stream": {"is_reset": True, "is_stream": True},
    "half-close of a stream": {"is_half": True, "is_stream": True},
    "a request": {"early": HEALTH},
    "too much": {"early": b" " * 2**22},
    "a request with it": {"sent_with_it": HEALTH},
}


@pytest.mark.parametrize("way", WAYS_TO_LEAVE.values(), ids=WAYS_TO_LEAVE)
def test_a_client_that_leaves_cancels_its_request(slow: Running, way: dict[str, Any]) -> None:
    """Whatever it has sent before it leaves."""
    before, is_stream = slow.num_tokens, way.get("is_stream", False)
    asked = request_bytes(n=4, stream=is_stream)
    with socket.create_connection(("127.0.0.1", slow.port), timeout=30) as connection:
        connection.sendall(asked + way.get("sent_with_it", b""))
        if is_stream:
            assert connection.recv(17).startswith(b"HTTP/1.1 200")
        else:
            slow.wait_until_running()
        if early := way.get("early"):
            with contextlib.suppress(ConnectionResetError, BrokenPipeError):
                connection.sendall(early)
            time.sleep(0.1)  # so that it is read before the end of the connection
        if way.get("is_half"):
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(65536):  # the server closes its half too
                pass
        elif way.get("is_reset"):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    slow.wait_until_idle()
    assert slow.num_tokens - before < 4 * (LENGTH - NUM_PROMPT_TOKENS) / 2


def test_a_request_before_the_last_answer_is_dropped(running: Running) -> None:
    asked = request_bytes(max_tokens=NUM_NEW)
    status, _, body = raw(running.port, asked + request_bytes(max_tokens=3) + HEALTH)
    assert status == 200 and json.loads(body)["choices"][0]["text"] == TEXT


def test_clients_that_leave_while_they_send_are_no_errors(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    chunked = "Transfer-Encoding: chunked\r\n\r\n"
    sent = [
        (POST + "Content-Length: 100\r\n\r\n", '{"prompt":'),
        (POST + chunked, '5\r\n{"pro\r\n'),
        (POST + chunked, "zz\r\n"),
        (POST.replace("v1/completions", "health") + chunked, "zz\r\n"),  # was answered already
        (POST, "Content-"),
    ]
    with site.serve() as running:
        for head, rest in sent:
            with socket.create_connection(("127.0.0.1", running.port), timeout=30) as connection:
                connection.sendall(head.encode())
                time.sleep(0.1)
                connection.sendall(rest.encode())
                time.sleep(0.1)
        assert greedy(running).choices[0].text == TEXT
        running.wait_until_idle()
        # The last one began no request.
        assert answers(running) == {"499": 3, "405": 1, "200": 1}
        assert "Traceback" not in "".join(running.lines)
    assert [one for one in caplog.records if one.levelno >= logging.ERROR] == []


def test_a_client_that_does_not_read_is_cancelled_alone(site: Site) -> None:
    sizes = dict(send_buffer=4096, unsent_updates=2, client_seconds=0.5)
    with site.serve(**sizes) as running:
        stalled(running.driver)
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            connection.connect(("127.0.0.1", running.port))
            connection.sendall(request_bytes(n=16, stream=True, logprobs=TOP))
            running.wait_until_running()
            assert greedy(running).choices[0].text == TEXT
            running.wait_until_idle()
            count = running.num_tokens - NUM_NEW
            assert count < 16 * (LENGTH - NUM_PROMPT_TOKENS), "its request was cancelled"
            running.clients.close()  # which would keep their connections for five seconds
            until(lambda: not running.connections)  # its socket is closed, too


def test_slow_requests_are_closed_and_connections_too_many_refused(site: Site) -> None:
    with site.serve(client_seconds=2.0, connections=3) as running:
        parts = [b"", b"POST /v1/comp", request_bytes()[:-3]]
        slow = [socket.create_connection(("127.0.0.1", running.port), 30) for _ in parts]
        for connection, part in zip(slow, parts, strict=True):
            connection.sendall(part)
        connections = running.connections
        until(lambda: len(connections) >= 3)
        assert raw(running.port, HEALTH)[0] == 503
        more = [socket.create_connection(("127.0.0.1", running.port), 30) for _ in range(30)]
        until(lambda: len(connections) >= 20)
        time.sleep(0.1)
        assert len(connections) == 20, "others are closed at once"
        for connection in more:
            connection.close()
        for connection in slow:
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(100) == b""
            connection.close()
        until(lambda: not connections)
        assert greedy(running).choices[0].text == TEXT


def test_who_reads_slowly_is_waited_for_and_who_does_not_is_not() -> None:
    """Connections by how many bytes are unread at each look, and the state of their request."""
    looks = itertools.count()

    class Cycle:
        def __init__(self, more_body: bool, response_complete: bool) -> None:
            self.more_body, self.response_complete = more_body, response_complete

    sending, answering, complete = Cycle(True, False), Cycle(False, False), Cycle(False, True)
    made: dict[str, Connection] = {}

    def make(name: str, cycle: Any, num_unread: Callable[[], int]) -> None:
        abort = functools.partial(closed.append, name)
        transport: Any = SimpleNamespace(get_write_buffer_size=num_unread, abort=abort)
        made[name] = object.__new__(Connection)
        made[name].cycle = cycle
        made[name].transport = transport

    closed: list[str] = []
    make("steady", complete, lambda: 10**6 - next(looks))
    make("answered", answering, lambda: 0)
    make("stopped", answering, lambda: 7)
    make("stopped at the end", complete, lambda: 7)
    make("sending", sending, lambda: 0)
    make("idle", None, lambda: 0)
    server: Any = SimpleNamespace(server_state=SimpleNamespace(connections={*made.values()}))

    async def look() -> None:
        task = asyncio.create_task(close_stuck(server, 0.1))
        while len({*closed}) < 4 and not task.done():
            await asyncio.sleep(0.01)
        assert task.cancel()

    asyncio.run(look())
    assert {*closed} == {"stopped", "stopped at the end", "sending", "idle"}


def test_slots_are_for_requests_in_turn_and_a_full_queue_takes_no_choice(slow: Running) -> None:
    worker, places = slow.server.worker, slow.server.worker.num_places
    assert places == QUEUE + slow.ask(lambda driver: driver.serving_stats().num_slots) == 24
    counts: list[int] = []  # of choices, by the end of their request

    def ask(**asked: Any) -> None:
        counts.append(len(greedy(slow, **asked).choices))

    with futures.ThreadPoolExecutor(3) as pool:
        for n in (16, 7):
            pool.submit(ask, n=n)
        until(lambda: worker.num_open >= places - 1)
        with pytest.raises(openai.RateLimitError) as error:
            greedy(slow, n=2)
        assert error.value.response.headers["Retry-After"] == "1"
        assert error.value.type == "rate_limit_error"
        pool.submit(ask, max_tokens=2)
        until(lambda: worker.num_open >= places)
        assert post(slow.port, b"{")[0] == 429, "before its parameters are looked at"
    assert counts[0] == 1 and sorted(counts) == [1, 7, 16]
    slow.wait_until_idle()
    assert worker.num_open == 0


def test_more_choices_than_there_are_places_are_no_reason_to_try_again(running: Running) -> None:
    places = running.server.worker.num_places
    running.server.worker.num_places = 4
    try:
        assert len(greedy(running, n=4, max_tokens=1).choices) == 4
        with pytest.raises(openai.BadRequestError, match="room for 4 choices at a time") as error:
            greedy(running, n=5)
    finally:
        running.server.worker.num_places = places
    assert error.value.param == "n"


# The loop around


def test_health_metrics_and_the_status_line(site: Site) -> None:
    with site.serve(status_seconds=0.5) as running:
        stalled(running.driver)
        choice = running.driver.draft_choice
        choice.costs = lm.StepCosts(8, (0, 2), (1.0, 9.0))
        assert json.loads(get(running, "health")[2]) == {"status": "ok"}
        assert greedy(running).choices[0].text == TEXT
        assert get(running, "v1/nothing")[0] == 404
        metrics = get(running, "metrics")[2].decode()
        labels = f'model_name="{running.server.model_name}"'
        for status, count in ((200, 2), (404, 1)):
            assert f'serving_answers_total{{{labels},status="{status}"}} {count}.0\n' in metrics
        assert f"jax_specdec:spec_decode_num_tokens_total{{{labels}}} {NUM_NEW}.0\n" in metrics
        assert f"jax_specdec:serving_num_slots{{{labels}}} 8.0\n" in metrics
        line = next(line for line in running.lines if "1 requests so far" in line)
        assert "tokens/s, acceptance length " in line
        assert line.endswith("; drafts do not pay, so there are none")
        choice.is_fixed = True
        assert app_lib._on_drafts(running.driver) == "; drafts do not pay, try --draft none"
        choice.costs = None
        assert app_lib._on_drafts(running.driver) == ""


def test_a_status_line_says_what_is_compiled_for_those_who_wait(site: Site) -> None:
    is_compiled = threading.Event()

    def states(running: Running) -> list[tuple[str, str]]:
        # Running and queued requests, and what is compiled; other lines are none of this test's.
        said = [line.split("; ") for line in running.lines if " queued, " in line]
        return [(first.split(" requests")[0], "; ".join(rest[1:])) for first, *rest in said]

    with (
        site.serve(status_seconds=0.1) as running,
        futures.ThreadPoolExecutor() as pool,
        contextlib.ExitStack() as at_last,
    ):
        # However long this machine takes: the program is there when the test says so.
        at_last.callback(is_compiled.set)
        assert running.driver._device.behind is not None
        running.driver._device.behind.compile_later([("grammars", is_compiled.wait)])
        asked = {"max_tokens": 16, "extra_body": {"response_format": FORMAT}}
        waiting = pool.submit(greedy, running, **asked)
        until(lambda: states(running))
        time.sleep(0.5)  # several lines more, where nothing is new
        assert states(running) == [("0 running, 1 queued, 1", "compiling for grammars")]
        # Another request does not wait, and is a state of its own.
        assert greedy(running).choices[0].text == TEXT
        until(lambda: len(states(running)) > 1)
        seen = states(running)
        assert {what for _, what in seen} == {"compiling for grammars"}, seen
        is_compiled.set()
        assert json.loads(waiting.result().choices[0].text)["size"] >= 0
        until(lambda: states(running)[-1][1] == "")


def test_stopping_finishes_what_runs_and_accepts_nobody(site: Site) -> None:
    with site.serve() as running:
        stalled(running.driver)
        stream = iter(greedy(running, stream=True))
        text = next(stream).choices[0].text
        running.server.stop()
        text += "".join(chunk.choices[0].text for chunk in stream)
        assert text == TEXT
        time.sleep(0.3)
        with pytest.raises(OSError):
            raw(running.port, b"")


@pytest.mark.parametrize("hangs", [False, True])
def test_stopping_has_a_bound(site: Site, hangs: bool) -> None:
    ends, seconds = threading.Event(), dict(drain_seconds=0.1, failed_seconds=0.1, stop_seconds=0.1)
    failure = pytest.raises(EngineFailed, match="a step does not end") if hangs else None
    with failure or contextlib.nullcontext(), site.serve(**seconds) as running:
        running.driver.step = lambda: time.sleep(0.01) or []  # no request goes on
        with futures.ThreadPoolExecutor() as pool:
            other = pool.submit(raw, running.port, request_bytes(n=9))
            stream = iter(greedy(running, stream=True))
            until(lambda: running.server.worker.num_open >= 10)
            if hangs:
                running.driver.step = lambda: ends.wait(60) and []
            running.server.stop()
            with pytest.raises(openai.APIError, match="the server has stopped"):
                list(stream)
        assert other.result()[0] == 503
        lines = "\n".join(running.lines)
        assert "waits: 10 choices, within 0.1 s" in lines and "not finished: 10 choices" in lines
    ends.set()
    running.server.worker._thread.join(60)


def test_a_step_that_does_not_end_shows(site: Site) -> None:
    ends = threading.Event()
    pool = futures.ThreadPoolExecutor()
    with site.serve(step_seconds=0.2, status_seconds=0.2) as running, pool:
        step = running.driver.step
        running.driver.step = lambda: (ends.wait(60), step())[1]
        other = pool.submit(greedy, running)
        until(lambda: get(running, "health")[0] == 500)
        metrics = get(running, "metrics")[2]
        ends.set()
        assert b'serving_num_slots{model_name="tiny"} 8.0\n' in metrics
        until(lambda: get(running, "health")[0] == 200)
    assert other.result().choices[0].text == TEXT
    assert "a step of the engine goes on for" in "".join(running.lines)


def test_descriptors_that_are_used_up_are_one_line(site: Site, caplog: Any) -> None:
    used_up = {"message": "socket.accept() out of system resource", "exception": OSError(24, "x")}

    async def report(running: Running) -> None:
        loop = asyncio.get_running_loop()
        for context in (used_up, used_up, {"message": "something else"}):
            running.server._on_error(loop, context)

    with site.serve() as running:
        asyncio.run(report(running))
        assert running.lines == ["clients wait for connections: [Errno 24] x"]
    assert [record.getMessage() for record in caplog.records] == ["something else"]


class Panic(BaseException):
    """As of a library in Rust."""


@pytest.mark.parametrize(("error", "has_log"), [(ZeroDivisionError, True), (Panic, False)])
def test_an_engine_that_fails_answers_and_ends_the_server(
    site: Site,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: type[BaseException],
    has_log: bool,
) -> None:
    def fail() -> None:
        raise error("of this test")

    def refuse(text: str) -> None:
        raise OSError(28, "No space left on device")

    if not has_log:
        monkeypatch.setattr(sys.stderr, "write", refuse)
    with (
        pytest.raises(RuntimeError, match="the engine has failed"),
        site.serve(failed_seconds=60) as running,
    ):
        stalled(running.driver)
        stream = iter(greedy(running, stream=True))
        next(stream)
        with futures.ThreadPoolExecutor(12) as pool:  # more than slots, so that some wait
            asked = request_bytes(header=CLOSE)
            others = [pool.submit(raw, running.port, asked) for _ in range(12)]
            until(lambda: running.ask(lambda driver: driver.num_queued))
            running.driver.step = fail
            with pytest.raises(openai.APIError, match="the engine has failed"):
                list(stream)
        assert {one.result()[0] for one in others} == {500}
        assert raw(running.port, request_bytes(header=CLOSE))[0] == 500
        assert get(running, "health")[0] == get(running, "metrics")[0] == 500
    if has_log:
        assert "of this test" in capsys.readouterr().err


def test_a_failed_engine_ends_the_server_by_itself(site: Site) -> None:
    with pytest.raises(RuntimeError, match="failed"), site.serve(failed_seconds=0) as running:
        running.driver.step = lambda: 1 / 0
        with pytest.raises(openai.APIError):
            greedy(running)
        until(lambda: running.server._uvicorn.should_exit)


@pytest.mark.parametrize("num_failing", [6, 10**9], ids=["a request", "the device"])
def test_a_device_that_has_failed_is_told_from_a_request_that_fails(
    site: Site,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    num_failing: int,
) -> None:
    calls = itertools.count()

    def failing(function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        if next(calls) < num_failing:
            raise RuntimeError("no such address: /of/the/operator/kernel.cc\n" + "0xdead\n" * 99)
        return function(*args, **named)

    ends = num_failing > 6
    with (
        pytest.raises(EngineFailed) if ends else contextlib.nullcontext(),
        site.serve(failed_seconds=60) as running,
    ):
        for name in ("admit", "step"):
            whole = getattr(programs, name)
            patched: Any = functools.partial(failing, whole)
            patched.lower = whole.lower  # what is compiled behind others does not fail
            monkeypatch.setattr(programs, name, patched)
        monkeypatch.setattr(jax, "eval_shape", lambda *_, **__: None)  # they can be traced
        with pytest.raises(openai.InternalServerError) as error:
            greedy(running)
        # A device may be found to have failed before the request is answered.
        is_of_request = "the engine cannot go on with this request" in str(error.value)
        assert is_of_request or (ends and "the engine has failed" in str(error.value))
        assert "operator" not in str(error.value)
        until(lambda: not ends or running.server.worker.failure is not None)
        assert get(running, "health")[0] == (500 if ends else 200)
        assert ends or greedy(running).choices[0].text == TEXT

        def logged_lines() -> list[str]:
            return [line for line in running.lines if "this request: no such address" in line]

        until(lambda: len(logged_lines()) == is_of_request)  # after the answer
        assert "0xdead" not in str(logged_lines())
    logged = capsys.readouterr().err
    assert logged.count("the engine has failed: no such address") == ends
    assert "0xdead" not in logged and "Traceback" not in logged


def test_a_call_that_panics_is_answered(running: Running) -> None:
    def panic(driver: lm.EngineDriver) -> None:
        raise Panic

    with pytest.raises(Panic):
        running.ask(panic)
    assert greedy(running).choices[0].text == TEXT


def test_a_panic_of_a_matcher_fails_its_own_request(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    panic = type("PanicException", (BaseException,), {})  # the name that pyo3 gives it

    def accept_token(matcher: sd.grammar.LlguidanceMatcher, token_id: int) -> bool:
        raise panic("of this test")

    monkeypatch.setattr(sd.grammar.LlguidanceMatcher, "accept_token", accept_token)
    with site.serve() as running, futures.ThreadPoolExecutor() as pool:
        stalled(running.driver)
        running.server.worker._num_failed_calls = -1  # as if a call had failed, and then not
        other = pool.submit(greedy, running)
        with pytest.raises(openai.InternalServerError, match="cannot go on with this request"):
            greedy(running, extra_body={"response_format": FORMAT})
        why = "cannot go on with this request: the matcher has failed: of this test"
        until(lambda: any(why in line for line in running.lines))  # perhaps after the answer
        assert get(running, "health")[0] == 200
    assert other.result().choices[0].text == TEXT


@pytest.mark.parametrize("error", [ZeroDivisionError, Panic])
def test_an_unexpected_error_is_counted_and_logged(
    site: Site, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    def fail(*_: Any) -> None:
        raise error("of this test")

    with site.serve() as running:
        stream = iter(greedy(running, stream=True))
        next(stream)
        with monkeypatch.context() as patch:
            patch.setattr(running.server.words, "encode", fail)
            assert raw(running.port, request_bytes(CLOSE))[0] == 500
            # Within a stream, whose status is 200.
            patch.setattr(app_lib.Answer, "_pieces", fail)
            status, _, body = raw(running.port, request_bytes(CLOSE, stream=True))
        list(stream)
        running.wait_until_idle()
        assert answers(running) == {"200": 1, "500": 2}
    assert "".join(running.lines).count("Traceback") == 2


def test_a_server_whose_output_is_closed_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in `serve | true`; nothing is left to be written when the process ends."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    with open(write_end, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        serve_lib._announce("Serving tiny at http://x/v1")
        closed.flush()
    error = "Serving tiny at http://x/v1; standard output cannot be written: Broken pipe\n"
    assert capsys.readouterr().err == error


def test_the_log_says_why_there_are_no_status_lines(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(site.models.text, make_driver(site.options, site.models), model_name="tiny")

    def stop(line: str) -> None:
        lines.append(line)
        server.stop()

    lines: list[str] = []
    monkeypatch.setattr(app_lib, "log", stop)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        asyncio.run(asyncio.wait_for(server.run(listener, lambda: 1 / 0), 60))
    assert "ZeroDivisionError" in lines[0]


def test_a_server_that_is_stopped_before_it_runs_ends_at_once(site: Site) -> None:
    server = Server(site.models.text, make_driver(site.options, site.models), model_name="tiny")
    server.stop()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        asyncio.run(server.run(listener, lambda: None))


def test_an_address_is_had_by_one_server_from_its_start() -> None:
    wanted = parse(["serve", "--port", "0"], "0")
    first, is_local = serve_lib._bind(wanted, None)
    with first, socket.create_connection(first.getsockname()):  # waits to be served
        port = first.getsockname()[1]
        message = f"--host 127.0.0.1 --port {port} cannot be listened on: Address already in use"
        with pytest.raises(cli_prompts.InputError, match=message):
            serve_lib._bind(dataclasses.replace(wanted, port=port), None)
    assert is_local
    again, _ = serve_lib._bind(dataclasses.replace(wanted, port=port), None)
    again.close()


INTERRUPTED = """
import time
from jax_specdec.lm.cli import process
def work():
    with process.handling_interrupt(lambda: print("first", flush=True)):
        print("ready", flush=True)
        time.sleep(60)
process.run_to_end(work)
"""


def test_the_first_interrupt_is_handled_the_next_one_ends() -> None:
    pipe: dict[str, Any] = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with subprocess.Popen([sys.executable, "-c", INTERRUPTED], **pipe) as working:
        assert working.stdout is not None and working.stderr is not None
        for line in ("ready\n", "first\n"):
            assert working.stdout.readline() == line
            working.send_signal(signal.SIGTERM)
        assert working.wait(60) == 128 + signal.SIGTERM
        assert working.stderr.read() == "jax-specdec: interrupted\n"


def test_an_interrupt_between_two_waits_is_handled_too(monkeypatch: pytest.MonkeyPatch) -> None:
    handled: list[str] = []
    is_alive = threading.Thread.is_alive

    def interrupted(thread: threading.Thread) -> bool:
        monkeypatch.setattr(threading.Thread, "is_alive", is_alive)
        signal.raise_signal(signal.SIGINT)
        return is_alive(thread)

    monkeypatch.setattr(threading.Thread, "is_alive", interrupted)
    with process.handling_interrupt(lambda: handled.append("once")):
        process.run_to_end(lambda: None)
    assert handled == ["once"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_the_page_shows_how_to_write_a_server(site: Site) -> None:
    page = Path(__file__).parents[2].joinpath("docs", "server.md").read_text("utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    scope: dict[str, Any] = {}
    exec(compile(code, "server.md", "exec"), scope)
    scope["driver"] = make_driver(site.options, site.models)  # whose programs are compiled
    prompt = site.tokenizer.encode(PROMPT)

    async def read(most: int) -> list[int]:
        found: list[int] = []
        async with contextlib.aclosing(scope["tokens"](prompt, max_new_tokens=NUM_NEW)) as tokens:
            async for new in tokens:
                found += new
                if len(found) >= most:
                    break
        return found

    async def all_at_once() -> list[list[int]]:
        thread = threading.Thread(target=scope["work"], args=(asyncio.get_running_loop(),))
        thread.start()
        found = await asyncio.gather(*(read(most) for most in (NUM_NEW, 5, NUM_NEW)))
        with pytest.raises(ValueError, match="prompt and max_new_tokens"):
            await anext(scope["tokens"](prompt, max_new_tokens=LENGTH))
        scope["calls"].put(None)
        await asyncio.to_thread(thread.join)
        return found

    texts = asyncio.run(all_at_once())
    truth = [int(x) for x in expected("qwen2")["greedy_token_ids"]]
    assert texts[0] == texts[2] == truth and texts[1] == truth[: len(texts[1])]


def test_a_key_comes_from_a_file_or_a_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = parse(["serve"], "0")
    monkeypatch.delenv("JAX_SPECDEC_API_KEY", raising=False)
    assert serve_lib._read_key(wanted) is None
    monkeypatch.setenv("JAX_SPECDEC_API_KEY", "from-variable")
    assert serve_lib._read_key(wanted) == "from-variable"
    file = tmp_path / "key"
    file.write_text("from-file\n")
    assert serve_lib._read_key(dataclasses.replace(wanted, api_key_file=file)) == "from-file"
    for wrong in (b"", b"two words", b"\xff", b"x" * 5000, "\u00e9".encode(), b"a\x1bb"):
        file.write_bytes(wrong)
        with pytest.raises(Exception, match="must (hold a key|be text)") as error:
            serve_lib._read_key(dataclasses.replace(wanted, api_key_file=file))
        assert wrong == b"" or repr(wrong)[2:-1] not in str(error.value)


def test_without_the_extra_one_line_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [
        name
        for name in sys.modules
        if name.startswith(("jax_specdec.lm.cli.serve", "jax_specdec.lm.server"))
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(SystemExit):
        main(["serve", "--no-compilation-cache"])
    assert "is not installed: it comes with the extra serve" in capsys.readouterr().err


def test_the_command_serves_until_an_interrupt_and_finishes_what_runs(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, whose programs are those of the other servers."""
    shown: queue.Queue[str] = queue.Queue()

    class Output(io.StringIO):
        def write(self, text: str) -> int:
            shown.put(text)
            return len(text)

    def client() -> tuple[str, list[Any]]:
        line = shown.get(timeout=120)
        url, asked = (
            line.split()[-1],
            dict(model="a\x1b[31m\\udcff", prompt=PROMPT[:8], temperature=0),
        )
        with openai.OpenAI(base_url=url, api_key=KEY, max_retries=0, timeout=60) as api:
            try:
                stream = iter(api.completions.create(**asked, stream=True))
                first = next(stream)
            finally:
                os.kill(os.getpid(), signal.SIGTERM)
            return line, [first, *stream]

    monkeypatch.setattr(sys, "stdout", Output())
    monkeypatch.setattr(app_lib, "log", terminal.log)  # whatever server of this module runs
    monkeypatch.setenv("JAX_SPECDEC_API_KEY", KEY)
    name = "a\x1b[31m\udcff"  # and a byte that is not UTF-8
    command = ["serve", "--port", "0", "--no-compilation-cache", "--model-name", name]
    with futures.ThreadPoolExecutor(1) as pool:
        asking = pool.submit(client)
        main([*command, *site.arguments])
        line, chunks = asking.result(60)
    errors = capsys.readouterr().err
    assert chunks[-1].choices[0].finish_reason in ("length", "stop")
    total = errors.count("compiled ")
    assert total > 3 and f"compiled {total} of {total} programs" in errors
    assert re.search("finishing what runs or waits: [01] choices, within 80 s; Ctrl-C", errors)
    assert KEY not in errors and KEY not in line
