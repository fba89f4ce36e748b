"""Gemma 4 checkpoints and their assistants against what `transformers` computes."""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from passes import Passed
from passes import run as run_pass

from jax_specdec import lm

from .checkpoints import edit_json, edit_tensors

pytestmark = pytest.mark.newest

HERE = Path(__file__).parent / "gemma4"
NAMES = ("edge", "wide")
NUM_TOKEN_IDS = 283
TOLERANCE = 5e-5
"""Of float32 logits, relative to the largest of their row."""


@functools.cache
def load(name: str) -> lm.formats.LoadedModel:
    return lm.load_huggingface(HERE / name, jnp.float32)


@functools.cache
def expected(name: str) -> dict[str, np.ndarray]:
    return dict(np.load(HERE / name / "expected.npz"))


@functools.cache
def passed(name: str) -> Passed:
    """A pass of a target over all tokens, with the stream that leaves its last layer."""
    model, params = load(name)
    ids = expected(name)["token_ids"][None]
    cache = model.init_cache(1, 40)
    layers = (len(model.config.layers),)
    run = jax.jit(lambda: run_pass(model, params, ids, jnp.zeros(1, jnp.int32), cache, layers))
    return run()


def error(found: Any, wanted: np.ndarray) -> float:
    """Largest difference, relative to the largest number of its row."""
    scale = np.abs(wanted).max(axis=-1, keepdims=True)
    return float((np.abs(np.asarray(found) - wanted) / scale).max())


# Targets


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers(name: str) -> None:
    """With every switch; the text is longer than the window."""
    wanted = expected(name)
    windows = [spec.window or 0 for spec in load(name).model.config.layers]
    assert 0 < max(windows) < len(wanted["token_ids"])
    assert (
        error(passed(name).logits[0, :, :NUM_TOKEN_IDS], wanted["logits"][:, :NUM_TOKEN_IDS])
        < TOLERANCE
    )


def test_the_text_of_a_file_with_images_and_sound_is_read(tmp_path: Path) -> None:
    directory = copied("wide", tmp_path / "wide")
    text = json.loads((directory / "config.json").read_text())
    raw = {"model_type": text["model_type"].removesuffix("_text"), "text_config": text}
    (directory / "config.json").write_text(json.dumps(raw))
    path = directory / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    renamed = {name.replace("model.", "model.language_model.", 1): x for name, x in tensors.items()}
    names = "audio_tower.x", "embed_vision.y", "vision_embedder.patch_dense.weight"
    others = {f"model.{name}": np.ones(3) for name in names}
    safetensors.numpy.save_file(renamed | others, path)
    found = lm.load_huggingface(directory, jnp.float32)
    assert found.model == load("wide").model
    jax.tree.map(np.testing.assert_array_equal, found.params, load("wide").params)


def test_the_switches_are_read() -> None:
    edge, wide = (load(name).model.config for name in NAMES)
    sliding, full, last_sliding, shared_sliding, shared_full = edge.layers
    assert (full.head_dim, full.rotation.fraction, full.window) == (32, 0.25, None)
    assert (sliding.head_dim, sliding.rotation.fraction, sliding.window) == (16, 1.0, 8)
    assert (shared_sliding.keys_of, shared_full.keys_of) == (2, 1)
    assert shared_full.intermediate_size == 2 * last_sliding.intermediate_size == 64
    assert edge.per_layer_input == 8
    assert (edge.logit_softcap, edge.scales_embedding, full.scale) == (30.0, True, 1.0)
    assert len(load("edge").model.init_cache(1, 8)) == 3
    assert [layer.value_is_key for layer in wide.layers] == [False, True] * 2
    assert [layer.num_key_value_heads for layer in wide.layers] == [2, 1] * 2
    scalars = [layer["layer_scalar"].item() for layer in load("wide").params["layers"]]
    assert len({*scalars, 1.0}) == 5


def copied(name: str, directory: Path) -> Path:
    return Path(shutil.copytree(HERE / name, directory / name))


def same(one: lm.formats.LoadedModel, other: lm.formats.LoadedModel) -> None:
    assert one.model == other.model
    jax.tree.map(np.testing.assert_array_equal, one.params, other.params)


