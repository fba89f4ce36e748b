"""The models that a command line asks for: the embedded pair, or checkpoints."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from jax_specdec._src.cli.options import Options
from jax_specdec._src.models.bytes import DOCUMENT_SEPARATOR, ByteDecoder, encode
from jax_specdec._src.models.checkpoint import LoadedModel, load_embedded_pair, load_huggingface
from jax_specdec._src.models.config_json import CONFIG_FILE, read_config
from jax_specdec._src.models.fields import shown
from jax_specdec._src.models.tokenizer import load_tokenizer

MAX_LENGTH = 1024
"""Longest sequence of the embedded models, prompt included."""


class InputError(Exception):
    """Something is wrong with files or options; the message is one line for the user."""


class Decoder(Protocol):
    """Token ids to text, as they come."""

    def decode(self, token_ids: list[int], *, final: bool = False) -> str:
        """The text that the next ids complete."""
        ...


@dataclasses.dataclass(frozen=True)
class Models:
    """A target and a drafter, and the prompt in their ids.

    Attributes:
      target: the target.
      draft: the draft model, or None for n-gram lookup.
      prompt: token ids.
      stop_token_ids: ids that end a text.
      stream: makes a decoder of what follows the prompt.
    """

    target: LoadedModel
    draft: LoadedModel | None
    prompt: list[int]
    stop_token_ids: tuple[int, ...]
    stream: Callable[[], Decoder]


def load_models(options: Options) -> Models:
    """Read what the options name, and check that the request fits.

    Raises:
      InputError: a file is missing or wrong, the tokenizers differ, or the text would be too long.
    """
    try:
        return _embedded(options) if options.target is None else _checkpoints(options)
    except (ImportError, OSError, ValueError) as error:
        raise InputError(" ".join(str(error).split())) from error


def _embedded(options: Options) -> Models:
    prompt = encode(options.prompt)
    _check_length(options, len(prompt), MAX_LENGTH, "bytes")
    target, draft = load_embedded_pair()
    return Models(
        target,
        draft if options.draft == "model" else None,
        prompt,
        (DOCUMENT_SEPARATOR,),
        ByteDecoder,
    )


def _checkpoints(options: Options) -> Models:
    assert options.target is not None
    config = read_config(options.target / CONFIG_FILE)
    tokenizer = load_tokenizer(options.target)
    draft_directory = None if options.draft == "ngram" else Path(options.draft)
    if draft_directory is not None:
        read_config(draft_directory / CONFIG_FILE)
        tokenizer.check_same_vocabulary(load_tokenizer(draft_directory))
    prompt = tokenizer.encode(options.prompt)
    if not prompt:
        raise ValueError(f"{shown(tokenizer.path)} makes no tokens of the prompt")
    if max(prompt) >= config.vocab_size:
        raise ValueError(
            f"{shown(tokenizer.path)} makes token id {max(prompt)} of the prompt, but "
            f"{CONFIG_FILE} beside it has vocab_size = {config.vocab_size}"
        )
    if tokenizer.stop_token_ids and max(tokenizer.stop_token_ids) >= config.vocab_size:
        raise ValueError(
            f"{shown(options.target)} has eos_token_id = {max(tokenizer.stop_token_ids)}, but "
            f"{CONFIG_FILE} there has vocab_size = {config.vocab_size}"
        )
    _check_length(options, len(prompt), config.max_position_embeddings, "tokens")
    target = load_huggingface(options.target, options.dtype)
    draft = None
    if draft_directory is not None:
        size = target.model.vocab_size
        draft = load_huggingface(draft_directory, options.dtype, max_vocab_size=size)
    return Models(target, draft, prompt, tokenizer.stop_token_ids, lambda: tokenizer.stream(prompt))


def _check_length(options: Options, prompt: int, most: int, unit: str) -> None:
    room = most - prompt
    if room < 1:
        raise ValueError(f"the prompt must be shorter than {most} {unit}, but has {prompt}")
    if not 1 <= options.max_new_tokens <= room:
        raise ValueError(
            f"--max-new-tokens must be in [1, {room}], which is {most} less the prompt, but "
            f"is {options.max_new_tokens}"
        )
