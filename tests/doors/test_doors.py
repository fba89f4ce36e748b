"""What a user starts, as the README says it: commands of their own, and models as published."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest

from . import models

pytestmark = [pytest.mark.doors, pytest.mark.newest]

# Of each line a command with its flags, how the checkpoint is stored, the model, and what --draft
# names: `-` for what a command takes by itself, `bench` several. "package" is what is embedded.
# Every model, every drafter, both dtypes and every command stand beside each other.
TABLE = """
    serve                bfloat16  llama    -
    serve                float32   llama    other
    serve --exact        bfloat16  llama    -
    serve                bfloat16  qwen2    draft
    serve                float32   qwen2    block
    serve                float32   qwen2    none
    serve                bfloat16  qwen3    suffix
    serve                float32   qwen3    eagle3
    serve --exact        bfloat16  gemma3   -
    serve                float32   gemma3   draft
    serve                bfloat16  gemma4   gemma
    serve                float32   package  -
    serve --exact        float32   package  -
    generate             float32   llama    suffix
    generate --compare   bfloat16  llama    eagle3
    generate             bfloat16  llama    none
    generate             float32   qwen2    ngram
    generate --chat      bfloat16  qwen3    other
    generate             bfloat16  qwen3    draft
    generate             bfloat16  qwen3    block
    generate --chat      float32   qwen3    none
    generate             bfloat16  gemma3   other
    generate --chat      float32   gemma3   none
    generate --compare   bfloat16  gemma3   suffix
    generate --compare   float32   gemma4   gemma
    generate --compare   float32   package  -
    generate             float32   package  none
    generate             float32   package  suffix
    generate             float32   package  eagle3
    generate             float32   package  dflash
    generate             float32   package  dspark
    bench -k 4           float32   llama    draft block
    bench -k 4           bfloat16  qwen2    suffix eagle3 other
    bench                bfloat16  qwen3    -
    bench -k 4           bfloat16  gemma3   eagle3 block
    bench -k 4           bfloat16  gemma4   gemma
    bench -k 4           float32   package  -
