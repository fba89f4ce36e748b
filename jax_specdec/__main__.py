"""`jax-specdec` and `python -m jax_specdec`: the command line."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console

from jax_specdec import __version__
from jax_specdec._src.cli.models import InputError
from jax_specdec._src.cli.options import parse
from jax_specdec._src.cli.show import show_json, show_text


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line.

    Args:
      arguments: without the program's name; None for ``sys.argv``.
    """
    options = parse(arguments, __version__)
    try:
        (show_json if options.json else show_text)(options, Console())
    except InputError as error:
        print(f"jax-specdec generate: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
