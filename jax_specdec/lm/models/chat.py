"""Chat templates of Hugging Face checkpoints: from messages to the format of a model's training.

A template is a Jinja program by the authors of the checkpoint, so it runs in Jinja's sandbox. That
does not bound time or memory, so the sandbox is in a process of its own (`chat_worker`), which has
a memory limit and is killed when it takes too long. The process is started without a fork, which
JAX's threads forbid, and without `multiprocessing`, which would import the user's script again.

MiniJinja with fuel, in this process, was tried in its place (minijinja 3.1.0). It renders templates
after the structure of published ones alike, save for strings' `%` and some of their methods. But
fuel bounds neither time nor depth: printing a list that holds a list twice, which holds another
twice, and so on 40 times, does not end and cannot be stopped; and a namespace that holds itself, or
100,000 times `not` in one expression, overflows the stack, which ends all that the process serves.
"""

import atexit
import contextlib
import dataclasses
import datetime
import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jax_specdec._src.arrays import refuse, require
from jax_specdec.lm.extras import extra
from jax_specdec.lm.models.added_tokens import TOKENIZER_CONFIG_FILE, special_tokens
from jax_specdec.lm.models.fields import reason, shown
from jax_specdec.lm.models.files import is_there, read_json, read_text

TEMPLATE_FILE = "chat_template.jinja"

SECONDS = 5.0
"""The most that a template may take; published ones take milliseconds."""

START_SECONDS = 60.0
"""The most that the process may take to start; it usually takes less than 0.5 s."""

