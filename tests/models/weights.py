"""Sizes of tiny models; random weights and token ids drawn by NumPy, which compiles nothing."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from jax_specdec.lm.models import Int8Weight, LlamaConfig


def sizes(
    vocab: int, hidden: int, inner: int, layers: int, heads: tuple[int, int, int], **fields: Any
) -> LlamaConfig:
    """Sizes of a Llama; `heads` are its query heads, its heads of keys, and their width."""
    return LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        head_dim=heads[2],
        **fields,
    )


def first_layers(loaded: Any, count: int) -> Any:
    """A loaded Llama cut to its first layers: the same code in programs that compile sooner."""
    config = dataclasses.replace(loaded.model.config, num_hidden_layers=count)
    model = dataclasses.replace(loaded.model, config=config)
    params = loaded.params | {"layers": loaded.params["layers"][:count]}
    return loaded._replace(model=model, params=params)


def of_features(loaded: Any, layers: tuple[int, ...]) -> Any:
    """A loaded head that reads these layers of its target."""
    config = dataclasses.replace(loaded.model.config, feature_layers=layers)
    return loaded._replace(model=dataclasses.replace(loaded.model, config=config))


def random_weights(model: Any, seed: int, scale: float = 1.0, *, moved: float = 0.0) -> Any:
    """Weights of a model or a head: matrices normal with variance ``scale^2 / fan-in``.

    Norms are `scale` and biases zero, moved by normal numbers of deviation `moved`.
    """
    rng = np.random.default_rng(seed)

    def draw(path: Any, x: jax.ShapeDtypeStruct) -> jax.Array:
        name = path[-1].key
        if name == "target_ids":
            return jax.device_put(np.arange(x.shape[0], dtype=np.int32))
        if len(x.shape) == 1:
            mean, deviation = scale * (not name.endswith("bias")), moved
        else:
            mean, deviation = 0.0, scale * x.shape[name == "embed_tokens"] ** -0.5
        drawn = mean + deviation * rng.standard_normal(x.shape)
        return jax.device_put(drawn.astype(x.dtype))

    shapes = jax.eval_shape(lambda: model.init_params(jax.random.key(0)))
    return jax.tree.map_with_path(draw, shapes)


def dequantized(params: Any, like: Any) -> Any:
    """What weights of `quantize` stand for, in float64 and in the shapes of those before it."""

    def one(x: Any, before: Any) -> Any:
        if not isinstance(x, Int8Weight):
            return x
        # [out, in] -> [in, out], or as it is
        weight = np.asarray(x.values, np.float64) * np.asarray(x.scale, np.float64)[:, None]
        return weight.T if weight.T.shape == before.shape else weight

    return jax.tree.map(one, params, like, is_leaf=lambda x: isinstance(x, Int8Weight))


def random_ids(shape: tuple[int, ...], most: int, seed: int = 0) -> np.ndarray:
    """Token ids below `most`, int32."""
    return np.random.default_rng(seed).integers(0, most, shape, np.int32)
