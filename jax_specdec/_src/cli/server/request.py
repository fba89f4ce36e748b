"""The parameters of OpenAI's API, checked."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import secrets
from typing import Any, NoReturn, TypeVar

import numpy as np

import jax_specdec as sd
from jax_specdec._src.cli.server.limits import ApiError, Json, Limits, named
from jax_specdec._src.cli.server.vocabulary import Vocabulary
from jax_specdec._src.serving.options import MIN_TOKENS, NUMBERS

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Asked:
    """A request whose parameters were checked."""

    is_chat: bool
    choices: list[Json]  # arguments of `submit`
    streams: list[sd.TextStream]  # by choice
    num_prompt_tokens: int
    stops: list[str]
    num_top: int | None  # alternatives of each token; None for no log-probabilities
    is_stream: bool
    has_usage: bool  # at the end of a stream


class Parameters:
    """A request's JSON object; each parameter is taken once, and what is left is unknown."""

    def __init__(self, values: Json) -> None:
        self._values = {name: value for name, value in values.items() if value is not None}

    def take(self, name: str, kind: type[T], least: int = -(2**63), most: int = 2**63) -> T | None:
        """A parameter of a type, and in a range if it is an integer; None if it is not there.

        Raises:
          ApiError: it is something else.
        """
        value = self._values.pop(name, None)
        if value is None:
            return None
        if kind is float and type(value) is int and abs(value) < 2**63:
            value = float(value)
        if type(value) is not kind:
            kinds = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}
            refuse(name, f"must be {kinds.get(kind, 'an object' if kind is dict else 'a list')}")
        if isinstance(value, int) and not least <= value <= most:
            refuse(name, f"must be in [{least}, {most}], but it is {str(value):.100}")
        return value

    def any(self, name: str) -> Any:
        """A parameter of any type."""
        return self._values.pop(name, None)

    def ignore(self, **neutral: Any) -> None:
        """Parameters that change nothing; None for any value.

        Raises:
          ApiError: one is not neutral.
        """
        for name, value in neutral.items():
            given = self._values.pop(name, value)
            if value is not None and given != value:
                refuse(name, f"is supported as {json.dumps(value)} only", "unsupported_parameter")

    def end(self, prefix: str = "") -> None:
        """Refuse what was not taken.

        Raises:
          ApiError: there is something.
        """
        for name in self._values:
            raise ApiError(
                f"unknown parameter: {prefix + name!r:.100}",
                (prefix + name)[:100],
                code="unknown_parameter",
            )


def refuse(name: str, rule: str, code: str | None = None) -> NoReturn:
    """Refuse a parameter.

    Raises:
      ApiError: always.
    """
    raise ApiError(f"{name} {rule}", name, code=code)


async def read_request(
    values: Json, is_chat: bool, engine: sd.Engine, words: Vocabulary, limits: Limits
) -> Asked:
    """Check a request of /v1/chat/completions or /v1/completions.

    Raises:
      ApiError: it asks for what is not there.
    """
    given = Parameters(values)
    given.any("model")
    is_stream = given.take("stream", bool) or False
    has_usage = False
    if (stream_options := given.take("stream_options", dict)) is not None:
        if not is_stream:
            refuse("stream_options", "needs stream")
        inner = Parameters(stream_options)
        has_usage = inner.take("include_usage", bool) or False
        inner.ignore(include_obfuscation=False)
        inner.end("stream_options.")
    n = given.take("n", int, 1, limits.choices) or 1
    seed = given.take("seed", int)
    stops = _stops(given.any("stop"), limits)
    num_top = _num_top(given, is_chat, engine)
    budgets = [given.take(name, int, 1) for name in ("max_completion_tokens", "max_tokens")]
    budget = next((one for one in budgets if one is not None), None)
    fields: Json = {"temperature": 1.0}  # that of the API
    for one in NUMBERS:
        kind: type[Any] = int if one.dtype is np.int32 else float
        if (number := given.take(one.name, kind)) is not None:
            fields[one.name] = number
    if (bias := given.take("logit_bias", dict)) is not None:
        if len(bias) > limits.logit_bias:
            refuse("logit_bias", f"must have at most {limits.logit_bias} tokens")
        if not all(key.isascii() and key.isdecimal() and len(key) <= 10 for key in bias):
            refuse("logit_bias", "must have token ids as keys")
        if not all(type(x) in (int, float) and -100 <= x <= 100 for x in bias.values()):
            refuse("logit_bias", "must have numbers in [-100, 100]")
        fields["logit_bias"] = bias
    schema = _schema(given.take("response_format", dict))
    if schema is not None and fields.get(MIN_TOKENS.name):  # where only a stop token is allowed
        refuse(MIN_TOKENS.name, "must not come with a response_format")
    name = "messages" if is_chat else "prompt"
    prompts: list[Any] = [_messages(given)] if is_chat else _prompts(given.any("prompt"))
    given.ignore(user=None, metadata=None, store=False, service_tier="auto", best_of=1, echo=False)
    given.end()
    if len(prompts) * n > limits.choices:
        refuse(name, f"and n must make at most {limits.choices} choices")
    budget_or_1 = 1 if budget is None else budget
    choices: list[Json] = []
    streams: list[sd.TextStream] = []
    num_prompt_tokens = 0
    seed = secrets.randbits(32) if seed is None else seed
    for prompt in prompts:
        try:
            encode = words.encode_chat if is_chat else words.encode
            token_ids = await asyncio.to_thread(encode, prompt)
            room = engine.max_length - len(token_ids)
            if budget_or_1 > room:
                raise ApiError(
                    f"this model has {engine.max_length} tokens for prompt and answer, but the "
                    f"prompt has {len(token_ids)} and the answer is to have {budget_or_1}",
                    name,
                    code="context_length_exceeded",
                )
            own = [await asyncio.to_thread(words.stream, token_ids) for _ in range(n)]
        except (OSError, TypeError, ValueError) as error:
            raise ApiError(str(error), name) from error
        num_prompt_tokens += len(token_ids)
        streams += own
        for _ in own:
            try:
                options = sd.RequestOptions(
                    **fields,
                    max_new_tokens=room if budget is None else budget,
                    stop_token_ids=words.stop_token_ids,
                    seed=(seed + len(choices) * 0x9E3779B9) % 2**32,
                )
            except (TypeError, ValueError) as error:
                raise ApiError(str(error), named(error)) from error
            choices.append({"prompt": token_ids, "options": options})
    if schema is not None:
        matchers = await words.matchers(schema, len(choices))
        for choice, matcher in zip(choices, matchers, strict=True):
            choice["matcher"] = matcher
    return Asked(is_chat, choices, streams, num_prompt_tokens, stops, num_top, is_stream, has_usage)


