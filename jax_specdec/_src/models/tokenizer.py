"""`tokenizer.json` of Hugging Face checkpoints, through the `tokenizers` library (extra `hf`)."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jax_specdec._src.arrays import check_type, require
from jax_specdec._src.models.bytes import id_list
from jax_specdec._src.models.chat import read_chat_template, special_tokens
from jax_specdec._src.models.config_json import CONFIG_FILE
from jax_specdec._src.models.fields import MAX_INT, is_token_id, quoted, reason, shown
from jax_specdec._src.models.files import existing, path_of, read_json

TOKENIZER_FILE = "tokenizer.json"
GENERATION_FILE = "generation_config.json"

_REPLACEMENT = "\ufffd"
_MOST_HELD = 3
"""A character in UTF-8 has at most 4 bytes, so at most 3 bytes can be incomplete."""


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """Text to token ids and back; from `load_tokenizer`.

    Attributes:
      path: the file it was read from.
      library_tokenizer: the `tokenizers.Tokenizer` behind it.
      stop_token_ids: ids that end a text, from the checkpoint's `generation_config.json` or else
        its `config.json`, and the `eos_token` of its `tokenizer_config.json`.

    Example:
      >>> import tokenizers
      >>> words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"no": 0, "yes": 1}))
      >>> tokenizer = Tokenizer(Path("tokenizer.json"), words, stop_token_ids=())
      >>> tokenizer.encode("yes"), tokenizer.decode([1, 0])
      ([1], 'yes no')
    """

    path: Path
    library_tokenizer: Any = dataclasses.field(repr=False)
    stop_token_ids: tuple[int, ...]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text. Other threads run meanwhile.

        Args:
          text: a lone surrogate in it, which UTF-8 cannot hold, becomes a question mark.
          add_special_tokens: with what the tokenizer adds around a text, such as a first token.

        Raises:
          TypeError: `text` is not a str.
          ValueError: the tokenizer has no ids for the text.
        """
        check_type("text", text, str)
        text = text.encode("utf-8", errors="replace").decode("utf-8")
        with _library_errors(self.path, "cannot encode the text"):
            # Unlike the library's `encode`, this gives up Python's lock; the ids are the same.
            (encoding,) = self.library_tokenizer.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
            return list(encoding.ids)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The ids of a conversation, up to where the model's answer begins.

        The checkpoint's chat template, from `chat_template.jinja` or else `tokenizer_config.json`,
        makes the text, special tokens included. It is a Jinja program, and runs in a sandbox in a
        process of its own: for at most 5 s, and in at most 512 MiB of memory. Systems that do not
        limit the memory of a process, such as Windows and macOS, bound the time alone.

        Args:
          messages: each with a "role", such as "user", and a "content".

        Raises:
          ImportError: the `jinja2` library is not installed.
          OSError: a file cannot be opened.
          TypeError: `messages` is something else.
          ValueError: there is no template, it cannot be applied to the messages or takes too much
            time or memory, or the tokenizer has no ids for the text.

        Example:
          >>> import tempfile, tokenizers
          >>> words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<user>": 0, "yes": 1}))
          >>> words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
          >>> with tempfile.TemporaryDirectory() as directory:
          ...     words.save(f"{directory}/tokenizer.json")
          ...     template = Path(directory) / "chat_template.jinja"
          ...     _ = template.write_text("<{{ messages[0].role }}> {{ messages[0].content }}")
          ...     load_tokenizer(directory).encode_chat([{"role": "user", "content": "yes"}])
          [0, 1]
        """
        return self.encode(self.chat_text(messages), add_special_tokens=False)

    def chat_text(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The text that `encode_chat` encodes, special tokens included.

        Args:
          messages: as for `encode_chat`.

        Raises:
          ImportError, OSError, TypeError, ValueError: as `encode_chat` does.

        Example:
          >>> import tempfile, tokenizers
          >>> words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"yes": 0}))
          >>> with tempfile.TemporaryDirectory() as directory:
          ...     words.save(f"{directory}/tokenizer.json")
          ...     template = Path(directory) / "chat_template.jinja"
          ...     _ = template.write_text("<{{ messages[0].role }}> {{ messages[0].content }}")
          ...     load_tokenizer(directory).chat_text([{"role": "user", "content": "yes"}])
          '<user> yes'
        """
        return read_chat_template(self.path.parent).apply(messages)

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text of ids. Special tokens have no text; bytes that are not UTF-8 become U+FFFD.

        Raises:
          TypeError: an id is not an integer.
          ValueError: an id is outside [0, 2**31).
        """
        token_ids = id_list(token_ids)
        for token_id in token_ids:
            require(is_token_id(token_id), "token_ids", "be ids, in [0, 2**31)", token_id)
        return str(self.library_tokenizer.decode(token_ids))

    def stream(self, prompt_token_ids: Sequence[int] = ()) -> "TextStream":
        """A decoder of what follows a prompt, as it comes."""
        return TextStream(self, prompt_token_ids)

    def check_same_vocabulary(self, other: "Tokenizer") -> None:
        """Check that an id means the same to both tokenizers.

        Raises:
          ValueError: one id does not; the message names the files and the first difference.
        """
        ours, theirs = (
            {i: token for token, i in tokenizer.library_tokenizer.get_vocab().items()}
            for tokenizer in (self, other)
        )
        differences = (i for i in ours.keys() | theirs.keys() if ours.get(i) != theirs.get(i))
        if (first := min(differences, default=None)) is not None:
            mine, its = (
                quoted(tokens[first]) if first in tokens else "unknown" for tokens in (ours, theirs)
            )
            raise ValueError(
                f"{shown(self.path)} and {shown(other.path)} differ: token id {first} is {mine} in "
                f"the first and {its} in the second."
            )


class TextStream:
    """Decodes a stream of token ids, holding back characters that are not complete yet.

    Joined, its pieces are the text that all ids add to the prompt's text. For each piece only the
    last few ids are decoded: those since the last point at which no character was incomplete, and
    those of the piece before, because a token's text may depend on whether it begins a text.

    Args:
      tokenizer: a `Tokenizer`, or a function that gives the text of a list of ids and U+FFFD for an
        incomplete character, such as `decode_bytes`.
      prompt_token_ids: what the stream follows.

    Raises:
      TypeError: `tokenizer` is neither.

    Example:
      >>> import jax_specdec as sd
      >>> _, (model, params) = sd.load_embedded_pair()  # for another model, `load_tokenizer`
      >>> prompt = sd.encode_bytes("class Stack(")
      >>> stream = sd.TextStream(sd.decode_bytes, prompt)
      >>> for step in sd.generate_stream(
      ...     model, params, [prompt], drafter=sd.NGramDrafter(), max_new_tokens=6,
      ...     config=sd.SpecDecodeConfig(num_speculative_tokens=2)):
      ...     kept = step.token_ids[0, : step.num_kept[0]]  # the rest is -1
      ...     print(stream.decode(kept), end="|", flush=True)
      o|b|j|e|c|t|
      >>> stream.decode([], final=True)
      ''
    """

    def __init__(
        self,
        tokenizer: Tokenizer | Callable[[list[int]], str],
        prompt_token_ids: Sequence[int] = (),
    ) -> None:
        decode = tokenizer.decode if isinstance(tokenizer, Tokenizer) else tokenizer
        must = "be a Tokenizer or a function"
        require(callable(decode), "tokenizer", must, tokenizer, error=TypeError)
        self._decode = decode
        self._token_ids = list(prompt_token_ids)
        self._shown = len(decode(self._token_ids))  # characters of their text that were returned
        self._context = len(self._token_ids)  # ids before the newest piece

    def decode(self, token_ids: Iterable[int], *, final: bool = False) -> str:
        """The text that the next ids complete.

        Args:
          token_ids: the next ids, of any integer type.
          final: no more ids follow: an incomplete character becomes U+FFFD.

        Raises:
          TypeError: an id is not an integer.
          ValueError: the tokenizer refuses an id, such as one outside [0, 2**31).
        """
        token_ids, pieces = id_list(token_ids), []
        self._decode(token_ids)  # what it refuses is not kept
        for token_id in token_ids:
            self._token_ids.append(token_id)
            pieces.append(self._advance(hold=True))
        return "".join(pieces) + (self._advance(hold=False) if final else "")

    def _advance(self, *, hold: bool) -> str:
        text = self._decode(self._token_ids)
        open_ = len(text) - len(text.rstrip(_REPLACEMENT))
        end = len(text) - (min(open_, _MOST_HELD) if hold else 0)
        piece = text[self._shown : end]
        self._shown = max(self._shown, end)
        newest = self._token_ids[self._context :]
        if open_ == 0 and (newest_text := self._decode(newest)):
            self._token_ids, self._shown = newest, len(newest_text)
            self._context = len(newest)
        return piece


def load_tokenizer(directory: str | Path) -> Tokenizer:
    """Read the tokenizer of a Hugging Face checkpoint from a local directory.

    Args:
      directory: holds `tokenizer.json`; and `config.json` or `generation_config.json`, from which
        the stop tokens are read.

    Returns:
      The tokenizer.

    Raises:
      ImportError: the `tokenizers` library is not installed.
      TypeError: `directory` is not a path.
      FileNotFoundError: there is no `tokenizer.json`.
      OSError: something other than a file is in its place, or a file cannot be opened.
      ValueError: a file cannot be parsed, or has an id that is not an integer in [0, 2**31) or that
        stands for two tokens.

    Example:
      >>> import tempfile, tokenizers
      >>> words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"no": 0, "yes": 1}))
      >>> with tempfile.TemporaryDirectory() as directory:
      ...     words.save(f"{directory}/tokenizer.json")
      ...     load_tokenizer(directory).encode("yes")
      [1]
    """
    path = existing(path_of(directory) / TOKENIZER_FILE)
    try:
        import tokenizers
    except ImportError as error:
        raise ImportError(
            f"{shown(path)} is read by the tokenizers library, which is not installed: "
            "pip install tokenizers, or the extra hf."
        ) from error
    count_token_ids(path)  # the library would not say which id is wrong
    with _library_errors(path, "is not a tokenizer that can be read"):
        library_tokenizer = tokenizers.Tokenizer.from_file(str(path))
        library_tokenizer.no_truncation()
        library_tokenizer.no_padding()
        library_tokenizer.encode("")  # some errors show only here
    stops = stop_token_ids(path.parent)
    if (end := special_tokens(path.parent).get("eos_token")) is not None:
        end_id = library_tokenizer.token_to_id(end)
        if end_id is not None and end_id not in stops:
            stops += (end_id,)
    return Tokenizer(path, library_tokenizer, stops)


def count_token_ids(path: Path) -> int:
    """One more than the last id in a `tokenizer.json`; needs no library.

    Raises:
      FileNotFoundError: it does not exist.
      OSError: it is not a file, or cannot be opened.
      ValueError: it holds no ids, one that is not an integer in [0, 2**31), or one for two tokens.
    """
    raw = read_json(path)
    where = raw.where
    vocab = _vocabulary(raw.get("model"))
    if not vocab:
        raise ValueError(f"{where} has no vocabulary of token ids in it.")
    added = raw.given("added_tokens", [])
    are_objects = isinstance(added, list) and all(isinstance(token, dict) for token in added)
    raw.require(are_objects, "added_tokens", "which is not a list of objects")
    added_ids = [(index, token.get("id")) for index, token in enumerate(added)]
    for field, ids in (("model.vocab", vocab), ("added_tokens", added_ids)):
        for key, token_id in ids:
            if not is_token_id(token_id):
                raise ValueError(
                    f"{where} has {field} with the id {quoted(token_id)} for {quoted(key)}, but a "
                    f"token id must be an integer in [0, {MAX_INT}]."
                )
    tokens: dict[int, Any] = {}
    for token, token_id in vocab:  # added tokens may repeat them
        if (first := tokens.setdefault(token_id, token)) != token:
            raise ValueError(
                f"{where} has model.vocab with the id {token_id} for {quoted(first)} and for "
                f"{quoted(token)}, but an id must mean one token."
            )
    return max(token_id for _, token_id in vocab + added_ids) + 1


def _vocabulary(model: Any) -> list[tuple[Any, Any]]:
    """Tokens and the values given as their ids; empty if there is no vocabulary."""
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocab, dict):
        return list(vocab.items())
    if isinstance(vocab, list) and all(isinstance(x, list) and len(x) == 2 for x in vocab):
        return [(index, index) for index in range(len(vocab))]  # with scores, in order of ids
    return []


def stop_token_ids(directory: Path) -> tuple[int, ...]:
    """The `eos_token_id` of a checkpoint, from `generation_config.json` or else `config.json`.

    Raises:
      OSError: a file cannot be opened.
      ValueError: a file cannot be parsed, or has something that is no id or list of ids.
    """
    for path in (directory / GENERATION_FILE, directory / CONFIG_FILE):
        raw = read_json(path, optional=True)
        if (found := raw.get("eos_token_id")) is not None:
            ids = found if isinstance(found, list) else [found]
            are_ids = all(map(is_token_id, ids))
            raw.require(are_ids, "eos_token_id", "which is no id or list of ids")
            return tuple(ids)
    return ()


@contextlib.contextmanager
def _library_errors(path: Path, what: str) -> Iterator[None]:
    """What the library raises, in one sentence; its panics are not of type `Exception`.

    Raises:
      ValueError: the library raised something.
    """
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"{shown(path)} {what}: {reason(error)}.") from error
