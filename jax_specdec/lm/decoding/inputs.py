"""Checks of what callers give to the decoding loops; each rule has a message of its own."""

from __future__ import annotations

import contextlib
import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jax_specdec._src.arrays import check_increasing, check_int, check_type, refuse, require
from jax_specdec._src.config import SpecDecodeConfig
from jax_specdec.lm.drafting import tree
from jax_specdec.lm.drafting.drafter import Drafter, feature_layers_of, tree_depth_of
from jax_specdec.lm.models.block import BlockHead
from jax_specdec.lm.models.protocol import CausalModel, check_runs_trees, is_loaded_model

_FEATURES = dict(features=None, next_token_ids=None)


def check_drafter(drafter: Any, config: Any) -> None:
    """Check that a drafter can be called as a `Drafter`, and its config.

    Raises:
      TypeError: one of them is something else.
    """
    check_type("config", config, SpecDecodeConfig)
    hint = None
    is_drafter = callable(getattr(drafter, "propose", None)) and not isinstance(drafter, type)
    if is_loaded_model(drafter):
        wrapper = _wrapper(drafter.model)
        hint = f"pass drafter={wrapper}(draft.model) and draft_params=draft.params"
    elif drafter == "ngram" or drafter is None:
        hint = "NGramDrafter() needs no model, and generate_plain no drafter"
    elif callable(getattr(drafter, "apply", None)) and not isinstance(drafter, type):
        hint = f"a model is wrapped, drafter={_wrapper(drafter)}(model)"
    require(is_drafter, "drafter", "be a Drafter", drafter, hint, TypeError)
    kind = type(drafter).__name__
    if not _takes(drafter.propose, None, None, None, None):
        raise TypeError(
            f"drafter must have a propose that takes (params, context, cache, store), but "
            f"{kind}.propose takes {inspect.signature(drafter.propose)}: token_ids, lengths, "
            "sampling, keys, config and the rest are fields of the context, a DraftContext"
        )
    layers = feature_layers_of(drafter)
    are_layers = isinstance(layers, tuple) and all(type(layer) is int for layer in layers)
    require(are_layers, "drafter.feature_layers", "be a tuple of ints", layers, error=TypeError)
    if layers and not _takes(drafter.prefill, None, None, None, **_FEATURES):
        raise TypeError(
            "drafter must have a prefill that takes features and next_token_ids, because it has "
            f"feature_layers, but {kind}.prefill takes {inspect.signature(drafter.prefill)}"
        )


def check_trees(model: CausalModel, drafter: Drafter, config: SpecDecodeConfig) -> None:
    """Check that the drafts of a drafter can be verified by a model if they are trees.

    Raises:
      TypeError: `drafter.tree_depth` is no int, or the model runs chains only.
      ValueError: it is below 0, the rule verifies chains only, or K is above 63.
    """
    if check_int("drafter.tree_depth", tree_depth_of(drafter), 0):
        tree.check_trees(config, drafter)
        check_runs_trees("model", model)


def reads_chunks(drafter: Drafter) -> bool:
    """Whether a drafter's `prefill` can begin at any position."""
    features = _FEATURES if feature_layers_of(drafter) else {}
    return _takes(drafter.prefill, None, None, None, start=None, **features)


def check_reads_chunks(drafter: Drafter, name: str, size: int) -> None:
    """Check that a drafter's `prefill` can begin at any position.

    Raises:
      TypeError: it takes no `start`, and a size of this name needs it.
    """
    if not reads_chunks(drafter):
        raise TypeError(
            f"drafter must have a prefill that takes start, because prompts longer than "
            f"{name}={size} are read in chunks, but {type(drafter).__name__}.prefill "
            f"takes {inspect.signature(drafter.prefill)}"
        )


def _takes(function: Callable[..., Any], *args: None, **named: None) -> bool:
    """Whether a function can be called with so many arguments, and with these names."""
    try:
        inspect.signature(function).bind(*args, **named)
    except TypeError:
        return False
    return True


def _wrapper(model: Any) -> str:
    if isinstance(model, BlockHead):
        return "BlockDrafter"
    return "Eagle3Drafter" if feature_layers_of(model) else "ModelDrafter"


def token_lists(prompts: Any, vocab_size: int) -> list[list[int]]:
    """B prompts as lists of ids.

    Raises:
      TypeError: not lists of integers.
      ValueError: a prompt that `token_list` refuses.
    """
    must, each = "be lists of token ids", None
    if not isinstance(prompts, (str, bytes)):
        with contextlib.suppress(TypeError):
            each = list(prompts)
    if each is None:
        refuse(TypeError, "prompts", must, prompts, _text_hint(prompts))
    is_one = bool(each) and np.ndim(each[0]) == 0
    is_one = is_one and isinstance(each[0], (int, np.integer, jax.Array))
    must, hint = f"{must}, one per request", "pass [ids]"
    require(not is_one, "prompts", must, prompts, hint, TypeError)
    return [token_list(f"prompts[{b}]", prompt, vocab_size) for b, prompt in enumerate(each)]


def token_list(name: str, values: Any, vocab_size: int) -> list[int]:
    """One prompt as a list of ids.

    Raises:
      TypeError: not a list of integers.
      ValueError: empty, or an id outside the vocabulary.
    """
    ids = integers(name, values)
    require(ids, name, "hold at least one token", ids)
    check_range(name, ids, vocab_size)
    return ids


def check_range(name: str, ids: Sequence[int], vocab_size: int) -> None:
    """Check that ids are in the vocabulary.

    Raises:
      ValueError: one is not.
    """
    are_ids = not ids or (0 <= min(ids) and max(ids) < vocab_size)
    require(are_ids, name, f"hold ids in [0, {vocab_size})", ids)


def drafts_by_length(name: str, values: Any, most: int) -> tuple[tuple[int, int], ...]:
    """Pairs of a length and of the most drafts from there on, as a tuple.

    Args:
      name: of `values`.
      values: any sequence of pairs; it may be empty.
      most: K.

    Raises:
      TypeError: not pairs of integers.
      ValueError: lengths do not increase from 1 on, or drafts do not decrease from K on.
    """
    are_pairs = isinstance(values, Sequence) and not isinstance(values, (str, bytes))
    are_pairs = are_pairs and all(np.shape(one) == (2,) for one in values)
    must = "be pairs of a length and a number of drafts"
    require(are_pairs, name, must, values, error=TypeError)
    if not values:
        return ()
    lengths = check_increasing(f"the lengths of {name}", [one[0] for one in values], 1)
    drafts = tuple(check_int(f"the drafts of {name}", one[1], 0, most) for one in values)
    is_falling = list(drafts) == sorted(set(drafts), reverse=True)
    require(is_falling, f"the drafts of {name}", "decrease", drafts)
    return tuple(zip(lengths, drafts, strict=True))


def _text_hint(value: object) -> str | None:
    if not isinstance(value, (str, bytes)):
        return None
    return (
        "turn text into ids, with encode_bytes for the embedded models, or with the encode of "
        "load_tokenizer's Tokenizer"
    )


def integers(name: str, values: Any) -> list[int]:
    """A list of ids.

    Raises:
      TypeError: not a list of integers.
    """
    if not isinstance(values, (str, bytes)):
        with contextlib.suppress(TypeError):
            return [operator.index(value) for value in values]
    refuse(TypeError, name, "be a list of ints", values, _text_hint(values))
