"""Between texts and the target's tokens: tokenizers, chat templates, grammars."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import importlib.util
import json
import math
import threading
from typing import Any

import jax_specdec as sd
from jax_specdec._src.cli.models import Models
from jax_specdec._src.cli.server.limits import ApiError, Json, Limits
from jax_specdec._src.models.token_sizes import most_bytes_per_token


class Vocabulary:
    """Between texts and the target's tokens; slow work is for threads."""

    def __init__(self, models: Models, limits: Limits, max_length: int) -> None:
        self.stop_token_ids, self.stream = models.stop_token_ids, models.stream
        self._tokenizer, self._limits = models.tokenizer, limits
        self.token = functools.lru_cache(2**16)(self._token)
        self._size, self._max_length = models.target.model.vocab_size, max_length
        self._most_bytes = 1.0 if self._tokenizer is None else most_bytes_per_token(self._tokenizer)
        self._turns = threading.Semaphore(2)  # to tokenize; more would leave no core to the engine
        self._compilers = concurrent.futures.ThreadPoolExecutor(2)
        self._grammar_tokenizer: Any = None
        if importlib.util.find_spec("llguidance") is not None and self.stop_token_ids:
            self._grammar_tokenizer = self._for_grammars()

    def encode(self, prompt: str | list[int]) -> list[int]:
        """The token ids of a prompt, which may be ids already.

        Raises:
          ApiError: a text has too many tokens, which is known without them.
          ValueError: an id is not of this vocabulary.
        """
        if isinstance(prompt, list):
            if prompt and not 0 <= min(prompt) <= max(prompt) < self._size:
                raise ValueError(f"prompt must have token ids in [0, {self._size})")
            return prompt
        return self._encode("prompt", prompt, add_special_tokens=True)

    def encode_chat(self, messages: list[Json]) -> list[int]:
        """The token ids of a conversation.

        Raises:
          ApiError: its text has too many tokens, which is known without them.
          ValueError: there is no chat template, or it refuses the messages.
        """
        if self._tokenizer is None:
            raise ValueError("this model has no chat template: use /v1/completions")
        text = self._tokenizer.chat_text(messages)
        return self._encode("messages", text, add_special_tokens=False)

    def _encode(self, name: str, text: str, *, add_special_tokens: bool) -> list[int]:
        """The tokens of a text; one that cannot fit is refused before they are found."""
        fewest = math.ceil(len(text.encode(errors="replace")) / self._most_bytes)
        if fewest > self._max_length:
            raise ApiError(
                f"this model has {self._max_length} tokens for prompt and answer, but the prompt "
                f"has at least {fewest}",
                name,
                code="context_length_exceeded",
            )
        if self._tokenizer is None:
            return sd.encode_bytes(text)
        with self._turns:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def _token(self, token_id: int) -> tuple[str, list[int] | None]:
        """The text of one token, and its bytes if they are known."""
        if self._tokenizer is None:
            return sd.decode_bytes([token_id]), [token_id]
        once, twice = (self._tokenizer.decode([token_id] * n) for n in (1, 2))
        text = twice[len(once) :]  # with the space that many tokenizers drop from the first
        if not text:  # special tokens have no text
            text = self._tokenizer.library_tokenizer.id_to_token(token_id) or ""
        return text, None if "\ufffd" in text else list(text.encode())

    async def matchers(self, schema: Json, count: int) -> list[sd.LlguidanceMatcher]:
        """Matchers of a JSON schema, all at its beginning.

        Raises:
          ApiError: llguidance is missing, or the schema is too large, wrong, or takes too long.
        """
        name, limits = "response_format", self._limits
        if not self.stop_token_ids:
            raise ApiError(f"{name} needs a model with a stop token", name)
        if self._grammar_tokenizer is None:
            raise ApiError(f"{name} needs the llguidance library on the server", name)
        text = json.dumps(schema)
        if len(text) > limits.schema_bytes:
            raise ApiError(
                f"{name} must have a schema of at most {limits.schema_bytes} bytes", name
            )
        compiling = asyncio.wrap_future(self._compilers.submit(self._compile, text))
        try:
            matcher = await asyncio.wait_for(compiling, limits.schema_seconds)
        except TimeoutError:
            seconds = f"{limits.schema_seconds:g} s"
            raise ApiError(f"{name} has a schema that takes longer than {seconds}", name) from None
        except ValueError as error:
            raise ApiError(f"{name} has a schema that cannot be used: {error}", name) from error
        copies = [matcher.deep_copy() for _ in range(count)]
        return [sd.LlguidanceMatcher(one, self.stop_token_ids) for one in copies]

    def _compile(self, schema: str) -> Any:
        import llguidance

        # Without blanks: a model may write them until its budget ends.
        compact: Any = {"whitespace_flexible": False}
        grammar = llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=compact)
        matcher = llguidance.LLMatcher(self._grammar_tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise ValueError(matcher.get_error()[:500])
        return matcher

    def _for_grammars(self) -> Any:
        import llguidance

        stops = list(self.stop_token_ids)
        if self._tokenizer is not None:
            text = self._tokenizer.library_tokenizer.to_str()
            return llguidance.LLTokenizer(text, n_vocab=self._size, eos_token=stops)
        return llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes), eos_token=stops)


class _Bytes:
    """The tokens of the embedded target, for llguidance."""

    eos_token_id, bos_token_id, special_token_ids = 0, None, [0]
    tokens = [b"<|end|>", *(bytes([i]) for i in range(1, 256))]

    def __new__(cls, text: bytes) -> Any:  # what llguidance calls to tokenize
        return list(text)
