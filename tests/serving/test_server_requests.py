"""Parameters of the server's requests: what is taken, what is refused, and under which name."""

from __future__ import annotations

import asyncio
import json
import threading
from concurrent import futures
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import tokenizers
from upper_floor import (
    NUMBERS,
    OPTIONS,
    ApiError,
    CheckedRequest,
    Limits,
    Parameters,
    Vocabulary,
    _event,
    loading,
    read_parameters,
    read_request,
)

import jax_specdec as sd
from jax_specdec import lm

pytestmark = pytest.mark.newest

USER = {"role": "user", "content": "x"}
ENGINE: Any = SimpleNamespace(max_length=64, logprobs=sd.LogprobsConfig(3))


class Words:
    """A vocabulary for which every text is one token."""

    stop_token_ids = (0,)
    threads = None

    def __init__(self) -> None:
        self.prompts: list[Any] = []

    def encode(self, prompt: Any) -> list[int]:
        self.prompts.append(prompt)
        return [1]

    def encode_chat(self, messages: Any, thinks: bool) -> list[int]:
        return self.encode(messages if thinks else (messages, "without thinking"))

    def encode_text(self, text: str) -> list[int]:
        return [*range(len(text))]

    def stream(self, prompt: list[int]) -> None:
        return None

    async def try_schema(self, schema: Any) -> str:
        return json.dumps(schema)

    def without_path(self, message: str) -> str:
        return message


def read(is_chat: bool = False, **asked: Any) -> tuple[CheckedRequest, list[Any]]:
    """A request as it was checked, and its prompts."""
    words: Any = Words()
    prompt = {"messages": [USER]} if is_chat else {"prompt": "x"}
    given = read_parameters({**prompt, **asked}, is_chat, ENGINE)
    return asyncio.run(read_request(given, ENGINE, words)), words.prompts


def refused(is_chat: bool = False, **asked: Any) -> ApiError:
    with pytest.raises(ApiError) as error:
        read(is_chat, **asked)
    assert error.value.status == 400
    return error.value


WITHOUT_EFFECT: list[tuple[str, Any, Any]] = [  # a value that changes nothing, and one that would
    ("best_of", 1, 2),
    ("include_reasoning", True, False),
    ("vllm_xargs", {}, {"x": 1}),
    ("echo", False, True),
    ("function_call", "none", {"name": "f"}),
    ("functions", [], [{}]),
    ("ignore_eos", False, True),
    ("include_stop_str_in_output", False, True),
    ("modalities", ["text"], ["text", "audio"]),
    ("parallel_tool_calls", True, "x"),
    ("service_tier", "auto", "flex"),
    ("skip_special_tokens", True, False),
    ("store", False, True),
    ("suffix", "", "x"),
    ("tool_choice", "none", "required"),
    ("tools", [], [{}]),
    ("verbosity", "medium", "low"),
    ("stream_options", {"include_usage": False}, {"include_usage": True}),
    ("stream_options", {"one_token_per_event": False}, {"one_token_per_event": True}),
    ("include_acceptance", False, 1),
    ("stop", [], [""]),
    ("logit_bias", {}, {"1": 101}),
    ("response_format", {"type": "text"}, {"type": "grammar"}),
]


@pytest.mark.parametrize("is_chat", [False, True])
@pytest.mark.parametrize(("name", "neutral", "other"), WITHOUT_EFFECT)
def test_a_value_without_effect_is_taken_and_others_are_refused(
    is_chat: bool, name: str, neutral: Any, other: Any
) -> None:
    truth = read(is_chat, seed=1)
    assert read(is_chat, seed=1, **{name: neutral}) == truth
    assert read(is_chat, seed=1, **{name: None}) == truth
    error = refused(is_chat, **{name: other})
    assert str(error.param).startswith(name) and str(error).startswith(name)


def test_a_seed_of_minus_one_is_random_as_none_is() -> None:
    def seeds(**asked: Any) -> list[int]:
        found, _ = read(n=2, **asked)
        return [choice["options"].seed for choice in found.choices]

    assert seeds(seed=7) == seeds(seed=7) and seeds(seed=-2) == seeds(seed=-2)
    drawn = [x for asked in ({"seed": -1}, {"seed": -1}, {}, {}) for x in seeds(**asked)]
    assert len({*drawn}) == 8


def test_what_nothing_depends_on_may_be_anything() -> None:
    names = ("metadata", "prompt_cache_key", "safety_identifier", "user")
    assert read(seed=1, **dict.fromkeys(names, {"a": [1]})) == read(seed=1)
    assert read(True, seed=1, logprobs=False, top_logprobs=0) == read(True, seed=1)


