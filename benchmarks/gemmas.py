"""Models of the shapes of Gemma 4 and its assistants, with random weights."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from jax_specdec import lm
from jax_specdec.lm.models.config import layer_shapes
from jax_specdec.lm.models.layers import random_weights

_SLIDING = lm.models.LayerSpec(
    num_attention_heads=32,
    num_key_value_heads=16,
    head_dim=256,
    intermediate_size=21504,
    window=1024,
    scale=1.0,
    norm=lm.models.Norm(rms_norm_eps=1e-6, in_float32=True),
    norms="around",
    activation="gelu_tanh",
    qk_norm=True,
    v_norm=True,
    has_scalar=True,
)
_FULL = dataclasses.replace(
    _SLIDING,
    num_key_value_heads=4,
    head_dim=512,
    window=None,
    rotation=lm.models.Rotation(rope_theta=1e6, fraction=0.25),
    value_is_key=True,
)
GEMMA_4_31B = lm.models.DecoderConfig(
    vocab_size=262144,
    hidden_size=5376,
    layers=((_SLIDING,) * 5 + (_FULL,)) * 10,
    tie_word_embeddings=True,
    scales_embedding=True,
    logit_softcap=30.0,
)
_SMALL: dict[str, Any] = dict(
    num_attention_heads=8, num_key_value_heads=2, intermediate_size=10240, per_layer_input=256
)
_SLIDING_SMALL = dataclasses.replace(_SLIDING, **_SMALL, window=512)
_FULL_SMALL = dataclasses.replace(_FULL, **_SMALL, value_is_key=False)
_ALL_SMALL = ((_SLIDING_SMALL,) * 5 + (_FULL_SMALL,)) * 7
GEMMA_4_E4B = dataclasses.replace(
    GEMMA_4_31B,
    hidden_size=2560,
    layers=tuple(
        # Of 42 layers, the last 18 read the keys of layers 22 and 23.
        spec if index < 24 else dataclasses.replace(spec, keys_of=22 if spec.window else 23)
        for index, spec in enumerate(_ALL_SMALL)
    ),
)


def tiny(config: lm.models.DecoderConfig) -> lm.models.DecoderConfig:
    """The config with small sizes, and two layers of each kind."""
    sizes: dict[str, Any] = dict(num_attention_heads=4, num_key_value_heads=2, intermediate_size=32)
    layers = []
    for spec in (*config.layers[4:6], *config.layers[-2:]):
        heads = 8 if spec.window else 16
        own = {"keys_of": spec.keys_of and spec.keys_of - 22, "head_dim": heads}
        own["per_layer_input"] = spec.per_layer_input and 8
        layers.append(dataclasses.replace(spec, **sizes, **own))
    return dataclasses.replace(config, vocab_size=512, hidden_size=16, layers=tuple(layers))


def assistant_of(
    config: lm.models.DecoderConfig, hidden_size: int, intermediate_size: int, groups: int | None
) -> lm.models.GemmaAssistantHead:
    """A head of four layers, of which the last one is full."""
    own = [index for index, spec in enumerate(config.layers) if spec.keys_of is None]
    sliding = max(index for index in own if config.layers[index].window)
    full = max(index for index in own if not config.layers[index].window)
    layers = [
        dataclasses.replace(
            config.layers[index],
            keys_of=index,
            intermediate_size=intermediate_size,
            per_layer_input=None,
        )
        for index in (sliding, sliding, sliding, full)
    ]
    head = lm.models.GemmaAssistantConfig(
        vocab_size=config.vocab_size,
        hidden_size=hidden_size,
        layers=tuple(layers),
        target_hidden_size=config.hidden_size,
        target_layers=len(config.layers),
        target_norm=config.norm,
        num_centroids=groups,
        num_active_centroids=groups and max(groups // 64, 1),
    )
    return lm.models.GemmaAssistantHead(head, "bfloat16")


def random_params(model: lm.models.Llama, seed: int, is_int8: bool) -> dict[str, Any]:
    """Random weights, made on the device and quantized layer by layer: a program for each kind."""
    config = model.config
    makers = {}
    for spec in config.layers:
        shapes = layer_shapes(spec, config.hidden_size)
        if str(shapes) not in makers:
            makers[str(shapes)] = jax.jit(
                lambda key, shapes=shapes: random_weights(shapes, key, model.dtype, config.layers)
            )
    first, *keys = jax.random.split(jax.random.key(seed), len(config.layers) + 1)
    layers = []
    for key, spec in zip(keys, config.layers, strict=True):
        layer = makers[str(layer_shapes(spec, config.hidden_size))](key)
        layers.append(lm.models.quantize(layer) if is_int8 else layer)
    own = {name: x for name, x in model.weight_shapes.items() if name != "layers"}
    rest = jax.jit(lambda key: random_weights(own, key, model.dtype, config.layers))(first)
    params = {**rest, "layers": layers}
    return lm.models.quantize(params) if is_int8 else params
