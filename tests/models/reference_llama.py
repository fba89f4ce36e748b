"""A Llama forward pass in NumPy float64: plain loops, no cache, one sequence; imports nothing."""

from typing import Any

import numpy as np


def forward(config: Any, params: Any, token_ids: list[int]) -> np.ndarray:
    """Logits `[S, V]` of one sequence from position 0."""
    x = norm(streams(config, params, token_ids)[-1], float64(params["norm"]), config.rms_norm_eps)
    head = params["embed_tokens"].T if config.tie_word_embeddings else params["lm_head"]
    return x @ float64(head)


def streams(config: Any, params: Any, token_ids: list[int]) -> list[np.ndarray]:
    """The residual stream `[S, H]` before each layer, and after the last one."""
    x = float64(params["embed_tokens"])[token_ids]
    found = [x]
    for layer in params["layers"]:
        layer = {name: float64(weight) for name, weight in layer.items()}
        x = x + attention(config, layer, norm(x, layer["input_layernorm"], config.rms_norm_eps))
        h = norm(x, layer["post_attention_layernorm"], config.rms_norm_eps)
        gate = h @ layer["gate_up_proj"][:, : config.intermediate_size]
        up = h @ layer["gate_up_proj"][:, config.intermediate_size :]
        x = x + (gate / (1.0 + np.exp(-gate)) * up) @ layer["down_proj"]
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


def attention(config: Any, layer: Any, h: np.ndarray) -> np.ndarray:
    num_query, num_kv = config.num_attention_heads, config.num_key_value_heads
    width, theta = config.head_dim, config.rope_theta
    heads = (h @ layer["qkv_proj"]).reshape(len(h), num_query + 2 * num_kv, width)
    out = np.zeros((len(h), num_query, width))
    for position in range(len(h)):
        for head in range(num_query):
            shared = num_query + head // (num_query // num_kv)
            query = rotate(heads[position, head], position, theta)
            scores = np.array(
                [
                    query @ rotate(heads[past, shared], past, theta) / np.sqrt(width)
                    for past in range(position + 1)
                ]
            )
            probs = np.exp(scores - scores.max())
            probs /= probs.sum()
            for past in range(position + 1):
                out[position, head] += probs[past] * heads[past, shared + num_kv]
    return out.reshape(len(h), -1) @ layer["o_proj"]
