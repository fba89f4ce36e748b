"""Where prompts come from: the command line, files, standard input.

`command` reads the prompts before anything is loaded; `models` reads a prediction by `read_file`.
"""

from __future__ import annotations

import sys

from jax_specdec.lm.cli.options import Decoding
from jax_specdec.lm.models.fields import shown

_MAX_BYTES = 2**24
"""More than any model here can read; a file without an end must not fill the memory."""


class InputError(Exception):
    """Something is wrong with files or options; the message is one line for the user."""


def read_prompts(options: Decoding) -> list[str]:
    """Returns the prompts of a command line in its order: arguments, then files.

    Raises:
      InputError: there is none, one is empty, or a file cannot be read.
    """
    prompts = options.prompts
    also = ""
    if not prompts and not options.prompt_files:
        if sys.stdin is None or sys.stdin.isatty():
            raise InputError(
                "a prompt is needed: an argument, --prompt-file FILE, or standard input (-)"
            )
        prompts = ("-",)
        also = ", once as the prompt, since there is no other"
    # A second reader would find nothing.
    if [*prompts, *options.prompt_files, options.prediction].count("-") > 1:
        raise InputError(f"standard input (-) can be read once, but is asked for twice{also}")
    texts = [read_file(text) if text == "-" else text for text in prompts]
    return texts + [read_file(name) for name in options.prompt_files]


def read_file(name: str, what: str = "the prompt") -> str:
    """Returns the text of a file, without a line break at its end; - is standard input.

    Raises:
      InputError: it cannot be read, is no text, too long, or empty.
    """
    where = "standard input" if name == "-" else shown(name)
    try:
        if name == "-":
            if sys.stdin is None:
                raise InputError("standard input is closed")
            # Not to standard output, which has texts alone.
            if sys.stdin.isatty():
                print(f"Type {what}; Ctrl-D ends it.", file=sys.stderr)
            # One byte more than may be there, so that more is noticed.
            data = sys.stdin.buffer.read(_MAX_BYTES + 1)
        else:
            with open(name, "rb") as file:
                data = file.read(_MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            raise InputError(f"{where} must hold at most {_MAX_BYTES} bytes, but holds more")
        # Without the mark that some editors write first (U+FEFF).
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{where} must be text in UTF-8, but byte {error.start} is {data[error.start]:#04x}"
        ) from error
    except OSError as error:
        raise InputError(f"{where} cannot be read: {error.strerror}") from error
    except ValueError as error:  # a character that a path cannot have
        raise InputError(f"{where} cannot be read: {error}") from error
    text = text.removesuffix("\n").removesuffix("\r")
    if not text:
        raise InputError(f"{what} must not be empty, but {where} holds nothing")
    return text
