"""`tokenizer.json` of Hugging Face checkpoints, through the `tokenizers` library.

`load_tokenizer` makes a `Tokenizer` of the files of a checkpoint, and a `TextStream` decodes ids as
they come. Three kinds of tokenizers differ in what a part of a character is:

- *Byte level* (GPT-2, Llama 3, Qwen): every token is bytes, spelled by a character for each, and
  may begin or end inside a character. The decoder gives U+FFFD for what is no UTF-8.
- *Byte fallback* (Llama 2, Gemma): tokens are whole characters, but for 256 tokens `<0x00>` to
  `<0xFF>`. The decoder joins a run of these; one bad byte makes all bytes of the run U+FFFD.
- All others have no token that is a part of a character.

A token's text may also depend on its place: some decoders drop the space before the first word.
"""

import codecs
import contextlib
import dataclasses
import functools
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jax_specdec._src.base.arrays import check_int, check_type, is_error, require
from jax_specdec.lm.extras import extra
from jax_specdec.lm.formats.added_tokens import (
    TOKENIZER_CONFIG_FILE,
    special_tokens,
    tokens_beside,
)
from jax_specdec.lm.formats.files import JsonValue, existing, path_of
from jax_specdec.lm.formats.text_keys import check_prefix_space, check_text_keys, tokens_around
from jax_specdec.lm.formats.token_ids import TOKENIZER_FILE, read_token_ids, stop_token_ids
from jax_specdec.lm.models.fields import MAX_INT, is_token_id, quoted, reason, shown
from jax_specdec.lm.text.bytes import id_list
from jax_specdec.lm.text.chat import Message, read_chat_template
from jax_specdec.lm.text.marks import Marks

_REPLACEMENT = "\ufffd"

_MOST_OPEN = 3
"""A character in UTF-8 has at most 4 bytes, so at most 3 bytes can be incomplete."""

_MOST_HELD = 64
"""Byte tokens that are held back, and other tokens that are decoded again."""

