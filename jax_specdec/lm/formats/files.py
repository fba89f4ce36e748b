"""Reading files of any origin: a file that is missing or of another kind is named in the error.

Files of a checkpoint come from strangers: they may be cut, damaged, or something else under the
name. Whatever is wrong with one ends in an OSError or a ValueError of one sentence that begins with
its path, never in an error of a library, and no JSON makes the process take memory without bound.
`JsonObject` carries the path on, down to the value that is wrong.
"""

import collections
import contextlib
import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jax_specdec._src.base.arrays import refuse
from jax_specdec.lm.models.fields import quoted, reason, shown

JsonValue = Any
"""A value in a JSON file, of any type: who reads it checks it."""

MAX_BYTES = 2**26
"""More than the largest tokenizers (some 35 MB); in memory JSON takes 20 times its size."""

# What a clone without Git LFS has in place of a large file: three lines of text.
_POINTER = b"version https://git-lfs"
_SAVES = "save_pretrained of transformers writes it"
_BESIDE = {
    "config.json": {
        "adapter_config.json": "an adapter alone is there, to be merged into its model",
        "snapshots": "name a directory in snapshots there, as this is one of the hub's cache",
    },
    "tokenizer.json": {"tokenizer.model": _SAVES, "vocab.json": _SAVES},
    "model.safetensors": {"pytorch_model.bin": _SAVES, "pytorch_model.bin.index.json": _SAVES},
}
"""By the name of a file that is missing: what may be there instead, and what to do then."""
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def path_of(directory: str | os.PathLike[str]) -> Path:
    """Returns the path of a directory.

    Raises:
      TypeError: it is not a path.
    """
    try:
        return Path(directory)
    except TypeError:
        refuse(TypeError, "directory", "be a path", directory)


def is_there(path: Path) -> bool:
    """Returns whether anything has this path, even a broken link."""
    return os.path.lexists(path)


def existing(path: Path) -> Path:
    """Returns the path, if it is a file or a link to one.

    Raises:
      FileNotFoundError: nothing is there, or a broken link.
      OSError: something other than a file is there, something other than a directory is in place of
        its directory, or the system refuses the path.
      ValueError: it is a pointer of Git LFS.
    """
    # Anything but a file is refused before it is opened: to open a named pipe would wait forever.
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError) as error:
        raise _missing(path) from error
    except OSError as error:  # a name too long, links in a circle, no permission
        raise OSError(f"{shown(path)} cannot be opened: {error.strerror}.") from error
    except ValueError as error:  # a character that a path cannot have
        raise OSError(f"{shown(path)} cannot be opened: {reason(error)}.") from error
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "something else")
        raise OSError(f"{shown(path)} is {kind}, but must be a file.")
    # What keeps the file from being read is not reported here, but by who opens it next.
    with contextlib.suppress(OSError), path.open("rb") as file:
        begin = file.read(len(_POINTER))
        if begin == _POINTER:
            raise ValueError(
                f"{shown(path)} is a pointer of Git LFS, not the file: `git lfs pull` in its "
                "directory gets that."
            )
    return path


def instead_of(path: Path) -> str:
    """Returns how a message about a missing file goes on, if what is beside it explains that."""
    hints = (
        text for name, text in _BESIDE.get(path.name, {}).items() if is_there(path.parent / name)
    )
    return "".join(f": {text}" for text in hints)


def _missing(path: Path) -> OSError:
    """Returns the error of a path at which nothing is, with what is there instead or would help."""
    # The hub's cache is made of links, which break where blobs were deleted.
    if path.is_symlink():
        target = shown(os.readlink(path))
        return FileNotFoundError(f"{shown(path)} is a link to {target}, which does not exist.")
    directory = shown(path.parent)
    # A model that is one file, as GGUF is, was named in place of a directory.
    if os.path.isfile(path.parent):
        return OSError(
            f"{directory} is a file, but a checkpoint must be a directory of config.json, "
            "safetensors and tokenizer.json; GGUF is not read."
        )
    if path.parent.exists():
        return FileNotFoundError(
            f"{shown(path)} does not exist; a checkpoint directory must hold it{instead_of(path)}."
        )
    # A directory that is called as models of the hub are, "OWNER/MODEL", was meant as one.
    parts = path.parent.parts
    is_name = len(parts) == 2 and not path.is_absolute() and ".." not in parts
    model = directory if is_name else f"OWNER/{shown(path.parent.name)}"
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", model):  # as no model of the hub is called
        return FileNotFoundError(f"{directory} does not exist.")
    return FileNotFoundError(
        f"{directory} does not exist; `hf download {model} --local-dir {directory}` downloads a "
        "checkpoint to it."
    )


