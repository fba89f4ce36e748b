"""What `--target` names, a target and its tokenizer, and what is loaded with it.

In the order of how long it takes: `read_target_text` reads a config and a tokenizer, by which a
command line checks prompts and lengths; `load_models` then reads what is quick of all drafters, and
the weights last.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from jax_specdec import lm
from jax_specdec.lm.drafters import SUFFIX_PREFIX, Draft, Given, Loaded, is_pair, kind_of_drafter
from jax_specdec.lm.formats.config_json import CONFIG_FILE, read_config
from jax_specdec.lm.models.fields import shown
from jax_specdec.lm.text.bytes import BYTE_VOCAB_SIZE

MAX_LENGTH = 1024
"""Longest sequence of the embedded models, prompt included."""


@dataclasses.dataclass(frozen=True)
class TargetText:
    """How the texts of a target become tokens, and tokens texts; known before its weights are read.

    Attributes:
      tokenizer: of a checkpoint; None for the embedded target, whose tokens are bytes.
      vocab_size: token ids of the target.
      stop_token_ids: ids that end a text.
      stream: from a prompt's ids, a decoder of what follows it.
      max_length: the most tokens that the target was made for, prompt included.
    """

    tokenizer: lm.Tokenizer | None
    vocab_size: int
    stop_token_ids: tuple[int, ...]
    stream: Callable[[Sequence[int]], lm.TextStream]
    max_length: int

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids of a text; see `Tokenizer.encode`."""
        if self.tokenizer is None:
            return lm.encode_bytes(text)
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)


@dataclasses.dataclass(frozen=True)
class Models:
    """A target, its texts, and its drafters by their names."""

    target: Loaded
    text: TargetText
    drafters: dict[str, Draft]


def read_target_text(directory: Path | None) -> TargetText:
    """Reads what a checkpoint says of its texts; no weights.

    Args:
      directory: of the checkpoint; None for the embedded target.

    Raises:
      ImportError, OSError, ValueError: as `load_tokenizer` does.
    """
    if directory is None:
        stream = functools.partial(lm.TextStream, lm.decode_bytes)
        return TargetText(None, BYTE_VOCAB_SIZE, (lm.DOCUMENT_SEPARATOR,), stream, MAX_LENGTH)
    config = read_config(directory / CONFIG_FILE)
    tokenizer = lm.load_tokenizer(directory)
    stops = tokenizer.stop_token_ids
    length = config.max_position_embeddings
    return TargetText(tokenizer, config.vocab_size, stops, tokenizer.stream, length)


def load_models(
    text: TargetText,
    drafters: Sequence[str],
    *,
    dtype: str | None = None,
    weights: Literal["int8"] | None = None,
    draft_weights: Literal["int8"] | None = None,
    history: int = 0,
) -> Models:
    """Reads the weights of a target and of its drafters.

    Args:
      text: of the target.
      drafters: names, of `DRAFTERS`; those with weights may have ``suffix+`` before them.
      dtype: compute dtype of checkpoints; None for the stored one.
      weights: of the target; "int8" for matrices in 8 bits, see `load_huggingface`.
      draft_weights: likewise, of draft models and heads.
      history: tokens of earlier texts in which ``suffix`` looks, too.

    Raises:
      ImportError, OSError, ValueError: a file is missing or wrong, the target has no such stop
        token, or the tokenizers of target and drafter have no token in common.
    """
    # Before any weights, which take long to read. `suffix+NAME` and `NAME` share what is read, and
    # all pairs share one lookup, which has no weights and is made whether a pair is there or not.
    given = Given(text.tokenizer, dtype, draft_weights, history)
    loads = {}
    for name in ("suffix", *drafters):
        alone = name.removeprefix(SUFFIX_PREFIX)
        kind = kind_of_drafter(alone)
        loads[alone] = kind.read(given, alone.removeprefix(kind.prefix))
    target = _load_target(text, dtype, weights)
    drafts = {name: load(target) for name, load in loads.items()}
    for name in filter(is_pair, drafters):
        drafts[name] = drafts[name.removeprefix(SUFFIX_PREFIX)].beside(drafts["suffix"])
    # What was asked for, in that order: half of a pair may not have been.
    return Models(target, text, {name: drafts[name] for name in drafters})


def _load_target(text: TargetText, dtype: str | None, weights: Literal["int8"] | None) -> Loaded:
    """Reads the weights of a target; see `load_models`."""
    if text.tokenizer is None:
        # Its compute dtype is float32, whatever `dtype` says of checkpoints.
        target, _ = lm.load_embedded_pair()
        if not weights:
            return target
        return target._replace(params=lm.models.quantize(target.params))
    # Such a text would never end there. `load_huggingface` alone passes over the id.
    directory = text.tokenizer.path.parent
    last = max(text.stop_token_ids, default=0)
    if last >= text.vocab_size:
        raise ValueError(
            f"{shown(directory)} has eos_token_id = {last}, but {CONFIG_FILE} there has "
            f"vocab_size = {text.vocab_size}"
        )
    return lm.load_huggingface(directory, dtype, weights=weights)