_NUM_KEPT = 4 * (_MOST_OPEN + 1)
"""Tokens that are tried as all that is decoded again: those of as many characters as must stay (see
`TextStream._shorten`), of 4 bytes, each a token. With fewer, no text would be another one, but 64
tokens would be decoded again in a text of such characters."""


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """Text to token ids and back; from `load_tokenizer`.

    Attributes:
      path: the file it was read from.
      library_tokenizer: the `tokenizers.Tokenizer` behind it.
      stop_token_ids: ids that end a text, from the checkpoint's `generation_config.json` or else
        its `config.json`, and the `eos_token` of its `tokenizer_config.json`.

    Example: see `load_tokenizer`.
    """

    path: Path
    library_tokenizer: Any = dataclasses.field(repr=False)
    stop_token_ids: tuple[int, ...]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Returns the ids of a text. Other threads run meanwhile.

        Args:
          text: a lone surrogate in it, which UTF-8 cannot hold, becomes a question mark.
          add_special_tokens: with what the tokenizer adds around a text, such as a first token.

        Raises:
          TypeError: `text` is not a str, or `add_special_tokens` no bool.
          ValueError: the tokenizer has no ids for the text.
        """
        check_type("text", text, str)
        check_type("add_special_tokens", add_special_tokens, bool)
        # The library takes no lone surrogates.
        text = text.encode("utf-8", errors="replace").decode("utf-8")
        with _library_errors(self.path, "cannot encode the text"):
            # Unlike the library's `encode`, this gives up Python's lock; the ids are the same.
            (encoding,) = self.library_tokenizer.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
            return list(encoding.ids)

    def encode_chat(
        self, messages: Sequence[Message], *, plain_messages: bool = False, **variables: Any
    ) -> list[int]:
        """Returns the ids of a conversation, up to where the model's answer begins.

        The checkpoint's chat template, from `chat_template.jinja` or else `tokenizer_config.json`,
        makes the text, special tokens included. It is a program by the authors of the checkpoint;
        Jinja's sandbox keeps it from files and from Python, but does not bound its time and memory.

        A "developer" is the "system" of a template that does not name that role. A message of
        another role than "system", "user" and "assistant" is refused if the template leaves it out.

        Args:
          messages: each with a "role", such as "user", and a "content".
          plain_messages: messages hold no special tokens: what spells one is encoded as text,
            wherever it is in a message, and a template that looks for one there finds none. If
            not, it becomes one, as in `transformers`, and so may begin another role's message. What
            the template joins with a text, such as ``"<" + role + ">"``, is the template's, and
            `variables` are written as they are.
          **variables: for the template, such as ``enable_thinking=False``.

        Raises:
          ImportError: the `jinja2` library is not installed.
          OSError: a file cannot be opened.
          TypeError: `messages` is something else, or of plain ones a part is none of JSON.
          ValueError: there is no template, it cannot be applied to the messages or leaves one out,
            or changes what is to be kept as text; or the tokenizer has no ids for the text.

        Example:
          >>> import tempfile, tokenizers
          >>> words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<user>": 0, "yes": 1}))
          >>> words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
          >>> with tempfile.TemporaryDirectory() as directory:
          ...     words.save(f"{directory}/tokenizer.json")
          ...     template = Path(directory) / "chat_template.jinja"
          ...     _ = template.write_text("<{{ messages[0].role }}> {{ messages[0].content }}")
          ...     tokenizer = load_tokenizer(directory)
          ...     messages = [{"role": "user", "content": "yes"}]
          ...     tokenizer.chat_text(messages), tokenizer.encode_chat(messages)
          ('<user> yes', [0, 1])
        """
        # The template writes the tokens that begin a text: the tokenizer must not add them again.
        if not plain_messages:
            return self.encode(self.chat_text(messages, **variables), add_special_tokens=False)
        pieces = self._plain_chat(messages, variables)
        ids = self.encode(pieces[0], add_special_tokens=False)
        for spelled, piece in zip(pieces[1::2], pieces[2::2], strict=True):
            ids += self._encode_without_special_tokens(spelled)
            ids += self.encode(piece, add_special_tokens=False)
        return ids

    def _plain_chat(self, messages: Sequence[Message], variables: dict[str, Any]) -> list[str]:
        """Returns pieces of a conversation: text, what is no special token, text, ..., text.

        Special tokens in the text are the template's own. Raises as `encode_chat` does.
        """
        # First as it is: errors show the texts of the messages, not marks in them.
        text = self.chat_text(messages, **variables)
        written = []
        for _ in range(2):
            marks = Marks(self._split_at_special_tokens)
            marked = [marks.put_into(x, f"messages[{i}]") for i, x in enumerate(messages)]
            if not marks:
                return [text]
            written.append(marks.take_out(self.chat_text(marked, **variables)))
        # Templates leave out messages and thoughts by intent, and marks with them. One that changes
        # a text, or cuts it within a mark, leaves a part of the mark, which is random: the second
        # time it is another.
        if written[0] != written[1]:
            name = read_chat_template(self.path.parent).path.name
            changes = "has a chat template that changes the texts of messages"
            raise ValueError(
                f"{name} {changes}, so that what spells a special token cannot be kept as text."
            )
        return written[0]

    def _split_at_special_tokens(self, text: str) -> list[str]:
        """Returns pieces of a text; each second one would be a special token.

        It is empty before the spaces at the end of a text that ends with the beginning of one: what
        a template writes after it, such as the next part of a content, could complete the token.
        """
        text = text.encode("utf-8", errors="replace").decode("utf-8")
        with _library_errors(self.path, "cannot encode the text"):
            encoding = self.library_tokenizer.encode(text, add_special_tokens=False)
        # Where each piece ends, in characters of the text: a special token is its span, and text
        # is what is before, between and after. The library finds them, as flags of a token may let
        # it match in another spelling, or take the spaces around it along.
        ends = [0]
        for token_id, span in zip(encoding.ids, encoding.offsets, strict=True):
            if token_id in self.special_tokens:
                ends += span
        # Templates often leave out spaces at the end of a text.
        if self._begins_special_token(text[ends[-1] :].rstrip()):
            ends += 2 * [len(text.rstrip())]
        return [text[begin:end] for begin, end in itertools.pairwise([*ends, len(text)])]

    def _begins_special_token(self, text: str) -> bool:
        """Returns whether a text ends with the beginning of a special token, but not with all."""
        beginnings, longest = self._beginnings
        # Flags of a token let it match what the normalizer makes of a text.
        tails = [text[-longest:], self._normalized(text[-longest:])]
        return any(tail[i:] in beginnings for tail in tails for i in range(len(tail)))

    @functools.cached_property
    def _beginnings(self) -> tuple[set[str], int]:
        """What special tokens begin with, as they are and normalized; and the longest length."""
        tokens = {*self.special_tokens.values()}
        tokens |= {*map(self._normalized, tokens)}
        beginnings = {token[:i] for token in tokens for i in range(1, len(token))}
        return beginnings, max(map(len, tokens), default=1)

    def _normalized(self, text: str) -> str:
        """Returns what the tokenizer's normalizer makes of a text."""
        normalizer = self.library_tokenizer.normalizer
        return text if normalizer is None else str(normalizer.normalize_str(text))

    def _encode_without_special_tokens(self, text: str) -> list[int]:
        """Returns the ids of a text, none of which is a special token."""
        encoder = self._encoder_without_special_tokens
        with _library_errors(self.path, "cannot encode the text"):
            token_ids = encoder.encode(text, add_special_tokens=False).ids
            if self.special_tokens.keys().isdisjoint(token_ids):
                return list(token_ids)
            # They are in the vocabulary of the model, too, which has a token for each character.
            by_letter = (encoder.encode(letter, add_special_tokens=False).ids for letter in text)
            return [token_id for ids in by_letter for token_id in ids]

    @functools.cached_property
    def _encoder_without_special_tokens(self) -> Any:
        """The library's tokenizer, which takes special tokens for text."""
        # A copy: the switch is one of the object, which other threads encode with.
        encoder = type(self.library_tokenizer).from_str(self.library_tokenizer.to_str())
        encoder.encode_special_tokens = True
        return encoder

    def chat_text(self, messages: Sequence[Message], **variables: Any) -> str:
        """Returns the text that `encode_chat` encodes, special tokens included.

        Args:
          messages: as for `encode_chat`.
          **variables: as for `encode_chat`.

        Raises:
          ImportError, OSError, TypeError, ValueError: as `encode_chat` does.

        Example: see `encode_chat`.
        """
        return read_chat_template(self.path.parent).apply(messages, **variables)

    def decode(self, token_ids: Iterable[int]) -> str:
        """Returns the text of ids; bytes that are not UTF-8 become U+FFFD, special tokens nothing.

        Raises:
          TypeError: an id is not an integer.
          ValueError: an id is outside [0, 2**31), or the tokenizer's decoder fails.
        """
        token_ids = id_list(token_ids)
        for token_id in token_ids:
            require(is_token_id(token_id), "token_ids", "be ids, in [0, 2**31)", token_id)
        with _library_errors(self.path, "cannot decode the ids"):
            return str(self.library_tokenizer.decode(token_ids))

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the UTF-8 that a token adds inside a text, maybe a part of a character.

        Raises:
          TypeError: the id is not an integer.
          ValueError: it is outside [0, 2**31), or the tokenizer's decoder fails.

        Example: see `load_tokenizer`.
        """
        token_id = check_int("token_id", token_id, 0, MAX_INT)
        if not self._has_text(token_id):
            return b""
        if token_id in self._byte_of:
            return bytes([self._byte_of[token_id]])
        # What the second one adds: with the space that many tokenizers drop from the first.
        once = self.decode([token_id])
        twice = self.decode([token_id, token_id])
        text = twice[len(once) :]
        # A part of a character has no text of its own; GPT-2's names of tokens spell their bytes.
        name = self.library_tokenizer.id_to_token(token_id)
        if _REPLACEMENT in text and set(name) <= _byte_level().keys():
            spelled = bytes(_byte_level()[character] for character in name)
            # A tokenizer of another kind may have a token with such a name, and another text.
            if spelled.decode(errors="replace") == once:
                return spelled
        return text.encode()

    def _has_text(self, token_id: int) -> bool:
        """Returns whether an id is a token with text; `decode` passes over the others."""
        is_token = self.library_tokenizer.id_to_token(token_id) is not None
        return is_token and token_id not in self.special_tokens

    @functools.cached_property
    def special_tokens(self) -> dict[int, str]:
        """Special tokens by their ids, the longest first."""
        added = self.library_tokenizer.get_added_tokens_decoder()
        special = {token_id: token.content for token_id, token in added.items() if token.special}
        return dict(sorted(special.items(), key=lambda item: -len(item[1])))

    @functools.cached_property
    def _byte_of(self) -> dict[int, int]:
        """The byte of each token `<0x00>` to `<0xFF>`, if the decoder takes them for bytes."""
        names = {byte: f"<0x{byte:02X}>" for byte in range(256)}
        ids = {byte: self.library_tokenizer.token_to_id(name) for byte, name in names.items()}
        bytes_ = {token_id: byte for byte, token_id in ids.items() if token_id is not None}
        # A decoder without byte fallback gives the name itself as the text.
        return {i: byte for i, byte in bytes_.items() if names[byte] not in self.decode([i])}

    def stream(self, prompt_token_ids: Sequence[int] = ()) -> "TextStream":
        """Returns a decoder of what follows a prompt, as it comes."""
        return TextStream(self, prompt_token_ids)

    def check_same_vocabulary(self, other: "Tokenizer") -> None:
        """Checks that an id which both tokenizers know means the same to both.

        One of them may know more, such as tokens that were added to it.

        Raises:
          TypeError: `other` is not a `Tokenizer`.
          ValueError: one id does not; the message names the files and the first difference.
        """
        first = self._first_difference(other)
        ours, theirs = (x.library_tokenizer.id_to_token for x in (self, other))
        if first is not None:
            raise ValueError(
                f"{shown(self.path)} and {shown(other.path)} differ: token id {first} is "
                f"{quoted(ours(first))} in the first and {quoted(theirs(first))} in the second: "
                "`retokenize` makes a drafter for this"
            )

    def has_same_vocabulary(self, other: "Tokenizer") -> bool:
        """Returns whether `check_same_vocabulary` raises nothing."""
        return self._first_difference(other) is None

    def _first_difference(self, other: "Tokenizer") -> int | None:
        """Returns the first id that means different things to both tokenizers."""
        check_type("other", other, Tokenizer)
        ours, theirs = (
            {token_id: token for token, token_id in x.library_tokenizer.get_vocab().items()}
            for x in (self, other)
        )
        differences = (i for i in ours.keys() & theirs.keys() if ours[i] != theirs[i])
        return min(differences, default=None)


class TextStream:
    """Decodes a stream of token ids, holding back characters that are not complete yet.

    Joined, its pieces are the text that all ids add to the prompt's text. For each piece only the
    last few ids are decoded: those since the last point at which no character was incomplete, and
    those of the piece before, because a token's text may depend on whether it begins a text.

    Tokens that are single bytes (`<0xE6>`; Llama 2, Mistral) are text only together: if one of a
    run of them is no UTF-8, all of them become U+FFFD. So a run is held back up to its end, or up
    to 64 bytes. What was held longer than that is returned, and no later byte changes it.

    Args:
      tokenizer: a `Tokenizer`, or a function that gives the text of a list of ids and U+FFFD for an
        incomplete character, such as `decode_bytes`. Of a function that changes what came before
        when an id is added, what was returned stays.
      prompt_token_ids: what the stream follows. It may end inside a character.

    Raises:
      TypeError: `tokenizer` is neither.

    Example:
      >>> import jax_specdec as sd
      >>> from jax_specdec import lm
      >>> _, (model, params) = lm.load_embedded_pair()  # for another model, `load_tokenizer`
      >>> prompt = lm.encode_bytes("class Stack(")
      >>> stream = lm.TextStream(lm.decode_bytes, prompt)
      >>> for step in lm.generate_stream(
      ...     model, params, [prompt], drafter=lm.NGramDrafter(), max_new_tokens=6,
      ...     config=sd.SpecDecodeConfig(num_speculative_tokens=2)):
      ...     kept = step.token_ids[0, : step.num_kept[0]]  # the rest is -1
      ...     print(stream.decode(kept), end="|", flush=True)
      o|b|j|e|c|t|
      >>> stream.decode([], final=True)
      ''
    """

    # `tokenizers.decoders.DecodeStream` does not do: it has no end, it returns what a broken run
    # of bytes would change, and it decodes all ids since the last text again for each id.
    #
    # Between calls, `_token_ids` are the last ids: first `_context` ids whose text was returned,
    # then those of the newest piece, and at the end those of `_run`, one for each of its bytes.
    # `_shown` is the text of `_token_ids` as far as it was returned, so what is new in a text of
    # theirs is what it has after `_shown`. The text of a run is not in it before the run has ended,
    # settled, or turned out to be none.

    def __init__(
        self,
        tokenizer: Tokenizer | Callable[[list[int]], str],
        prompt_token_ids: Sequence[int] = (),
    ) -> None:
        # A function does not say which ids are bytes: whatever it gives U+FFFD for is incomplete.
        decode = tokenizer.decode if isinstance(tokenizer, Tokenizer) else tokenizer
        must = "be a Tokenizer or a function"
        require(callable(decode), "tokenizer", must, tokenizer, error=TypeError)
        self._decode = decode
        self._byte_of: Mapping[int, int] = {}
        self._has_text: Callable[[int], bool] = lambda token_id: True
        if isinstance(tokenizer, Tokenizer):
            self._byte_of = tokenizer._byte_of
            self._has_text = tokenizer._has_text
        self._run = bytearray()  # of the byte tokens at the end
        self._num_run_shown = 0  # bytes of it whose text was returned
        self._num_held = 0  # characters at the end of the text of other tokens
        self._context = 0  # ids before the newest piece
        token_ids = id_list(prompt_token_ids, "prompt_token_ids")
        text = decode(token_ids)  # what it refuses is named first
        # Ids without text, such as special tokens, would take the place of those that give context.
        token_ids = list(filter(self._has_text, token_ids))
        # The prompt's last run of byte tokens may go on: only what is before it is settled.
        end = len(token_ids)
        while end and token_ids[end - 1] in self._byte_of:
            end -= 1
        self._token_ids = token_ids[:end]
        self._shown = text if end == len(token_ids) else decode(self._token_ids)
        self._shorten(self._shown)
        for token_id in token_ids[end:]:
            self._add(token_id)
        # The text of the run is the prompt's. What is left of it is the beginning of a character,
        # whose bytes count as shown: if they are never completed, no U+FFFD stands for them.
        if not self.is_complete:
            self._settle()
            self._num_run_shown = len(self._run)

    @property
    def is_complete(self) -> bool:
        """True if nothing is held back: the pieces are the text of all ids so far."""
        return self._num_held == 0 and self._num_run_shown == len(self._run)

    def decode(self, token_ids: Iterable[int], *, final: bool = False) -> str:
        """Returns the text that the next ids complete.

        Args:
          token_ids: the next ids, of any integer type.
          final: no more ids follow: an incomplete character becomes U+FFFD.

        Raises:
          TypeError: an id is not an integer.
          ValueError: the tokenizer refuses an id, such as one outside [0, 2**31).
        """
        token_ids = id_list(token_ids)
        self._decode(token_ids)  # what it refuses is not kept
        pieces = [self._add(token_id) for token_id in filter(self._has_text, token_ids)]
        # At the end, a run comes out if it is text or not, and then what other tokens held back.
        if final:
            pieces += [self._end_run(), self._advance(hold=False)]
        return "".join(pieces)

    def _add(self, token_id: int) -> str:
        """Returns the text that one more id completes."""
        if token_id in self._byte_of:
            self._token_ids.append(token_id)
            self._run.append(self._byte_of[token_id])
            return self._advance_run()
        # Any other token ends a run of bytes: what is still to be returned of it goes first.
        piece = self._end_run()
        self._token_ids.append(token_id)
        return piece + self._advance(hold=True)

    def _advance(self, *, hold: bool) -> str:
        """Returns what the text of the ids has more than was shown; an open character is held."""
        text = self._decode(self._token_ids)
        # U+FFFD at the end may become a character with the next id. Where bytes have tokens of
        # their own, all other tokens are whole characters.
        open_ = len(text) - len(text.rstrip(_REPLACEMENT)) if hold and not self._byte_of else 0
        is_long = len(self._token_ids) > _MOST_HELD
        if open_ and not is_long and not text.startswith(self._shown):
            self._num_held = open_
            return ""  # the function changes what it gave: for how long, later ids decide
        # Of many U+FFFD in a row only the last ones can be open, even at one for each byte.
        self._num_held = min(open_, _MOST_OPEN)
        # What was returned stays, also where the text is another one now.
        begin = len(os.path.commonprefix([text, self._shown]))
        end = max(begin, len(text) - self._num_held)
        piece = text[begin:end]
        self._shown = text[:end]
        # Once nothing is open, the ids of this piece are the context of the next one.
        # Ids that have no text by themselves are no context: those before them stay, too.
        newest = self._token_ids[self._context :]
        if self._num_held == 0 and (newest_text := self._decode(newest)):
            self._token_ids = newest
            self._shown = newest_text
            self._context = len(newest)
        elif is_long:
            self._shorten(text)
        return piece

    def _shorten(self, text: str) -> None:
        """Forgets ids that the rest of the text does not depend on; `text` is that of all.

        That is so if the last 4 characters stay, since at most 3 of them can be incomplete. If the
        end of the ids alone gives another text, as in the middle of a character, no id is forgotten
        this time.
        """
        for token_ids in (
            self._token_ids[-_NUM_KEPT:],
            self._token_ids[-_MOST_HELD:],
            self._token_ids[: self._context] + self._token_ids[-_NUM_KEPT:],  # the end has no text
        ):
            short = self._decode(token_ids)
            is_same = short[-_MOST_OPEN - 1 :] == text[-_MOST_OPEN - 1 :]
            if is_same and len(token_ids) < len(self._token_ids):
                # All of the shorter text was shown but for what is held at the end of both.
                self._shown = short[: len(self._shown) - len(text) + len(short)]
                self._token_ids = token_ids
                self._context = 0
                return

    def _advance_run(self) -> str:
        """Returns the text of a run of byte tokens as far as no later byte can change it."""
        # An incremental decoder waits at an incomplete character, and raises where bytes are none.
        try:
            codecs.getincrementaldecoder("utf-8")().decode(self._run)
        except UnicodeDecodeError as error:  # whatever follows, no byte of the run is text
            num_new = len(self._run) - self._num_run_shown
            # The bytes of the error and the one that showed it are kept: with them, the decoder
            # finds the run broken for as long as it goes on.
            broken = slice(error.start, error.end + 1)
            self._token_ids[-len(self._run) :] = self._token_ids[-len(self._run) :][broken]
            self._run = self._run[broken]
            self._num_run_shown = len(self._run)
            self._shown = self._decode(self._token_ids)
            return _REPLACEMENT * num_new
        return self._settle() if len(self._run) - self._num_run_shown > _MOST_HELD else ""

    def _settle(self) -> str:
        """Returns the text of the run's complete characters; the last becomes the context."""
        # Only the end of the run can be no UTF-8: an incomplete character.
        whole = self._run.decode(errors="ignore")
        if not whole:
            return ""
        end = len(whole.encode())  # bytes of the run, one for each token
        last = len(whole[-1].encode())
        begin = len(self._token_ids) - len(self._run)
        # Decoded without the incomplete end, which would make all of it U+FFFD.
        text = self._decode(self._token_ids[: begin + end])
        piece = text[len(os.path.commonprefix([text, self._shown])) :]
        # Now the ids and the run begin at the same byte.
        self._token_ids = self._token_ids[begin + end - last :]
        self._context = 0
        self._run = self._run[end - last :]
        self._num_run_shown = last
        self._shown = self._decode(self._token_ids[:last])
        return piece

    def _end_run(self) -> str:
        """Returns what is left of a run of bytes that is no text; one that is becomes text."""
        # A run that is text is in what `_advance` decodes next, after `_shown`. Of one that is not,
        # the decoder gives U+FFFD for each byte: those that were not shown are returned here.
        piece = ""
        try:
            self._run.decode()
        except UnicodeDecodeError:
            piece = _REPLACEMENT * (len(self._run) - self._num_run_shown)
            self._shown = self._decode(self._token_ids)
        self._run.clear()
        self._num_run_shown = 0
        return piece


