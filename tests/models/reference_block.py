"""A DFlash or DSpark head in NumPy float64, one block of one sequence, no cache, plain loops."""

from typing import Any

import numpy as np

from .reference_llama import feed_forward, float64, norm, rotate


def forward(
    config: Any, params: Any, features: np.ndarray, newest: int
) -> tuple[np.ndarray, np.ndarray]:
    """Logits `[K, Vd]` without a bias and states `[K, H]`, after features `[n, A * H_target]`."""
    eps, size, n = config.norm.rms_norm_eps, config.block_size, len(features)
    context = norm(float64(features) @ float64(params["fc"]), float64(params["hidden_norm"]), eps)
    ids = [newest] + [config.mask_token_id] * (size - 1)
    x = float64(params["embed_tokens"])[ids]
    for spec, layer in zip(config.layers, params["layers"], strict=True):
        layer = {name: float64(weight) for name, weight in layer.items()}
        u = norm(x, layer["input_layernorm"], eps)
        slides = spec.window is not None
        seen = []
        for row in range(size):
            own = [i for i in range(n) if not slides or i > n - spec.window]
            causal = slides and not config.sliding_window_non_causal
            seen.append(own + [n + j for j in range(size) if j <= row or not causal])
        x = x + attention(spec, layer, np.concatenate([context, u]), n, seen)
        x = x + layer.get("o_bias", 0)
        x = x + feed_forward(layer, norm(x, layer["post_attention_layernorm"], eps))
    states = norm(x, float64(params["norm"]), eps)
    lm_head = float64(params["lm_head"])
    is_embedding = config.tie_word_embeddings and not config.own_lm_head
    logits = states @ (lm_head.T if is_embedding else lm_head) * config.logit_scale
    first = 0 if config.sample_from_anchor else 1
    return logits[first:], states[first:]


def attention(spec: Any, layer: Any, rows: np.ndarray, n: int, seen: list[list[int]]) -> np.ndarray:
    """What attention adds to the rows from n on; `seen` are the rows that each of these sees."""
    num_query, num_kv, width = spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim
    heads = (rows @ layer["qkv_proj"] + layer.get("qkv_bias", 0)).reshape(len(rows), -1, width)
    query, key, value = np.split(heads, [num_query, num_query + num_kv], 1)
    if spec.qk_norm:
        eps = spec.norm.rms_norm_eps
        query = np.stack([norm(row, layer["q_norm"], eps) for row in query])
        key = np.stack([norm(row, layer["k_norm"], eps) for row in key])
    theta = spec.rotation.rope_theta
    out = np.zeros((len(rows) - n, num_query, width))
    for row in range(len(rows) - n):
        for head in range(num_query):
            shared = head // (num_query // num_kv)
            q = rotate(query[n + row, head], n + row, theta)
            scores = [q @ rotate(key[t, shared], t, theta) for t in seen[row]]
            weights = np.exp((np.array(scores) - max(scores)) / np.sqrt(width))
            out[row, head] = weights / weights.sum() @ value[seen[row], shared]
    return out.reshape(len(out), -1) @ layer["o_proj"]


def bias(config: Any, params: Any, before: int) -> np.ndarray:
    """What the token before adds to a row of logits, `[Vd]`; nothing without a Markov head."""
    if config.markov_rank is None:
        return np.zeros(config.draft_vocab_size)
    product = float64(params["markov_w2"]) @ float64(params["markov_w1"])[before]
    return product * config.logit_scale


def confidence(config: Any, params: Any, state: np.ndarray, before: int) -> float:
    """How likely a draft is to be accepted."""
    if config.confidence_head_with_markov:
        state = np.concatenate([state, float64(params["markov_w1"])[before]])
    logit = state @ float64(params["confidence_proj"])[:, 0] + float64(params["confidence_bias"])[0]
    return float(1 / (1 + np.exp(-logit)))