def test_what_other_writers_say_is_read(tmp_path: Path) -> None:
    """Sizes of heads by kind of layer, no rotations, and what need not be there."""
    directory = copied("wide", tmp_path)
    by_kind = dict(global_head_dim=32, num_global_key_value_heads=1)
    edit_json(directory / "config.json", per_layer_config=..., rope_parameters=..., **by_kind)
    same(lm.load_huggingface(directory, jnp.float32), load("wide"))
    directory = copied("edge", tmp_path)
    edit_json(directory / "config.json", per_layer_config=..., **by_kind)
    unread = {
        f"model.layers.{index}.self_attn.{name}.weight": np.zeros(3, np.float32)
        for index in (3, 4)
        for name in ("k_proj", "v_proj", "k_norm", "v_norm")
    }
    edit_tensors(directory / "model.safetensors", **unread)
    same(lm.load_huggingface(directory, jnp.float32), load("edge"))


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("wide", dict(enable_moe_block=True), "a mixture of experts, as of Gemma 4 26B-A4B, is not"),
    ("wide", dict(use_bidirectional_attention="all"), "only 'vision' is supported"),
    ("wide", dict(num_kv_shared_layers=4), "must be in .0, 3"),
    ("wide", dict(num_kv_shared_layers=3), "leaves a kind of layers no keys"),
    ("wide", dict(per_layer_config={"1": {"num_attention_heads": 4}}), "only 'head_dim' and"),
    ("wide", dict(hidden_activation="silu"), "only 'gelu_pytorch_tanh' is supported"),
    ("edge", dict(vocab_size_per_layer_input=300), "not vocab_size"),
    ("edge", dict(use_double_wide_mlp="yes"), "only False and True are supported"),
    ("edge", dict(hidden_size_per_layer_input=-8), "per_layer_input must be a positive integer"),
]


