"""Layers in a scan: the logits, caches, checkpoints and texts of layers one after another."""

from __future__ import annotations

import dataclasses
import functools
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_specdec as sd
from jax_specdec import lm

from . import reference_llama
from .test_llama import CONFIG, MAX_LENGTH, apply, bytes_of_a_decoding_loop
from .weights import random_ids, random_weights

pytestmark = pytest.mark.newest

B, T, S = 3, 24, 11
stack, unstack = jax.jit(lm.models.stack_layers), jax.jit(lm.models.unstack_layers)


@functools.cache
def listed(model: lm.models.Llama) -> Any:
    """Weights whose layers differ, norms and biases too."""
    return random_weights(dataclasses.replace(model, scan_layers=False), 1, moved=0.3)


def scanned(**changes: Any) -> tuple[lm.models.Llama, Any]:
    model = lm.models.Llama(dataclasses.replace(CONFIG, **changes), scan_layers=True)
    return model, stack(listed(model))


def tokens() -> np.ndarray:
    return random_ids((B, S), CONFIG.vocab_size)


def in_calls(model: Any, params: Any, pieces: tuple[int, ...]) -> np.ndarray:
    """Logits of the same tokens, fed in pieces; what a later piece overwrites comes first."""
    cache, logits, first = model.init_cache(B, T), [], 0
    wrong = tokens()[:, ::-1]
    _, cache = apply(model, params, wrong, np.zeros((B,), np.int32), cache)
    for piece in pieces:
        part = tokens()[:, first : first + piece]
        new, cache = apply(model, params, part, np.full((B,), first, np.int32), cache)
        logits.append(new)
        first += piece
    return np.concatenate(logits, axis=1)


@pytest.mark.parametrize("pieces", [(S,), (1, 5, 5)])
def test_agrees_with_a_numpy_decoder(pieces: tuple[int, ...]) -> None:
    model, params = scanned()
    found = in_calls(model, params, pieces)
    for logits, token_ids in zip(found, tokens(), strict=True):
        want = reference_llama.forward(CONFIG, listed(model), token_ids.tolist())
        np.testing.assert_allclose(logits, want, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(
    "changes",
    [
        dict(qkv_bias=True, qk_norm=True, num_token_ids=30),
        dict(tie_word_embeddings=True, num_key_value_heads=1, num_hidden_layers=1),
    ],
    ids=["Qwen", "one layer"],
)
def test_agrees_with_layers_one_after_another(changes: dict[str, Any]) -> None:
    model, params = scanned(**changes)
    plain = dataclasses.replace(model, scan_layers=False)
    want = in_calls(plain, listed(model), (S,))
    np.testing.assert_allclose(in_calls(model, params, (S,)), want, rtol=1e-5, atol=2e-5)


def test_features_are_those_of_layers_one_after_another() -> None:
    (model, params), layers = scanned(), (0, 2, 3)
    start, cache = np.zeros(B, np.int32), model.init_cache(B, T)
    run = jax.jit(functools.partial(model.apply, feature_layers=layers))
    features = run(params, tokens(), start, cache).features
    for found, token_ids in zip(features, tokens(), strict=True):
        streams = reference_llama.streams(CONFIG, listed(model), token_ids.tolist())
        want = np.concatenate([streams[layer] for layer in layers], axis=1)
        np.testing.assert_allclose(found, want, rtol=1e-5, atol=2e-5)


def test_weights_begin_the_same_and_go_both_ways() -> None:
    model = lm.models.Llama(CONFIG, scan_layers=True)
    plain = dataclasses.replace(model, scan_layers=False)
    params, wanted = (jax.jit(one.init_params)(jax.random.key(4)) for one in (model, plain))
    jax.tree.map(np.testing.assert_array_equal, unstack(params), wanted)
    jax.tree.map(np.testing.assert_array_equal, stack(wanted), params)


@pytest.mark.parametrize(("batch", "length"), [(1, 5), (4, 1)])
def test_a_decoding_loop_updates_the_cache_in_place(batch: int, length: int) -> None:
    model, params = scanned(num_hidden_layers=6)
    scores = batch * length * CONFIG.num_attention_heads * MAX_LENGTH * 4
    one_layer = 2 * batch * CONFIG.num_key_value_heads * CONFIG.head_dim * MAX_LENGTH * 4
    found = bytes_of_a_decoding_loop(model, params, batch, length)
    assert found < 2 * scores + 1.5 * one_layer


def test_the_devices_of_a_mesh_give_the_same_logits() -> None:
    model, params = scanned(
        num_attention_heads=12,
        num_key_value_heads=6,
        intermediate_size=21,
        qkv_bias=True,
        qk_norm=True,
    )
    mesh = jax.make_mesh((4,), ("tensor",), devices=jax.devices()[:4])
    parallel = lm.models.TensorParallelLlama(model, mesh, "tensor")
    shared = parallel.shard_params(params)
    found = in_calls(parallel, shared, (S,))[..., : model.vocab_size]
    np.testing.assert_allclose(found, in_calls(model, params, (S,)), rtol=1e-5, atol=2e-5)
    for x in jax.tree.leaves(shared):
        assert {shard.data.shape[0] for shard in x.addressable_shards} == {1}


def test_a_checkpoint_is_the_same_file_either_way(tmp_path: Path) -> None:
    model, params = scanned(qkv_bias=True)
    plain = dataclasses.replace(model, scan_layers=False)
    lm.models.save_checkpoint(tmp_path / "scanned", model, params)
    lm.models.save_checkpoint(tmp_path / "plain", plain, unstack(params))
    for name in ("config.json", "model.safetensors"):
        written = [(tmp_path / kind / name).read_bytes() for kind in ("scanned", "plain")]
        assert written[0] == written[1]
    for load in (lm.models.load_checkpoint, lm.load_huggingface):
        loaded = load(tmp_path / "plain", scan_layers=True)
        assert loaded.model == model
        jax.tree.map(np.testing.assert_array_equal, loaded.params, params)


@pytest.mark.long
def test_a_text_is_the_same_with_an_engine_in_between() -> None:
    _, (plain, listed) = lm.load_embedded_pair()
    model, params = dataclasses.replace(plain, scan_layers=True), lm.models.stack_layers(listed)
    config = sd.SpecDecodeConfig(num_speculative_tokens=2)
    prompts = [lm.encode_bytes("import "), lm.encode_bytes("for x in "), lm.encode_bytes("def f(")]
    want = lm.generate_plain(plain, listed, prompts, max_new_tokens=12).completions
    drafter = lm.ModelDrafter(model)
    engine = lm.Engine(model, drafter, config, num_slots=2, max_length=32, prefill_sizes=(16,))
    driver = lm.EngineDriver(engine, params, params)
    requests = [driver.submit(prompt, max_new_tokens=12) for prompt in prompts]
    texts: dict[int, list[int]] = {request: [] for request in requests}
    while any(len(text) < 12 for text in texts.values()):
        for update in driver.step():
            texts[update.request_id] += update.token_ids
    assert [texts[request] for request in requests] == want


def test_the_page_turns_weights_into_stacked_ones() -> None:
    page = Path(__file__).parents[2] / "docs" / "models.md"
    text, scope = page.read_text("utf-8"), dict[str, Any]()
    *_, code = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    exec(compile(code, str(page), "exec"), scope)
    model, params = scope["model"], scope["params"]
    arguments = jnp.zeros((1, 2), jnp.int32), jnp.zeros((1,), jnp.int32), model.init_cache(1, 8)
    logits = jax.eval_shape(model.apply, params, *arguments).logits
    assert model.scan_layers and logits.shape == (1, 2, 256)
