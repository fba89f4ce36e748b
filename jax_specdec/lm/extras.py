"""Libraries that come with an extra of the package; this file needs none.

What needs such a library imports it within ``with extra("lm"):``, in the function that uses it.
"""

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def extra(name: str) -> Iterator[None]:
    """Says in one sentence what to install, where a library that is imported here is missing.

    Raises:
      ImportError: it is missing; it comes with the extra `name`.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        # "jinja2" of "jinja2.sandbox"
        library = str(error.name).partition(".")[0]
        # No index has this package: its name there could become anybody's.
        raise ImportError(
            f"{library} is not installed: it comes with the extra {name}, "
            f'pip install ".[{name}]" in a clone of jax_specdec'
        ) from error
