"""The study of decoding steps runs every drafter, and its models have the shapes they claim."""

import bench_steps_gpu as bench
import jax
import jax.numpy as jnp
import llamas
import measure
import pytest

from jax_specdec import lm

pytestmark = pytest.mark.slow


def test_every_drafter_is_timed_with_and_without_the_target(tmp_path, capsys):
    command = ["--tiny", "--batches", "2", "--steps", "4", "--repeats", "2"]
    assert bench.main([*command, "--output", str(tmp_path)]) == 0
    (row,) = measure.load(tmp_path / "steps_gpu.json")["rows"]
    drafters = ("model", "EAGLE-3 head", "n-gram")
    ways = ["plain", *(f"{name}, {kind}" for name in drafters for kind in ("step", "draft"))]
    assert list(row["ms"]) == ways and min(row["ms"].values()) > 0
    assert all(len(row["samples"][way]) == 2 for way in ways)
    model = lm.models.Llama(llamas.TINY, "bfloat16")
    sizes = jax.tree.leaves(jax.eval_shape(model.init_params, jax.random.key(0)))
    assert row["draft_bytes"]["model"] == bench.K * sum(2 * x.size for x in sizes)
    assert list(row["draft_bytes"]) == ["model", "EAGLE-3 head"]
    assert "pays above" in capsys.readouterr().out


@pytest.mark.parametrize("scan_layers", [False, True])
def test_random_weights_have_the_shapes_of_the_models(scan_layers):
    for config, billions in ((llamas.LLAMA_3_8B, 8.03), (llamas.LLAMA_3_1B, 1.24)):
        shapes = lm.models.Llama(config).init_params
        sizes = jax.tree.leaves(jax.eval_shape(shapes, jax.random.key(0)))
        assert abs(sum(x.size for x in sizes) / 1e9 - billions) < 0.01
    model = lm.models.Llama(llamas.TINY, "bfloat16", scan_layers=scan_layers)
    params = llamas.random_params(model, 0)
    start = jnp.zeros((1,), jnp.int32)
    logits = model.apply(params, start[None, :], start, model.init_cache(1, 1)).logits
    assert jnp.isfinite(logits).all()
