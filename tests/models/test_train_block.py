"""Training of block heads: blocks see what drafting sees, the loss is what it says, it learns."""

import functools
import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import train_block
import train_eagle3
from safetensors.numpy import load_file

from jax_specdec import lm

pytestmark = pytest.mark.newest

HEADS = {kind: train_block.make_head(kind, 5) for kind in ("dflash", "dspark")}


def weights_of(head: lm.BlockHead) -> Any:
    return train_block.first_params(head, jax.random.key(1))


def plain_block(
    head: lm.BlockHead, params: Any, embedding: Any, features: Any, token: int, n: int
) -> np.ndarray:
    """States `[S, H]` of the block of one anchor, in float64, row by row."""
    c, size = head.config.layer, head.config.block_size
    to64 = functools.partial(np.asarray, dtype=np.float64)
    params, embedding, features = jax.tree.map(to64, (params, embedding, features))

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + c.rms_norm_eps) * weight

    def turn(x: np.ndarray, position: int) -> np.ndarray:
        half = c.head_dim // 2
        angle = position * c.rope_theta ** (-np.arange(half) / half)
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
@pytest.mark.parametrize("kind", [pytest.param("dflash", marks=pytest.mark.slow), "dspark"])
def test_blocks_are_those_of_one_anchor_at_a_time(kind: str) -> None:
    head, rng = HEADS[kind], np.random.default_rng(0)
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


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param("dflash", marks=pytest.mark.slow), "dspark"])
def test_a_head_of_zeros_has_the_loss_of_uniform_drafts(kind: str) -> None:
    head, (target, _) = HEADS[kind], lm.load_embedded_pair()
    params = jax.tree.map(jnp.zeros_like, weights_of(head))
    tokens = jnp.asarray(lm.encode_bytes("def f(x):\n    return x + 1\n"))[None]
    anchors = jnp.array([[1, 4, 17]], jnp.int32)
    rows = np.array([1, 4, 17])[:, None] + np.arange(head.config.max_drafts)
    whole = train_eagle3.Target(*target)
    found = train_block.measure(head, params, whole, tokens, anchors)
    p = np.asarray(jax.nn.softmax(whole.run(tokens, (2,))[0][0]), np.float64)[rows]
    shared = np.minimum(p, 1 / 256).sum(-1)
    np.testing.assert_allclose(found.acceptance[0], shared, rtol=1e-4)
    np.testing.assert_allclose(found.cross_entropy, np.log(256), rtol=1e-5)
    np.testing.assert_allclose(found.confidence_loss, np.log(2), rtol=1e-5)
    loss = 0.1 * np.log(256) + 0.9 * np.abs(p - 1 / 256).sum(-1).mean(0)
    loss = loss + np.log(2) * (kind == "dspark")
    weights = np.exp(-np.arange(head.config.max_drafts) / 4)
    expected = (weights * loss).sum() / weights.sum()
    np.testing.assert_allclose(train_block.loss_of(head, found), expected, rtol=1e-4)


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


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("dspark", marks=pytest.mark.slow),  # with all parts that dflash has
        pytest.param("dflash", marks=pytest.mark.slow),
    ],
)
def test_a_head_learns_and_is_written(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    library = tmp_path / "library"
    library.mkdir()
    for name in ("bisect.py", "glob.py", "ast.py"):
        lines = [f"def f{i}(x):\n    return x + {i % 7}\n" for i in range(200)]
        (library / name).write_text("".join(lines))
    arguments = (
        f"--kinds {kind} --out {tmp_path} --stdlib {library} --steps 100 --sampled 8 --batch-size 4"
    )
    arguments += " --length 32 --anchors 4 --functions 2 --new-tokens 8"
    with jax.numpy_dtype_promotion("standard"):  # optax asks for it
        train_block.main(arguments.split())
    assert len(re.findall(r"acceptance length, K = ", capsys.readouterr().out)) == 2
    record = json.loads((tmp_path / kind / "training.json").read_text())
    assert record["log"][-1]["loss"] < 0.8 * record["log"][0]["loss"]
    config = json.loads((tmp_path / kind / "config.json").read_text())
    assert config["sample_from_anchor"] == (kind == "dspark")
    tensors = load_file(tmp_path / kind / "model.safetensors")
    assert tensors["fc.weight"].shape == (256, 768)
    assert ("markov_head.markov_w1.weight" in tensors) == (kind == "dspark")
    assert (tmp_path / kind / "model.safetensors").stat().st_size < 1.5e6