def load_tokenizer(directory: str | Path) -> Tokenizer:
    """Reads the tokenizer of a Hugging Face checkpoint from a local directory.

    Args:
      directory: holds `tokenizer.json`; `config.json` or `generation_config.json`, from which the
        stop tokens are read; and maybe `tokenizer_config.json`, `special_tokens_map.json` and
        `added_tokens.json`, which add tokens as they do in `transformers`. Other keys that change
        texts are followed or refused, see docs/models.md.

    Returns:
      The tokenizer.

    Raises:
      ImportError: the `tokenizers` library is not installed.
      TypeError: `directory` is not a path.
      FileNotFoundError: there is no `tokenizer.json`.
      OSError: something other than a file is in its place, or a file cannot be opened.
      ValueError: a file cannot be parsed, or has an id that is not an integer in [0, 2**31), that
        stands for two tokens, or that is not the next one for a token that a file adds; or a key
        asks for texts that are not made here, such as `stop_strings`.

    Example:
      >>> import tempfile, tokenizers
      >>> words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"no": 0, "yes": 1}))
      >>> with tempfile.TemporaryDirectory() as directory:
      ...     words.save(f"{directory}/tokenizer.json")
      ...     tokenizer = load_tokenizer(directory)
      >>> tokenizer.encode("yes"), tokenizer.decode([1, 0]), tokenizer.token_bytes(1)
      ([1], 'yes no', b' yes')
    """
    path = existing(path_of(directory) / TOKENIZER_FILE)
    check_text_keys(path.parent)
    with extra("lm"):
        import tokenizers
    vocab, added = read_token_ids(path)
    beside = tokens_beside(path.parent, vocab, added)
    with _library_errors(path, "is not a tokenizer that can be read"):
        library_tokenizer = tokenizers.Tokenizer.from_file(str(path))
        # A file may keep the lengths of the program that saved it, to which texts would be cut.
        library_tokenizer.no_truncation()
        library_tokenizer.no_padding()
    _check_added_ids(path, added, library_tokenizer)
    with _library_errors(path, "is not a tokenizer that can be read"):
        # In the order of their ids, which the library gives out itself. Of one that it has, it
        # takes over the flags.
        library_tokenizer.add_tokens(
            [tokenizers.AddedToken(token.content, **token.flags) for token in beside.values()]
        )
        library_tokenizer.encode("")  # some errors show only here
        has_prefix = _has_prefix_space(library_tokenizer)
    check_prefix_space(path.parent, has_prefix)
    # In place of what tokenizer.json puts around a text, whatever that is.
    if (around := tokens_around(path.parent)) is not None:
        library_tokenizer.post_processor = _template(path, library_tokenizer, *around)
    # The end of a turn of a chat model may be said by its name alone.
    stops = stop_token_ids(path.parent)
    if (end := special_tokens(path.parent).get("eos_token")) is not None:
        end_id = library_tokenizer.token_to_id(end)
        if end_id is not None and end_id not in stops:
            stops += (end_id,)
    return Tokenizer(path, library_tokenizer, stops)


