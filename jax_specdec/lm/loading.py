"""What `--target` and `--draft` name: a target, its tokenizer, and drafters."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from jax_specdec import SpecDecodeConfig, lm
from jax_specdec.lm.formats.config_json import CONFIG_FILE, read_config
from jax_specdec.lm.models.fields import shown
from jax_specdec.lm.models.protocol import Params
from jax_specdec.lm.text.bytes import BYTE_VOCAB_SIZE

LOOKUPS = ("ngram", "suffix")
"""Drafters that look in the text so far."""
NO_DRAFTS = "none"
"""Instead of a drafter: plain decoding."""
SUFFIX_PREFIX = "suffix+"
"""What stands before a drafter that has a lookup beside it."""
HEAD_PREFIXES = ("eagle3:", "block:")
"""What stands before the directory of a head."""
EMBEDDED_HEADS = ("eagle3", "dflash", "dspark")
"""Heads of the embedded target."""
MAX_LENGTH = 1024
"""Longest sequence of the embedded models, prompt included."""
TREE_CANDIDATES = 64
"""Ids of each row of a block that a tree of a head with a Markov bias is chosen from."""

Loaded = lm.formats.LoadedModel[lm.models.Llama]


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


class Draft(NamedTuple):
    """A drafter and its weights."""

    drafter: lm.Drafter
    params: Params | None = None

    @property
    def most_drafts(self) -> int | None:
        """The most drafts of a step, or of a path of its tree; None where the drafter sets none."""
        drafter = self.alone
        return drafter.head.config.max_drafts if isinstance(drafter, lm.BlockDrafter) else None

    @property
    def alone(self) -> lm.Drafter:
        """The drafter without the lookup beside it."""
        return self.drafter.head if isinstance(self.drafter, lm.FirstOf) else self.drafter

    def drafting(
        self, config: SpecDecodeConfig, num_nodes: int | None
    ) -> tuple[lm.Drafter, SpecDecodeConfig]:
        """Returns the drafter and the config of a step.

        Args:
          config: for chains. Its K is the depth of trees.
          num_nodes: of each tree, the newest token among them; None for chains.

        Raises:
          ValueError: `tree_depth` cannot be K.
        """
        drafter = self.drafter
        if num_nodes is None:
            return drafter, config
        assert isinstance(drafter, lm.SuffixDrafter | lm.Eagle3Drafter | lm.BlockDrafter)
        drafter = dataclasses.replace(drafter, tree_depth=config.num_speculative_tokens)
        if isinstance(drafter, lm.BlockDrafter) and drafter.head.config.markov_rank is not None:
            most = min(TREE_CANDIDATES, drafter.head.vocab_size)
            drafter = dataclasses.replace(drafter, num_candidates=most)
        # Node 0 is the newest token; each of the others is a draft.
        return drafter, dataclasses.replace(config, num_speculative_tokens=num_nodes - 1)


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
    most = config.max_position_embeddings
    return TargetText(tokenizer, config.vocab_size, stops, tokenizer.stream, most)


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
      drafters: names. ``ngram``, ``suffix`` and ``none`` have no weights. ``eagle3:DIR`` and
        ``block:DIR`` are heads. ``model``, ``eagle3``, ``dflash`` and ``dspark`` go with the
        embedded target, any other name is the directory of a checkpoint. All but the lookups may
        have ``suffix+`` before them.
      dtype: compute dtype of checkpoints; None for the stored one.
      weights: of the target; "int8" for matrices in 8 bits, see `load_huggingface`.
      draft_weights: likewise, of draft models and heads.
      history: tokens of earlier texts in which ``suffix`` looks, too.

    Raises:
      ImportError, OSError, ValueError: a file is missing or wrong, the target has no such stop
        token, or the tokenizers of target and drafter have no token in common.
    """
    suffix = lm.SuffixDrafter(history=history)
    if text.tokenizer is None:
        target, embedded = lm.load_embedded_pair()
        if weights:
            target = target._replace(params=lm.models.quantize(target.params))
        if draft_weights:
            embedded = embedded._replace(params=lm.models.quantize(embedded.params))
        draft_models = {"model": Draft(lm.ModelDrafter(embedded.model), embedded.params)}
    else:
        directory = text.tokenizer.path.parent
        last = max(text.stop_token_ids, default=0)
        if last >= text.vocab_size:
            raise ValueError(
                f"{shown(directory)} has eos_token_id = {last}, but {CONFIG_FILE} there has "
                f"vocab_size = {text.vocab_size}"
            )
        names = dict.fromkeys(name.removeprefix(SUFFIX_PREFIX) for name in drafters)
        tokenizers = {}
        for name in names:  # before any weights, which take long to read
            if not _is_lookup_or_head(name):
                read_config(Path(name) / CONFIG_FILE)
                tokenizers[name] = lm.load_tokenizer(name)
        target = lm.load_huggingface(directory, dtype, weights=weights)
        draft_models = {
            name: _load_draft_model(name, text.tokenizer, own, target, dtype, draft_weights)
            for name, own in tokenizers.items()
        }

    @functools.cache  # so that `suffix+NAME` and `NAME` share weights
    def load(name: str) -> Draft:
        if name.startswith(SUFFIX_PREFIX):
            lookup = load("suffix")
            own = load(name.removeprefix(SUFFIX_PREFIX))
            return Draft(lm.FirstOf(suffix, own.drafter), (lookup.params, own.params))
        if name == "suffix":
            return Draft(suffix, suffix.init_params())
        if name in ("ngram", NO_DRAFTS):
            return Draft(lm.NGramDrafter())
        if _is_lookup_or_head(name):
            return _load_head(name, target, draft_weights)
        return draft_models[name]

    return Models(target, text, {name: load(name) for name in drafters})


