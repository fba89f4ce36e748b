"""A Llama forward pass in NumPy float64: plain loops, no cache, one sequence; imports nothing."""

from typing import Any

import numpy as np


def forward(config: Any, params: Any, token_ids: list[int]) -> np.ndarray:
    """Logits `[S, V]` of one sequence from position 0."""
    x = streams(config, params, token_ids)[-1]
    x = norm(x, float64(params["norm"]), config.norm.rms_norm_eps)
    head = params["embed_tokens"].T if config.tie_word_embeddings else params["lm_head"]
    return x @ float64(head)


def streams(config: Any, params: Any, token_ids: list[int]) -> list[np.ndarray]:
    """The residual stream `[S, H]` before each layer, and after the last one."""
    x = float64(params["embed_tokens"])[token_ids]
    found = [x]
    eps = config.norm.rms_norm_eps
    for spec, layer in zip(config.layers, params["layers"], strict=True):
        layer = {name: float64(weight) for name, weight in layer.items()}
        x = x + attention(spec, layer, norm(x, layer["input_layernorm"], eps))
        h = norm(x, layer["post_attention_layernorm"], eps)
        x = x + feed_forward(layer, h)
        found.append(x)
    return found


def float64(array: Any) -> np.ndarray:
    return np.asarray(array, np.float64)


def norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return np.stack([row / np.sqrt(np.mean(row**2) + eps) * weight for row in x])


def rotate(vector: np.ndarray, position: int, theta: float) -> np.ndarray:
    """Multiplies the complex numbers v[i] + 1j v[i + D/2] by exp(1j position theta^(-2i/D))."""
    half = len(vector) // 2
    turned = (vector[:half] + 1j * vector[half:]) * np.exp(
        1j * position * theta ** (-np.arange(half) / half)
    )
    return np.concatenate([turned.real, turned.imag])


def attention(spec: Any, layer: Any, h: np.ndarray) -> np.ndarray:
    """What attention adds at positions 0 to S - 1, without the bias of its output."""
    num_query, num_kv = spec.num_attention_heads, spec.num_key_value_heads
    width, eps = spec.head_dim, spec.norm.rms_norm_eps
    heads = (h @ layer["qkv_proj"] + layer.get("qkv_bias", 0)).reshape(len(h), -1, width)
    query, key, value = np.split(heads, [num_query, num_query + num_kv], 1)
    if spec.qk_norm:
        query = np.stack([norm(row, layer["q_norm"], eps) for row in query])
        key = np.stack([norm(row, layer["k_norm"], eps) for row in key])
    theta = spec.rotation.rope_theta
    out = np.zeros((len(h), num_query, width))
    for position in range(len(h)):
        for head in range(num_query):
            shared = head // (num_query // num_kv)
            q = rotate(query[position, head], position, theta)
            seen = range(max(0, position + 1 - (spec.window or len(h))), position + 1)
            keys = [rotate(key[t, shared], t, theta) for t in seen]
            scores = np.array([q @ k for k in keys]) * (spec.scale or width**-0.5)
            weights = np.exp(scores - scores.max())
            out[position, head] = weights / weights.sum() @ value[seen, shared]
    return out.reshape(len(h), -1) @ layer["o_proj"]


def feed_forward(layer: Any, h: np.ndarray) -> np.ndarray:
    gate, up = np.split(h @ layer["gate_up_proj"], 2, axis=1)
    return (gate / (1 + np.exp(-gate)) * up) @ layer["down_proj"]