"""


class Door(NamedTuple):
    """A line of the table."""

    command: str
    flags: tuple[str, ...]
    dtype: str
    model: str
    drafters: tuple[str, ...]

    @property
    def named_drafters(self) -> set[str]:
        """The drafters, with the names of those that are taken by themselves."""
        own = {"model"} if self.model == "package" else {"ngram"}
        if self.command == "bench":
            own |= {"ngram"}
        return {*self.drafters} - {"-"} | (own if "-" in self.drafters else set())


def door_of(line: str) -> Door:
    before, dtype, after = re.split(r"\s(float32|bfloat16)\s", line.strip())
    command, *flags = before.split()
    model, *drafters = after.split()
    return Door(command, tuple(flags), dtype, model, tuple(drafters))


DOORS = [door_of(line) for line in TABLE.strip().splitlines()]
CHECKPOINTS = ("llama", "qwen2", "qwen3", "gemma3")
DRAFTERS = ("none", "ngram", "suffix", "draft", "other", "eagle3", "block")
OF_PACKAGE = ("none", "ngram", "suffix", "model", "eagle3", "dflash", "dspark")

PROMPT = '''def quicksort(items):
    """Returns the items in order, 0123456789, and the alphabet."""
    abcdefghijklmnopqrstuvwxyz = sorted(items)
    return "ABCDEFGHIJKLMNOPQRSTUVWXYZ", a'''
SCHEMA = {
    "type": "object",
    "properties": {"size": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["size"],
    "additionalProperties": False,
}
COMMAND = Path(sys.executable).with_name("jax-specdec")


def test_every_value_stands_beside_every_other() -> None:
    commands = ("serve", "generate", "bench")
    found: set[tuple[str, str]] = set()
    for door in DOORS:
        for drafter in door.named_drafters:
            values = (door.command, door.dtype, door.model, drafter)
            found |= {*itertools.combinations(values, 2)}
    dtypes = models.LEAST_GAP
    wanted = {
        *itertools.product(commands, dtypes),
        *itertools.product(commands, (*CHECKPOINTS, "package")),
        *itertools.product(dtypes, CHECKPOINTS),
        *itertools.product(dtypes, DRAFTERS),
        *itertools.product(CHECKPOINTS, DRAFTERS),
        *itertools.product(["package"], OF_PACKAGE),
        *itertools.product(commands, DRAFTERS),
    }
    wanted.remove(("bench", "none"))  # every table has plain decoding
    assert wanted - found == set()


@pytest.fixture
def arguments(door: Door, tmp_path: Path) -> list[str]:
    """What follows the command, of models that are written to disk."""
    found = list(door.flags)
    if door.model != "package":
        target = models.write(door.model, door.dtype, tmp_path / "target")
        found += ["--target", str(target)]
    for drafter in door.drafters:
        in_files = ("draft", "other", "block", "gemma")
        if drafter in in_files or (drafter == "eagle3" and "--target" in found):
            drafter = models.write_draft(drafter, target, door.dtype, tmp_path / drafter)
        if drafter != "-":
            found += ["--draft", drafter]
    return found


def environment(arguments: Sequence[str]) -> dict[str, str]:
    """As a user has it, but compiled as other tests are; what is to be exact, as users do."""
    own = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    if "--exact" in arguments:
        del own["JAX_DISABLE_MOST_OPTIMIZATIONS"]
    own.pop("JAX_SPECDEC_API_KEY", None)
    return own


def cases(command: str) -> Any:
    """The lines of a command, which any worker may take."""
    own = [door for door in DOORS if door.command == command]
    names = [" ".join([*door.flags, door.dtype, door.model, *door.drafters]) for door in own]
    params = [
        pytest.param(door, id=name, marks=[pytest.mark.xdist_group(f"{command} {name}")])
        for door, name in zip(own, names, strict=True)
    ]
    return pytest.mark.parametrize("door", params)


def target_of(arguments: list[str]) -> Path | None:
    if "--target" not in arguments:
        return None
    return Path(arguments[arguments.index("--target") + 1])


def run(command: str, *arguments: str) -> tuple[str, str]:
    """Returns what a command that succeeds prints to both streams."""
    done = subprocess.run(
        [COMMAND, command, *arguments], capture_output=True, env=environment(arguments)
    )
    # As bytes: a text may have carriage returns.
    out, errors = done.stdout.decode(), done.stderr.decode()
    assert done.returncode == 0 and "Traceback" not in errors, errors
    return out, errors


# generate


@cases("generate")
def test_generate_prints_what_plain_decoding_says(door: Door, arguments: list[str]) -> None:
    chat = "--chat" in door.flags
    text = models.sure_text(target_of(arguments), PROMPT, chat=chat)
    out, errors = run("generate", PROMPT, *arguments)
    if "--compare" in door.flags:
        assert_compared(out, door)
        assert errors == ""
    else:
        assert re.search(r"\d+ prompt tokens read, .*\n\d+ tokens at \d+ per second: ", errors)
    begin = text if chat else PROMPT + text
    assert len(text) > 5 and begin in out
    assert ("has another tokenizer than the target" in errors) == ("other" in door.drafters)


def assert_compared(out: str, door: Door) -> None:
    """A table has rows of each drafter, whose greedy texts are those of plain decoding."""
    assert re.search(r"^ +0 +plain ", out, re.MULTILINE) and "failed" not in out
    found = re.findall(r"^ +0 +[^p].* (?:yes|no, gap (\S+))$", out, re.MULTILINE)
    num_counts = 3 if door.command == "bench" and not door.flags else 1
    assert len(found) == num_counts * len(door.named_drafters), out
    # A text that differs does so at a near tie.
    assert all(float(gap or 0) < models.LEAST_GAP[door.dtype] for gap in found), out


# bench


@cases("bench")
def test_bench_compares_its_drafters(door: Door, arguments: list[str]) -> None:
    out, _ = run("bench", PROMPT, *arguments)
    assert_compared(out, door)
    assert "Fastest on these prompts: " in out


# serve


@contextlib.contextmanager
def serving(arguments: list[str], errors: Path) -> Iterator[str | None]:
    """Starts a server; yields its address, or None where it says at once that it cannot be exact.

    Ctrl-C ends it.
    """
    with (
        errors.open("w") as log,
        subprocess.Popen(
            [COMMAND, "serve", "--port", "0", *arguments],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment(arguments),
        ) as process,
    ):
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line and "--exact" in arguments:
                said = errors.read_text()
                assert process.wait() == 2 and said.count("\n") == 1, said
                assert "exact" in said and "Traceback" not in said
                yield None
                return
            address = re.fullmatch(r"Serving (.+) at (http://127\.0\.0\.1:\d+/v1)\n", line)
            assert address is not None, line + errors.read_text()
            yield address[2]
            process.send_signal(signal.SIGINT)
            rest, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    said = errors.read_text()
    assert process.returncode == 0 and rest == "", said
    assert "Traceback" not in said and "rror" not in said, said
    assert "compiled" in said


@cases("serve")
def test_a_server_answers_and_ends(door: Door, arguments: list[str], tmp_path: Path) -> None:
    target = target_of(arguments)
    name = "jax-specdec" if target is None else "target"
    with serving(arguments, tmp_path / "errors") as url, contextlib.ExitStack() as clients:
        if url is None:
            return
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120)
        clients.enter_context(client)
        assert [model.id for model in client.models.list()] == [name]
        asks = [Texts(client, name, models.sure_text(target, PROMPT))]
        if target is not None:
            asks.append(Chats(client, name, models.sure_text(target, PROMPT, chat=True)))
        for ask in asks:
            ask.whole(num_cached=0)
            ask.stream()
            ask.whole(num_cached=32)
            ask.follow()


class Texts:
    """Asks for greedy texts, which begin with a certain one."""

    def __init__(self, client: openai.OpenAI, model: str, begin: str) -> None:
        assert begin
        self.client = client
        self.begin = begin
        self.asked: dict[str, Any] = dict(model=model, temperature=0, max_tokens=24)

    def ask(self, **asked: Any) -> Any:
        return self.client.completions.create(prompt=PROMPT, **self.asked | asked)

    def text_of(self, choice: Any) -> str:
        return choice.text

    def whole(self, num_cached: int) -> None:
        """Of the prompt so many tokens, or more, are not read again; none for 0."""
        answer = self.ask()
        assert self.text_of(answer.choices[0]).startswith(self.begin), answer
        found = answer.usage.prompt_tokens_details.cached_tokens
        assert found >= num_cached and bool(found) == bool(num_cached)
        assert answer.usage.completion_tokens == 24

    def stream(self) -> None:
        texts = [self.text_of(chunk.choices[0]) for chunk in self.ask(stream=True)]
        assert "".join(texts).startswith(self.begin), texts

    def follow(self) -> None:
        """Asks for JSON by a schema."""
        follows = {"type": "json_schema", "json_schema": {"name": "size", "schema": SCHEMA}}
        answer = self.ask(extra_body={"response_format": follows})
        found = json.loads(self.text_of(answer.choices[0]))
        assert found.keys() == {"size"} and found["size"] in range(100)


class Chats(Texts):
    """Asks for them as answers."""

    def ask(self, **asked: Any) -> Any:
        messages: Any = [{"role": "user", "content": PROMPT}]
        return self.client.chat.completions.create(messages=messages, **self.asked | asked)

    def text_of(self, choice: Any) -> str:
        of = getattr(choice, "delta", None) or choice.message
        return of.content or ""
