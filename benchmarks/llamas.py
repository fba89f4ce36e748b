"""Models of the shapes of Llama 3, Qwen2.5-Coder, Qwen3 and SmolLM2, with random weights."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from jax_specdec import lm

_LLAMA_3 = lm.models.LayerSpec(
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    intermediate_size=14336,
    rotation=lm.models.Rotation(rope_theta=500000.0),
)
LLAMA_3_8B = lm.models.DecoderConfig(vocab_size=128256, hidden_size=4096, layers=(_LLAMA_3,) * 32)
LLAMA_3_1B = lm.models.DecoderConfig(
    vocab_size=128256,
    hidden_size=2048,
    layers=(dataclasses.replace(_LLAMA_3, head_dim=64, intermediate_size=8192),) * 16,
    tie_word_embeddings=True,
)
_QWEN3 = lm.models.LayerSpec(
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    intermediate_size=12288,
    rotation=lm.models.Rotation(rope_theta=1000000.0),
    qk_norm=True,
)
QWEN3_8B = lm.models.DecoderConfig(vocab_size=151936, hidden_size=4096, layers=(_QWEN3,) * 36)
QWEN3_06B = lm.models.DecoderConfig(
    vocab_size=151936,
    hidden_size=1024,
    layers=(dataclasses.replace(_QWEN3, num_attention_heads=16, intermediate_size=3072),) * 28,
    tie_word_embeddings=True,
)
_QWEN2 = lm.models.LayerSpec(
    num_attention_heads=14,
    num_key_value_heads=2,
    head_dim=64,
    intermediate_size=4864,
    rotation=lm.models.Rotation(rope_theta=1000000.0),
    qkv_bias=True,
)
QWEN2_05B = lm.models.DecoderConfig(vocab_size=151936, hidden_size=896, layers=(_QWEN2,) * 24)
QWEN2_15B = lm.models.DecoderConfig(
    vocab_size=151936,
    hidden_size=1536,
    layers=(
        dataclasses.replace(_QWEN2, num_attention_heads=12, head_dim=128, intermediate_size=8960),
    )
    * 28,
)
_SMOLLM2 = lm.models.LayerSpec(
    num_attention_heads=9, num_key_value_heads=3, head_dim=64, intermediate_size=1536
)
SMOLLM2_135M = lm.models.DecoderConfig(
    vocab_size=49152, hidden_size=576, layers=(_SMOLLM2,) * 30, tie_word_embeddings=True
)
_TINY = lm.models.LayerSpec(
    num_attention_heads=4, num_key_value_heads=2, head_dim=8, intermediate_size=32
)
TINY = lm.models.DecoderConfig(vocab_size=300, hidden_size=16, layers=(_TINY,) * 2)


def cut(config: lm.models.DecoderConfig, count: int) -> lm.models.DecoderConfig:
    """The config with `count` layers, each like the first."""
    return dataclasses.replace(config, layers=config.layers[:1] * count)


def random_params(model: lm.models.Llama, seed: int) -> dict[str, Any]:
    """Random weights, made on the device a layer at a time: one layer's program serves for all."""
    one = dataclasses.replace(model, config=cut(model.config, 1)).init_params
    first, *keys = jax.random.split(jax.random.key(seed), len(model.config.layers) + 1)
    rest = jax.jit(lambda key: {k: v for k, v in one(key).items() if k != "layers"})(first)
    layer = jax.jit(lambda key: one(key)["layers"][0])
    return {**rest, "layers": [layer(key) for key in keys]}
