"""The parameters of OpenAI's API, checked, and the tokens of what they hold.

`ChatParameters` and `TextParameters` are the bodies of /v1/chat/completions and /v1/completions, as
models of pydantic; the options of the engine are added from the table of `RequestOptions`. Nothing
is ignored that would change a text: a parameter that is not supported is refused, unless its value
has no effect. `app` calls `read_parameters` in a thread, and, once the request has its places,
`read_request`, which makes of them what `EngineDriver.submit` takes.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import secrets
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_type_hints

import pydantic
from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, WrapValidator
from pydantic_core import PydanticCustomError

from jax_specdec import lm
from jax_specdec._src.base.arrays import described, either
from jax_specdec._src.base.config import did_you_mean
from jax_specdec.lm.decoding.options import ROWS
from jax_specdec.lm.server.limits import ApiError, Choice, Json
from jax_specdec.lm.server.vocabulary import Vocabulary

OPTIONS = tuple(name for name, row in ROWS.items() if row.by_clients)
"""What a request may ask for that clients of this server do, by the same names."""
MAX_BIASES = 300
MAX_CHOICES = 16  # prompts of a request times n


class Object(pydantic.BaseModel):
    """A JSON object; null is absent, and what is neither a field nor neutral is refused."""

    model_config = pydantic.ConfigDict(strict=True)
    ignored: ClassVar[frozenset[str]] = frozenset()  # whatever their values are
    neutral: ClassVar[dict[str, list[Any]]] = {}  # values of what is not supported

    @pydantic.model_validator(mode="before")
    @classmethod
    def _known(cls, values: object) -> Json:
        """Returns what is given and not null; pydantic leaves out what is no field."""
        if not isinstance(values, dict):
            raise ValueError("must be an object")
        fields = {*_names(cls)}
        present = {k: x for k, x in values.items() if x is not None and k not in cls.ignored}
        # These have no sentence: `_refusal` writes it, with the place of this object.
        for name in [name for name in present if name not in fields]:
            if name not in cls.neutral:
                raise PydanticCustomError("unknown_parameter", "", {"name": name})
            if not any(_is_same(present[name], neutral) for neutral in cls.neutral[name]):
                only = either(map(json.dumps, cls.neutral[name]))
                context = {"name": name, "rule": f"is supported as {only} only"}
                raise PydanticCustomError("unsupported_parameter", "", context)
        return present


def _is_same(value: object, neutral: object) -> bool:
    """Returns whether two values are one in JSON: 1 and 1.0 are, 1 and true are not."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _names(kind: type[Object]) -> list[str]:
    """Returns what the fields of an object are called in JSON."""
    return [field.alias or name for name, field in kind.model_fields.items()]


def _stated(rule: str) -> WrapValidator:
    """Returns a validator with one rule, in place of the several of pydantic for a union."""

    def check(value: object, handler: pydantic.ValidatorFunctionWrapHandler) -> object:
        try:
            return handler(value)
        except pydantic.ValidationError as error:
            raise ValueError(f"must be {rule}") from error

    return WrapValidator(check)


class ContentPart(Object):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


# Parts become one text here, so that templates and tokenizers see texts alone. `fail_fast`: of a
# thousand wrong parts one error is enough.
_CONTENT = Annotated[
    str | Annotated[list[ContentPart], Field(fail_fast=True)],
    AfterValidator(lambda x: x if isinstance(x, str) else "".join(part.text for part in x)),
    _stated("a string, or a list of parts of type text, each with a text"),
]


class Message(Object):
    """A message of a conversation, such as an answer of this server."""

    # An assistant's message of OpenAI's API has these, and comes back as part of a conversation.
    neutral = {"annotations": [[]], "refusal": [""], "tool_calls": [[]]}

    role: Literal["developer", "system", "user", "assistant"]
    content: _CONTENT
    name: str | None = None


class Prediction(Object):
    """What the text is expected to be, or to be near, such as a file before an edit."""

    type: Literal["content"]
    content: _CONTENT


