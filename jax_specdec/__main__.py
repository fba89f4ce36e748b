"""`jax-specdec` and `python -m jax_specdec`: the command line."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from jax_specdec.lm.cli import missing


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line.

    Args:
      arguments: without the program's name; None for ``sys.argv``.
    """
    try:
        from jax_specdec.lm.cli.command import run
    except ModuleNotFoundError as error:
        print(f"jax-specdec: {missing(error, 'lm')}", file=sys.stderr)
        sys.exit(2)
    run(arguments)


if __name__ == "__main__":
    main()
