"""Models of the shapes of Llama 3 and Qwen3, with random weights."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from jax_specdec import lm

LLAMA_3_8B = lm.models.LlamaConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    rope_theta=500000.0,
)
LLAMA_3_1B = dataclasses.replace(
    LLAMA_3_8B,
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    head_dim=64,
    tie_word_embeddings=True,
)
QWEN3_8B = lm.models.LlamaConfig(
    vocab_size=151936,
    hidden_size=4096,
    intermediate_size=12288,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    rope_theta=1000000.0,
    qk_norm=True,
)
QWEN3_06B = dataclasses.replace(
    QWEN3_8B,
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    tie_word_embeddings=True,
)
TINY = lm.models.LlamaConfig(
    vocab_size=300,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
)


def random_params(model: lm.models.Llama, seed: int) -> dict[str, Any]:
    """Random weights, made on the device a layer at a time: one layer's program serves for all."""
    config = dataclasses.replace(model.config, num_hidden_layers=1)
    one = dataclasses.replace(model, config=config).init_params
    first, *keys = jax.random.split(jax.random.key(seed), model.config.num_hidden_layers + 1)
    rest = jax.jit(lambda key: {k: v for k, v in one(key).items() if k != "layers"})(first)
    layer = jax.jit(lambda key: one(key)["layers"][0])
    return {**rest, "layers": [layer(key) for key in keys]}
