"""Training of block heads: blocks see what drafting sees."""

import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import train_block
from formats.checkpoints import CHECKPOINTS

from jax_specdec import lm

pytestmark = pytest.mark.newest

HEADS = {kind: train_block.make_head(kind, 5) for kind in ("dflash", "dspark")}


def weights_of(head: lm.BlockHead) -> Any:
    return train_block.first_params(head, jax.random.key(1))


def plain_block(
    head: lm.BlockHead, params: Any, embedding: Any, features: Any, token: int, n: int
) -> np.ndarray:
    """States `[S, H]` of the block of one anchor, in float64, row by row."""
    c, size = head.config.layers[0], head.config.block_size
    to64 = functools.partial(np.asarray, dtype=np.float64)
    params, embedding, features = jax.tree.map(to64, (params, embedding, features))

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + c.norm.rms_norm_eps) * weight

    def turn(x: np.ndarray, position: int) -> np.ndarray:
        half = c.head_dim // 2
        angle = position * c.rotation.rope_theta ** (-np.arange(half) / half)
        first, second = x[..., :half], x[..., half:]
        turned = first * np.cos(angle) - second * np.sin(angle)
        return np.concatenate([turned, second * np.cos(angle) + first * np.sin(angle)], -1)

    context = norm(features[:n] @ params["fc"], params["hidden_norm"])
    x = embedding[[token] + [train_block.MASK] * (size - 1)]
    groups = c.num_attention_heads // c.num_key_value_heads
    for layer in params["layers"]:
        u = np.concatenate([context, norm(x, layer["input_layernorm"])])
        heads = (u @ layer["qkv_proj"]).reshape(n + size, -1, c.head_dim)
        keys, values = np.split(heads[:, c.num_attention_heads :], 2, axis=1)
        keys = np.stack([turn(norm(k, layer["k_norm"]), i) for i, k in enumerate(keys)])
        read = np.zeros((size, c.num_attention_heads, c.head_dim))
        for j in range(size):
            for head_index in range(c.num_attention_heads):
                query = turn(norm(heads[n + j, head_index], layer["q_norm"]), n + j)
                scores = keys[:, head_index // groups] @ query / np.sqrt(c.head_dim)
                shares = np.exp(scores - scores.max())
                read[j, head_index] = shares / shares.sum() @ values[:, head_index // groups]
        x = x + read.reshape(size, -1) @ layer["o_proj"]
        gate, up = np.split(
            norm(x, layer["post_attention_layernorm"]) @ layer["gate_up_proj"], 2, axis=1
        )
        x = x + (gate / (1 + np.exp(-gate)) * up) @ layer["down_proj"]
    return norm(x, params["norm"])


@pytest.mark.long
def test_blocks_are_those_of_one_anchor_at_a_time() -> None:
    head, rng = HEADS["dspark"], np.random.default_rng(0)
    params = weights_of(head)
    embedding = rng.normal(size=(256, 256)).astype(np.float32)
    features = rng.normal(size=(2, 12, params["fc"].shape[0])).astype(np.float32)
    anchors = np.array([[1, 7, 7], [12, 3, 5]], np.int32)
    ids = rng.integers(0, 256, anchors.shape, np.int32)
    run = jax.jit(train_block.run_blocks, static_argnums=0)
    states = run(head, params, embedding, features, ids, anchors)
    assert states.shape == (2, 3, head.config.max_drafts, 256)
    for b, a in np.ndindex(anchors.shape):
        token, n = ids[b, a], anchors[b, a]
        expected = plain_block(head, params, embedding, features[b], token, n)
        first = 5 - head.config.max_drafts
        np.testing.assert_allclose(states[b, a], expected[first:], rtol=1e-3, atol=1e-3)


def test_the_markov_head_and_the_confidence_see_the_token_before() -> None:
    params = weights_of(HEADS["dspark"])
    rng = np.random.default_rng(0)
    state, embedding = rng.normal(size=256), rng.normal(size=(256, 256))
    given = jnp.asarray(embedding, jnp.float32), jnp.asarray(state, jnp.float32)[None]
    logits, confidence = train_block.draft_logits(params, *given, jnp.array([7]))
    memory = np.asarray(params["markov_w1"], np.float64)[7]
    expected = embedding @ state + np.asarray(params["markov_w2"]) @ memory
    np.testing.assert_allclose(logits[0], expected, rtol=1e-4, atol=1e-4)
    both = np.concatenate([state, memory]) @ np.asarray(params["confidence_proj"])[:, 0]
    np.testing.assert_allclose(confidence[0], both, rtol=1e-4)


@pytest.mark.long
def test_a_head_of_another_target_learns_what_is_wanted_and_is_read_again(tmp_path: Path) -> None:
    rng, file = np.random.default_rng(0), tmp_path / "own.npz"
    ids = np.tile(rng.integers(3, 100, (12, 8), np.int32), (1, 4))  # each repeats its 8 tokens
    wanted = np.ones(ids.shape, bool)
    arrays = {"ids": ids, "wanted": wanted, "temperature": np.ones(12, np.float32)}
    np.savez(file, **arrays, **{f"held_out_{name}": x[:4] for name, x in arrays.items()})
    arguments = f"--out {tmp_path} --target {CHECKPOINTS / 'llama'} --windows {file} --kinds dspark"
    arguments += " --layers 0 1 2 --num-layers 1 --markov-rank 3 --block-size 4 --anchors 4"
    with jax.numpy_dtype_promotion("standard"):  # optax asks for it
        train_block.main([*arguments.split(), "--batch-size", "4", "--steps", "150"])
    record = json.loads((tmp_path / "dspark" / "training.json").read_text())
    losses = [entry["loss"] for entry in record["log"]]
    assert losses[-1] < losses[0]
    assert 0 < record["results"]["own text at temperature 1"]["acceptance"][0] < 1
    target = lm.load_huggingface(CHECKPOINTS / "llama", jnp.float32)
    head, params = lm.load_head(tmp_path / "dspark", target)
    assert len(head.config.layers) == 1 and head.config.markov_rank == 3
    assert head.config.mask_token_id in lm.load_tokenizer(CHECKPOINTS / "llama").special_tokens
    assert params["lm_head"] is target.params["lm_head"]
    # Where nothing is wanted, nothing is learned.
    measured = train_block.Measures(*[jnp.ones((2, 3, 4))] * 5)
    assert train_block.loss_of(head, measured, jnp.zeros((2, 3, 4))) == 0
    assert train_block.loss_of(head, measured, jnp.ones((2, 3, 4))) > 0


@pytest.mark.long
def test_texts_are_decoded_by_the_package() -> None:
    target = train_block.Target(*lm.load_embedded_pair()[0])
    head, prompts = HEADS["dspark"], [lm.encode_bytes("def f("), lm.encode_bytes("class A:")]
    found = train_block.evaluate_decoding(head, weights_of(head), target, prompts, 4, 8)
    assert found.keys() == {"0", "0.8"} and all(1 <= length <= 5 for length in found.values())
