"""Chat templates of Hugging Face checkpoints: from messages to the format of a model's training.

A template is a Jinja program by the authors of the checkpoint. It runs in Jinja's sandbox, with the
names and filters that `transformers` gives it. The sandbox keeps it from the rest of the process,
but does not bound its time and memory: who chooses a checkpoint trusts its template that far.

Templates are found in `chat_template.jinja`, in `tokenizer_config.json`, or among several there.
`Tokenizer.encode_chat` encodes the text without adding special tokens: the template writes them.
"""

import dataclasses
import datetime
import functools
import json
import re
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from jax_specdec._src.base.arrays import require
from jax_specdec.lm.extras import extra
from jax_specdec.lm.formats.added_tokens import TOKENIZER_CONFIG_FILE, special_tokens
from jax_specdec.lm.formats.files import JsonValue, is_there, read_json, read_text
from jax_specdec.lm.models.fields import reason

TEMPLATE_FILE = "chat_template.jinja"

Message = Mapping[str, Any]
"""A message of a conversation: a "role", a "content", and what else a template reads."""

_USUAL_ROLES = ("system", "user", "assistant")
"""Roles that templates know; one that leaves out system messages does so by intent."""


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """A template and the special tokens that it may name.

    Attributes:
      path: the file it was read from.
      source: the program.
      special_tokens: by name.
    """

    path: Path
    source: str
    special_tokens: dict[str, str]

    def apply(self, messages: Sequence[Message], **variables: Any) -> str:
        """Returns the text of a conversation, up to where the model's answer begins.

        A "developer" is the "system" of a template that does not name that role. Errors name no
        directory, because a server shows them to its clients.

        Args:
          messages: each with a "role" and a "content".
          **variables: for the template besides those that all have, or in their place.

        Raises:
          ImportError: the `jinja2` library is not installed.
          TypeError: `messages` is something else.
          ValueError: the template refuses the messages or leaves one out, or cannot be parsed or
            run.
        """
        check_messages(messages)
        # First as it is: what the template itself refuses is said in its own words.
        text = self._render(messages, variables)
        self._check_nothing_is_left_out(messages, variables)
        return text

    def _render(self, messages: Sequence[Message], further_variables: Mapping[str, Any]) -> str:
        """Returns what the template writes; raises as `apply` does."""
        # Whether the template knows the role shows in the quoted name in its source. The bare
        # word may stand in a comment.
        known = "developer" if re.search("[\"']developer[\"']", self.source) else "system"
        # Templates ask for these without looking whether they are defined, as `transformers` always
        # gives them. An undefined one is not none, as `tools is none` asks.
        variables = {
            "messages": [
                {**message, "role": known if message["role"] == "developer" else message["role"]}
                for message in messages
            ],
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
            **self.special_tokens,
            **further_variables,
        }
        environment = _environment()
        failed = "parsed"
        try:
            template = _parsed(environment, self.source)
            failed = "applied"
            return template.render(variables)
        except Exception as error:  # a program may raise anything
            why = reason(error) or type(error).__name__
            message = f"{self.path.name} has a chat template that cannot be {failed}: {why}."
            raise ValueError(message) from error

    def _check_nothing_is_left_out(
        self, messages: Sequence[Message], variables: Mapping[str, Any]
    ) -> None:
        """Checks that the text has every message of an unusual role: many templates skip those.

        Raises:
          ValueError: it lacks one.
        """
        # The template writes the conversation once more, each of these between marks. A random mark
        # is in no message, and one on either side is left where a template cuts off an end. Empty
        # messages leave no trace, and the usual roles are left out by intent, if at all.
        mark = uuid.uuid4().hex
        marked = {
            index: {**message, "content": f"{mark}-{index}-{message['content']}-{mark}-{index}-"}
            for index, message in enumerate(messages)
            if message["content"] and message["role"] not in _USUAL_ROLES
        }
        if not marked:
            return
        try:
            all_of_them = [marked.get(i, message) for i, message in enumerate(messages)]
            text = self._render(all_of_them, variables)
        except ValueError:  # a template that refuses another content has looked at it
            return
        written = set(re.findall(f"{mark}-([0-9]+)-", text))
        must = "be one that the chat template writes out"
        for index, message in marked.items():
            require(str(index) in written, f"messages[{index}]['role']", must, message["role"])


def check_messages(messages: Iterable[object]) -> None:
    """Checks the messages of a conversation.

    Raises:
      TypeError: they are no list, or one has no "role" or no "content".
    """
    # These two can be iterated over, as a list of messages can.
    is_list = not isinstance(messages, (str, Mapping))
    must = "be a list such as [{'role': 'user', 'content': 'Hi'}]"
    require(is_list, "messages", must, messages, error=TypeError)
    must = "have a 'role' and a 'content'"
    for index, message in enumerate(messages):
        is_one = isinstance(message, Mapping) and {"role", "content"} <= message.keys()
        require(is_one, f"messages[{index}]", must, message, error=TypeError)


def read_chat_template(directory: Path) -> ChatTemplate:
    """Reads the chat template of a checkpoint.

    Raises:
      OSError: something other than a file is in its place, or a file cannot be opened.
      ValueError: there is no template, or it is not text.
    """
    path = directory / TEMPLATE_FILE
    if is_there(path):
        source: JsonValue = read_text(path)
    else:
        path = directory / TOKENIZER_CONFIG_FILE
        raw = read_json(path, optional=True)
        source = raw.get("chat_template")
        # Some checkpoints have several, by name, such as one for tools. Only the default one is
        # taken.
        if isinstance(source, list):
            defaults = [x for x in source if isinstance(x, dict) and x.get("name") == "default"]
            source = defaults[0].get("template") if defaults else None
        is_text = source is None or isinstance(source, str)
        raw.require(is_text, "chat_template", "which is not text")
    if source is None:
        raise ValueError(
            f"the checkpoint has no chat template, neither {TEMPLATE_FILE} nor one in "
            f"{TOKENIZER_CONFIG_FILE}; a model that was not trained to chat has none."
        )
    return ChatTemplate(path, source, special_tokens(directory))


@functools.lru_cache(8)
def _parsed(environment: Any, source: str) -> Any:
    """Returns a template; parsing one takes tens of times as long as rendering it."""
    return environment.from_string(source)


@functools.cache
def _environment() -> Any:
    """Returns Jinja's sandbox with what `transformers` gives to templates.

    Raises:
      ImportError: the `jinja2` library is not installed.
    """
    with extra("lm"):
        import jinja2
        import jinja2.ext
        import jinja2.sandbox

    class GenerationTag(jinja2.ext.Extension):
        """`{% generation %}` marks answers in training texts; here it has no effect."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            """Returns the body of the block."""
            # the word "generation" of the tag itself
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, **options: Any) -> str:  # Jinja's own escapes "<", for web pages
        return json.dumps(value, **{"ensure_ascii": False, **options})

    # Immutable: a template cannot change the messages of the caller. Lines of a block alone leave
    # no line behind, as templates are written for.
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, GenerationTag]
    )
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda layout: datetime.datetime.now().strftime(layout)
    environment.filters["tojson"] = to_json
    return environment
