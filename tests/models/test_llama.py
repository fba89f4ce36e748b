"""The decoder against an independent one; what every model must keep is in `test_models`."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from passes import run as run_pass

from jax_specdec.lm.models import DecoderConfig, Llama, Norm

from . import reference_llama
from .weights import mixed, random_ids, random_weights, sizes, with_fields

pytestmark = pytest.mark.newest

CONFIG = mixed(sizes(37, 24, 40, 3, (6, 2, 8), rope_theta=500.0))
MODEL = Llama(CONFIG)
B, T, S = 3, 24, 16
MAX_LENGTH = 8192


@functools.cache
def params_of(model: Llama) -> Any:
    return random_weights(model, 1, moved=0.3)  # a norm of ones could be missing unseen


@functools.partial(jax.jit, static_argnums=0)
def apply(model: Llama, params: Any, token_ids: Any, start: Any, cache: Any) -> Any:
    return run_pass(model, params, token_ids, start, cache)[:2]


def tokens(seed: int = 0) -> np.ndarray:
    return random_ids((B, S), CONFIG.vocab_size, seed)


def at(position: int) -> np.ndarray:
    """Where each request stands."""
    return np.full(B, position, np.int32)


@functools.cache
def one_pass(model: Llama = MODEL, seed: int = 0) -> np.ndarray:
    cache = model.init_cache(B, T)
    return np.asarray(apply(model, params_of(model), tokens(seed), at(0), cache)[0])


@pytest.mark.parametrize(
    ("tied", "num_kv"), [(True, 1), pytest.param(False, 2, marks=pytest.mark.long)]
)
def test_agrees_with_a_numpy_decoder(tied: bool, num_kv: int) -> None:
    config = with_fields(CONFIG, tie_word_embeddings=tied, num_key_value_heads=num_kv)
    model = Llama(config)
    for logits, token_ids in zip(one_pass(model), tokens(), strict=True):
        expected = reference_llama.forward(config, params_of(model), token_ids.tolist())
        np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=2e-5)


def test_features_are_the_streams_that_enter_the_layers() -> None:
    layers = (0, 2, 3)
    run = jax.jit(run_pass, static_argnums=(0, 5))
    params = params_of(MODEL)
    features = run(MODEL, params, tokens(), at(0), MODEL.init_cache(B, T), layers).features
    for found, token_ids in zip(features, tokens(), strict=True):
        streams = reference_llama.streams(CONFIG, params, token_ids.tolist())
        expected = np.concatenate([streams[layer] for layer in layers], axis=1)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=2e-5)


def test_bfloat16_stays_near_float32() -> None:
    model = Llama(CONFIG, jnp.bfloat16)
    params = params_of(model)
    logits, _ = apply(model, params, tokens(), at(0), model.init_cache(B, T))
    assert logits.dtype == jnp.bfloat16
    error = np.float32(logits) - one_pass()
    assert np.sqrt(np.mean(error**2)) < 0.03 * one_pass().std()


def test_a_pass_of_one_row_copies_no_weight_and_no_cache() -> None:
    """XLA for CPUs has no product of one row in 16 bits: it made float32 of all that is read."""
    config = sizes(512, 128, 256, 2, (2, 2, 64), tie_word_embeddings=True)  # one row for each head
    model = Llama(config, "bfloat16")
    params = random_weights(model, 1)
    cache = jax.device_put(model.init_cache(1, 512))
    ids, start = np.array([[3]], np.int32), np.array([300], np.int32)
    run = jax.jit(run_pass, static_argnums=(0, 5))
    program = run.lower(model, params, ids, start, cache, (0, 2)).compile()
    read = sum(x.nbytes for x in jax.tree.leaves((params, cache)))
    assert program.memory_analysis().temp_size_in_bytes < read / 10
    text = [3, 5, 7, 11]
    expected = reference_llama.forward(config, jax.tree.map(np.float32, params), text)
    for position, token_id in enumerate(text):
        at_position = np.array([position], np.int32)
        ids = np.array([[token_id]], np.int32)
        logits, cache, features = program(params, ids, at_position, cache)
        assert (logits.shape, features.shape) == ((1, 1, 512), (1, 1, 256))
        np.testing.assert_array_equal(features[0, 0, :128], params["embed_tokens"][token_id])
        np.testing.assert_allclose(logits[0, 0], expected[position], rtol=0.1, atol=0.1)


def bytes_of_a_decoding_loop(model: Llama, params: Any, batch: int, length: int) -> int:
    """What a loop over a donated cache of MAX_LENGTH takes beside its arguments."""

    def loop(params: Any, token_ids: Any, cache: Any) -> Any:
        def body(state: Any) -> Any:
            position, token_ids, cache = state
            start = jnp.full((batch,), position, jnp.int32)
            logits, cache, _ = run_pass(model, params, token_ids, start, cache)
            return position + length, jnp.argmax(logits, axis=-1).astype(jnp.int32), cache

        state = (jnp.int32(0), token_ids, cache)
        return jax.lax.while_loop(lambda state: state[0] < 100, body, state)

    given = jax.eval_shape(
        lambda: (jnp.zeros((batch, length), jnp.int32), model.init_cache(batch, MAX_LENGTH))
    )
    compiled = jax.jit(loop, donate_argnums=2).lower(params, *given).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def test_a_decoding_loop_updates_the_cache_in_place() -> None:
    batch, length, num_kv = 4, 5, 2
    model = Llama(with_fields(CONFIG, num_key_value_heads=num_kv, num_attention_heads=2))
    # Room for the attention scores, twice; none for a copy of one layer's keys.
    scores = batch * length * 2 * MAX_LENGTH * 4
    keys = batch * num_kv * CONFIG.layers[0].head_dim * MAX_LENGTH * 4
    assert bytes_of_a_decoding_loop(model, params_of(model), batch, length) < 2 * scores + keys // 2


def test_it_is_compared_by_value() -> None:
    assert Llama(dataclasses.replace(CONFIG), jnp.float32) == MODEL
    assert hash(Llama(dataclasses.replace(CONFIG), np.float32)) == hash(MODEL)
    assert Llama(CONFIG, jnp.bfloat16) != MODEL


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("vocab_size", 0),
        ("hidden_size", 2.0),
        ("window", True),
        ("scale", 0),
        ("softcap", float("nan")),
        ("norms", "after"),
        ("activation", "relu"),
        ("logit_softcap", -1.0),
        ("rope_theta", -1.0),
        ("rope_theta", 0.5),
        ("rms_norm_eps", "x"),
        ("rms_norm_eps", True),
        ("rms_norm_eps", float("inf")),
        ("hidden_size", 2**31),
        pytest.param("vocab_size", 10**5000, id="a number too long to write"),
        ("tie_word_embeddings", 1),
        ("num_attention_heads", 7),  # for 2 heads of keys and values
        ("head_dim", 7),
        ("qkv_bias", None),
        ("num_token_ids", 38),
        ("num_token_ids", 1.5),
    ],
)
def test_sizes_that_do_not_fit_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name} must"):
        with_fields(CONFIG, **{name: value})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wider(DecoderConfig):
    """A config whose annotations are strings, as ``from __future__ import annotations`` does."""

    width: "int"
    factor: "float | None" = None


def test_fields_have_rules_where_their_types_are_strings() -> None:
    fields = dataclasses.fields(CONFIG)
    known: dict[str, Any] = {field.name: getattr(CONFIG, field.name) for field in fields}
    with pytest.raises(ValueError, match="^width must be a positive integer, but it is 0"):
        Wider(**known, width=0)
    with pytest.raises(ValueError, match="^factor must be a positive number or None, but it is -1"):
        Wider(**known, width=1, factor=-1)
    assert isinstance(Wider(**known, width=1, factor=2).factor, float)


@pytest.mark.long
def test_weights_begin_with_norms_of_one_and_no_biases() -> None:
    config = with_fields(CONFIG, qkv_bias=True, qk_norm=True, has_scalar=True)
    first, *others = config.layers
    # 1 + w stands for w in one layer alone.
    first = dataclasses.replace(first, norm=Norm(adds_one=True))
    model = Llama(dataclasses.replace(config, layers=(first, *others)))
    params = jax.jit(model.init_params)(jax.random.key(0))
    for layer, norm in zip(params["layers"], (0, 1, 1), strict=True):
        wanted = {"qkv_bias": 0, "q_norm": norm, "k_norm": norm, "input_layernorm": norm}
        for name, value in (wanted | {"layer_scalar": 1}).items():
            assert np.unique(layer[name]) == value
    assert np.unique(params["norm"]) == 1


def test_a_dtype_that_is_not_floating_is_refused() -> None:
    with pytest.raises(TypeError, match="^dtype must"):
        Llama(CONFIG, jnp.int32)


def cache_of(model: Llama, *size: int) -> Any:
    return jax.eval_shape(lambda: model.init_cache(*size))


def changed(path: list[Any], value: Any) -> Any:
    """Params with the leaf at `path` replaced, or removed if `value` is None."""
    params = jax.tree.map(lambda x: x, params_of(MODEL))
    parent = functools.reduce(lambda tree, key: tree[key], path[:-1], params)
    if value is None:
        del parent[path[-1]]
    else:
        parent[path[-1]] = value
    return params


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"token_ids": np.zeros(3, np.int32)}, ValueError, r"groups\[0\].token_ids"),
        ({"token_ids": np.zeros((1, 2), np.float32)}, TypeError, r"groups\[0\].token_ids"),
        ({"start": np.zeros((), np.int32)}, ValueError, r"groups\[0\].start"),
        ({"start": np.zeros(1, np.float32)}, TypeError, r"groups\[0\].start"),
        ({"start": np.zeros(2, np.int32)}, ValueError, r"groups\[0\].start"),
        ({"cache": cache_of(MODEL, 1, 1)}, ValueError, r"groups\[0\].token_ids"),
        ({"aux_hidden_state_layers": (0, 4)}, ValueError, "aux_hidden_state_layers"),
    ],
)
def test_wrong_arguments_are_refused(change: Any, error: type[Exception], message: str) -> None:
    arguments = {
        "params": params_of(MODEL),
        "token_ids": np.zeros((1, 2), np.int32),
        "start": np.zeros(1, np.int32),
        "cache": cache_of(MODEL, 1, T),
        **change,
    }
    with pytest.raises(error, match=f"^{message}"):
        run_pass(MODEL, **arguments)


@pytest.mark.parametrize(
    "params, error, message",
    [
        (None, TypeError, "params must be the weights of the model, but it is None"),
        (
            changed(["layers", 1, "o_proj"], np.zeros((24, 48), np.float32)),
            ValueError,
            r"params\['layers'\]\[1\]\['o_proj'\]",
        ),
        (changed(["norm"], np.zeros(24, jnp.bfloat16)), TypeError, r"params\['norm'\]"),
        (changed(["lm_head"], None), ValueError, r"params\['lm_head'\]"),
        (changed(["lm_head"], 0.5), ValueError, r"params\['lm_head'\] must be an array"),
        (changed(["lm_head"], "a"), ValueError, r"params\['lm_head'\] must be an array"),
        (changed(["bias"], np.zeros(3, np.float32)), ValueError, r"params\['bias'\]"),
    ],
)
def test_weights_of_another_model_are_refused(
    params: Any, error: type[Exception], message: str
) -> None:
    MODEL.check_params("params", params_of(MODEL))
    with pytest.raises(error, match=f"^{message}"):
        MODEL.check_params("params", params)