def read_text(path: Path) -> str:
    """Returns the text of a file.

    Raises:
      FileNotFoundError: it does not exist.
      OSError: it is not a file, or cannot be opened.
      ValueError: it is not text in UTF-8, or has more than 64 MiB.
    """
    # By its size on disk, before any of it is in memory.
    if (size := existing(path).stat().st_size) > MAX_BYTES:
        raise ValueError(f"{shown(path)} must have at most {MAX_BYTES} bytes, but has {size}.")
    try:
        with path.open(encoding="utf-8") as file:
            return file.read()
    except UnicodeDecodeError as error:
        raise ValueError(f"{shown(path)} is not text in UTF-8: {reason(error)}.") from error
    except OSError as error:
        raise OSError(f"{shown(path)} cannot be opened: {error.strerror}.") from error


class JsonObject(dict[str, JsonValue]):
    """The object in a JSON file, or an object in it; `where` is what messages call it.

    Writers leave out a key or write null for the same. Where null has a meaning of its own, use
    `or_else` or `get`; all other methods take it for absent.
    """

    def __init__(self, members: dict[str, JsonValue], where: str) -> None:
        super().__init__(members)
        self.where = where

    def given(self, key: str, default: JsonValue) -> JsonValue:
        """Returns the value of a key, or the default where it is absent or null."""
        value = self.get(key)
        return default if value is None else value

    def or_else(self, **defaults: JsonValue) -> "JsonObject":
        """Returns the object with values of keys that are absent; one that is null stays so."""
        return JsonObject({**defaults, **self}, self.where)

    def but(self, **values: JsonValue) -> "JsonObject":
        """Returns the object with other values of some keys."""
        return JsonObject({**self, **values}, self.where)

    def needed(self, key: str) -> JsonValue:
        """Returns the value of a key that must be there."""
        if (value := self.get(key)) is None:
            raise ValueError(f"{self.where} lacks {key}.")
        return value

    def nested(self, key: str) -> "JsonObject":
        """Returns the object of a key; an empty one where it is absent or null."""
        value = self.given(key, {})
        self.require(isinstance(value, dict), key, "which is not a JSON object")
        return JsonObject(value, f"{self.where}: {key}")

    def require(self, holds: object, key: str, reason: str) -> None:
        """Raises ValueError with the value of a key and a reason, unless something holds."""
        if not holds:
            raise ValueError(f"{self.where} has {key} = {quoted(self.get(key))}, {reason}.")

    def require_one_of(self, key: str, *served: JsonValue) -> None:
        """Raises ValueError unless a key has a value that is served, or is absent or null.

        Values are compared as Python does: 1 is 1.0, and also True.
        """
        self.require(self.get(key) in (None, *served), key, only(*served))


def only(*supported: object) -> str:
    """Returns the end of a sentence about a value that is none of these."""
    if not supported:
        return "which is not supported"
    *others, last = map(repr, supported)
    listed = f"{', '.join(others)} and {last} are" if others else f"{last} is"
    return f"but only {listed} supported"


@contextlib.contextmanager
def errors_name(where: str) -> Iterator[None]:
    """Raises TypeError and ValueError of what is made of a file as ValueError with its name.

    Classes such as `LayerSpec` check what any caller gives them, and do not know of files.
    """
    try:
        yield
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}.") from error


def read_json(path: Path, *, optional: bool = False) -> JsonObject:
    """Returns the JSON object in a file; an empty one if an `optional` file is not there.

    Numbers are as Python reads them: 1e400 and Infinity are inf. The caller checks them.

    Raises:
      FileNotFoundError, OSError: as for `read_text`.
      ValueError: it holds something other than a JSON object, one key twice, or more than 64 MiB.
    """
    if optional and not is_there(path):
        return JsonObject({}, shown(path))
    text = read_text(path)
    # Objects nested too deep end in a RecursionError.
    try:
        raw = json.loads(text, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{shown(path)} is not valid JSON: {reason(error)}.") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{shown(path)} must hold a JSON object.")
    return JsonObject(raw, shown(path))


def _object(pairs: list[tuple[str, JsonValue]]) -> dict[str, JsonValue]:
    """Returns an object. One with a key twice is refused: readers differ in which one counts."""
    members = dict(pairs)
    if len(members) < len(pairs):
        (twice, _), *_ = collections.Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"an object has the key {quoted(twice)} twice")
    return members