def _check_added_ids(
    path: Path, added: Mapping[int, Mapping[str, JsonValue]], library_tokenizer: Any
) -> None:
    """Checks that tokens which a file adds have the ids that it says.

    Raises:
      ValueError: one has another: the library numbers those that are new itself.
    """
    for token_id, token in added.items():
        content = token["content"]  # text, or the library would have refused the file
        has = library_tokenizer.token_to_id(content)
        # The library passes over a token without text.
        if content and has != token_id:
            raise ValueError(
                f"{shown(path)} has added_tokens with the id {token_id} for {quoted(content)}, but "
                f"the tokenizers library gives it {has}: new ones must follow the vocabulary, "
                "without a gap and in the order of ids."
            )


def _has_prefix_space(library_tokenizer: Any) -> bool:
    """Returns whether a tokenizer puts a space before a text that begins with a letter."""
    # Llama 2 prepends it in the normalizer, others in the pre-tokenizer, and several classes of
    # each do so. A letter that is put through both shows it, whichever it is.
    text = "a"
    if (normalizer := library_tokenizer.normalizer) is not None:
        text = normalizer.normalize_str(text)
    if (pre_tokenizer := library_tokenizer.pre_tokenizer) is not None:
        text = "".join(piece for piece, _ in pre_tokenizer.pre_tokenize_str(text))
    return len(text) > 1