def _stops(stop: Any, limits: Limits) -> list[str]:
    stops = [stop] if isinstance(stop, str) else [] if stop is None else stop
    if not (isinstance(stops, list) and all(isinstance(x, str) and x for x in stops)):
        refuse("stop", "must be a string or a list of strings, none of them empty")
    if len(stops) > limits.stops or max(map(len, stops), default=0) > limits.stop_characters:
        refuse("stop", f"must be at most {limits.stops} strings of {limits.stop_characters}")
    return stops


def _num_top(given: Parameters, is_chat: bool, engine: sd.Engine) -> int | None:
    """How many alternatives each token is to have; None if log-probabilities are not wanted."""
    if is_chat:
        is_wanted, top = given.take("logprobs", bool), given.take("top_logprobs", int, 0)
        if top is not None and not is_wanted:
            refuse("top_logprobs", "needs logprobs")
        name, num_top = "top_logprobs", (top or 0) if is_wanted else None
    else:
        name, num_top = "logprobs", given.take("logprobs", int, 0)
    if num_top is not None and engine.logprobs is None:
        refuse("logprobs", "are turned off on this server", "unsupported_parameter")
    if num_top is not None and engine.logprobs and num_top > engine.logprobs.num_top:
        refuse(name, f"must be at most {engine.logprobs.num_top} on this server")
    return num_top


def _schema(response_format: Json | None) -> Json | None:
    """The JSON schema that a text must follow, if there is one."""
    if response_format is None:
        return None
    kind, name = response_format.get("type"), "response_format"
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    holder = response_format.get("json_schema")
    if kind != "json_schema" or not isinstance(holder, dict):
        refuse(name, "must have a type: text, json_object, or json_schema with a json_schema")
    if not isinstance(schema := holder.get("schema"), dict):
        refuse(f"{name}.json_schema.schema", "must be an object")
    return schema


def _messages(given: Parameters) -> list[Json]:
    """A conversation, each message with a role and a text."""
    messages = given.take("messages", list) or []
    if not messages:
        refuse("messages", "must be a list of at least one message")
    found = []
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            refuse(where, "must be an object with a role")
        if unknown := message.keys() - {"role", "content", "name"}:
            refuse(f"{where}.{min(unknown)}"[:100], "is not supported", "unknown_parameter")
        content = message.get("content")
        if isinstance(content, list):  # of parts
            parts = [part.get("text") for part in content if isinstance(part, dict)]
            are_texts = len(parts) == len(content) and all(isinstance(x, str) for x in parts)
            content = "".join(map(str, parts)) if are_texts else None
        if not isinstance(content, str):
            refuse(f"{where}.content", "must be a string, or a list of parts with texts")
        found.append({**message, "content": content})
    return found


def _prompts(prompt: Any) -> list[str | list[int]]:
    """The prompts of a completion: texts, or token ids."""
    prompts = prompt if isinstance(prompt, list) else [prompt]
    if prompts and all(type(x) is int for x in prompts):
        prompts = [prompts]
    if not prompts or not all(
        isinstance(x, str) or (isinstance(x, list) and all(type(i) is int for i in x))
        for x in prompts
    ):
        refuse("prompt", "must be a string, a list of token ids, or a list of these")
    return prompts