def test_true_is_no_number_and_one_is_the_same_with_a_point() -> None:
    for name, value in (
        ("echo", 0),
        ("skip_special_tokens", 1),
        ("parallel_tool_calls", 1),
        ("best_of", True),
        ("priority", False),
    ):
        error = refused(**{name: value})
        assert error.param == name and f"{name} is supported as " in str(error)
    assert read(seed=1, best_of=1.0, length_penalty=1.0, priority=0.0) == read(seed=1)


def test_texts_are_encoded_and_decoded_in_the_threads_for_them() -> None:
    """So no more of them at a time than there are of these."""
    names: set[str] = set()

    class Noting(Words):
        def encode(self, prompt: Any) -> list[int]:
            names.add(threading.current_thread().name)
            return super().encode(prompt)

        def encode_text(self, text: str) -> list[int]:
            return self.encode(text)

        def stream(self, prompt: list[int]) -> None:
            self.encode(prompt)

    words: Any = Noting()
    given = read_parameters(
        {"prompt": ["x", "y"], "n": 2, "prediction": {"type": "content", "content": "x"}},
        False,
        ENGINE,
    )
    with futures.ThreadPoolExecutor(1, thread_name_prefix="texts") as words.threads:
        asyncio.run(read_request(given, ENGINE, words))
    assert words.prompts == ["x", "x", [1], [1], "y", [1], [1]] and names == {"texts_0"}


NAMED: list[tuple[dict[str, Any], str, str]] = [
    ({"n": "2"}, "n", "n must be a valid integer, but it is '2'"),
    ({"cache_salt": ""}, "cache_salt", "cache_salt must have at least 1 character, but it is ''"),
    ({"n": 17}, "n", "n must be less than or equal to 16, but it is 17"),
    ({"temperature": True}, "temperature", "temperature must be a valid number, but it is True"),
    ({"top_p": 2}, "top_p", "top_p must be in (0, 1], but it is 2.0"),
    ({"x\ny": 1}, "x\ny", "unknown parameter: 'x\\ny'"),
    ({"x" * 500: 1}, "x" * 100, f"unknown parameter: '{'x' * 100}'"),
    ({"echo": True}, "echo", "echo is supported as false only"),
    ({"service_tier": 1}, "service_tier", 'service_tier is supported as "auto" or "default" only'),
    ({"stop": ""}, "stop", "stop must be a string of 1 to 256 characters, or a list of at most "),
    ({"logit_bias": {"x": 1}}, "logit_bias", "logit_bias must be a list of ints, but "),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "x": 1}}},
        "response_format.json_schema.x",
        "unknown parameter: 'response_format.json_schema.x'",
    ),
    (
        {"response_format": {"type": "json_schema"}},
        "response_format",
        "response_format must have a json_schema exactly if that is its type",
    ),
    ({"response_format": 3}, "response_format", "response_format must be an object"),
    ({"messages": None}, "messages", "messages is required"),
    ({"messages": []}, "messages", "messages must have at least 1 item, not 0, but it is []"),
    ({"messages": [USER, 3]}, "messages[1]", "messages[1] must be an object"),
    (
        {"messages": [USER, {**USER, "role": "function"}]},
        "messages[1].role",
        "messages[1].role must be 'developer', 'system', 'user' or 'assistant', but it is "
        "'function'",
    ),
    ({"messages": [{**USER, "x": 1}]}, "messages[0].x", "unknown parameter: 'messages[0].x'"),
    (
        {"messages": [{**USER, "content": [{"type": "text", "text": "x", "y": 1}]}]},
        "messages[0].content",
        "messages[0].content must be a string, or a list of parts of type text, each with a text",
    ),
    ({"messages": [{**USER, "audio": {"id": "x"}}]}, "messages[0].audio", "unknown parameter: "),
    ({"reasoning_effort": "low"}, "reasoning_effort", "reasoning_effort must be 'none', but it is"),
    ({"add_special_tokens": True}, "add_special_tokens", "add_special_tokens is supported as f"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream_options.include_usage"),
    (
        {"stream": True, "include_acceptance": True},
        "include_acceptance",
        "include_acceptance needs stream_options.include_usage in a stream",
    ),
    ({"top_logprobs": 1}, "top_logprobs", "top_logprobs needs logprobs"),
    (
        {"one_token_per_event": True},
        "one_token_per_event",
        "unknown parameter: 'one_token_per_event'; did you mean "
        "'stream_options.one_token_per_event'?",
    ),
    (
        {"stream_options": {"one_token_per_event": True}},
        "stream_options",
        'stream_options.one_token_per_event needs "stream": true',
    ),
    (
        {"stream": True, "stream_options": {"include_acceptance": True}},
        "stream_options.include_acceptance",
        "unknown parameter: 'stream_options.include_acceptance'; did you mean 'include_acceptance'",
    ),
    (
        {"prediction": {"type": "text", "content": "x"}},
        "prediction.type",
        "prediction.type must be 'content', but it is 'text'",
    ),
    ({"prediction": {"type": "content"}}, "prediction.content", "prediction.content is required"),
    (
        {"prediction": {"type": "content", "content": [{"type": "image"}]}},
        "prediction.content",
        "prediction.content must be a string, or a list of parts of type text, each with a text",
    ),
    ({"prediction": "x"}, "prediction", "prediction must be an object"),
    ({"json_schema": {}}, "json_schema", "unknown parameter: 'json_schema'; did you mean 'respon"),
    ({"prompt": "x"}, "prompt", "unknown parameter: 'prompt'; it is a parameter of /v1/completion"),
    ({"temprature": 0}, "temprature", "unknown parameter: 'temprature'; did you mean 'temperatur"),
    (
        {"chat_template_kwargs": {"enable_thinking": False}},
        "chat_template_kwargs",
        'chat_template_kwargs is supported as {} only; reasoning_effort "none" turns thinking off',
    ),
    ({"extra_body": {}}, "extra_body", "unknown parameter: 'extra_body'; what is in it goes besi"),
]


