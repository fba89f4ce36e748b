"""An EAGLE-3 head in NumPy float64, one sequence, no cache, from the formulas of the paper."""

from typing import Any

import numpy as np

from .reference_llama import float64, norm, rotate


def project(config: Any, params: Any, features: np.ndarray) -> np.ndarray:
    """fc of features `[S, A * H_target]`, after the norms that come before it."""
    g, eps = float64(features), config.layer.rms_norm_eps
    if config.norm_before_fc:
        g = norm(g, float64(params["input_norm"]), eps)
    if config.fc_norm:
        count = len(config.feature_layers)
        chunks = zip(np.split(g, count, 1), np.split(params["fc_norm"], count), strict=True)
        g = np.concatenate([norm(chunk, float64(weight), eps) for chunk, weight in chunks], 1)
    return g @ float64(params["fc"])


def forward(
    config: Any, params: Any, states: np.ndarray, next_ids: list[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Logits `[S, Vd]` and feedback `[S, H]` of positions 0 to S - 1."""
    c, eps = config.layer, config.layer.rms_norm_eps
    layer = {name: float64(weight) for name, weight in params["layer"].items()}
    embedded = norm(float64(params["embed_tokens"])[next_ids], layer["input_layernorm"], eps)
    normed = norm(states, layer["hidden_norm"], eps)
    h = normed if config.norm_before_residual else states
    h = h + attention(c, layer, np.concatenate([embedded, normed], 1)) + layer.get("o_bias", 0)
    u = norm(h, layer["post_attention_layernorm"], eps)
    gate, up = np.split(u @ layer["gate_up_proj"], 2, 1)
    h = h + (gate / (1 + np.exp(-gate)) * up) @ layer["down_proj"]
    output = norm(h, float64(params["norm"]), eps)
    lm_head = float64(params["lm_head"])
    is_embedding = c.tie_word_embeddings and not config.own_lm_head
    logits = output @ (lm_head.T if is_embedding else lm_head) * config.logit_scale
    return logits, output if config.norm_output else h


def attention(config: Any, layer: Any, u: np.ndarray) -> np.ndarray:
    """What attention reads at positions 0 to S - 1, before the bias of its output."""
    num_query, num_kv, width = (
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
    )
    heads = (u @ layer["qkv_proj"] + layer.get("qkv_bias", 0)).reshape(len(u), -1, width)
    query, key, value = np.split(heads, [num_query, num_query + num_kv], 1)
    if config.qk_norm:
        query = np.stack([norm(row, layer["q_norm"], config.rms_norm_eps) for row in query])
        key = np.stack([norm(row, layer["k_norm"], config.rms_norm_eps) for row in key])
    out = np.zeros((len(u), num_query, width))
    for position in range(len(u)):
        for head in range(num_query):
            shared = head // (num_query // num_kv)
            q = rotate(query[position, head], position, config.rope_theta)
            keys = [rotate(key[t, shared], t, config.rope_theta) for t in range(position + 1)]
            scores = np.array([q @ k for k in keys]) / np.sqrt(width)
            weights = np.exp(scores - scores.max())
            out[position, head] = weights / weights.sum() @ value[: position + 1, shared]
    return out.reshape(len(u), -1) @ layer["o_proj"]
