"""The models that a command line asks for: the embedded pair, or checkpoints."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from jax_specdec._src.arrays import require
from jax_specdec._src.config import SpecDecodeConfig
from jax_specdec.lm.cli.options import (
    DEFAULT_MAX_NEW_TOKENS,
    HEAD_PREFIXES,
    LOOKUPS,
    NO_DRAFTS,
    SUFFIX_PREFIX,
    Options,
)
from jax_specdec.lm.cli.prompts import InputError
from jax_specdec.lm.drafting.block import BlockDrafter
from jax_specdec.lm.drafting.combined import FirstOf
from jax_specdec.lm.drafting.draft_model import ModelDrafter
from jax_specdec.lm.drafting.drafter import Drafter
from jax_specdec.lm.drafting.eagle3 import Eagle3Drafter
from jax_specdec.lm.drafting.ngram import NGramDrafter
from jax_specdec.lm.drafting.suffix import SuffixDrafter
from jax_specdec.lm.formats.block_files import load_block_head
from jax_specdec.lm.formats.checkpoint import LoadedModel, load_embedded_pair, load_huggingface
from jax_specdec.lm.formats.config_json import CONFIG_FILE, read_config
from jax_specdec.lm.formats.eagle3_files import load_eagle3
from jax_specdec.lm.formats.embedded_heads import load_embedded_head
from jax_specdec.lm.models.fields import shown
from jax_specdec.lm.models.llama import Llama
from jax_specdec.lm.models.llama_config import LlamaConfig
from jax_specdec.lm.text.bytes import DOCUMENT_SEPARATOR, decode_bytes, encode_bytes
from jax_specdec.lm.text.tokenizer import TextStream, Tokenizer, load_tokenizer

MAX_LENGTH = 1024
"""Longest sequence of the embedded models, prompt included."""
TREE_CANDIDATES = 64
"""Ids of each row of a block that a tree of a head with a Markov bias is chosen from."""


class Draft(NamedTuple):
    """A drafter and its weights."""

    drafter: Drafter
    params: Any = None

    def drafting(
        self, config: SpecDecodeConfig, num_nodes: int | None
    ) -> tuple[Drafter, SpecDecodeConfig]:
        """The drafter and the config; of trees of so many nodes, whose paths have up to K drafts.

        Node 0 is the newest token.
        """
        if num_nodes is None:
            return self.drafter, config
        drafter: Any = self.drafter
        drafter = dataclasses.replace(drafter, tree_depth=config.num_speculative_tokens)
        if isinstance(drafter, BlockDrafter) and drafter.head.config.markov_rank is not None:
            most = min(TREE_CANDIDATES, drafter.head.vocab_size)
            drafter = dataclasses.replace(drafter, num_candidates=most)
        return drafter, dataclasses.replace(config, num_speculative_tokens=num_nodes - 1)


@dataclasses.dataclass(frozen=True)
class Models:
    """A target and its drafters, and the prompts, if there are any, in their ids.

    Attributes:
      target: the target.
      drafters: by their names in the options.
      prompts: the token ids of each prompt.
      max_new_tokens: budget of each request.
      stop_token_ids: ids that end a text.
      stream: from a prompt's ids, a decoder of what follows it.
      tokenizer: of the target; None for the embedded one, whose tokens are bytes.
      max_length: the most tokens that the target was made for, prompt included.
    """

    target: LoadedModel
    drafters: dict[str, Draft]
    prompts: list[list[int]]
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    stream: Callable[[list[int]], TextStream]
    tokenizer: Tokenizer | None
    max_length: int


def load_models(options: Options, texts: list[str]) -> Models:
    """Read what the options name, and check that the requests fit.

    Raises:
      InputError: a file is missing or wrong, the tokenizers differ, or a text would be too long.
    """
    try:
        return (_embedded if options.target is None else _checkpoints)(options, texts)
    except (ImportError, OSError, ValueError) as error:
        raise InputError(" ".join(str(error).split())) from error


def _embedded(options: Options, texts: list[str]) -> Models:
    prompts = [encode_bytes(text) for text in texts]
    budget = _budget(options, prompts, MAX_LENGTH, "bytes")
    target, draft = load_embedded_pair()
    drafters = _load_drafters(options, target, {"model": draft})
    stream = functools.partial(TextStream, decode_bytes)
    stops = (DOCUMENT_SEPARATOR,)
    return Models(target, drafters, prompts, budget, stops, stream, None, MAX_LENGTH)


def _checkpoints(options: Options, texts: list[str]) -> Models:
    assert options.target is not None
    config = read_config(options.target / CONFIG_FILE)
    tokenizer = load_tokenizer(options.target)
    names = [x.removeprefix(SUFFIX_PREFIX) for x in options.drafters]
    without = *LOOKUPS, NO_DRAFTS
    names = [x for x in names if x not in without and not x.startswith(HEAD_PREFIXES)]
    for name in names:
        read_config(Path(name) / CONFIG_FILE)
        tokenizer.check_same_vocabulary(load_tokenizer(name))
    prompts = _encode(options, texts, tokenizer, config)
    most = config.max_position_embeddings
    budget = _budget(options, prompts, most, "tokens")
    target = load_huggingface(options.target, options.dtype)
    drafters = _load_drafters(
        options, target, {name: _load_draft_model(name, target, options) for name in names}
    )
    stops = tokenizer.stop_token_ids
    return Models(target, drafters, prompts, budget, stops, tokenizer.stream, tokenizer, most)


def _load_drafters(
    options: Options, target: LoadedModel[Llama], models: dict[str, LoadedModel[Llama]]
) -> dict[str, Draft]:
    """The drafters by their names: models, lookup, heads, and lookup beside one of them."""
    suffix = SuffixDrafter(history=options.history)
    lookup = Draft(suffix, suffix.init_params())
    found = {"ngram": Draft(NGramDrafter()), "suffix": lookup, NO_DRAFTS: Draft(NGramDrafter())}
    found |= {name: Draft(ModelDrafter(one.model), one.params) for name, one in models.items()}
    for given in options.drafters:
        name = given.removeprefix(SUFFIX_PREFIX)
        if name not in found:
            found[name] = _load_head(name, target, options)
        if name != given:
            both = FirstOf(suffix, found[name].drafter)
            found[given] = Draft(both, (lookup.params, found[name].params))
        _check_depths(found[given], options)
    return {name: found[name] for name in options.drafters}


def _check_depths(draft: Draft, options: Options) -> None:
    """Check that a drafter proposes trees of the depths that are wanted, if trees are."""
    for config in options.configs:
        try:
            draft.drafting(config, options.tree)
        except ValueError as error:
            message = str(error).replace("tree_depth", "--num-speculative-tokens")
            raise ValueError(f"{message}, with --tree") from None


def _load_draft_model(
    directory: str, target: LoadedModel[Llama], options: Options
) -> LoadedModel[Llama]:
    """A checkpoint that never proposes an id which is no token of the target."""
    size = target.model.vocab_size
    model, params = load_huggingface(directory, options.dtype, max_vocab_size=size)
    own, others = model.config, target.model.config
    known = min(own.num_token_ids or own.vocab_size, others.num_token_ids or size)
    config = dataclasses.replace(own, num_token_ids=known if known < own.vocab_size else None)
    return LoadedModel(dataclasses.replace(model, config=config), params)


def _load_head(name: str, target: LoadedModel[Llama], options: Options) -> Draft:
    """A head of the embedded target, or one in a directory."""
    kind, _, directory = name.partition(":")
    if kind == "eagle3":
        head = load_eagle3(directory, target) if directory else load_embedded_head(target)
        return Draft(Eagle3Drafter(head.model), head.params)
    if directory:
        block = load_block_head(directory, target)
    else:
        block = load_embedded_head(target, "dspark" if kind == "dspark" else "dflash")
    most = block.model.config.max_drafts
    for config in options.configs:
        k, must = config.num_speculative_tokens, f"be at most {most} with --draft {name}"
        require(k <= most, "--num-speculative-tokens", must, k)
    return Draft(BlockDrafter(block.model), block.params)


def _encode(
    options: Options, texts: list[str], tokenizer: Tokenizer, config: LlamaConfig
) -> list[list[int]]:
    """The prompts' ids, after checking that the target knows them and the stop tokens."""
    if options.chat:
        prompts = [tokenizer.encode_chat([{"role": "user", "content": text}]) for text in texts]
    else:
        prompts = [tokenizer.encode(text) for text in texts]
    where = shown(tokenizer.path)
    for prompt in prompts:
        if not prompt:
            raise ValueError(f"{where} gives no tokens for the prompt")
        if max(prompt) >= config.vocab_size:
            raise ValueError(
                f"{where} gives token id {max(prompt)} for the prompt, but {CONFIG_FILE} beside it "
                f"has vocab_size = {config.vocab_size}"
            )
    stop_token_ids = tokenizer.stop_token_ids
    if stop_token_ids and max(stop_token_ids) >= config.vocab_size:
        raise ValueError(
            f"{shown(tokenizer.path.parent)} has eos_token_id = {max(stop_token_ids)}, but "
            f"{CONFIG_FILE} there has vocab_size = {config.vocab_size}"
        )
    return prompts


def _budget(options: Options, prompts: list[list[int]], most: int, unit: str) -> int:
    """How many new tokens each request may have: what was asked for, or the default if it fits."""
    longest = max(map(len, prompts), default=0)
    room = most - longest
    if room < 1:
        raise ValueError(f"the prompt must be shorter than {most} {unit}, but has {longest}")
    if options.max_new_tokens is None:
        return min(DEFAULT_MAX_NEW_TOKENS, room)
    if options.max_new_tokens > room:
        raise ValueError(
            f"--max-new-tokens must be in [1, {room}], which is {most} less the prompt, but "
            f"is {options.max_new_tokens}"
        )
    return options.max_new_tokens
