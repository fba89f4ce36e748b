"""Chat templates of Hugging Face checkpoints: from messages to the format of a model's training.

A template is a Jinja program by the authors of the checkpoint, so it runs in Jinja's sandbox. That
does not bound time or memory, so the sandbox is in a process of its own (`chat_worker`), which has
a memory limit and is killed when it takes too long. The process is started without a fork, which
JAX's threads forbid, and without `multiprocessing`, which would import the user's script again.
"""

import atexit
import contextlib
import dataclasses
import datetime
import functools
import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jax_specdec._src.arrays import refuse, require
from jax_specdec._src.models.added_tokens import TOKENIZER_CONFIG_FILE, special_tokens
from jax_specdec._src.models.fields import reason, shown
from jax_specdec._src.models.files import is_there, read_json, read_text

TEMPLATE_FILE = "chat_template.jinja"

SECONDS = 5.0
"""The most that a template may take; published ones take milliseconds."""

START_SECONDS = 60.0
"""The most that the process may take to start; it usually takes less than 0.5 s."""

MAX_CHARACTERS = 2**20
"""Of a template; published ones have some thousands."""


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

        Args:
          messages: each with a "role" and a "content".

        Raises:
          TypeError: `messages` is something else.
          ValueError: the template refuses the messages, cannot be parsed or run, or takes too much
            time or memory.
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
        variables = {
            "messages": [dict(message) for message in messages],
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
            **self.special_tokens,
        }
        now = datetime.datetime.now().isoformat()
        job = {"source": self.source, "variables": variables, "now": now, "seconds": 2 * SECONDS}
        try:
            answer = _worker(os.getpid()).answer(job)
        except (OSError, ValueError) as error:
            answer = {"reason": str(error), "is_parsed": True}
        if "text" in answer:
            return answer["text"]
        verb = "applied" if answer["is_parsed"] else "parsed"
        raise ValueError(
            f"{shown(self.path)} has a chat template that cannot be {verb}: "
            f"{reason(answer['reason'])}."
        )


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
            f"{shown(directory)} has no chat template, neither {TEMPLATE_FILE} nor one in "
            f"{TOKENIZER_CONFIG_FILE}; a model that was not trained to chat has none."
        )
    if len(source) > MAX_CHARACTERS:
        raise ValueError(
            f"{shown(path)} must have a chat template of at most {MAX_CHARACTERS} characters, but "
            "it has more."
        )
    if importlib.util.find_spec("jinja2") is None:
        raise ImportError(
            f"{shown(path)} has a chat template, which is read by the jinja2 library, which is not "
            "installed: pip install jinja2, or the extra hf."
        )
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