def _template(path: Path, library_tokenizer: Any, first: str | None, last: str | None) -> Any:
    """Returns what puts a token, or None for none, before a text and after it.

    Raises:
      ValueError: the tokenizer has no such token.
    """
    with extra("lm"):
        from tokenizers.processors import TemplateProcessing
    described = []
    for name, token in (("first", first), ("last", last)):
        tokens = [] if token is None else [token]
        ids = [library_tokenizer.token_to_id(token) for token in tokens]
        if None in ids:
            where = shown(path.parent / TOKENIZER_CONFIG_FILE)
            raise ValueError(f"{where} adds {quoted(token)} to texts, which {path.name} lacks.")
        described.append({"id": name, "ids": ids, "tokens": tokens})
    # By names of its own: a token may be spelled like something else in a template.
    return TemplateProcessing(single="first $A last", special_tokens=described)


@functools.cache
def _byte_level() -> dict[str, int]:
    """Returns the byte that a character stands for in tokens of GPT-2 and its followers."""
    # Bytes that are printable characters in Latin-1 stand for themselves. The other 68 are, in
    # order, the characters from U+0100 on.
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + i): b for i, b in enumerate(others)}


@contextlib.contextmanager
def _library_errors(path: Path, what: str) -> Iterator[None]:
    """Raises what the library raises in one sentence; its panics are not of type `Exception`.

    Raises:
      ValueError: the library raised something.
    """
    try:
        yield
    except BaseException as error:
        if not is_error(error):
            raise
        raise ValueError(f"{shown(path)} {what}: {reason(error)}.") from error
