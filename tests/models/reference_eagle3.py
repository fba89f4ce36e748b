"""An EAGLE-3 head in NumPy float64, one sequence, no cache, from the formulas of the paper."""

from typing import Any

import numpy as np

from .reference_llama import attention, feed_forward, float64, norm


def project(config: Any, params: Any, features: np.ndarray) -> np.ndarray:
    """fc of features `[S, A * H_target]`, after the norms that come before it."""
    g, eps = float64(features), config.norm.rms_norm_eps
    if config.norm_before_fc:
        g = norm(g, float64(params["input_norm"]), eps)
    if config.fc_norm:
        count = len(config.aux_hidden_state_layers)
        chunks = zip(np.split(g, count, 1), np.split(params["fc_norm"], count), strict=True)
        g = np.concatenate([norm(chunk, float64(weight), eps) for chunk, weight in chunks], 1)
    return g @ float64(params["fc"])


def forward(
    config: Any, params: Any, states: np.ndarray, next_ids: list[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Logits `[S, Vd]` and feedback `[S, H]` of positions 0 to S - 1."""
    eps = config.norm.rms_norm_eps
    layer = {name: float64(weight) for name, weight in params["layer"].items()}
    embedded = norm(float64(params["embed_tokens"])[next_ids], layer["input_layernorm"], eps)
    normed = norm(states, layer["hidden_norm"], eps)
    h = normed if config.norm_before_residual else states
    h = h + attention(config.layers[0], layer, np.concatenate([embedded, normed], 1))
    h = h + layer.get("o_bias", 0)
    u = norm(h, layer["post_attention_layernorm"], eps)
    h = h + feed_forward(layer, u)
    output = norm(h, float64(params["norm"]), eps)
    lm_head = float64(params["lm_head"])
    is_embedding = config.tie_word_embeddings and not config.own_lm_head
    logits = output @ (lm_head.T if is_embedding else lm_head) * config.logit_scale
    return logits, output if config.norm_output else h
