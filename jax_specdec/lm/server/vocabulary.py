"""Between texts and the target's tokens: tokenizers, chat templates, grammars.

A server has one `Vocabulary`. `request` has it encode prompts and try schemas, `app` has it compile
matchers, and `answer` asks it how a token is shown. Methods that take long are called in threads,
or are coroutines that do this themselves.
"""

from __future__ import annotations

import asyncio
import collections
import copy
import functools
import importlib.util
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

import jax_specdec as sd
from jax_specdec import lm
from jax_specdec.lm import terminal
from jax_specdec.lm.loading import TargetText
from jax_specdec.lm.models.fields import shown
from jax_specdec.lm.server import schemas
from jax_specdec.lm.server.limits import BUSY, ApiError, Json, Limits
from jax_specdec.lm.text.chat import read_chat_template

if TYPE_CHECKING:
    import llguidance

T = TypeVar("T")


class Vocabulary:
    """Between texts and the target's tokens; slow work is for threads."""

    def __init__(self, text: TargetText, limits: Limits) -> None:
        self.stop_token_ids = text.stop_token_ids
        self.stream = text.stream
        self.special_tokens = {} if text.tokenizer is None else text.tokenizer.special_tokens
        # Alternatives of log-probabilities are mostly the same tokens again.
        self.token = functools.lru_cache(2**16)(self._token)
        self._text = text
        self._tokenizer = text.tokenizer
        self._size = text.vocab_size
        self._limits = limits
        self.threads = ThreadPoolExecutor(2)  # more would leave no core to the engine
        # Each waits for the process of one schema, or compiles it here.
        self._schema_threads = ThreadPoolExecutor(limits.schema_processes)
        self._trials = asyncio.Semaphore(limits.schema_processes)
        self._tried = collections.deque[str](maxlen=64)  # those that can be used
        self._grammar_tokenizer, self._without_schemas = self._for_grammars()

    def encode(self, prompt: str | list[int]) -> list[int]:
        """Returns the token ids of a prompt, which may be ids already, at least one.

        Raises:
          ValueError: an id is not of this vocabulary.
        """
        if isinstance(prompt, list):
            if not 0 <= min(prompt) <= max(prompt) < self._size:
                raise ValueError(f"prompt must have token ids in [0, {self._size})")
            return prompt
        return self._text.encode(prompt)

    def encode_text(self, text: str) -> list[int]:
        """Returns the token ids of a text that has another before it."""
        return self._text.encode(text, add_special_tokens=False)

    def encode_chat(self, messages: list[Json], *, thinks: bool = True) -> list[int]:
        """Returns the token ids of a conversation.

        Raises:
          ApiError: the model is not to think, and the chat template has no switch for that.
          ValueError: there is no chat template, or it refuses the messages.
        """
        if self._tokenizer is None:
            raise ValueError("this model has no chat template: use /v1/completions")
        variables = {}
        # A template takes variables that it does not name, and the model would think all the same.
        if not thinks:
            name = "reasoning_effort"
            switch = "enable_thinking"
            if switch not in read_chat_template(self._tokenizer.path.parent).source:
                message = f"{name} is not supported: the chat template of this model has no switch"
                raise ApiError(message, name, code="unsupported_parameter")
            variables[switch] = False
        plain = self._limits.plain_messages
        return self._tokenizer.encode_chat(messages, plain_messages=plain, **variables)

    def without_path(self, message: str) -> str:
        """Returns a message for clients: a file of the model by its name, not by its path."""
        if self._tokenizer is None:
            return message
        directory = self._tokenizer.path.parent
        for path in (*directory.iterdir(), directory):
            if message.startswith(f"{shown(path)} "):
                name = "this model" if path == directory else path.name
                return name + message.removeprefix(shown(path))
        return message

    def _token(self, token_id: int) -> tuple[str, bytes]:
        """Returns a token as it is shown, and the UTF-8 that it adds inside a text."""
        if self._tokenizer is None:
            return lm.decode_bytes([token_id]), bytes([token_id])
        token_bytes = self._tokenizer.token_bytes(token_id)
        # What is shown of a special token, which has no text; an id may be no token at all.
        name = self._tokenizer.library_tokenizer.id_to_token(token_id) or ""
        return token_bytes.decode(errors="replace") or name, token_bytes

    async def try_schema(self, schema: Json) -> str:
        """Returns the JSON of a schema that can be used, after trying it in a process.

        Nobody waits for one whose client has left: it is killed.

        Raises:
          ApiError: this server has no schemas, or this one is too large, wrong, or takes too much.
        """
        name = "response_format"
        limits = self._limits
        if self._without_schemas:
            raise ApiError(f"{name} {self._without_schemas}", name)
        text = json.dumps(schema)
        if len(text) > limits.schema_bytes:
            raise ApiError(
                f"{name} must have a schema of at most {limits.schema_bytes} bytes", name
            )
        # Clients send the same schema with every request.
        if text in self._tried:
            return text
        # No more processes than threads that wait for them; others wait here, where a client that
        # leaves ends the wait.
        async with self._trials:
            try:
                trial = schemas.Trial(limits.schema_seconds, limits.schema_mebibytes)
            except OSError as error:
                message = "no process can be started to compile a schema: try again later"
                raise ApiError(message, name, status=503, headers=BUSY, reason=error) from error
            try:
                await self._on_schema(trial.run, text)
            finally:
                # If the client has left, the thread still waits for the process: this ends both.
                trial.end()
        self._tried.append(text)
        return text

    async def matchers(self, schema: str, budgets: list[int]) -> list[sd.grammar.LlguidanceMatcher]:
        """Returns matchers of what `try_schema` returned, for texts of at most so many tokens.

        All are at the beginning of the schema. Together they take up to 48 MiB.

        Raises:
          ApiError: it forces more tokens than a text may have, or fails with this tokenizer.
        """
        matcher, forced = await self._on_schema(self._compile, schema)
        # An answer that ends before what is forced would never follow the schema.
        budget = min(budgets)
        if forced > budget:
            raise ApiError(
                f"response_format must have a schema whose texts can have {budget} tokens, as the "
                f"answer may have, but it forces {forced} at its beginning",
                "response_format",
            )
        # One for each choice: each goes on with its own text.
        return [copy.deepcopy(matcher) for _ in budgets]

    async def _on_schema(self, function: Callable[[str], T], schema: str) -> T:
        """Returns what a function makes of a schema in a thread; a ValueError is an `ApiError`."""
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._schema_threads, function, schema)
        except ValueError as error:
            message = f"response_format has a schema that cannot be used: {error}"
            raise ApiError(message, "response_format") from error

    def _compile(self, schema: str) -> tuple[sd.grammar.LlguidanceMatcher, int]:
        """Returns a matcher, and how many tokens the schema forces at its beginning."""
        assert self._grammar_tokenizer is not None  # `try_schema` has found one
        compiled = schemas.compile_schema(schema, self._grammar_tokenizer)
        # The forced bytes may end within a character. `compute_ff_tokens` would not do for the
        # count: of a long text it gives the beginning alone (`schemas._Exact`).
        text = compiled.compute_ff_bytes().decode(errors="ignore")
        forced = self._text.encode(text, add_special_tokens=False)
        return sd.grammar.LlguidanceMatcher(compiled, self.stop_token_ids), len(forced)

    def _for_grammars(self) -> tuple[llguidance.LLTokenizer | None, str]:
        """Returns llguidance's tokenizer; or None and why no request can have a schema."""
        if not self.stop_token_ids:
            return None, "needs a model with a stop token"
        if importlib.util.find_spec("llguidance") is None:
            return None, "needs the llguidance library on the server"
        # The least schema is tried at the start, here and in a process: if it fails, the log says
        # so at once, and each request with a schema is refused with the reason.
        try:
            tokenizer = self._llguidance_tokenizer()
            schemas.compile_schema("{}", tokenizer)
            schemas.Trial(self._limits.schema_seconds, self._limits.schema_mebibytes).run("{}")
            return tokenizer, ""
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic in Rust is no Exception
            why = f"cannot be used: llguidance fails with this tokenizer: {error!s:.200}"
            terminal.log(f"response_format {why}")
            return None, why

    def _llguidance_tokenizer(self) -> llguidance.LLTokenizer:
        """Returns llguidance's tokenizer; that of a model without ids that the model lacks."""
        if self._tokenizer is None:
            return schemas.byte_tokenizer()
        described = json.loads(self._tokenizer.library_tokenizer.to_str())
        # A tokenizer may have added tokens behind the model's last id: no logit is theirs.
        added = [token for token in described["added_tokens"] if token["id"] < self._size]
        texts = {token["id"]: self._tokenizer.token_bytes(token["id"]) for token in added}
        described["added_tokens"] = added
        return schemas.model_tokenizer(described, self._size, texts, [*self.stop_token_ids])
