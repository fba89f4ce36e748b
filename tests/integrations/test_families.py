"""Gemma 2 and 3 against `transformers` itself, with tiny random weights: `make test-models`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import jax_specdec as sd
from jax_specdec import lm

NEW = 24
TEXT: dict[str, Any] = dict(
    vocab_size=90, hidden_size=24, intermediate_size=40, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, query_pre_attn_scalar=20, sliding_window=7,
    max_position_embeddings=128, bos_token_id=1, eos_token_id=None, pad_token_id=0,
)  # fmt: skip
ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e4},
}
VISION = dict(
    hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, image_size=28,
    patch_size=14,
)  # fmt: skip


def gemma3() -> Any:
    """Every sixth of seven layers has full attention, as where a file does not say which."""
    config = transformers.Gemma3TextConfig(**TEXT, num_hidden_layers=7, rope_parameters=ROPE)
    return transformers.Gemma3ForCausalLM(config)


def gemma3_with_images() -> Any:
    """Its file has weights of the other modality, and longer names."""
    text = dict(TEXT, num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"])
    config = transformers.Gemma3Config(
        text_config=text, vision_config=VISION, mm_tokens_per_image=4, image_token_index=5
    )
    return transformers.Gemma3ForConditionalGeneration(config)


def gemma2() -> Any:
    """Soft caps of scores and logits."""
    caps = dict(attn_logit_softcapping=2.0, final_logit_softcapping=4.0)
    return transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(**TEXT, **caps, num_hidden_layers=3)
    )


@pytest.mark.parametrize("make", [gemma3, gemma3_with_images, gemma2], ids=lambda x: x.__name__)
def test_logits_and_texts_are_those_of_transformers(make: Any, tmp_path: Path) -> None:
    theirs = make().eval()
    theirs.set_attn_implementation("eager")
    generator = torch.Generator().manual_seed(1)
    for name, weight in theirs.named_parameters():
        is_norm = name.endswith("norm.weight")
        deviation = 0.3 if is_norm else 1.5 * weight.shape[-1] ** -0.5
        weight.data = deviation * torch.randn(weight.shape, generator=generator)
    theirs.save_pretrained(tmp_path)
    model, params = lm.load_huggingface(tmp_path, "float32")

    # Repeats, which n-grams propose, and three windows.
    ids = np.tile(np.random.default_rng(0).integers(6, 90, 10), 3)
    with torch.no_grad():
        wanted = theirs(torch.tensor(ids[None])).logits[0].numpy()
        greedy = theirs.generate(torch.tensor(ids[None]), do_sample=False, max_new_tokens=NEW)
    rows = lm.models.Rows(ids[None].astype(np.int32), np.zeros(1, np.int32))
    (output,), _ = model.apply(params, [rows], model.init_cache(1, len(ids)))
    error = np.abs(np.asarray(output.logits[0]) - wanted).max(axis=1)
    assert (error < 1e-5 * np.abs(wanted).max(axis=1)).all()
    config = sd.SpecDecodeConfig(num_speculative_tokens=3)
    found = lm.generate(
        model, params, [ids.tolist()], drafter=lm.NGramDrafter(), config=config, max_new_tokens=NEW
    )
    assert found.completions[0] == greedy[0, len(ids) :].tolist()
