"""Documented calls, with numbers, lists and NumPy arrays: mypy reads them, and they run.

`make check` gives this file to mypy, which also reports a `type: ignore` that ignores nothing.
"""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_specdec as sd
from jax_specdec import lm
from jax_specdec.adapters import tpu_inference

CONFIG = sd.SpecDecodeConfig(num_speculative_tokens=1)
KEYS = jax.random.split(jax.random.key(0), 1)
LOGITS = np.zeros((2, 8), np.float32)
SAMPLING = sd.SamplingParams([0.7], min_p=0.1, top_k=[5], top_p=np.array([0.9]))


def test_configs_and_parameters_are_made_of_numbers_and_lists() -> None:
    rates = sd.SpecDecodeConfig(
        num_speculative_tokens=np.int64(1),
        rejection_sample_method="synthetic",
        synthetic_acceptance_rates=[0.5],
    )
    assert rates.synthetic_acceptance_rates == (0.5,)
    assert sd.SamplingParams(0.7, top_k=5).min_p is None
    sd.SamplingParams(np.float32(0.7), top_k=np.int32(5))
    sd.SamplingParams(jnp.ones(1))
    sd.SamplingParams("warm")  # type: ignore[arg-type]


@pytest.mark.long
def test_a_head_is_of_the_class_that_is_asked_for(tmp_path: Path) -> None:
    target, _ = lm.load_embedded_pair()
    head = lm.load_embedded_head(target)
    lm.formats.save_eagle3(tmp_path, *head)
    lm.Eagle3Drafter(lm.load_head(tmp_path, target, lm.models.Eagle3Head).model)
    any_head = lm.load_head(tmp_path, target).model
    assert isinstance(any_head, lm.models.Eagle3Head)
    lm.Eagle3Drafter(any_head)


def test_drafts_are_made_of_lists() -> None:
    assert sd.Drafts.from_dense([[1]]).token_ids.tolist() == [1]
    sd.Drafts.from_dense(np.array([[1]]), [1], sd.DraftProbs(jnp.zeros((1, 1, 8))))
    sd.Drafts.from_flat([1], np.array([1]))
    with pytest.raises(TypeError):
        sd.Drafts.from_flat(["1"], [1])  # type: ignore[list-item]


@pytest.mark.long
def test_a_step_takes_lists_and_numpy_arrays() -> None:
    drawn = sd.sample_draft_tokens(
        LOGITS[:1], sampling=SAMPLING, keys=KEYS, positions=[4], offset=0, config=CONFIG
    )
    store = sd.DraftStore.create(1, 1, 8).write(
        0, jnp.asarray(LOGITS[:1]), drawn, positions=[4], sampling=SAMPLING
    )
    drafts = store.attach(sd.Drafts.from_dense([[1]]), positions=[4], sampling=SAMPLING)
    assert int(sd.DraftStore.count_fallbacks(drafts, sampling=SAMPLING)) == 0
    bias = sd.LogitsProcessors(logit_bias=sd.LogitBias.from_mappings([{3: -1.0}]))
    assert sd.process_logits(LOGITS, drafts, bias, config=CONFIG).tolist()[1][3] == -1.0

    mask, active = np.full((2, 1), -1, np.int32), np.array([True])
    sd.testing.validate(
        LOGITS,
        drafts,
        sampling=SAMPLING,
        keys=KEYS,
        positions=[4],
        config=CONFIG,
        active=active,
        token_bitmask=mask,
    )
    output = sd.rejection_sample(
        LOGITS,
        drafts,
        sampling=SAMPLING,
        keys=KEYS,
        positions=[4],
        config=CONFIG,
        active=active,
        token_bitmask=mask,
    )
    assert output.status.tolist() == [sd.Status.OK]
    found = sd.token_logprobs(
        LOGITS, drafts, output, sampling=SAMPLING, config=CONFIG, token_bitmask=mask
    )
    np.testing.assert_allclose(found.logprobs[0, 0], -np.log(8), rtol=1e-5)
    counters = sd.AcceptanceCounters.create(1).update(
        num_proposed=[1], num_accepted=np.array([1]), num_emitted=[2]
    )
    assert sd.AcceptanceStats.from_counters(counters).num_verifications == 1
    shape = jax.ShapeDtypeStruct((2, 8), jnp.bfloat16)
    assert sd.testing.which_implementation(shape, drafts, config=CONFIG) in ("xla", "mosaic_gpu")


def test_integrations_are_typed() -> None:
    verify_flat = tpu_inference.verify_flat
    found = verify_flat(jnp.asarray(LOGITS), [0], [1], config=CONFIG, temperature=None)
    assert found.token_ids.tolist() == [0, 0]
    with pytest.raises(TypeError, match="config"):
        verify_flat(jnp.asarray(LOGITS), [0], [1], config=None, temperature=None)  # type: ignore[arg-type]


@pytest.mark.newest
@pytest.mark.xdist_group("examples")  # the example of `generate_plain` has the same program
def test_prompts_are_lists_or_arrays() -> None:
    _, (model, params) = lm.load_embedded_pair()
    ids = lm.encode_bytes("import ")
    of_list, of_array = (
        lm.generate_plain(model, params, [prompt], max_new_tokens=4).completions
        for prompt in (ids, np.array(ids))
    )
    assert of_list == of_array
