"""`jax-specdec` and `python -m jax_specdec`: the command line.

Only the door: `lm.cli` has the commands, their options and what they do.
"""

from __future__ import annotations

from collections.abc import Sequence

from jax_specdec.lm.cli.command import run


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line.

    Args:
      arguments: without the program's name; None for ``sys.argv``.
    """
    run(arguments)


if __name__ == "__main__":
    main()
