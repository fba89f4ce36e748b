"""Chat templates of Hugging Face checkpoints: from messages to the format of a model's training.

A template is a Jinja program by the authors of the checkpoint, so it runs in Jinja's sandbox.
"""

import dataclasses
import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from jax_specdec._src.models.fields import quoted, reason, shown
from jax_specdec._src.models.files import existing, is_there, read_json

__all__ = [
    "TEMPLATE_FILE",
    "TOKENIZER_CONFIG_FILE",
    "ChatTemplate",
    "read_chat_template",
    "special_tokens",
]

TEMPLATE_FILE = "chat_template.jinja"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"

_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """A template and the special tokens that it may name.

    Attributes:
        path: the file it was read from.
        render: from the variables of `transformers` to text.
        variables: special tokens by name.
    """

    path: Path
    render: Callable[..., str]
    variables: dict[str, str]

    def apply(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The text of a conversation, up to where the model's answer begins.

        Args:
            messages: each with a "role" and a "content".

        Raises:
            TypeError: `messages` is something else.
            ValueError: the template refuses the messages, or cannot be run.
        """
        if isinstance(messages, (str, Mapping)):
            raise TypeError(
                "messages must be a list such as [{'role': 'user', 'content': 'Hi'}], but it is "
                f"{quoted(messages)}"
            )
        for index, message in enumerate(messages):
            if not (isinstance(message, Mapping) and {"role", "content"} <= message.keys()):
                raise TypeError(
                    f"messages[{index}] must have a 'role' and a 'content', but it is "
                    f"{quoted(message)}"
                )
        try:
            return self.render(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self.variables,
            )
        except Exception as error:  # a program of unknown origin may raise anything
            raise ValueError(
                f"{shown(self.path)} has a chat template that cannot be applied: {reason(error)}."
            ) from error


def read_chat_template(directory: Path) -> ChatTemplate:
    """Reads the chat template of a checkpoint.

    Raises:
        ImportError: the `jinja2` library is not installed.
        OSError: something other than a file is in its place, or a file cannot be opened.
        ValueError: there is no template, or it cannot be parsed.
    """
    path = directory / TEMPLATE_FILE
    if is_there(path):
        try:
            source: Any = existing(path).read_text(encoding="utf-8")
        except ValueError as error:
            raise ValueError(f"{shown(path)} is not text in UTF-8: {reason(error)}.") from error
    else:
        path = directory / TOKENIZER_CONFIG_FILE
        source = read_json(path).get("chat_template") if is_there(path) else None
        if isinstance(source, list):  # several, by name
            named = [x for x in source if isinstance(x, dict) and x.get("name") == "default"]
            source = named[0].get("template") if named else None
    if source is None:
        raise ValueError(
            f"{shown(directory)} has no chat template, neither {TEMPLATE_FILE} nor one in "
            f"{TOKENIZER_CONFIG_FILE}; a model that was not trained to chat has none."
        )
    if not isinstance(source, str):
        raise ValueError(f"{shown(path)} has chat_template = {quoted(source)}, which is not text.")
    return ChatTemplate(path, _compile(path, source), special_tokens(directory))


def special_tokens(directory: Path) -> dict[str, str]:
    """Special tokens by name, such as `eos_token`, from `tokenizer_config.json`, if it is there.

    Raises:
        OSError: something other than a file is in its place, or it cannot be opened.
        ValueError: it cannot be parsed, or a special token is not text.
    """
    path = directory / TOKENIZER_CONFIG_FILE
    raw = read_json(path) if is_there(path) else {}
    found = {}
    for name in _SPECIAL:
        token = raw.get(name)
        if isinstance(token, dict):
            token = token.get("content")
        if token is None:
            continue
        if not isinstance(token, str):
            raise ValueError(f"{shown(path)} has {name} = {quoted(raw[name])}, which is not text.")
        found[name] = token
    return found


def _compile(path: Path, source: str) -> Callable[..., str]:
    try:
        import jinja2
        import jinja2.ext
        import jinja2.sandbox
    except ImportError as error:
        raise ImportError(
            f"{shown(path)} has a chat template, which is read by the jinja2 library, which is not "
            "installed: pip install jinja2, or the extra hf."
        ) from error

    class Generation(jinja2.ext.Extension):
        """`{% generation %}` marks answers in training texts; here it has no effect."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            """The body of the block."""
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, Generation]
    )
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    environment.filters["tojson"] = lambda value, **options: json.dumps(
        value, **{"ensure_ascii": False, **options}
    )
    try:
        return environment.from_string(source).render
    except (jinja2.TemplateError, RecursionError) as error:
        raise ValueError(
            f"{shown(path)} has a chat template that cannot be parsed: {reason(error)}."
        ) from error
