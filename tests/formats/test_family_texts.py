"""Each family's texts, however they are drafted and wherever its weights lie, are plain ones."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models.weights import random_ids

import jax_specdec as sd
from jax_specdec import lm

from .checkpoints import CHECKPOINTS, NUM_TOKEN_IDS, logits_of

pytestmark = [pytest.mark.newest, pytest.mark.long]

FAMILIES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3")
NEW, ROOM = 16, 48
PROMPT = np.tile(random_ids((10,), NUM_TOKEN_IDS), 3)  # repeats, longer than windows
TREES = lm.SuffixDrafter(tree_depth=4)


def plain(model: Any, params: Any) -> list[int]:
    """Argmaxes of passes over the whole text so far, padded."""
    ids = np.zeros(ROOM, np.int32)
    ids[: len(PROMPT)] = PROMPT
    for end in range(len(PROMPT), len(PROMPT) + NEW):
        ids[end] = np.argmax(np.asarray(logits_of(model, params, ids))[end - 1])
    return ids[len(PROMPT) : len(PROMPT) + NEW].tolist()


def drafted(model: Any, params: Any, drafter: Any, draft_params: Any = None) -> list[int]:
    """The text of a drafter; trees have 9 nodes."""
    config = sd.SpecDecodeConfig(num_speculative_tokens=3)
    if drafter is TREES:
        draft_params = TREES.init_params()
    if drafter.serves.tree_depth:
        config = sd.SpecDecodeConfig(num_speculative_tokens=8, rejection_sample_method="agreement")
    output = lm.generate(
        model, params, [PROMPT.tolist()], drafter=drafter, draft_params=draft_params,
        config=config, max_new_tokens=NEW)  # fmt: skip
    return output.completions[0]


@pytest.mark.parametrize(
    "name",
    [*(f"huggingface/{x}" for x in FAMILIES), "gemma4/edge", "gemma4/wide"],
)
def test_texts_are_those_of_plain_decoding(name: str) -> None:
    loaded = lm.load_huggingface(CHECKPOINTS.parent / name, jnp.float32)
    model, params = loaded
    wanted = plain(model, params)
    assert drafted(model, params, lm.NGramDrafter()) == wanted
    assert drafted(model, params, TREES) == wanted
    rng = np.random.default_rng(0)
    near = jax.tree.map(lambda x: x * (1 + 0.1 * rng.normal(size=x.shape).astype("f4")), params)
    assert drafted(model, params, lm.ModelDrafter(model), near) == wanted

    if name.startswith("gemma4"):
        head = lm.load_head(CHECKPOINTS.parent / f"{name}_assistant", loaded)
        trees = lm.GemmaAssistantDrafter(head.model, tree_depth=4)
        assert drafted(model, params, trees, head.params) == wanted

    mesh = jax.make_mesh((2,), ("tensor",), devices=jax.devices()[:2])
    parallel = lm.models.TensorParallelLlama(model, mesh, "tensor")
    shares = parallel.shard_params(params)
    assert drafted(parallel, shares, lm.NGramDrafter()) == wanted
    assert drafted(parallel, shares, TREES) == wanted

    lean = lm.models.quantize(params)
    assert drafted(model, lean, lm.NGramDrafter()) == plain(model, lean)
    found, known = (
        np.asarray(logits_of(model, x, PROMPT))[:, :NUM_TOKEN_IDS] for x in (lean, params)
    )
    assert 0 < np.std(found - known) < 0.1 * np.std(known)
