"""JSON schemas for llguidance, tried first in a process that has little time and memory.

llguidance's limits (`LLParserLimits`) bound the lexer and each mask, but not how a schema becomes a
grammar: with the smallest, a string that must match 24 patterns takes more than 20 s or 3 GB there,
`{"multipleOf": 999983}` 16 s and 390 MB. Nothing stops a thread, so a process tries it first.

This file is that process's script, too, so it imports nothing of the package.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import llguidance

_MOST_FORCED = 4096
"""Characters of a forced text that are tokenized at a time, which takes some ms."""

_REFUSED = 3
"""Exit status of the process where llguidance says what is wrong; it is printed."""


def byte_tokenizer() -> llguidance.LLTokenizer:
    """Returns llguidance's tokenizer whose tokens are bytes, and whose token 0 ends a text."""
    import llguidance

    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes), eos_token=[0])


class _Bytes:
    """What llguidance asks of a tokenizer, for bytes."""

    eos_token_id = 0
    bos_token_id = None
    special_token_ids = [0]
    tokens = [b"<|end|>", *(bytes([i]) for i in range(1, 256))]

    def __new__(cls, text: bytes) -> Any:  # what llguidance calls to tokenize
        return list(text)


def model_tokenizer(
    described: dict[str, Any], size: int, added: dict[int, bytes], stop_token_ids: list[int]
) -> llguidance.LLTokenizer:
    """Returns llguidance's tokenizer of a model, for which forced text is what a schema says.

    Args:
      described: a `tokenizer.json`.
      size: ids of the model, at least as many as the tokenizer has.
      added: the texts of added tokens; special ones have none.
      stop_token_ids: of the model.
    """
    import llguidance

    # llguidance reads the bytes of all tokens out of the file; from these and `_Exact` the
    # tokenizer is then made anew. (Of a file alone, it tokenizes forced text with the normalizer.)
    library = llguidance.LLTokenizer(json.dumps(described), n_vocab=size)
    tokens = [library.decode_bytes([i]) for i in range(size)]
    # An id that is no token is shown as its number.
    special = {i for i in range(size) if library.is_special_token(i) or tokens[i] == b"<[%d]>" % i}
    for token_id in added.keys() - special:
        tokens[token_id] = added[token_id]
    exact = _Exact(described, tokens, special, stop_token_ids[0])
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(exact), eos_token=stop_token_ids)
    # Each needs the other: this is what `exact` does where the model's tokenizer changes a text.
    exact.longest_tokens = tokenizer.greedy_tokenize
    return tokenizer


class _Exact:
    """A tokenizer that does what the model's does, unless that changes the text.

    A normalizer may, and what spells a special token would become one. Such a text is cut into the
    longest tokens from its beginning on. Of a long text the first part is enough: llguidance asks
    again when that is written, in the way of all requests.
    """

    bos_token_id = None
    longest_tokens: Callable[[str], list[int]]

    def __init__(
        self, described: dict[str, Any], tokens: list[bytes], special: set[int], eos_token_id: int
    ) -> None:
        import tokenizers

        self.eos_token_id = eos_token_id
        self.tokens = tokens
        self.special_token_ids = [*special]
        self._special = special
        parts = {x: _without_prefix(described[x]) for x in ("normalizer", "pre_tokenizer")}
        self._encoder = tokenizers.Tokenizer.from_str(json.dumps(described | parts))
        self._encoder.encode_special_tokens = True

    def __call__(self, text: str) -> list[int]:
        tokens = self._tokens(text[:_MOST_FORCED])
        return tokens if len(text) <= _MOST_FORCED else tokens[:-4]  # what follows may change those

    def _tokens(self, text: str) -> list[int]:
        # Unlike `encode`, this gives up Python's lock.
        (encoding,) = self._encoder.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = encoding.ids
        # The ids are right if they spell the text, byte for byte, and none stands for something
        # that is no text.
        if self._special.isdisjoint(ids):
            if b"".join(self.tokens[i] for i in ids) == text.encode():
                return ids
        return self.longest_tokens(text)


