"""The text the embedded models are trained, validated and tested on: Python's standard library.

Three disjoint sets of files: training, validation (which checkpoint to keep) and held-out (what is
reported). See README.md for what is left out and why. What is malformed is left out by name, not
by parsing, so that the text does not depend on the Python that runs this.
"""

import hashlib
import re
import sysconfig
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jax_specdec.lm.text.bytes import DOCUMENT_SEPARATOR

HELD_OUT = (
    "bisect.py",
    "calendar.py",
    "cmd.py",
    "colorsys.py",
    "configparser.py",
    "csv.py",
    "difflib.py",
    "fnmatch.py",
    "fractions.py",
    "graphlib.py",
    "heapq.py",
    "json/encoder.py",
    "queue.py",
    "sched.py",
    "shlex.py",
    "statistics.py",
    "textwrap.py",
    "urllib/robotparser.py",
)
"""Ordinary modules of varied kind, for the reported numbers."""

VALIDATION = (
    "asyncio/queues.py",
    "concurrent/futures/thread.py",
    "getopt.py",
    "glob.py",
    "html/parser.py",
    "netrc.py",
    "reprlib.py",
    "string.py",
    "timeit.py",
    "zipapp.py",
)
"""Modules that choose the checkpoint."""

EXCLUDED = (
    "site-packages/",  # not the standard library
    "dist-packages/",
    "encodings/",  # generated character tables
    "html/entities.py",  # a table
    "lib2to3/tests/data/",  # malformed on purpose, or Python 2
    "pydoc_data/",  # the language reference as one generated string
    "re/_casefix.py",  # generated
    "stringprep.py",  # generated from the Unicode database
    "test/encoded_modules/",  # exercises other encodings than UTF-8
    "test/test_ast/snippets.py",  # generated dumps
    "test/tokenizedata/",  # malformed on purpose
)
"""Paths, or their beginnings, that are never read."""

EXCLUDED_NAMES = (
    "_sysconfigdata",  # generated for one machine
    "bad_",  # malformed on purpose
    "badsyntax_",
)
"""Beginnings of file names that are never read."""


class Text(NamedTuple):
    """The three sets of files, each as `(path, bytes)` in the order of their paths.

    Attributes:
        library: training files outside `test` and `idlelib/idle_test`.
        tests: training files inside; some distributions of Python ship none.
        validation: the files of `VALIDATION`.
        held_out: the files of `HELD_OUT`.
    """

    library: list[tuple[str, bytes]]
    tests: list[tuple[str, bytes]]
    validation: list[tuple[str, bytes]]
    held_out: list[tuple[str, bytes]]


def read_text(stdlib: Path | None = None) -> Text:
    """Reads a standard library directory (default: that of the running Python)."""
    stdlib = stdlib or Path(sysconfig.get_paths()["stdlib"])
    text = Text([], [], [], [])
    for path in sorted(stdlib.rglob("*.py"), key=lambda path: path.relative_to(stdlib).as_posix()):
        name = path.relative_to(stdlib).as_posix()
        if name.startswith(EXCLUDED) or path.name.startswith(EXCLUDED_NAMES):
            continue
        source = path.read_bytes()
        if not _is_text(source):
            continue
        if name in HELD_OUT:
            text.held_out.append((name, source))
        elif name in VALIDATION:
            text.validation.append((name, source))
        elif name.startswith(("test/", "idlelib/idle_test/")):
            if not _tests_an_unseen_module(name):
                text.tests.append((name, source))
        else:
            text.library.append((name, source))
    if not (text.library and text.validation and text.held_out):
        raise SystemExit(f"{stdlib} is not Python's standard library.")
    return text


def _is_text(source: bytes) -> bool:
    try:
        source.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return bool(source) and DOCUMENT_SEPARATOR not in source


def _tests_an_unseen_module(name: str) -> bool:
    """Whether a path has a component `test_<module>` for a held-out or validation module."""
    stems = {Path(unseen).stem for unseen in HELD_OUT + VALIDATION}
    parts = {Path(part).stem for part in name.split("/")}
    return bool(parts & {f"test_{stem}" for stem in stems})


def without_docstrings(source: bytes) -> bytes:
    """A source file without the docstrings of its functions and classes.

    By pattern, so that the result does not depend on the Python that runs this: a triple-quoted
    string that begins the line after a colon, where code of the same indentation follows.
    """
    return _DOCSTRING.sub(b"", source)


_DOCSTRING = re.compile(
    rb"""(?<=:\n)([ ]+)[rRuU]?(\"\"\"|''')(?s:(?!\2).)*\2[ ]*\n(?:[ ]*\n)*(?=\1[^\s#])"""
)


def join(files: list[tuple[str, bytes]]) -> np.ndarray:
    """The files as one uint8 array, each followed by a separator, with one before the first."""
    separator = bytes([DOCUMENT_SEPARATOR])
    parts = [separator, *(source + separator for _, source in files)]
    return np.frombuffer(b"".join(parts), np.uint8)


def digest(text: Text) -> str:
    """SHA-256 of all files, by which a run says what it read."""
    return hashlib.sha256(b"".join(join(files).tobytes() for files in text)).hexdigest()


def block_starts(data: np.ndarray) -> np.ndarray:
    """Offsets of the lines that begin a function or a class, ascending, int32."""
    pattern = re.compile(rb"^[ \t]*(?:async def|def|class) ", re.MULTILINE)
    return np.array([match.start() for match in pattern.finditer(data.tobytes())], np.int32)


CONTEXT_BYTES = 256  # at most, before a function's head
_HEAD = re.compile(r"^( *)(?:async )?def \w+\(.*\)(?: *->.*)?:\n", re.MULTILINE)


def function_heads(files: list[tuple[str, bytes]], count: int) -> list[tuple[str, str]]:
    """`(context, head)` of `count` functions, evenly spread over all one-line heads of the files.

    The context is what stands before the head: at most CONTEXT_BYTES, from the start of a line.
    """
    heads = []
    for _, source in files:
        text = source.decode("utf-8")
        for match in _HEAD.finditer(text):
            context = text[max(0, match.start() - CONTEXT_BYTES) : match.start()]
            if match.start() > CONTEXT_BYTES:
                context = context[context.find("\n") + 1 :]
            heads.append((context, match.group()))
    return [heads[i * len(heads) // count] for i in range(count)]
