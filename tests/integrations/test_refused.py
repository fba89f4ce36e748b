"""Wrong layouts: one sentence where shapes tell. (Where only values do: the tables of cases.)"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from filled import ones, zeros
from jax.sharding import AxisType, Mesh

import jax_specdec as sd
from jax_specdec.adapters import sglang_jax, tpu_inference
from jax_specdec.adapters.keys import step_keys

B, K, V = 4, 3, 16
CONFIG = sd.SpecDecodeConfig(num_speculative_tokens=K)
KEY = jax.random.key(0)


@functools.cache
def mesh() -> Mesh:
    """Not made while the file is imported: a machine may have one device."""
    return jax.make_mesh((2, 4), ("data", "tensor"), (AxisType.Auto,) * 2)


def split() -> sd.VerifySharding:
    return sd.VerifySharding(mesh(), "tensor", "data")


def made(changed: dict[str, Any]) -> dict[str, Any]:
    """Arguments, with the functions that make a mesh called."""
    return {name: x() if callable(x) else x for name, x in changed.items()}


def ids(*shape: int) -> jax.Array:
    return zeros(shape, jnp.int32)


def names(value: Any) -> str:
    """The id of a case: what it changes."""
    return ", ".join(value) if isinstance(value, dict) else ""


FLAT: dict[str, Any] = dict(
    logits=zeros((12, V)),
    draft_token_ids=ids(10),
    draft_lengths=ids(B),
    config=CONFIG,
    temperature=ones(B),
    keys=KEY,
)
CHAINS: dict[str, Any] = dict(
    target_logits=zeros((B * (K + 1), V)),
    draft_tokens=ids(B, K + 1),
    seq_lens=ids(B),
    config=CONFIG,
    temperatures=ones(B),
    keys=KEY,
)


@pytest.mark.parametrize(
    ("changed", "error", "sentence"),
    [
        (dict(logits=zeros((B, 3, V))), ValueError, "logits"),
        (dict(bonus_token_ids=ids(B)), ValueError, "logits"),
        (dict(logits=zeros((0, V))), ValueError, "target_logits"),
        (dict(logits=None), TypeError, "logits"),
        (dict(logits=ids(12, V)), TypeError, "target_logits"),
        (dict(draft_token_ids=ids(B, K)), ValueError, "draft_token_ids"),
        (dict(draft_token_ids=ones(10)), TypeError, "draft_token_ids"),
        (dict(draft_lengths=ids(B, 1)), ValueError, "draft_lengths"),
        (dict(draft_lengths=ids(B + 1)), ValueError, "temperature"),
        (dict(top_k=ids(3)), ValueError, "top_k"),
        (dict(top_k=ones(B)), TypeError, r"sampling\.top_k"),
        (dict(top_p=0.9), TypeError, "top_p"),
        (dict(draft_probs=zeros((9, V))), ValueError, "draft_probs"),
        (dict(active=ones(3, bool)), ValueError, "active"),
        (dict(token_bitmask=ids(11, 1)), ValueError, "token_bitmask"),
        (dict(config=3), TypeError, "config"),
        (dict(logprobs=5), TypeError, "logprobs"),
        (dict(sharding=mesh), TypeError, "sharding"),
        (dict(keys=None), ValueError, "keys"),
        (dict(keys=ids(2)), TypeError, "keys"),
        (dict(keys=jax.random.split(KEY, 3)), ValueError, "keys"),
        (dict(keys=jax.random.split(KEY, B)), ValueError, "positions"),
        (dict(positions=ids(3)), ValueError, "positions"),
        (dict(draft_token_ids=ids(11), sharding=split), ValueError, "N"),
        (dict(logits=zeros((13, V)), sharding=split), ValueError, "L"),
        (dict(logits=zeros((12, 15)), sharding=split), ValueError, r"logits\.shape"),
    ],
    ids=names,
)
def test_a_flat_call_that_makes_no_sense_is_refused(changed, error, sentence):
    with pytest.raises(error, match=f"^{sentence}"):
        tpu_inference.verify_flat(**FLAT | made(changed))


@pytest.mark.parametrize(
    ("changed", "error", "sentence"),
    [
        (dict(draft_tokens=ids(B, K)), ValueError, "draft_tokens"),
        (dict(draft_tokens=ids(B * K)), ValueError, "draft_tokens"),
        (dict(draft_tokens=ids(B, 6)), ValueError, "draft_tokens"),
        (dict(draft_tokens=ones((B, 4))), TypeError, "draft_tokens"),
        (dict(target_logits=zeros((B * K, V))), ValueError, "target_logits"),
        (dict(target_logits=zeros((B, K + 1, V))), ValueError, "target_logits"),
        (dict(seq_lens=ids(3)), ValueError, "draft_tokens"),
        (dict(seq_lens=ids(B, 1)), ValueError, "seq_lens"),
        (dict(temperatures=ones((2, 2))), ValueError, "temperatures"),
        (dict(temperatures=0.5), TypeError, "temperatures"),
        (dict(temperatures=[[0.5]] * B), TypeError, "temperatures"),
        (dict(min_ps=ones(5)), ValueError, "min_ps"),
        (dict(draft_probs=zeros((B, K + 1, V))), ValueError, "draft_probs"),
        (dict(draft_probs=[[[0.5]]]), TypeError, "draft_probs"),
        (dict(token_bitmask=ids(3, 1)), ValueError, "token_bitmask"),
        (dict(keys=None), ValueError, "keys"),
        (dict(keys=jax.random.split(KEY, 3)), ValueError, "keys"),
        (dict(config=None), TypeError, "config"),
        (dict(logprobs=True), TypeError, "logprobs"),
        (
            dict(
                seq_lens=ids(3),
                draft_tokens=ids(3, 4),
                target_logits=zeros((12, V)),
                temperatures=ones(3),
                sharding=split,
            ),
            ValueError,
            "bs",
        ),
    ],
    ids=names,
)
def test_chains_that_make_no_sense_are_refused(changed, error, sentence):
    with pytest.raises(error, match=f"^{sentence}"):
        sglang_jax.verify_chains(**CHAINS | made(changed))


@pytest.mark.parametrize(
    ("key", "slots", "error", "sentence"),
    [
        (jax.random.split(KEY, 2), ids(3), ValueError, "key"),
        (jnp.zeros(2, jnp.uint32), ids(3), TypeError, "key"),
        (KEY, ids(3, 1), ValueError, "slots"),
        (KEY, jnp.ones(3), TypeError, "slots"),
    ],
    ids=str,
)
def test_keys_of_a_step_that_make_no_sense_are_refused(key, slots, error, sentence):
    with pytest.raises(error, match=f"^{sentence}"):
        step_keys(key, slots)