@pytest.mark.parametrize(("asked", "param", "message"), NAMED)
def test_a_refusal_is_a_sentence_with_the_name(
    asked: dict[str, Any], param: str, message: str
) -> None:
    error = refused(True, **asked)
    assert error.param == param and str(error).startswith(message)


FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": [{}]}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ["x"] * 17}, "prompt"),
    ({"prompt": ["x"] * 5, "n": 4}, "prompt"),
    ({"n": 0}, "n"),
    ({"n": True}, "n"),
    ({"max_tokens": 10**400}, "max_tokens"),
    ({"temperature": 10**400}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"max_drafts": "none"}, "max_drafts"),
    ({"min_tokens": 1, "response_format": FORMAT}, "min_tokens"),
    ({"frequency_penalty": []}, "frequency_penalty"),
    ({"seed": "x"}, "seed"),
    ({"stop": [str(i) for i in range(17)]}, "stop"),
    ({"stop": "x" * 257}, "stop"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"logit_bias": {str(i): 0 for i in range(301)}}, "logit_bias"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    ({"logprobs": 4}, "logprobs"),
    ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema"),
    ({"response_format": {**FORMAT, "type": "json_object"}}, "response_format"),
]


def test_a_wrong_value_is_named() -> None:
    for asked, param in WRONG:
        error = refused(**asked)
        assert error.param == param and len(str(error)) < 500


def test_a_conversation_keeps_roles_names_and_texts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    nothing = {"refusal": None, "annotations": [], "tool_calls": [], "function_call": None}
    messages = [
        {"role": "developer", "content": "d", "name": None},
        {"role": "system", "content": "s"},
        {"role": "user", "content": parts, "name": "n"},
        {"role": "assistant", "content": "", "audio": None, **nothing},
    ]
    _, (prompt,) = read(True, messages=messages)
    assert prompt == [
        {"role": "developer", "content": "d"},
        {"role": "system", "content": "s"},
        {"role": "user", "content": "ab", "name": "n"},
        {"role": "assistant", "content": ""},
    ]


def test_an_effort_of_none_reaches_the_template_or_is_refused(tmp_path: Path) -> None:
    vocab = {"yes": 0, "no": 1, "?": 2}
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="?"))
    library.add_special_tokens(["<e>"])
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = lm.load_tokenizer(tmp_path)
    text = loading.TargetText(tokenizer, 4, (), tokenizer.stream, 64)
    words = Vocabulary(text, Limits())
    given = read_parameters({"messages": [USER], "reasoning_effort": "none"}, True, ENGINE)
    template = tmp_path / "chat_template.jinja"
    template.write_text("{{ 'no' if enable_thinking is false else 'yes' }}")
    assert asyncio.run(read_request(given, ENGINE, words)).choices[0]["prompt"] == [1]
    assert words.encode_chat([USER]) == [0]
    template.write_text("yes")
    with pytest.raises(ApiError, match="^reasoning_effort is not supported") as error:
        asyncio.run(read_request(given, ENGINE, words))
    assert error.value.param == "reasoning_effort" and words.encode_chat([USER]) == [0]
    template.write_text("yes{{ messages[0].content }}")
    plain, spells = Vocabulary(text, Limits(plain_messages=True)), [{**USER, "content": "<e>"}]
    assert words.encode_chat(spells) == [0, 3] and plain.encode_chat(spells) == [0, 2]


