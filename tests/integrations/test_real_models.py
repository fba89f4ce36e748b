"""Models of others from their own packages, with tiny random weights: `make test-models`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import pytest

import jax_specdec as sd
from jax_specdec.integrations import models

pytestmark = [pytest.mark.models, pytest.mark.filterwarnings("ignore")]
PROMPTS = [[3, 1, 4], [5], [2, 7, 1, 8, 2, 8]]
V, NEW, LAYERS, HEADS, SIZE = 50, 20, 2, 2, 16


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
        return 0


@pytest.fixture(autouse=True)
def default_promotion() -> Iterator[None]:
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def qwen3(seed: int) -> Any:
    from flax import nnx
    from tunix.models.qwen3 import model as qwen3

    config = qwen3.ModelConfig(
        num_layers=LAYERS,
        vocab_size=V,
        embed_dim=32,
        hidden_dim=48,
        num_heads=4,
        head_dim=SIZE,
        num_kv_heads=HEADS,
        rope_theta=10000,
        norm_eps=1e-6,
    )
    return qwen3.Qwen3(config, rngs=nnx.Rngs(seed))


def test_tunix_greedy_text_is_that_of_its_own_sampler():
    from flax import nnx
    from tunix.generate import sampler

    module = qwen3(0)
    own = sampler.Sampler(module, Ids(), sampler.CacheConfig(64, LAYERS, HEADS, SIZE))
    want = []
    for prompt in PROMPTS:  # one at a time: without padding
        text = " ".join(map(str, prompt))
        found = own(text, max_generation_steps=NEW, temperature=0.0)
        want.append([int(token) for token in found.tokens[0]][:NEW])
    model, params = models.from_tunix(nnx, module)
    draft, draft_params = models.from_tunix(nnx, qwen3(1))
    config = sd.SpecDecodeConfig(num_speculative_tokens=3)
    given: Any = dict(config=config, max_new_tokens=NEW, key=jax.random.key(0))
    for drafter, weights in (
        (sd.ModelDrafter(draft), draft_params),
        (sd.ModelDrafter(model), params),  # itself: its drafts are accepted
        (sd.NGramDrafter(min_ngram=1), None),
    ):
        output = sd.generate(
            model,
            params,
            PROMPTS,
            drafter=drafter,
            draft_params=weights,
            temperature=0.0,
            **given,
        )
        assert output.completions == want
    output = sd.generate(
        model,
        params,
        PROMPTS,
        drafter=sd.ModelDrafter(model),
        draft_params=params,
        temperature=1.0,
        **given,
    )
    proposed, accepted = output.steps.num_proposed.sum(), output.steps.num_accepted.sum()
    assert accepted > 0.98 * proposed  # sampled, and verified against the same model
