"""`jax-specdec` and `python -m jax_specdec`: the command line."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line.

    Args:
      arguments: without the program's name; None for ``sys.argv``.
    """
    try:
        from jax_specdec.lm.extras import extra

        with extra("lm"):
            from jax_specdec.lm.cli.command import run
    except ImportError as error:
        print(f"jax-specdec: {error}", file=sys.stderr)
        sys.exit(2)
    run(arguments)


if __name__ == "__main__":
    main()
