"""Reads a command line and runs its command.

What is wrong with files or options, and a library that is not installed, ends a command with exit
code 2 and one line on standard error, before anything is printed to standard output.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence

from jax_specdec import __version__
from jax_specdec.lm import terminal
from jax_specdec.lm.cli.cache import keep_compiled_programs
from jax_specdec.lm.cli.options import Serve
from jax_specdec.lm.cli.parsing import parse
from jax_specdec.lm.cli.process import run_to_end
from jax_specdec.lm.cli.prompts import InputError, read_prompts
from jax_specdec.lm.decoding.exact import NotExactError
from jax_specdec.lm.extras import extra


def run(arguments: Sequence[str] | None) -> None:
    """Runs a command line to its end.

    Args:
      arguments: without the program's name; None for ``sys.argv``.
    """
    terminal.prepare_streams()
    run_to_end(functools.partial(_run, arguments))


def _run(arguments: Sequence[str] | None) -> None:
    # Help, the version and errors of the command line need no extra; the commands do.
    options = parse(arguments, __version__)
    try:
        # Only what this command needs: `generate` runs without the libraries of a server.
        with extra("serve" if isinstance(options, Serve) else "lm"):
            import rich as rich  # for `terminal`

            if isinstance(options, Serve):
                from jax_specdec.lm.cli.serve import serve
            else:
                from jax_specdec.lm.cli.show import show
        # Before the models, which take long: a file may be missing.
        prompts = [] if isinstance(options, Serve) else read_prompts(options)
        # Before the first program is compiled.
        if options.compilation_cache:
            keep_compiled_programs()
        if isinstance(options, Serve):
            serve(options)
        else:
            show(options, prompts)
    except (ImportError, InputError, NotExactError) as error:
        terminal.log(f"jax-specdec {options.command}: {error}")
        sys.exit(2)
