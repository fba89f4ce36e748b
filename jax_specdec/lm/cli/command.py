"""Reads a command line and runs its command."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from jax_specdec import __version__
from jax_specdec.lm import terminal
from jax_specdec.lm.cli.cache import keep_compiled_programs
from jax_specdec.lm.cli.options import Options, parse
from jax_specdec.lm.cli.process import run_to_end
from jax_specdec.lm.cli.prompts import InputError, read_prompts
from jax_specdec.lm.extras import extra


def run(arguments: Sequence[str] | None) -> None:
    """Run a command line to its end.

    Args:
      arguments: without the program's name; None for ``sys.argv``.
    """
    terminal.prepare_streams()
    run_to_end(lambda: _run(arguments))


def _run(arguments: Sequence[str] | None) -> None:
    # Help, the version and errors of the command line need no extra; the commands do.
    options = parse(arguments, __version__)
    command = _serve if options.command == "serve" else _show
    try:
        command(options)
    except (ImportError, InputError) as error:
        terminal.log(f"jax-specdec {options.command}: {error}")
        sys.exit(2)


def _serve(options: Options) -> None:
    with extra("serve"):
        import rich as rich  # for `terminal`

        from jax_specdec.lm.cli.serve import serve
    if options.compilation_cache:
        keep_compiled_programs()
    serve(options)


def _show(options: Options) -> None:
    with extra("lm"):
        from jax_specdec.lm.cli.show import show_bench, show_json, show_text
    prompts = read_prompts(options)
    if options.compilation_cache:
        keep_compiled_programs()
    if options.command == "bench":
        show_bench(options, prompts)
    else:
        (show_json if options.json else show_text)(options, prompts)
