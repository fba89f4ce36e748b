"""Wrong layouts: one sentence where shapes tell. (Where only values do: the tables of cases.)"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType

import jax_specdec as sd
from jax_specdec.integrations import sglang_jax, tpu_inference
from jax_specdec.integrations.keys import step_keys

B, K, V = 4, 3, 16
CONFIG = sd.SpecDecodeConfig(num_speculative_tokens=K)
KEY = jax.random.key(0)
MESH = jax.make_mesh((2, 4), ("data", "tensor"), (AxisType.Auto,) * 2)
SPLIT = sd.VerifySharding(MESH, "tensor", "data")


def ids(*shape: int) -> jax.Array:
    return jnp.zeros(shape, jnp.int32)


FLAT: dict[str, Any] = dict(
    logits=jnp.zeros((12, V)),
    draft_token_ids=ids(10),
    draft_lengths=ids(B),
    config=CONFIG,
    temperature=jnp.ones(B),
    keys=KEY,
)
CHAINS: dict[str, Any] = dict(
    target_logits=jnp.zeros((B * (K + 1), V)),
    draft_tokens=ids(B, K + 1),
    seq_lens=ids(B),
    config=CONFIG,
    temperatures=jnp.ones(B),
    keys=KEY,
)


@pytest.mark.parametrize(
    ("changed", "error", "sentence"),
    [
        (
            dict(logits=jnp.zeros((B, 3, V))),
            ValueError,
            r"logits must be \[L, V\], the rows of one request after those of another, but its "
            r"shape is \[4, 3, 16\]",
        ),
        (
            dict(bonus_token_ids=ids(B)),
            ValueError,
            r"logits must be \[N, V\] = \[10, V\], for bonus_token_ids are given, but its shape is "
            r"\[12, 16\]",
        ),
        (dict(logits=jnp.zeros((0, V))), ValueError, "target_logits .* but its M is 0"),
        (dict(logits=None), TypeError, "logits must be an array"),
        (dict(logits=ids(12, V)), TypeError, "target_logits must be float32 or bfloat16"),
        (
            dict(draft_token_ids=ids(B, K)),
            ValueError,
            r"draft_token_ids must be \[N\], but its shape is \[4, 3\]",
        ),
        (dict(draft_token_ids=jnp.ones(10)), TypeError, "draft_token_ids must be integers"),
        (dict(draft_lengths=ids(B, 1)), ValueError, r"draft_lengths must be \[B\], but its shape"),
        (dict(draft_lengths=ids(B + 1)), ValueError, r"temperature must be \[B\] = \[5\], but its"),
        (dict(top_k=ids(3)), ValueError, r"top_k must be \[B\] = \[4\], but its shape is \[3\]"),
        (dict(top_k=jnp.ones(B)), TypeError, "sampling.top_k must be int32, but it is float32"),
        (dict(top_p=0.9), TypeError, r"top_p must be an array \[B\], but it is 0.9"),
        (
            dict(draft_probs=jnp.zeros((9, V))),
            ValueError,
            r"draft_probs must be \[N, V\] = \[10, V\], a row for each draft, but its shape is "
            r"\[9, 16\]",
        ),
        (dict(active=jnp.ones(3, bool)), ValueError, r"active must be \[B\] = \[4\]"),
        (
            dict(token_bitmask=ids(11, 1)),
            ValueError,
            r"token_bitmask must be \[L, ceil\(V/32\)\] = \[12, 1\], but its shape is \[11, 1\]",
        ),
        (dict(config=3), TypeError, "config must be a SpecDecodeConfig, but it is 3"),
        (dict(logprobs=5), TypeError, "logprobs must be a LogprobsConfig or None, but it is 5"),
        (dict(sharding=MESH), TypeError, "sharding must be a VerifySharding or None"),
        (dict(keys=None), ValueError, "keys must be given with temperature, .* they are None"),
        (dict(keys=ids(2)), TypeError, "keys must be typed, as jax.random.key"),
        (dict(keys=jnp.zeros((B, 3), jnp.uint32)), TypeError, "pass jax.random.wrap_key_data"),
        (dict(top_p=jnp.ones((1, 1))), ValueError, r"top_p must be \[B\] = \[4\]"),
        (
            dict(keys=jax.random.split(KEY, 3)),
            ValueError,
            r"keys must be one key for the step, or \[B\] = \[4\], but their shape is \[3\]",
        ),
        (
            dict(keys=jax.random.split(KEY, B)),
            ValueError,
            "positions must be given where keys are one per request: .* noise repeats",
        ),
        (dict(positions=ids(3)), ValueError, r"positions must be \[B\] = \[4\]"),
        (
            dict(draft_token_ids=ids(11), sharding=SPLIT),
            ValueError,
            "N must divide over the 2 devices of 'data', but is 11",
        ),
        (
            dict(logits=jnp.zeros((13, V)), sharding=SPLIT),
            ValueError,
            "L must divide over the 2 devices of 'data', but is 13",
        ),
        (
            dict(logits=jnp.zeros((12, 15)), sharding=SPLIT),
            ValueError,
            "V of logits must divide over the 4 devices of 'tensor', but is 15",
        ),
    ],
    ids=str,
)
def test_a_flat_call_that_makes_no_sense_is_refused_in_a_sentence(changed, error, sentence):
    with pytest.raises(error, match=sentence):
        tpu_inference.verify_flat(**FLAT | changed)


@pytest.mark.parametrize(
    ("changed", "error", "sentence"),
    [
        (
            dict(draft_tokens=ids(B, K)),
            ValueError,
            r"draft_tokens must be \[bs, n\] = \[4, 4\] or \[bs\*n\] with n = "
            r"config.num_speculative_tokens \+ 1, but its shape is \[4, 3\]: "
            "column 0, the token verified before, is missing",
        ),
        (dict(draft_tokens=ids(B * K)), ValueError, "column 0, the token verified before, is miss"),
        (dict(draft_tokens=ids(B, 6)), ValueError, r"but its shape is \[4, 6\]$"),
        (dict(draft_tokens=jnp.ones((B, 4))), TypeError, "draft_tokens must be integers"),
        (
            dict(target_logits=jnp.zeros((B * K, V))),
            ValueError,
            r"target_logits must be \[bs\*n, V\] = \[16, V\], but its shape is \[12, 16\]",
        ),
        (dict(target_logits=jnp.zeros((B, K + 1, V))), ValueError, r"but its shape is \[4, 4, 16"),
        (dict(seq_lens=ids(3)), ValueError, r"draft_tokens must be \[bs, n\] = \[3, 4\]"),
        (dict(seq_lens=ids(B, 1)), ValueError, r"seq_lens must be \[bs\], but its shape"),
        (dict(temperatures=jnp.ones((2, 2))), ValueError, r"temperatures must be \[bs\] = \[4\]"),
        (dict(temperatures=0.5), TypeError, r"temperatures must be an array \[bs\]"),
        (dict(min_ps=jnp.ones(5)), ValueError, r"min_ps must be \[bs\] = \[4\], but its shape is"),
        (
            dict(draft_probs=jnp.zeros((B, K + 1, V))),
            ValueError,
            r"draft_probs must be \[bs\*\(n-1\), V\] = \[12, V\], but its shape is \[16, 16\]",
        ),
        (dict(token_bitmask=ids(3, 1)), ValueError, r"token_bitmask must be .* = \[16, 1\]"),
        (dict(keys=None), ValueError, "keys must be given with temperatures"),
        (dict(keys=jax.random.split(KEY, 3)), ValueError, "keys must be one key for the step"),
        (dict(config=None), TypeError, "config must be a SpecDecodeConfig"),
        (dict(logprobs=True), TypeError, "logprobs must be a LogprobsConfig or None"),
        (
            dict(
                seq_lens=ids(3),
                draft_tokens=ids(3, 4),
                target_logits=jnp.zeros((12, V)),
                temperatures=jnp.ones(3),
                sharding=SPLIT,
            ),
            ValueError,
            "bs must divide over the 2 devices of 'data', but is 3",
        ),
    ],
    ids=str,
)
def test_chains_that_make_no_sense_are_refused_in_a_sentence(changed, error, sentence):
    with pytest.raises(error, match=sentence):
        sglang_jax.verify_chains(**CHAINS | changed)


@pytest.mark.parametrize(
    ("key", "slots", "error", "sentence"),
    [
        (
            jax.random.split(KEY, 2),
            ids(3),
            ValueError,
            r"key must be one key, but its shape is \[2",
        ),
        (jnp.zeros(2, jnp.uint32), ids(3), TypeError, "key must be typed"),
        (KEY, ids(3, 1), ValueError, r"slots must be \[B\], but its shape is \[3, 1\]"),
        (KEY, jnp.ones(3), TypeError, "slots must be integers"),
    ],
    ids=str,
)
def test_keys_of_a_step_that_make_no_sense_are_refused(key, slots, error, sentence):
    with pytest.raises(error, match=sentence):
        step_keys(key, slots)
