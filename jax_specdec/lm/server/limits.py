"""What a client may ask for, and what it is answered if it asks for more.

All other files of the server import this one. An `ApiError` is raised wherever something is wrong
with a request; `app` makes the answer of it, or, within a stream, `answer` the last event.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NotRequired, TypedDict

from starlette.responses import JSONResponse

from jax_specdec import grammar, lm

Json = dict[str, Any]


class Choice(TypedDict):
    """What `EngineDriver.submit` gets of a choice."""

    prompt: list[int]
    options: lm.RequestOptions
    matcher: NotRequired[grammar.LlguidanceMatcher]


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a client may ask for; sizes of the engine bound the rest."""

    connections: int = 512
    client_seconds: float = 30.0  # to send a request, or to read anything of what was sent
    body_bytes: int = 2**20
    schema_bytes: int = 2**16
    schema_seconds: int = 5  # of processor time, to compile it
    schema_mebibytes: int = 48  # of the process in which it is compiled first
    schema_processes: int = 8
    unsent_updates: int = 256  # of a request, while its client does not read
    status_seconds: float = 5.0  # between two status lines
    plain_messages: bool = False  # chats: what spells a special token is text
    failed_seconds: float = 2.0  # from a failure of the engine to the end of the server
    step_seconds: float = 60.0  # of a step, until it is taken for one that does not end
    drain_seconds: float = 80.0  # for what runs and waits when the server is stopped
    stop_seconds: float = 5.0  # for the engine's last step after that


class ApiError(Exception):
    """What a client is answered instead of a text, in the shape of OpenAI's errors."""

    def __init__(
        self,
        message: str,
        param: str | None = None,
        *,
        status: int = 400,
        code: str | None = None,
        headers: dict[str, str] | None = None,
        reason: object = None,
    ) -> None:
        super().__init__(_encodable(message))
        self.param = None if param is None else _encodable(param)
        self.status = status
        self.code = code
        self.headers = headers
        self.reason = reason  # for the log alone: it may name files, or have many lines

    @property
    def content(self) -> Json:
        """The JSON object."""
        # OpenAI's clients choose their exceptions by the status; `type`, `param` and `code` are for
        # those who read them.
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(self.status, kind)
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    @property
    def response(self) -> JSONResponse:
        """The whole answer."""
        return JSONResponse(self.content, self.status, self.headers)


def _encodable(text: str) -> str:
    """Returns a text without lone surrogates, which UTF-8 does not hold."""
    return text.encode("utf-8", "backslashreplace").decode()


def first_line(error: object) -> str:
    """Returns the beginning of a message, for a line of the log."""
    return str(error).partition("\n")[0][:500]


BUSY = {"Retry-After": "1"}
"""Headers of an error that may pass: after so many seconds OpenAI's client tries again."""
CLOSE = {"Connection": "close"}
"""Headers of an answer before the whole body was read: what follows is no new request."""
