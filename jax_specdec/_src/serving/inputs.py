"""Checks of what callers give to the decoding loops; each rule has a message of its own."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jax_specdec._src.config import SpecDecodeConfig
from jax_specdec._src.drafting.drafter import Drafter, feature_layers_of
from jax_specdec._src.models.eagle3 import Eagle3Head
from jax_specdec._src.models.llama import Llama
from jax_specdec._src.models.protocol import is_loaded_model
from jax_specdec._src.models.tensor_parallel import TensorParallelLlama
from jax_specdec._src.types import described

_HAVE_WEIGHTS = (Llama, TensorParallelLlama, Eagle3Head)


def check_config(config: Any) -> None:
    """Check that a config is a `SpecDecodeConfig`.

    Raises:
      TypeError: it is something else.
    """
    if not isinstance(config, SpecDecodeConfig):
        raise TypeError(f"config must be a SpecDecodeConfig, but it is {described(config)}")


def check_drafter(drafter: Any, config: Any) -> None:
    """Check that a drafter can be called as a `Drafter`, and its config.

    Raises:
      TypeError: one of them is something else.
    """
    check_config(config)
    must = f"drafter must be a Drafter, but it is a {type(drafter).__name__}"
    if is_loaded_model(drafter):
        wrapper = _wrapper(drafter.model)
        raise TypeError(
            f"drafter must be a Drafter, but it is a LoadedModel: pass "
            f"drafter={wrapper}(draft.model) and draft_params=draft.params"
        )
    if isinstance(drafter, type):
        raise TypeError(f"drafter must be a Drafter, but it is the class {drafter.__name__}")
    if drafter == "ngram" or drafter is None:
        raise TypeError(
            f"drafter must be a Drafter, but it is {drafter!r}: NGramDrafter() needs no model, and "
            "generate_plain no drafter"
        )
    if not callable(getattr(drafter, "propose", None)):
        if callable(getattr(drafter, "apply", None)):
            raise TypeError(f"{must}: a model is wrapped, drafter={_wrapper(drafter)}(model)")
        raise TypeError(must)
    signature = inspect.signature(drafter.propose)
    try:
        signature.bind(None, None, None, None)
    except TypeError:
        raise TypeError(
            f"drafter must have a propose that takes (params, context, cache, store), but "
            f"{type(drafter).__name__}.propose takes {signature}: token_ids, lengths, sampling, "
            "keys, config and the rest are fields of the context, a DraftContext"
        ) from None
    layers = feature_layers_of(drafter)
    if not (isinstance(layers, tuple) and all(type(layer) is int for layer in layers)):
        raise TypeError(
            "drafter must have feature_layers that are a tuple of ints, but "
            f"{type(drafter).__name__}.feature_layers is {described(layers)}"
        )
    if layers:
        signature = inspect.signature(drafter.prefill)
        try:
            signature.bind(None, None, None, features=None, next_token_ids=None)
        except TypeError:
            raise TypeError(
                "drafter must have a prefill that takes features and next_token_ids, because it "
                f"has feature_layers, but {type(drafter).__name__}.prefill takes {signature}"
            ) from None


def _wrapper(model: Any) -> str:
    return "Eagle3Drafter" if isinstance(model, Eagle3Head) else "ModelDrafter"


def check_draft_params(drafter: Drafter | None, draft_params: Any) -> None:
    """Check a drafter's weights.

    Raises:
      TypeError: they are a model, or missing although the drafter's model has weights.
    """
    check_params("draft_params", draft_params)
    models = getattr(drafter, "model", None), getattr(drafter, "head", None)
    if draft_params is None and any(isinstance(model, _HAVE_WEIGHTS) for model in models):
        raise TypeError(
            "draft_params must be the weights of the drafter's model, but it is None: pass "
            "draft_params=draft.params"
        )


def check_params(name: str, params: Any) -> None:
    """Check that weights are not a model.

    Raises:
      TypeError: they are.
    """
    if is_loaded_model(params):
        raise TypeError(
            f"{name} must be a model's weights, but it is a LoadedModel: pass its .params"
        )


def token_lists(prompts: Any, vocab_size: int) -> list[list[int]]:
    """B prompts as lists of ids.

    Raises:
      TypeError: not lists of integers.
      ValueError: a prompt that `token_list` refuses.
    """
    if isinstance(prompts, (str, bytes)):
        raise TypeError(f"prompts must be lists of token ids, but it is {_text(prompts)}")
    try:
        each = list(prompts)
    except TypeError:
        raise TypeError(
            f"prompts must be lists of token ids, but it is {described(prompts)}"
        ) from None
    if each and np.ndim(each[0]) == 0 and isinstance(each[0], (int, np.integer, jax.Array)):
        raise TypeError(
            f"prompts must be lists of token ids, one per request, but it is one list of ids, "
            f"{described(prompts)}: pass [ids]"
        )
    return [token_list(f"prompts[{b}]", prompt, vocab_size) for b, prompt in enumerate(each)]


def token_list(name: str, values: Any, vocab_size: int) -> list[int]:
    """One prompt as a list of ids.

    Raises:
      TypeError: not a list of integers.
      ValueError: empty, or an id outside the vocabulary.
    """
    ids = integers(name, values)
    if not ids:
        raise ValueError(f"{name} must hold at least one token, but it is empty")
    check_range(name, ids, vocab_size)
    return ids


def check_range(name: str, ids: Sequence[int], vocab_size: int) -> None:
    """Check that ids are in the vocabulary.

    Raises:
      ValueError: one is not.
    """
    if ids and not (0 <= min(ids) and max(ids) < vocab_size):
        raise ValueError(
            f"{name} must hold ids in [0, {vocab_size}), but they span {min(ids)} to {max(ids)}"
        )


def _text(value: str | bytes) -> str:
    return (
        f"the text {described(value)}: turn it into ids, with encode for the embedded models, or "
        "with the encode of load_tokenizer's Tokenizer"
    )


def integers(name: str, values: Any) -> list[int]:
    """A list of ids.

    Raises:
      TypeError: not a list of integers.
    """
    if isinstance(values, (str, bytes)):
        raise TypeError(f"{name} must be a list of ints, but it is {_text(values)}")
    try:
        return [operator.index(value) for value in values]
    except TypeError:
        raise TypeError(f"{name} must be a list of ints, but it is {described(values)}") from None
