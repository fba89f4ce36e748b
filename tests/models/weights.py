"""Sizes of tiny models; random weights and token ids drawn by NumPy, which compiles nothing."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from jax_specdec.lm.models import DecoderConfig, Int8Weight, LayerSpec, Norm, Rotation


def sizes(
    vocab: int, hidden: int, inner: int, layers: int, heads: tuple[int, int, int], **fields: Any
) -> DecoderConfig:
    """Sizes of a Llama; `heads` are its query heads, its heads of keys, and their width."""
    layer = LayerSpec(
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        head_dim=heads[2],
        intermediate_size=inner,
    )
    config = DecoderConfig(vocab_size=vocab, hidden_size=hidden, layers=(layer,) * layers)
    return with_fields(config, **fields)


def with_fields(config: Any, **fields: Any) -> Any:
    """A config of a decoder or head with other fields, those of a layer in all of its layers.

    `windows` has one of each layer; `rope_theta` and `rms_norm_eps` are fields of fields.
    """
    inner = {"rope_theta": ("rotation", Rotation), "rms_norm_eps": ("norm", Norm)}
    for name, (field, kind) in inner.items():
        if name in fields:
            fields[field] = kind(**{name: fields.pop(name)})
    names = {field.name for field in dataclasses.fields(LayerSpec)}
    of_layers = {name: fields.pop(name) for name in names & fields.keys()}
    given = fields.pop("layers", config.layers)
    layers = [dataclasses.replace(spec, **of_layers) for spec in given]
    if "windows" in fields:
        windows = fields.pop("windows")
        layers = [
            dataclasses.replace(spec, window=window)
            for spec, window in zip(layers, windows, strict=True)
        ]
    return dataclasses.replace(config, **{"layers": tuple(layers), **fields})


def mixed(config: DecoderConfig) -> DecoderConfig:
    """A config of three layers that differ in windows, heads of keys, and their width."""
    first, second, third = config.layers
    second = dataclasses.replace(second, window=4, num_key_value_heads=3, head_dim=4)
    return dataclasses.replace(
        config, layers=(first, second, dataclasses.replace(third, window=9, scale=0.2))
    )


def first_layers(loaded: Any, count: int) -> Any:
    """A loaded Llama cut to its first layers: the same code in programs that compile sooner."""
    config = loaded.model.config
    config = dataclasses.replace(config, layers=config.layers[:count])
    model = dataclasses.replace(loaded.model, config=config)
    params = loaded.params | {"layers": loaded.params["layers"][:count]}
    return loaded._replace(model=model, params=params)


def of_features(loaded: Any, layers: tuple[int, ...]) -> Any:
    """A loaded head that reads these layers of its target."""
    config = dataclasses.replace(loaded.model.config, aux_hidden_state_layers=layers)
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
