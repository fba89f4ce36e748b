"""Applies chat templates, which are programs of strangers; `chat` runs this file in a process.

It reads a job from each line of standard input and writes the answer to a line of standard output,
both JSON. It imports nothing of the package, so that it starts quickly.
"""

import contextlib
import datetime
import functools
import json
import sys
from typing import Any, NoReturn

MAX_MEMORY = 2**29
"""Bytes of address space, of which Python and Jinja take a tenth."""

MAX_CHARACTERS = 2**24
"""As many as a prompt of the command line has bytes at most."""


def main() -> None:
    """Answer jobs until standard input ends.

    A job holds a template's `source`, the `variables` that it may name, the time `now`, and the
    `seconds` it may take. An answer holds the `text`; or a `reason` why there is none, and whether
    the template `is_parsed`.
    """
    sys.path += sys.argv[1:]  # where Jinja is: -I and -S leave out all but the standard library
    _limit_memory()
    environment = _environment()
    print(flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        _die_after(job["seconds"])
        answer = _answer(environment, job)
        _die_after(0)
        print(json.dumps(answer), flush=True)


def _limit_memory() -> None:
    with contextlib.suppress(ImportError, OSError, ValueError):  # not every system has limits
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))


def _die_after(seconds: float) -> None:
    """End this process even if the one that started it, and counts the time too, is gone."""
    import signal

    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, seconds)


def _environment() -> Any:
    """Jinja's sandbox with what `transformers` gives to templates."""
    import jinja2
    import jinja2.ext
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """`{% generation %}` marks answers in training texts; here it has no effect."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            """The body of the block."""
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, Generation]
    )
    environment.globals["raise_exception"] = refuse
    environment.filters["tojson"] = lambda value, **options: json.dumps(
        value, **{"ensure_ascii": False, **options}
    )
    return environment


@functools.lru_cache(8)
def _parsed(environment: Any, source: str) -> Any:
    """A template; parsing one takes tens of times as long as rendering it."""
    return environment.from_string(source)


def _answer(environment: Any, job: dict[str, Any]) -> dict[str, Any]:
    now, is_parsed = datetime.datetime.fromisoformat(job["now"]), False
    environment.globals["strftime_now"] = now.strftime
    try:
        template = _parsed(environment, job["source"])
        is_parsed = True
        text = template.render(job["variables"])
        if len(text) <= MAX_CHARACTERS:
            return {"text": text}
        reason = f"its text has {len(text)} characters, more than {MAX_CHARACTERS}"
    except MemoryError:
        reason = f"it needs more than {MAX_MEMORY >> 20} MiB of memory"
    except Exception as error:  # a program of unknown origin may raise anything
        reason = str(error)[:1000] or f"it raises {type(error).__name__} without a message"
    return {"reason": reason, "is_parsed": is_parsed}


if __name__ == "__main__":
    main()
