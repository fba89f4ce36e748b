"""The throughput study times the package's own step, and reports what it says."""

import argparse

import bench_throughput_gpu as bench
import jax
import jax.numpy as jnp
import measure
import numpy as np
import plots
import pytest
import serving_programs

from jax_specdec._src.serving.core import Decoder

pytestmark = pytest.mark.slow

STEPS = 4


@pytest.fixture(scope="module")
def programs():
    study = bench.make_study(tiny=True)
    params = serving_programs.random_params(study.target, 0)
    draft_params = serving_programs.random_params(study.drafter.model, 1)
    options = argparse.Namespace(prompt=3, steps=STEPS, threads=1)
    return bench.Programs(study, params, draft_params, 2, options)


def test_a_step_emits_what_the_packages_own_step_emits(programs):
    study = bench.make_study(tiny=True)
    decoder = Decoder(study.target, study.drafter, study.configs[bench.WAYS.index("standard")])
    state = programs.state
    step = jax.jit(decoder.step)
    for _ in range(STEPS):
        state, _ = step(programs.params, programs.draft_params, state)
    expected = state.batch.lengths - programs.state.batch.lengths
    np.testing.assert_array_equal(programs.run("standard", STEPS), expected)
    assert expected.sum() > 2 * STEPS  # some drafts were accepted


def test_the_study_measures_lengths_and_compares_with_the_model(
    programs, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(bench, "Programs", lambda *_: programs)
    command = ["--tiny", "--batches", "2", "--steps", f"{STEPS}", "--repeats", "1"]
    assert bench.main([*command, "--output", str(tmp_path)]) == 0
    rows = measure.load(tmp_path / "throughput_gpu.json")["rows"]
    parts, *ways = rows
    assert [row["way"] for row in ways] == list(bench.WAYS[:-1])
    lengths = [row["length"] for row in ways]
    assert lengths[0] == 1 and lengths[4] == bench.K + 1  # certain; those between are drawn
    assert all(1 < length < bench.K + 1 for length in lengths[1:4])
    for row in ways:
        ms = parts["step_ms"]
        tokens = 2 * row["length"] / ms[row["way"]] * 1e3
        np.testing.assert_allclose(row["tokens_per_second"], tokens)
        np.testing.assert_allclose(row["plain_tokens_per_second"], 2 / ms["plain"] * 1e3)
        model = row["length"] / (1 + ms["draft"] / ms["plain"])
        np.testing.assert_allclose(row["model_speedup"], model)
    assert (tmp_path / "throughput_gpu_speedup.png").stat().st_size > 1000
    assert plots.throughput({"rows": [parts]}) is None
    assert "a pass over K+1 tokens" in capsys.readouterr().out


def test_random_weights_have_the_shapes_of_the_models():
    for config, billions in (
        (serving_programs.LLAMA_3_8B, 8.03),
        (serving_programs.LLAMA_3_1B, 1.24),
    ):
        shapes = bench.sd.models.Llama(config).init_params
        sizes = jax.tree.leaves(jax.eval_shape(shapes, jax.random.key(0)))
        assert abs(sum(x.size for x in sizes) / 1e9 - billions) < 0.01
    model = bench.sd.models.Llama(serving_programs.TINY, "bfloat16")
    params = serving_programs.random_params(model, 0)
    start = jnp.zeros((1,), jnp.int32)
    logits = model.apply(params, start[None, :], start, model.init_cache(1, 1)).logits
    assert jnp.isfinite(logits).all()
