"""Models of others from their own packages, with tiny random weights: `make test-models`."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from serving.chi_square import CONTROL, assert_distributed, p_value, tally

import jax_specdec as sd
from jax_specdec import lm
from jax_specdec.lm.models import foreign

from .reports import chi_square_of

pytestmark = pytest.mark.filterwarnings("ignore")
PROMPTS = [[3, 1, 4], [0], [2, 4, 1, 3, 2, 1]]
V, NEW, LAYERS, HEADS, SIZE, MLP = 5, 20, 2, 2, 16, 48
CONFIG = sd.SpecDecodeConfig(num_speculative_tokens=3)


@pytest.fixture(autouse=True)
def default_promotion() -> Iterator[None]:
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


class Case(NamedTuple):
    """A module of theirs, and what their own code says about it."""

    model: foreign.OneIndexModel
    params: Any
    greedy: Any
    """One prompt to the NEW ids of their own sampler."""
    logits: Any
    """``[n, S]`` ids to ``[n, S, V]``, the whole text at once, without a cache."""


class Ids:
    """A tokenizer whose texts are ids, without a begin or end token."""

    def encode(self, text: str, **_: Any) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: list[int], **_: Any) -> str:
        return " ".join(map(str, ids))

    def bos_id(self) -> None:
        return None

    def eos_id(self) -> int:
        return V + 1

    def pad_id(self) -> int:
        return -1


def tunix(seed: int) -> Case:
    from flax import nnx
    from tunix.generate import sampler
    from tunix.models.qwen3 import model as qwen3

    config = qwen3.ModelConfig(
        num_layers=LAYERS,
        vocab_size=V,
        embed_dim=32,
        hidden_dim=MLP,
        num_heads=2 * HEADS,
        head_dim=SIZE,
        num_kv_heads=HEADS,
        rope_theta=10000,
        norm_eps=1e-6,
    )
    module = qwen3.Qwen3(config, rngs=nnx.Rngs(seed))

    def greedy(prompt: list[int]) -> list[int]:
        own = sampler.Sampler(module, Ids(), sampler.CacheConfig(64, LAYERS, HEADS, SIZE))
        found = own(" ".join(map(str, prompt)), max_generation_steps=NEW, temperature=0.0)
        return [int(token) for token in found.tokens[0]][:NEW]

    def logits(ids: np.ndarray) -> Any:
        positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
        mask = jnp.broadcast_to(jnp.tri(ids.shape[1], dtype=bool), (*ids.shape, ids.shape[1]))
        return module(jnp.asarray(ids), positions, None, mask)[0]

    return Case(*foreign.from_tunix(nnx, module), greedy, logits)


def keras_hub(seed: int) -> Case:
    os.environ["KERAS_BACKEND"] = "jax"
    import keras
    import keras_hub

    keras.utils.set_random_seed(seed)
    backbone = keras_hub.models.LlamaBackbone(
        vocabulary_size=V,
        num_layers=LAYERS,
        num_query_heads=2 * HEADS,
        num_key_value_heads=HEADS,
        hidden_dim=32,
        intermediate_dim=MLP,
    )
    module = keras_hub.models.LlamaCausalLM(backbone, preprocessor=None)
    module.compile(sampler="greedy")

    def greedy(prompt: list[int]) -> list[int]:
        ids, mask = np.zeros((2, 1, len(prompt) + NEW), np.int32)
        ids[0, : len(prompt)], mask[0, : len(prompt)] = prompt, 1
        given = {"token_ids": ids, "padding_mask": mask}
        return module.generate(given, stop_token_ids=None)["token_ids"][0, len(prompt) :].tolist()

    def logits(ids: np.ndarray) -> Any:
        return module({"token_ids": ids, "padding_mask": np.ones_like(ids)})

    return Case(*foreign.from_keras_hub(keras, module), greedy, logits)


def texts(case: Case, prompts: list[list[int]], config=CONFIG, **given: Any) -> lm.GenerateOutput:
    return lm.generate(case.model, case.params, prompts, config=config, **given)


def law(case: Case, prompt: list[int], temperature: float) -> np.ndarray:
    """``[V, V, V]``: the chance of each three tokens after the prompt, by the whole text."""
    tokens = np.array([[*prompt, *rest] for rest in itertools.product(range(V), repeat=3)])
    logits = np.asarray(case.logits(tokens.astype(np.int32)), np.float64)[:, len(prompt) - 1 : -1]
    weights = np.exp(logits / temperature)
    chances = weights / weights.sum(axis=2, keepdims=True)
    of_tokens = np.take_along_axis(chances, tokens[:, len(prompt) :, None], axis=2)
    return of_tokens.prod(axis=(1, 2)).reshape(V, V, V)


@pytest.mark.parametrize(("make", "temperature"), [(tunix, 0.7), (keras_hub, 0.2)])
def test_text_is_that_of_their_own_code(make, temperature):
    target, draft = make(0), make(1)
    by_draft = dict(drafter=lm.ModelDrafter(draft.model), draft_params=draft.params)
    by_itself = dict(drafter=lm.ModelDrafter(target.model), draft_params=target.params)

    # Greedy: their own sampler, one prompt at a time, so without padding.
    want = [target.greedy(prompt) for prompt in PROMPTS]
    assert len({token for text in want for token in text}) > 1
    for given in (by_draft, by_itself, dict(drafter=lm.NGramDrafter(min_ngram=1))):
        output = texts(target, PROMPTS, temperature=0.0, max_new_tokens=NEW, **given)
        assert output.completions == want

    # Sampled: the chances of three tokens, by their code without a cache. One draft is often wrong.
    prompt, n = PROMPTS[0], 4000
    output = texts(target, [prompt] * n, temperature=temperature, max_new_tokens=3, **by_draft)
    counts = tally(np.array(output.completions), V)
    assert_distributed(counts, law(target, prompt, temperature), make.__name__)
    assert p_value(counts, law(draft, prompt, temperature)) < CONTROL
    accepted, proposed = output.steps.num_accepted.sum(), output.steps.num_proposed.sum()
    assert 0.2 * proposed < accepted < 0.95 * proposed

    # The agreement rule: plain decoding's own text, token for token.
    agreement = sd.SpecDecodeConfig(num_speculative_tokens=3, rejection_sample_method="agreement")
    sampled: Any = dict(temperature=temperature, max_new_tokens=NEW, key=jax.random.key(5))
    plain = lm.generate_plain(target.model, target.params, PROMPTS, config=agreement, **sampled)
    output = texts(target, PROMPTS, agreement, **sampled, **by_draft)
    assert output.completions == plain.completions
    assert output.steps.num_accepted.sum() > 0


def test_the_program_of_the_report_to_keras_hub_shows_the_fault() -> None:
    assert chi_square_of("keras-hub") > 100