@pytest.mark.parametrize(("name", "keys", "message"), REFUSED)
def test_what_is_not_computed_is_refused(
    name: str, keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    directory = copied(name, tmp_path)
    edit_json(directory / "config.json", **keys)
    with pytest.raises(ValueError, match=message):
        lm.load_huggingface(directory)


def test_layers_that_do_not_fit_together_are_refused() -> None:
    config = load("edge").model.config
    own, shared = config.layers[:3], config.layers[3:]
    replace = dataclasses.replace
    cases: list[tuple[tuple[Any, ...], str]] = [
        ((*shared, *own), r"layers\[0\].keys_of must be None in the first 3 layers alone"),
        ((*own, replace(shared[0], keys_of=1)), r"layers\[3\].keys_of must be one of the first 3"),
        ((*own, replace(shared[0], keys_of=3)), r"layers\[3\].keys_of must be one of the first 3"),
        ((*own, replace(own[0], per_layer_input=4)), "layers must all have the same per_layer"),
    ]
    for layers, message in cases:
        with pytest.raises(ValueError, match=message):
            replace(config, layers=layers)
    with pytest.raises(ValueError, match="keys_of must be an integer of at least 0 or None"):
        replace(own[0], keys_of=-1)
    with pytest.raises(ValueError, match="fraction must be at most 1"):
        lm.models.Rotation(fraction=1.5)


# Assistants


@functools.cache
def assistant(name: str) -> lm.formats.LoadedModel:
    return lm.load_head(HERE / f"{name}_assistant", load(name))


@pytest.mark.parametrize("name", NAMES)
def test_drafts_are_those_of_transformers_at_both_positions(name: str) -> None:
    """The rotary position is that of the newest token, or the one before; windows are crossed."""
    head, params = assistant(name)
    head.check_params("params", params)
    # transformers counts one more key into a window here than in the target.
    layers = tuple(
        dataclasses.replace(spec, window=spec.window and spec.window + 1)
        for spec in head.config.layers
    )
    config = dataclasses.replace(head.config, layers=layers, num_token_ids=None)
    head = dataclasses.replace(head, config=config)
    wanted = expected(f"{name}_assistant")
    length = wanted["length"].item()
    for p, position in enumerate((wanted["positions"] - length).tolist()):
        state = head.first_states(params, passed(name).features[:, length - 1 : length])
        token = expected(name)["token_ids"][length]
        for j, draft in enumerate(wanted["token_ids"][p]):
            rows = lm.models.Rows(jnp.asarray(token)[None, None], jnp.array([length]))
            found = head.apply(params, state, rows, passed(name).cache, position)
            row = wanted["logits"][p, j]
            columns = np.arange(len(row)) if found.ids is None else np.asarray(found.ids[0, 0])
            assert error(found.logits[0, 0], row[columns]) < TOLERANCE
            assert error(found.states[0, 0], wanted["states"][p, j]) < TOLERANCE
            assert columns[found.logits[0, 0].argmax()] == draft
            assert len(columns) == (64 if name == "edge" else 320)
            state, token = found.states, draft
    assert (wanted["positions"] - length).tolist() == [0, -1]


def test_an_assistant_reads_the_cache_of_one_device_alone() -> None:
    mesh = jax.make_mesh((2,), ("tensor",), devices=jax.devices()[:2])
    parallel = lm.models.TensorParallelLlama(load("edge").model, mesh, "tensor")
    rows = lm.models.Rows(jnp.zeros((1, 1), jnp.int32), jnp.ones(1, jnp.int32))
    head, own = assistant("edge")
    with pytest.raises(ValueError, match="^the target's cache must have keys .B . Nkv, 16, T. at"):
        head.apply(own, jnp.zeros((1, 1, 24)), rows, parallel.init_cache(1, 40))


def test_drafts_beside_one_another_do_not_see_each_other() -> None:
    """Rows of two nodes of a level are those of each alone."""
    head, params = assistant("edge")
    features = passed("edge").features[:, 18:20]
    ids, start = jnp.array([[5, 6]]), jnp.array([20])

    @jax.jit
    def run(params: Any, cache: Any) -> Any:
        states = head.first_states(params, features)
        both = head.apply(params, states, lm.models.Rows(ids, start), cache)
        second = lm.models.Rows(ids[:, 1:], start)
        return both, head.apply(params, states[:, 1:], second, cache)

    both, alone = run(params, passed("edge").cache)
    assert both.ids.shape == (1, 2, 64) and np.array_equal(both.ids[:, 1:], alone.ids)
    known = np.asarray(both.ids[0, 1]) < NUM_TOKEN_IDS
    assert error(both.logits[0, 1][known], np.asarray(alone.logits[0, 0])[known]) < TOLERANCE
    assert error(both.states[0, 1], np.asarray(alone.states[0, 0])) < TOLERANCE


@functools.cache
def first_row(dtype: str | None, *, is_int8: bool = False, copies: int = 1) -> np.ndarray:
    """Logits by id of the first draft after four tokens, with weights as stored or in 8 bits."""
    weights = "int8" if is_int8 else None
    target = lm.load_huggingface(HERE / "edge", dtype, weights=weights)
    head, params = lm.load_head(HERE / "edge_assistant", target)
    params = lm.models.quantize(params) if is_int8 else params
    head.check_params("params", params)
    ids = np.tile(expected("edge")["token_ids"][:4], (copies, 1))

    @jax.jit
    def run(target_params: Any, params: Any) -> Any:
        zeros = jnp.zeros(copies, jnp.int32)
        cache = target.model.init_cache(copies, 64)
        found = run_pass(target.model, target_params, ids, zeros, cache, (5,))
        rows = lm.models.Rows(jnp.asarray(ids[:, 3:]), zeros + 3)
        states = head.first_states(params, found.features[:, 2:3])
        return head.apply(params, states, rows, found.cache)

    output = run(target.params, params)
    assert output.logits.shape == (copies, 1, 64) and output.states.dtype == target.model.dtype
    by_id = np.full(320, np.nan)
    by_id[np.asarray(output.ids[0, 0])] = np.asarray(output.logits[0, 0], np.float32)
    return by_id


@pytest.mark.parametrize("case", [dict(), dict(is_int8=True, copies=2)])
def test_rows_in_fewer_bits_are_close(case: dict[str, Any]) -> None:
    """A row alone, which products take twice; matrices in 8 bits in both models."""
    whole = first_row("float32")
    found = first_row(None, **case)
    both = np.isfinite(whole) & np.isfinite(found)  # groups at the end may be others
    assert both.sum() > 40
    assert error(found[both], whole[both]) < 0.15


def test_the_targets_own_arrays_are_shared() -> None:
    target, head = load("edge"), assistant("edge")
    assert head.params["embed_tokens"] is target.params["embed_tokens"]
    assert head.params["target_norm"] is target.params["norm"]


def of_text(**keys: Any) -> dict[str, Any]:
    """The keys of a config with others for text."""
    raw = json.loads((HERE / "wide_assistant" / "config.json").read_text())
    return {"text_config": raw["text_config"] | keys}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (dict(backbone_hidden_size=32), "but the target's hidden_size is 24"),
        (of_text(vocab_size=300), "vocab_size = 300, but the target's is 320"),
        (of_text(hidden_size_per_layer_input=8), "but only 0 is supported"),
        (of_text(use_double_wide_mlp=True), "but only False is supported"),
        (of_text(num_key_value_heads=4), "layer 0 reads 4 heads of 16, but the target's layer has"),
        (of_text(num_hidden_layers="4"), "num_hidden_layers must be an integer in"),
    ],
)
def test_an_assistant_that_does_not_fit_is_refused(
    keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    directory = copied("wide_assistant", tmp_path)
    edit_json(directory / "config.json", **keys)
    with pytest.raises(ValueError, match=message):
        lm.load_head(directory, load("wide"))


ORDER = "masked_embedding.token_ordering"


@pytest.mark.parametrize(
    ("keys", "order", "message"),
    [
        (dict(num_centroids=7), None, "num_centroids must divide vocab_size = 320"),
        (dict(centroid_intermediate_top_k=21), None, "must be at most num_centroids = 20"),
        (dict(), ..., f"lacks the tensor {ORDER}"),
        (dict(), np.zeros(320, np.int64), "must have each id below 320 once, and has not"),
        (dict(), np.arange(319), "must have each id below 320 once, and has not"),
    ],
)
def test_an_order_that_is_none_is_refused(
    keys: dict[str, Any], order: Any, message: str, tmp_path: Path
) -> None:
    directory = copied("edge_assistant", tmp_path)
    edit_json(directory / "config.json", **keys)
    if order is not None:
        edit_tensors(directory / "model.safetensors", **{ORDER: order})
    with pytest.raises(ValueError, match=message):
        lm.load_head(directory, load("edge"))


def test_readers_name_one_another() -> None:
    reads = "of a Gemma 4 assistant, which load_head and --draft gemma:DIR read"
    with pytest.raises(ValueError, match=reads):
        lm.load_huggingface(HERE / "edge_assistant")
    reads = (
        "not of an EAGLE-3 head; load_head with GemmaAssistantHead and --draft gemma:DIR read it"
    )
    with pytest.raises(ValueError, match=reads):
        lm.load_head(HERE / "edge_assistant", load("edge"), lm.models.Eagle3Head)
    with pytest.raises(TypeError, match="^target must be a LoadedModel of a Llama"):
        lm.load_head(HERE / "edge_assistant", load("edge").model)
    model, params = load("edge")
    config = dataclasses.replace(model.config, layers=model.config.layers[:1])
    of_one_kind = load("edge")._replace(model=dataclasses.replace(model, config=config))
    with pytest.raises(ValueError, match="^target must be a Gemma 4, which has layers with a win"):
        lm.load_head(HERE / "edge_assistant", of_one_kind)


def test_a_config_whose_layers_have_keys_or_groups_of_no_kind_is_refused() -> None:
    config = assistant("edge").model.config
    own = load("edge").model.config.layers[0]
    cases: list[tuple[dict[str, Any], str]] = [
        (dict(layers=(own,)), r"layers\[0\].keys_of must be a layer of the target, below 5"),
        (dict(target_layers=1), r"layers\[0\].keys_of must be a layer of the target, below 1"),
        (dict(num_centroids=None), "num_active_centroids must be None or not as num_centroids"),
    ]
    for fields, message in cases:
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(config, **fields)