def _is_lookup_or_head(name: str) -> bool:
    """Returns whether a drafter is no model of its own."""
    return name in (*LOOKUPS, NO_DRAFTS, *EMBEDDED_HEADS) or name.startswith(HEAD_PREFIXES)


def _load_draft_model(
    directory: str,
    of_target: lm.Tokenizer,
    own: lm.Tokenizer,
    target: Loaded,
    dtype: str | None,
    weights: Literal["int8"] | None,
) -> Draft:
    """Reads a checkpoint so that it never proposes an id which is no token of the target.

    Args:
      directory: of the draft model.
      of_target: the target's tokenizer.
      own: the draft model's.
      target: the target.
      dtype: as for `load_models`.
      weights: as for `load_models`, of the draft model.
    """
    size = target.model.vocab_size
    if not of_target.has_same_vocabulary(own):
        loaded = lm.load_huggingface(directory, dtype, weights=weights)
        return Draft(*lm.retokenize(of_target, size, own, *loaded))
    model, params = lm.load_huggingface(directory, dtype, weights=weights, max_vocab_size=size)
    config = model.config
    most = target.model.config.num_token_ids or size
    known = min(config.num_token_ids or config.vocab_size, most)
    is_all = known == config.vocab_size
    config = dataclasses.replace(config, num_token_ids=None if is_all else known)
    return Draft(lm.ModelDrafter(dataclasses.replace(model, config=config)), params)


def _load_head(name: str, target: Loaded, weights: Literal["int8"] | None) -> Draft:
    """Reads a head of the embedded target, or one in a directory."""
    kind, _, directory = name.partition(":")
    if directory in EMBEDDED_HEADS and not Path(directory).exists():
        hint = f"the head of the embedded target is --draft {directory}"
        raise FileNotFoundError(f"{directory} does not exist; {hint}.")
    drafter: lm.Drafter
    if kind == "eagle3":
        eagle = lm.load_eagle3(directory, target) if directory else lm.load_embedded_head(target)
        drafter, params = lm.Eagle3Drafter(eagle.model), eagle.params
    else:
        own: Literal["dflash", "dspark"] = "dspark" if kind == "dspark" else "dflash"
        if directory:
            block = lm.load_block_head(directory, target)
        else:
            block = lm.load_embedded_head(target, own)
        drafter, params = lm.BlockDrafter(block.model), block.params
    return Draft(drafter, lm.models.quantize(params) if weights else params)