class JsonSchema(Object):
    """A JSON schema, which is followed whether it is strict or not."""

    # `schema` is a method of pydantic's models.
    schema_: Json = Field(alias="schema")
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Object):
    """What a text must be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @pydantic.model_validator(mode="after")
    def _agrees(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("must have a json_schema exactly if that is its type")
        return self

    @property
    def followed(self) -> Json | None:
        """The JSON schema that the text must follow, if there is one."""
        if self.json_schema is not None:
            return self.json_schema.schema_
        return {"type": "object"} if self.type == "json_object" else None


class StreamOptions(Object):
    """What a stream has besides texts."""

    # The first is vLLM's, the second OpenAI's.
    neutral = {"continuous_usage_stats": [False], "include_obfuscation": [False]}

    include_usage: bool = False
    # Not of OpenAI's API: for clients that count events as tokens.
    one_token_per_event: bool = False


# Parameters of OpenAI's API and of vLLM's that are supported at their neutral value alone: false,
# true, or an empty list. Clients send them so.
_OFF = (
    "continue_final_message early_stopping echo ignore_eos include_stop_str_in_output "
    "return_token_ids return_tokens_as_token_ids store use_beam_search"
)
_ON = "add_generation_prompt include_reasoning skip_special_tokens spaces_between_special_tokens"
_EMPTY = "bad_words documents functions logits_processors stop_token_ids tools"
_STOP = Annotated[str, Field(min_length=1, max_length=256)]
_IDS = Annotated[list[int], Field(min_length=1, fail_fast=True)]


# What is narrower here than for `RequestOptions`, or begins with another value: the type, and the
# default. OpenAI's temperature is 1 where it is missing; that of the library is 0. Biases are
# bounded as in OpenAI's API, and in number by the arrays that `cli.serve` has the engine make.
_OWN_KINDS: dict[str, tuple[Any, Any]] = {
    "temperature": (float, 1.0),
    "cache_salt": (str | None, Field(None, min_length=1)),
    "logit_bias": (
        Annotated[
            dict[str, Annotated[float, Field(ge=-100, le=100)]],
            Field(max_length=MAX_BIASES),
            _stated(
                f"an object of at most {MAX_BIASES} token ids, each with a number in [-100, 100]"
            ),
        ],
        {},
    ),
}


def _is_an_option(value: Any, info: ValidationInfo) -> Any:
    """Checks a value as `RequestOptions` does, whose sentence clients get."""
    try:
        lm.RequestOptions(**{str(info.field_name): value})
    except (TypeError, ValueError) as error:
        raise PydanticCustomError("sentence", "", {"sentence": str(error)}) from error
    return value


_Body = TypeVar("_Body", bound=Object)


def _with_options(body: type[_Body]) -> type[_Body]:
    """Adds the options of a request to what a body has."""
    # The types of the dataclass, as objects: its annotations are strings.
    types = get_type_hints(lm.RequestOptions)
    defaults = lm.RequestOptions()
    fields: dict[str, Any] = {}
    for name in OPTIONS:
        kind, default = _OWN_KINDS.get(name, (types[name], getattr(defaults, name)))
        fields[name] = Annotated[kind, AfterValidator(_is_an_option)], default
    return pydantic.create_model(
        body.__name__, __base__=body, __module__=body.__module__, __doc__=body.__doc__, **fields
    )


@_with_options
class Parameters(Object):
    """What both paths take."""

    neutral = {
        **dict.fromkeys(_OFF.split(), [False]),
        **dict.fromkeys(_ON.split(), [True]),
        **dict.fromkeys(_EMPTY.split(), [[]]),
        **dict.fromkeys(("function_call", "tool_choice"), ["none", "auto"]),
        **dict.fromkeys(("best_of", "length_penalty"), [1]),
        **dict.fromkeys("chat_template_kwargs mm_processor_kwargs vllm_xargs".split(), [{}]),
        "modalities": [["text"]],
        "parallel_tool_calls": [True, False],
        "priority": [0],
        "service_tier": ["auto", "default"],
        "suffix": [""],
        "verbosity": ["medium"],
    }

    # The server has checked the first; the others change nothing.
    ignored = frozenset("model metadata prompt_cache_key safety_identifier user".split())

    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    # Not of OpenAI's API: the usage then says what became of drafts.
    include_acceptance: bool = False
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Annotated[
        list[_STOP],
        Field(max_length=16),
        BeforeValidator(lambda stop: [stop] if isinstance(stop, str) else stop),
        _stated("a string of 1 to 256 characters, or a list of at most 16 of these"),
    ] = []
    # The second is the older name of the first, which counts where both are given.
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31)
    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    response_format: ResponseFormat = ResponseFormat(type="text")
    prediction: Prediction | None = None

    @property
    def options(self) -> dict[str, Any]:
        """What the request asks for, by the names of fields of `RequestOptions`."""
        return {name: getattr(self, name) for name in OPTIONS}


class ChatParameters(Parameters):
    """What /v1/chat/completions takes."""

    # `add_special_tokens` is vLLM's. In a chat the template writes them.
    neutral = {**Parameters.neutral, "add_special_tokens": [False]}
    is_chat: ClassVar = True
    path: ClassVar = "/v1/chat/completions"
    prompt_name: ClassVar = "messages"
    top_name: ClassVar = "top_logprobs"

    # The model thinks as its template says, or, by "none", not at all: there are no degrees.
    reasoning_effort: Literal["none"] | None = None
    messages: list[Message] = Field(min_length=1, fail_fast=True)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0)

    @property
    def prompts(self) -> list[list[Json]]:
        """The conversation."""
        return [[message.model_dump(exclude_none=True) for message in self.messages]]

    @property
    def num_top(self) -> int | None:
        """Alternatives of each token; None for no log-probabilities."""
        return self.top_logprobs if self.logprobs else None


class TextParameters(Parameters):
    """What /v1/completions takes."""

    neutral = {**Parameters.neutral, "add_special_tokens": [True]}
    is_chat: ClassVar = False
    path: ClassVar = "/v1/completions"
    prompt_name: ClassVar = "prompt"
    top_name: ClassVar = "logprobs"

    prompt: Annotated[
        str | _IDS | Annotated[list[str | _IDS], Field(min_length=1, fail_fast=True)],
        _stated("a string, a list of token ids, or a list of these, none of them empty"),
    ]
    # A number here, where chats have a flag `logprobs` and a number `top_logprobs`.
    num_top: int | None = Field(None, alias="logprobs", ge=0)

    @property
    def prompts(self) -> list[Any]:
        """Texts, or token ids."""
        is_one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if is_one else list(self.prompt)


Given = ChatParameters | TextParameters
_INNER: dict[str, type[Object]] = {
    "stream_options": StreamOptions,
    "prediction": Prediction,
    "response_format": ResponseFormat,
    "response_format.json_schema": JsonSchema,
}
"""Objects among the parameters, by their places."""
_OTHER_NAMES = {
    **dict.fromkeys(
        ("chat_template_kwargs", "enable_thinking"), 'reasoning_effort "none" turns thinking off'
    ),
    "best_of": "n is the number of choices",
    "stop_token_ids": "stop takes strings",
    "extra_body": "what is in it goes beside the other parameters",
    **dict.fromkeys(("n_predict", "num_predict"), "did you mean 'max_tokens'?"),
    **dict.fromkeys(
        ("grammar", "guided_json", "guided_regex", "guided_choice", "structured_outputs"),
        "response_format takes a JSON schema",
    ),
}
"""What clients of others send, and what to send instead."""


@dataclasses.dataclass(frozen=True)
class CheckedRequest:
    """A request whose parameters were checked, with the tokens of its prompts."""

    given: Given
    choices: list[Choice]
    schema: str | None  # the JSON schema of all choices
    streams: list[lm.TextStream]  # by choice
    num_prompt_tokens: int


def read_parameters(values: Json, is_chat: bool, engine: lm.Engine) -> Given:
    """Returns the parameters of /v1/chat/completions or /v1/completions.

    Raises:
      ApiError: they ask for what is not there.
    """
    kind = ChatParameters if is_chat else TextParameters
    messages = values.get("messages")
    # Counted before pydantic looks at each: with more of them than tokens, none fits.
    if isinstance(messages, list):
        parts = (x.get("content") for x in messages if isinstance(x, dict))
        count = len(messages) + sum(len(x) for x in parts if isinstance(x, list))
        if count > engine.max_length:
            raise ApiError(
                f"this model has {engine.max_length} tokens for prompt and answer, but the prompt "
                f"has {count} messages and parts of these",
                "messages",
                code="context_length_exceeded",
            )
    try:
        given = kind.model_validate(values)
    except pydantic.ValidationError as error:
        raise _refusal(error, kind) from error
    # What depends on another parameter, or on the engine: pydantic has looked at each one alone.
    num_top = given.num_top
    for name, is_asked in given.stream_options:
        if is_asked and not given.stream:
            raise ApiError(f'stream_options.{name} needs "stream": true', "stream_options")
    if given.include_acceptance and given.stream and not given.stream_options.include_usage:
        message = "include_acceptance needs stream_options.include_usage in a stream"
        raise ApiError(message, "include_acceptance")
    if isinstance(given, ChatParameters) and given.top_logprobs and not given.logprobs:
        raise ApiError("top_logprobs needs logprobs", "top_logprobs")
    if num_top is not None and engine.logprobs is None:
        raise ApiError("logprobs are turned off on this server", "logprobs")
    if num_top and engine.logprobs and num_top > engine.logprobs.num_top:
        limit = engine.logprobs.num_top
        raise ApiError(f"{given.top_name} must be at most {limit} on this server", given.top_name)
    options = given.options
    if options["min_tokens"] and given.response_format.followed is not None:
        # At the end of the schema only a stop token is allowed.
        raise ApiError("min_tokens must not come with a response_format", "min_tokens")
    max_drafts = options["max_drafts"]
    if max_drafts and max_drafts > (limit := engine.config.num_speculative_tokens):
        raise ApiError(f"max_drafts must be at most {limit} on this server", "max_drafts")
    if len(given.prompts) * given.n > MAX_CHOICES:
        message = f"{given.prompt_name} and n must make at most {MAX_CHOICES} choices"
        raise ApiError(message, given.prompt_name)
    return given


async def read_request(given: Given, engine: lm.Engine, words: Vocabulary) -> CheckedRequest:
    """Returns a request, with the tokens of its prompts and a schema that can be used.

    Raises:
      ApiError: the prompts are too long, or there is something wrong with them or the schema.
    """
    encode: Callable[[Any], list[int]] = words.encode
    if isinstance(given, ChatParameters):
        thinks = given.reasoning_effort is None
        encode = functools.partial(words.encode_chat, thinks=thinks)
    # Tokenizers and templates take long for long texts, so threads run them. If the client leaves,
    # the `await` ends: a text that waits for a thread is dropped, and one in a thread is finished
    # for nobody.
    loop = asyncio.get_running_loop()
    # Without a budget an answer may have what the prompt leaves.
    budget = given.max_completion_tokens or given.max_tokens
    # For clients of llama.cpp -1 is a random seed.
    seed = secrets.randbits(32) if given.seed in (None, -1) else given.seed
    prediction: list[int] = []
    if given.prediction is not None:
        text = given.prediction.content
        assert isinstance(text, str)  # parts were joined
        prediction = await loop.run_in_executor(words.threads, words.encode_text, text)
    choices: list[Choice] = []
    streams: list[lm.TextStream] = []
    num_prompt_tokens = 0
    # As in OpenAI's API, choice `i * n + j` is the j-th of prompt i.
    for prompt in given.prompts:
        try:
            token_ids = await loop.run_in_executor(words.threads, encode, prompt)
            room = engine.max_length - len(token_ids)
            if (budget or 1) > room:
                raise ApiError(
                    f"this model has {engine.max_length} tokens for prompt and answer, but the "
                    f"prompt has {len(token_ids)} and the answer is to have {budget or 1}",
                    given.prompt_name,
                    code="context_length_exceeded",
                )
            # In these threads, too: a stream begins by decoding its prompt.
            prompt_streams = [
                await loop.run_in_executor(words.threads, words.stream, token_ids)
                for _ in range(given.n)
            ]
        except (TypeError, ValueError) as error:
            raise ApiError(words.without_path(str(error)), given.prompt_name) from error
        num_prompt_tokens += len(token_ids)
        streams += prompt_streams
        for _ in prompt_streams:
            options = lm.RequestOptions(
                **given.options,
                prediction=prediction[: engine.max_length] or None,  # no text is longer
                max_new_tokens=budget or room,
                stop_token_ids=words.stop_token_ids,
                # Far apart: clients count their own seeds up, and no two texts may share noise.
                seed=(seed + len(choices) * 0x9E3779B9) % 2**32,
            )
            choices.append({"prompt": token_ids, "options": options})
    # Last, because its process is started only for a request that is right in all else.
    followed = given.response_format.followed
    schema = None if followed is None else await words.try_schema(followed)
    return CheckedRequest(given, choices, schema, streams, num_prompt_tokens)


def _instead_of(name: str, kind: type[Given]) -> str:
    """Returns how a message about an unknown parameter ends: with its place, or what is near it."""
    # What is wrong within a message is no misspelled parameter.
    if name.startswith("messages["):
        return ""
    if name in _OTHER_NAMES:
        return f"; {_OTHER_NAMES[name]}"
    # The same name at another place: beside, within or around an object.
    paths = _names(kind)
    for place, inner in _INNER.items():
        paths += [f"{place}.{field}" for field in _names(inner)]
    last = name.rpartition(".")[2]
    for path in paths:
        if path.rpartition(".")[2] == last:
            return f"; did you mean {path!r}?"
    # A parameter of the other path, or a name near one of this path.
    for other in (ChatParameters, TextParameters):
        if last in _names(other):
            return f"; it is a parameter of {other.path}"
    return did_you_mean(last, paths)


def _refusal(error: pydantic.ValidationError, asked: type[Given]) -> ApiError:
    """Returns the first thing that is wrong, in a sentence with its name."""
    problem = error.errors(include_url=False)[0]
    kind = problem["type"]
    context = problem.get("ctx", {})
    # ("messages", 0, "role") becomes messages[0].role, as OpenAI's errors name it. Errors of
    # `Object` are at the object, and have the name of the parameter within it.
    name = ""
    for part in (*problem["loc"], *filter(None, [context.get("name")])):
        if isinstance(part, int):
            name += f"[{part}]"
        else:
            name += f".{part}" if name else part
    # A client may send any name.
    name = name[:100]
    if kind == "unknown_parameter":
        hint = _instead_of(name, asked)
        return ApiError(f"unknown parameter: {name!r}{hint}", name, code=kind)
    if kind == "unsupported_parameter":
        hint = f"; {_OTHER_NAMES[name]}" if name in _OTHER_NAMES else ""
        return ApiError(f"{name} {context['rule']}{hint}", name, code=kind)
    if kind == "sentence":  # of `RequestOptions`
        return ApiError(context["sentence"], name)
    if kind == "value_error":  # a rule
        return ApiError(f"{name} {context['error']}", name)
    if kind == "missing":
        return ApiError(f"{name} is required", name)
    # pydantic's own, such as "Input should be a valid integer".
    rule = problem["msg"].partition(" should ")[2].replace(" after validation", "")
    return ApiError(f"{name} must {rule}, but it is {described(problem['input'])}", name)
