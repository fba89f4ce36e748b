"""64-bit mode changes no token: arguments are int32 and float32, and all between them is too."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from serving import engines, tiny

import jax_specdec as sd
from jax_specdec.__main__ import main

pytestmark = pytest.mark.newest
long = functools.partial(pytest.param, marks=pytest.mark.long)

B, K, V = 3, 2, 300
RNG = np.random.default_rng(0)
LOGITS = RNG.standard_normal((B * (K + 1), V)).astype(np.float32)
Q = RNG.standard_normal((B * K, V)).astype(np.float32)
IDS = RNG.integers(0, V, (B, K)).astype(np.int32)
MASK = np.full((B * (K + 1), -(-V // 32)), -2, np.int32)  # id 0 of every 32 is not allowed
KEYS = np.array([[0, 7], [0, 8], [3, 9]], np.uint32)


def config(**fields: Any) -> sd.SpecDecodeConfig:
    return sd.SpecDecodeConfig(num_speculative_tokens=K, **fields)


def sampling(filtered: bool) -> sd.SamplingParams:
    temperature = np.float32([0.0, 1.0, 0.7])
    if not filtered:
        return sd.SamplingParams(temperature)
    filters = np.float32([0.0, 0.01, 0.0]), np.int32([4, 0, 40]), np.float32([1, 0.9, 0.95])
    return sd.SamplingParams(temperature, *filters)


def keys() -> jax.Array:
    return jax.random.wrap_key_data(jnp.asarray(KEYS), impl="threefry2x32")


def verified(distribution: Callable[[], Any], filtered: bool, **fields: Any) -> Any:
    given: dict[str, Any] = dict(
        sampling=sampling(filtered),
        config=config(**fields),
        token_bitmask=MASK if filtered else None,
    )

    @jax.jit
    def both(logits: jax.Array, keys: jax.Array) -> tuple[Any, Any]:
        drafts = sd.Drafts.from_dense(IDS, None, distribution())
        output = sd.rejection_sample(
            logits, drafts, keys=keys, positions=np.int32([5, 6, 7]), **given
        )
        named = dict(num_top=2, distribution="processed")
        return output, sd.token_logprobs(logits, drafts, output, **named, **given)

    output, found = both(LOGITS, keys())
    return sd.parse_output(output), found.top_token_ids.tolist()


def normalized() -> sd.DraftLogits:
    normalizer = np.log(np.exp(Q.astype(np.float64)).sum(axis=1)).astype(np.float32)
    return sd.DraftLogits(Q, log_normalizer=normalizer)


def generated() -> Any:
    options = [
        sd.RequestOptions(top_p=0.9, frequency_penalty=0.2, allowed_token_ids=range(1, 6)),
        sd.RequestOptions(temperature=0.8),
    ]
    output = sd.generate(
        tiny.Trigram(engines.VOCAB),
        jnp.asarray(engines.TARGET),
        [[1, 2], [3]],
        drafter=sd.ModelDrafter(tiny.Trigram(engines.VOCAB)),
        draft_params=jnp.asarray(engines.DRAFT),
        config=engines.CONFIG,
        max_new_tokens=12,
        options=options,
        logprobs=sd.LogprobsConfig(num_top=1),
    )
    return output.completions


def served() -> Any:
    driver = sd.EngineDriver(engines.LOOKUP, jnp.asarray(engines.TARGET))
    for seed in range(3):
        driver.submit([1, 2, 1], max_new_tokens=9, temperature=0.4 * seed, seed=seed)
    finished = engines.run(driver)
    return [one.token_ids for one in finished.values()], driver.stats().mean_acceptance_length


CALLS: dict[str, Callable[[], Any]] = {
    "standard": lambda: verified(normalized, True),
    "block": lambda: verified(lambda: sd.DraftLogits(Q), False, rejection_sample_method="block"),
    "synthetic": lambda: verified(
        lambda: None, False, rejection_sample_method="synthetic", synthetic_acceptance_length=2.0
    ),
    "drafting": lambda: sd.sample_draft_tokens(
        LOGITS[:B],
        sampling=sampling(True),
        keys=keys(),
        positions=np.int32([5, 6, 7]),
        offset=1,
    ).token_ids.tolist(),
    "loop": generated,
    "engine": served,
}


@pytest.mark.parametrize(
    "call",
    [CALLS[name] if name in ("standard", "drafting") else long(CALLS[name]) for name in CALLS],
    ids=CALLS,
)
def test_tokens_are_the_same_in_64_bit_mode(call):
    expected = call()
    with jax.enable_x64(True):  # with strict promotion, as in all tests
        assert call() == expected


@pytest.mark.long
def test_the_command_line_prints_the_same_in_64_bit_mode(capsys):
    """In a process of its own, with JAX's own promotion of dtypes."""
    command = ["generate", "import ", "--draft", "ngram", "--temperature", "0.8", "--json"]
    command += ["--max-new-tokens", "8", "--no-compilation-cache"]
    main(command)
    expected = json.loads(capsys.readouterr().out)["requests"]
    done = subprocess.run(
        [sys.executable, "-m", "jax_specdec", *command],
        env=os.environ | {"JAX_ENABLE_X64": "1", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        check=True,
    )
    assert json.loads(done.stdout)["requests"] == expected
