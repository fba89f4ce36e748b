"""Checks of what callers give to the decoding loops; each rule has a message of its own.

`generate`, `Engine`, `EngineDriver` and `RequestOptions` call these, once, where arguments enter.
Functions named ``check_...`` return nothing. `token_lists`, `token_list` and `integers` return ids
as lists of Python's ints, whatever they came as.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jax_specdec._src.base.arrays import check_int, check_type, refuse, require
from jax_specdec._src.base.config import SpecDecodeConfig
from jax_specdec._src.base.tree import TREE_MASK_BITS
from jax_specdec._src.logits.logprobs import LogprobsConfig
from jax_specdec.lm.drafting.drafter import Drafter, DrafterServes
from jax_specdec.lm.models.block import BlockHead
from jax_specdec.lm.models.eagle3 import Eagle3Head
from jax_specdec.lm.models.gemma_assistant import GemmaAssistantHead
from jax_specdec.lm.models.protocol import CausalModel, check_runs_trees, is_loaded_model

_MOST_ROUNDING = 2**16
"""Positions that the caches of models are rounded up to, at most."""


def check_drafter(drafter: Drafter, config: SpecDecodeConfig) -> None:
    """Checks that a drafter is a `Drafter`, what it declares, and its config.

    Raises:
      TypeError: one of them is something else.
    """
    check_type("config", config, SpecDecodeConfig)
    if isinstance(drafter, Drafter):
        check_type("drafter.serves", drafter.serves, DrafterServes)
    else:
        refuse(TypeError, "drafter", "be a Drafter", drafter, _hint(drafter))


def check_logprobs(logprobs: LogprobsConfig | None, model: CausalModel) -> None:
    """Checks which log-probabilities of a model's tokens are wanted.

    Raises:
      TypeError: it is no `LogprobsConfig`.
      ValueError: more alternatives than the model has ids.
    """
    check_type("logprobs", logprobs, LogprobsConfig, None)
    if logprobs:
        check_int("num_top", logprobs.num_top, 0, model.vocab_size)


def _hint(given: Any) -> str | None:
    """Returns what to pass in place of what is no drafter, if that can be said."""
    # In turn: a pair of model and params, no drafter or the name of one, a class in place of its
    # object, a model, and an object with `propose` that does not derive from `Drafter`.
    if is_loaded_model(given):
        return f"pass drafter={_wrapper(given.model)}(draft.model) and draft_params=draft.params"
    if given is None or isinstance(given, str):
        return "NGramDrafter() needs no model, and generate_plain no drafter"
    if isinstance(given, type):
        return f"make an object, {given.__name__}(...)"
    if callable(getattr(given, "apply", None)):
        return f"a model is wrapped, drafter={_wrapper(given)}(model)"
    if callable(getattr(given, "propose", None)):
        return f"derive {type(given).__name__} from jax_specdec.lm.Drafter"
    return None


def _wrapper(model: Any) -> str:
    """Returns the name of the drafter that a model or head is wrapped in."""
    drafters: dict[type, str] = {
        BlockHead: "BlockDrafter",
        Eagle3Head: "Eagle3Drafter",
        GemmaAssistantHead: "GemmaAssistantDrafter",
    }
    return drafters.get(type(model), "ModelDrafter")


def check_trees(model: CausalModel, drafter: Drafter, config: SpecDecodeConfig) -> None:
    """Checks that the drafts of a drafter can be verified by a model if they are trees.

    Raises:
      TypeError: the model runs chains only.
      ValueError: the rule verifies chains only, or a step has more drafts than a tree has nodes.
    """
    depth = drafter.serves.tree_depth
    if not depth:
        return
    hint = f"{type(drafter).__name__} with tree_depth={depth} proposes trees, with 0 chains"
    method = config.rejection_sample_method
    k = config.num_speculative_tokens
    # Agreement draws the token after a node, and looks for it among the node's children. The other
    # rules judge one draft at each position.
    must = 'be "agreement"'
    require(method == "agreement", "config.rejection_sample_method", must, method, hint)
    # A tree has K + 1 nodes, and a mask a bit for each.
    require(
        k < TREE_MASK_BITS, "config.num_speculative_tokens", f"be below {TREE_MASK_BITS}", k, hint
    )
    check_runs_trees("model", model)


def check_prediction(drafter: Drafter, prediction: Sequence[int] | None) -> None:
    """Checks that a drafter can use what a request expects to be generated.

    Raises:
      ValueError: it does not look in texts.
    """
    must = f"be None with {type(drafter).__name__}, which looks in no text"
    is_used = prediction is None or drafter.serves.predictions
    hint = "NGramDrafter, SuffixDrafter and FirstOf do"
    require(is_used, "prediction", must, prediction, hint)


def check_keeps_rows(model: CausalModel, drafter: Drafter, length: int, *, has_cache: bool) -> None:
    """Checks that a request may begin with what another has left in both caches.

    Args:
      drafter: what proposes tokens.
      length: positions of each request.
      has_cache: whether the drafter has a cache.

    Raises:
      TypeError: the drafter declares that it may not.
      ValueError: the model remembers something that belongs to no position.
    """
    serves = drafter.serves
    if not serves.chunks or (has_cache and serves.kept_rows == "none"):
        raise TypeError(
            f"drafter must keep rows for prefix_caching=True, but {type(drafter).__name__}.serves "
            f"says chunks={serves.chunks}, kept_rows={serves.kept_rows!r}"
        )

    @functools.cache
    def arrays(length: int) -> list[tuple[jax.tree_util.KeyPath, jax.ShapeDtypeStruct]]:
        return jax.tree.leaves_with_path(jax.eval_shape(lambda: model.init_cache(1, length)))

    minimal = arrays(1)
    for i, (path, array) in enumerate(arrays(length)):
        # The axis of positions is one that grows with their number.
        grown = [n for n, least in zip(array.shape, minimal[i][1].shape, strict=True) if n != least]
        # An index is set anew by every pass. An array with a place for each position is as wanted.
        if model.serves.is_index(path) or max(grown, default=0) >= length:
            continue
        # What was rounded up, or is in pages, is longer for a longer text; a ring is not, nor what
        # belongs to no position. Only these are asked: a model may refuse so long a text.
        longer = array
        with contextlib.suppress(ValueError):
            _, longer = arrays(length + _MOST_ROUNDING)[i]
        must = "have a cache whose arrays grow with max_length for prefix_caching=True"
        name = f"{type(model).__name__}.init_cache(...){jax.tree_util.keystr(path)}"
        require(array.shape != longer.shape, "model", must, name)


def check_reads_chunks(drafter: Drafter, name: str, size: int) -> None:
    """Checks that a drafter reads a prompt in chunks, as a size of this name needs it.

    Raises:
      TypeError: it reads prompts whole.
    """
    if not drafter.serves.chunks:
        raise TypeError(
            f"drafter must serve chunks, because prompts longer than {name}={size} are read in "
            f"chunks, but {type(drafter).__name__} does not"
        )


def token_lists(prompts: Any, vocab_size: int) -> list[list[int]]:
    """Returns B prompts as lists of ids.

    Raises:
      TypeError: not lists of integers.
      ValueError: a prompt that `token_list` refuses.
    """
    must = "be lists of token ids"
    rows = None
    # Texts can be listed, too: as characters, or as bytes, which would pass for ids.
    if not isinstance(prompts, (str, bytes)):
        with contextlib.suppress(TypeError):
            rows = list(prompts)
    if rows is None:
        refuse(TypeError, "prompts", must, prompts, _text_hint(prompts))
    # The ids of one prompt, which would be a list of prompts that are numbers.
    is_one = bool(rows) and np.ndim(rows[0]) == 0
    is_one = is_one and isinstance(rows[0], (int, np.integer, jax.Array))
    must = f"{must}, one per request"
    require(not is_one, "prompts", must, prompts, "pass [ids]", TypeError)
    return [token_list(f"prompts[{b}]", prompt, vocab_size) for b, prompt in enumerate(rows)]


def token_list(name: str, values: Any, vocab_size: int) -> list[int]:
    """Returns one prompt as a list of ids.

    Raises:
      TypeError: not a list of integers.
      ValueError: empty, or an id outside the vocabulary.
    """
    ids = integers(name, values)
    require(ids, name, "hold at least one token", ids)
    check_range(name, ids, vocab_size)
    return ids


def check_range(name: str, ids: Sequence[int], vocab_size: int) -> None:
    """Checks that ids are in the vocabulary.

    Raises:
      ValueError: one is not.
    """
    are_ids = not ids or (0 <= min(ids) and max(ids) < vocab_size)
    require(are_ids, name, f"hold ids in [0, {vocab_size})", ids)


def _text_hint(value: object) -> str | None:
    """Returns what turns text into ids, if a value is text."""
    if not isinstance(value, (str, bytes)):
        return None
    return (
        "turn text into ids, with encode_bytes for the embedded models, or with the encode of "
        "load_tokenizer's Tokenizer"
    )


def integers(name: str, values: Any) -> list[int]:
    """Returns ids as a list of Python's ints.

    Raises:
      TypeError: not a list of integers.
    """
    if not isinstance(values, (str, bytes)):
        # Of NumPy and JAX too; a float or an array of several numbers has no index. What is refused
        # is refused below, with no other error beside it.
        with contextlib.suppress(TypeError):
            return [operator.index(value) for value in values]
    refuse(TypeError, name, "be a list of ints", values, _text_hint(values))