MAX_CHARACTERS = 2**20
"""Of a template; published ones have some thousands."""

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

    def apply(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The text of a conversation, up to where the model's answer begins.

        A "developer" is the "system" of a template that does not name that role. Errors name no
        directory, because a server shows them to its clients.

        Args:
          messages: each with a "role" and a "content".

        Raises:
          TypeError: `messages` is something else.
          ValueError: the template refuses the messages or leaves one out, cannot be parsed or run,
            or takes too much time or memory.
        """
        is_list, must = not isinstance(messages, (str, Mapping)), "be a list such as "
        must += "[{'role': 'user', 'content': 'Hi'}]"
        require(is_list, "messages", must, messages, error=TypeError)
        for index, message in enumerate(messages):
            name, must = f"messages[{index}]", "have a 'role' and a 'content'"
            is_one = isinstance(message, Mapping) and {"role", "content"} <= message.keys()
            require(is_one, name, must, message, error=TypeError)
            try:
                json.dumps(dict(message))
            except (TypeError, ValueError, RecursionError) as error:
                refuse(TypeError, name, "hold what JSON can hold", message, reason(error))
        answer = self._answer(messages)
        if "text" not in answer:
            verb = "applied" if answer["is_parsed"] else "parsed"
            raise ValueError(
                f"{self.path.name} has a chat template that cannot be {verb}: "
                f"{reason(answer['reason'])}."
            )
        self._check_nothing_is_left_out(messages)
        return answer["text"]

    def _check_nothing_is_left_out(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Check that the text has every message of an unusual role: many templates skip those.

        Raises:
          ValueError: it lacks one.
        """
        mark = uuid.uuid4().hex
        marked = {
            index: {**message, "content": f"{mark}-{index}-{message['content']}-{mark}-{index}-"}
            for index, message in enumerate(messages)
            if message["content"] and message["role"] not in _USUAL_ROLES
        }
        if not marked:
            return
        answer = self._answer([marked.get(i, message) for i, message in enumerate(messages)])
        if "text" not in answer:  # who refuses another content has looked at it
            return
        written = set(re.findall(f"{mark}-([0-9]+)-", answer["text"]))
        for index, message in marked.items():
            name, must = f"messages[{index}]['role']", "be one that the chat template writes out"
            require(str(index) in written, name, must, message["role"])

    def _answer(self, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """What `chat_worker` answers, or why it does not."""
        known = "developer" if re.search("[\"']developer[\"']", self.source) else "system"
        variables = {
            "messages": [
                {**message, "role": known if message["role"] == "developer" else message["role"]}
                for message in messages
            ],
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
            **self.special_tokens,
        }
        now = datetime.datetime.now().isoformat()
        job = {"source": self.source, "variables": variables, "now": now, "seconds": 2 * SECONDS}
        try:
            return _worker(os.getpid()).answer(job)
        except OSError as error:
            what = f"its process cannot be started: {error.strerror}"
            return {"reason": what, "is_parsed": True}
        except ValueError as error:
            return {"reason": str(error), "is_parsed": True}


def read_chat_template(directory: Path) -> ChatTemplate:
    """Read the chat template of a checkpoint.

    Raises:
      ImportError: the `jinja2` library is not installed.
      OSError: something other than a file is in its place, or a file cannot be opened.
      ValueError: there is no template, or it is not text or too long.
    """
    path = directory / TEMPLATE_FILE
    if is_there(path):
        source: Any = read_text(path)
    else:
        path = directory / TOKENIZER_CONFIG_FILE
        raw = read_json(path, optional=True)
        source = raw.get("chat_template")
        if isinstance(source, list):  # several, by name
            named = [x for x in source if isinstance(x, dict) and x.get("name") == "default"]
            source = named[0].get("template") if named else None
        is_text = source is None or isinstance(source, str)
        raw.require(is_text, "chat_template", "which is not text")
    if source is None:
        raise ValueError(
            f"the checkpoint has no chat template, neither {TEMPLATE_FILE} nor one in "
            f"{TOKENIZER_CONFIG_FILE}; a model that was not trained to chat has none."
        )
    if len(source) > MAX_CHARACTERS:
        raise ValueError(
            f"{shown(path)} must have a chat template of at most {MAX_CHARACTERS} characters, but "
            "it has more."
        )
    with extra("lm"):
        import jinja2  # noqa: F401  # which the worker imports
    return ChatTemplate(path, source, special_tokens(directory))


@functools.cache
def _worker(process_id: int) -> "_Worker":
    """The worker of a process; a fork of it gets one of its own."""
    return _Worker()


class _Worker:
    """A process that applies templates; started when needed, and again after it was killed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        atexit.register(self.end)

    def answer(self, job: dict[str, Any]) -> dict[str, Any]:
        """What `chat_worker` answers to a job.

        Raises:
          OSError: the process cannot be started.
          ValueError: it was killed because it took too long, or it ended by itself.
        """
        line = json.dumps(job).encode() + b"\n"
        with self._lock:
            try:
                if self._process is not None and self._process.poll() is not None:
                    self.end()  # it has ended since, by an interrupt from the terminal for example
                if self._process is None:
                    self._process = _start()
                    _exchange(self._process, b"", START_SECONDS)
                return json.loads(_exchange(self._process, line, SECONDS))
            except BaseException:  # an interrupt too: the answer must not go to the next job
                self.end()
                raise

    def end(self) -> None:
        """Kill the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            with contextlib.suppress(OSError), process:  # closes its pipes, and waits
                pass


def _start() -> subprocess.Popen[bytes]:
    paths: dict[str, None] = {}
    for name in ("jinja2", "markupsafe"):
        spec = importlib.util.find_spec(name)
        for path in () if spec is None else spec.submodule_search_locations or ():
            paths[str(Path(path).parent)] = None
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(Path(__file__).with_name("chat_worker.py")), *paths],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={name: os.environ[name] for name in ("SYSTEMROOT",) if name in os.environ},  # Windows
    )


def _exchange(process: subprocess.Popen[bytes], line: bytes, seconds: float) -> bytes:
    """The line with which a process answers; if there is none after some seconds, it is killed."""
    assert process.stdin is not None and process.stdout is not None
    begin, answer = time.monotonic(), b""
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    try:
        process.stdin.write(line)
        process.stdin.flush()
        answer = process.stdout.readline()
    except OSError:  # it has ended
        pass
    finally:
        timer.cancel()
        timer.join()
    if time.monotonic() - begin >= seconds:
        raise ValueError(f"it takes longer than {seconds:g} s")
    if not answer.endswith(b"\n"):
        raise ValueError(f"the process that applies it ended with code {process.wait()}")
    return answer