def _without_prefix(part: Any) -> Any:
    """Returns a part of a `tokenizer.json` that puts nothing before a text, such as a blank."""
    nothing = {"prepend": "", "prepend_scheme": "never", "add_prefix_space": False}

    # JSON's hook is called for each object, however deep: parts may be sequences of parts.
    def changed(one: dict[str, Any]) -> dict[str, Any]:
        return one | {name: value for name, value in nothing.items() if name in one}

    return json.loads(json.dumps(part), object_hook=changed)


def compile_schema(schema: str, tokenizer: llguidance.LLTokenizer) -> llguidance.LLMatcher:
    """Returns an ``LLMatcher`` at the beginning of a JSON schema, which has made its first mask.

    Raises:
      ValueError: llguidance refuses the schema.
    """
    import llguidance

    # Without blanks: a model may write them until its budget ends.
    compact: Any = {"whitespace_flexible": False}
    grammar = llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=compact)
    # A state takes about 1 kB. Other limits of a step are llguidance's: some 20 ms.
    limits = llguidance.LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    # An `LLMatcher` never raises: it keeps its error. Some come with the first mask only.
    matcher.compute_bitmask()
    _check(matcher)
    return matcher


def _check(matcher: llguidance.LLMatcher) -> None:
    if matcher.is_error():
        message = matcher.get_error().partition("\n<non-verbose")[0]
        raise ValueError("no text follows it" if message == "NoExtensionBias" else message[:500])


class Trial:
    """A process that compiles one schema, and begins texts of all kinds.

    Args:
      seconds: of processor time that it may take.
      mebibytes: of memory that it may take. Only Linux keeps this bound.

    Raises:
      OSError: no process can be started.
    """

    def __init__(self, seconds: int, mebibytes: int) -> None:
        self._bounds = f"{seconds} s or {mebibytes} MiB"
        # -P: else Python looks for modules in this folder first, where `request` and others are.
        # utf8: the schema comes, and a refusal goes, in UTF-8, whatever the locale is.
        command = [sys.executable, "-P", "-X", "utf8", __file__, str(seconds), str(mebibytes)]
        # Terminals and systemd send these to all processes, but the server finishes what runs. A
        # process begins with the blocked signals of the thread that starts it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                encoding="utf-8",
                # Out of the terminal's foreground group, which Ctrl-C goes to.
                start_new_session=True,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def run(self, schema: str) -> None:
        """Checks that the schema, which is JSON, can be used.

        Raises:
          ValueError: llguidance refuses it, or it takes too much, or the process fails.
        """
        # In a thread, which waits until the process has ended by itself, by a bound or by `end`.
        refusal, errors = self._process.communicate(schema)
        code = self._process.returncode
        if code == _REFUSED:
            raise ValueError(refusal)
        if code < 0:  # killed, or ended by Rust for want of memory
            raise ValueError(f"compiling it takes more than {self._bounds}")
        if code > 0:  # such as a Python without llguidance
            raise ValueError(errors.strip().rpartition("\n")[2][:200])

    def end(self) -> None:
        """Kills the process, unless it has ended; at any time, in any thread."""
        self._process.kill()


def _begin_texts(matcher: llguidance.LLMatcher) -> None:
    """Follows a grammar of bytes behind every first byte, as far as the next bytes are forced.

    Objects of many keys and long counts fail there, not at their first mask.

    Raises:
      ValueError: it fails.
    """
    # A byte for each of the 256 tokens of `byte_tokenizer`, 0 where it may not come.
    for byte, is_allowed in enumerate(matcher.compute_logit_bias()):
        if is_allowed:
            text = matcher.deep_copy()
            text.consume_token(byte)
            text.consume_tokens(text.compute_ff_tokens())
            text.compute_bitmask()
            _check(text)


def _main() -> None:
    import resource

    tokenizer = byte_tokenizer()
    seconds, mebibytes = map(int, sys.argv[1:])
    # At its bounds the process is killed, or Rust aborts it; it leaves no core.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_DATA, (mebibytes << 20,) * 2)
    try:
        _begin_texts(compile_schema(sys.stdin.read(), tokenizer))
    except ValueError as error:
        print(error, end="")
        sys.exit(_REFUSED)


if __name__ == "__main__":
    _main()