def test_texts_have_the_tokens_that_a_tokenizer_adds() -> None:
    assert read(seed=1, add_special_tokens=True) == read(seed=1)
    assert read(True, seed=1, add_special_tokens=False) == read(True, seed=1)
    assert refused(add_special_tokens=False).param == "add_special_tokens"


def test_a_prediction_is_a_text_or_parts_and_no_longer_than_texts_are() -> None:
    def predicted(content: Any) -> Any:
        found, _ = read(True, n=2, prediction={"type": "content", "content": content})
        first, second = (choice["options"].prediction for choice in found.choices)
        assert first == second
        return first

    parts = [{"type": "text", "text": "ab"}, {"type": "text", "text": "c"}]
    assert predicted("abc") == predicted(parts) == (0, 1, 2)
    assert predicted("") is None and predicted([]) is None
    assert predicted(100 * "x") == (*range(ENGINE.max_length),)


def test_a_schema_is_followed_or_there_is_none() -> None:
    schema = {"type": "integer"}
    form = {"type": "json_schema", "json_schema": {"name": "x", "strict": None, "schema": schema}}
    for given, truth in ((form, schema), ({"type": "json_object"}, {"type": "object"})):
        assert json.loads(str(read(response_format=given)[0].schema)) == truth
    assert read(response_format={"type": "text"})[0].schema is None


def test_every_option_of_one_number_can_be_asked_for() -> None:
    defaults = {one.name: Parameters.model_fields[one.name].default for one in NUMBERS}
    assert defaults == {one.name: one.neutral for one in NUMBERS}
    assert {*defaults, "logit_bias", "max_drafts", "cache_salt"} == {*OPTIONS}


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
NUMBERS_OF_JSON = st.integers() | st.floats(allow_nan=False) | st.sampled_from([1e-45, 10**400])
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS_OF_JSON | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from([*Parameters.model_fields, *Parameters.neutral, "logprobs", "top_logprobs"])


@hypothesis.given(
    asked=st.dictionaries(NAMES | TEXTS, JSON, max_size=3),
    message=st.dictionaries(st.sampled_from(["role", "content", "name", "x"]), JSON),
    is_chat=st.booleans(),
)
def test_any_json_is_taken_or_refused_in_a_sentence(
    asked: dict[str, Any], message: dict[str, Any], is_chat: bool
) -> None:
    if is_chat:
        asked = {"messages": [USER, {**USER, **message}], **asked}
    try:
        read(is_chat, **{name: value for name, value in asked.items() if name != "is_chat"})
    except ApiError as error:
        assert error.status == 400 and error.param is not None and len(str(error)) < 500
        assert error.response.body


def test_many_mistakes_are_one_sentence() -> None:
    many: dict[str, Any] = {f"a{i}": 1 for i in range(10**4)}
    assert len(str(refused(**many))) < 500
    for name, value in (
        ("prompt", [{}] * 10**4),
        ("prompt", [[{}] * 10**4]),
        ("stop", [1] * 10**4),
        ("logit_bias", many),
    ):
        assert refused(**{name: value}).param == name
    for messages in ([1] * 64, [{**USER, "content": [1] * 63}]):
        assert str(refused(True, messages=messages)).startswith("messages[0]")


def test_messages_and_their_parts_are_at_most_as_many_as_tokens() -> None:
    part = {"type": "text", "text": "a"}
    for messages in ([USER] * 65, [1] * 65, [USER, {**USER, "content": [part] * 63}]):
        error = refused(True, messages=messages)
        assert (error.param, error.code) == ("messages", "context_length_exceeded")
        assert "has 65 messages and parts of these" in str(error)
    assert len(read(True, messages=[USER, {**USER, "content": [part] * 62}])[1][0]) == 2


def test_the_answer_of_an_error_can_be_encoded() -> None:
    error = ApiError("no \ud800", "\udfff")
    assert json.loads(error.response.body)["error"]["param"] == "\\udfff"


def test_an_event_is_one_line_for_every_client() -> None:
    text = "".join(map(chr, range(0x3000))) + "\U0001f600"
    text = text.encode("utf-8", "ignore").decode()
    event = _event({"text": text}).decode()
    assert event.endswith("\n\n") and len(event.splitlines()) == 2
    assert json.loads(event.removeprefix("data: ")) == {"text": text}
    assert "\u00e9" in event and "\u2026" in event, "other text is not escaped"
