"""Benchmarks whose runs take long: each at a tiny size, and what it saves."""

import json

import bench_block_gpu
import bench_compile_cpu
import bench_forced_drafts
import bench_serving_gpu
import bench_sharded_gpu
import bench_steps_gpu
import bench_trees
import bench_trees_gpu
import bench_verify_tpu
import jax
import jax.numpy as jnp
import llamas
import measure
import numpy as np
import pytest

from jax_specdec import lm


@pytest.mark.slow
def test_compile_time_is_measured_in_every_situation(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(measure, "RESULTS", tmp_path)
    bench_compile_cpu.main(["--batches", "2", "--vocabularies", "64", "--repeats", "2"])
    saved = json.loads((tmp_path / "compile_cpu.json").read_text())["rows"]
    assert [(r["when"], r["way"]) for r in saved] == [
        (when, way) for when in bench_compile_cpu.WHEN for way in bench_compile_cpu.WAYS
    ]
    assert all(len(samples) == 2 for row in saved for samples in row["samples"].values())
    assert min(measure.median(row["samples"]["compile_s"]) for row in saved) > 0
    assert "from disk" in capsys.readouterr().out
    assert jax.config.jax_compilation_cache_dir is None


@pytest.mark.slow
def test_a_tpu_compares_times_and_fails_where_tokens_differ(tmp_path, monkeypatch, capsys):
    path = tmp_path / "verify_tpu.json"
    assert bench_verify_tpu.main(["--only", "greedy", "--output", str(path)]) == 0
    document = json.loads(path.read_text())
    (row,) = document["rows"]
    assert set(row["samples"]) == {"xla", "plain"}
    assert all(len(samples) == 1 for samples in row["samples"].values())
    assert row["margins"] == []
    printed = capsys.readouterr().out
    assert "tokens agree" in printed and f"attach {path}" in printed.replace("\n", "")

    monkeypatch.setattr(bench_verify_tpu, "margins", lambda *_: [0.5])
    monkeypatch.setattr(
        bench_verify_tpu, "seconds_per_call", lambda case, forms, *_: dict.fromkeys(forms, [1.0])
    )
    assert bench_verify_tpu.main(["--only", "greedy", "--output", str(path)]) == 1
    assert "TOKENS DIFFER" in capsys.readouterr().out


@pytest.mark.slow
def test_trees_are_counted_and_timed(tmp_path, capsys):
    few = ["--prompts", "2", "--max-new-tokens", "12", "--nodes", "0", "8", "--temperatures", "0.8"]
    bench_trees.main([*few, "--drafters", "dspark", "--output", str(tmp_path)])
    chain, tree = json.loads((tmp_path / "trees_cpu.json").read_text())["rows"]
    assert chain["same_text"] == tree["same_text"] == 2
    assert 1 <= chain["tokens_per_pass"] <= tree["tokens_per_pass"] <= 8

    tiny = ["--tiny", "--batches", "1", "--nodes", "0", "8", "--candidates", "16"]
    assert (
        bench_trees_gpu.main([*tiny, "--repeats", "1", "--steps", "2", "--output", str(tmp_path)])
        == 0
    )
    rows = json.loads((tmp_path / "trees_gpu.json").read_text())["rows"]
    assert [row["nodes"] for row in rows] == [0, 8]
    assert all(min(row["ms"].values()) > 0 for row in rows)
    assert "chain of 3" in capsys.readouterr().out


@pytest.mark.slow
def test_serving_is_measured_with_full_slots_and_arrivals(tmp_path, capsys):
    command = ["--tiny", "--slots", "2", "--drafters", "lookup", "--steps", "8", "--repeats", "1"]
    command += ["--arrivals", "60", "--rounds", "1", "--policies", "largest", "8", "steps-8"]
    assert bench_serving_gpu.main([*command, "--output", str(tmp_path)]) == 0
    (row,) = measure.load(tmp_path / "serving_gpu.json")["rows"]
    full = row["full"]
    assert 0 < full["steps_ahead"] <= 1
    np.testing.assert_allclose(row["host_share"], 1 - row["bare_ms"] / full["ms"])
    rate = full["tokens_per_step"] / full["ms"] * 1e3
    np.testing.assert_allclose(full["tokens_per_second"], rate)
    rows = measure.load(tmp_path / "arrivals_gpu.json")["rows"]
    assert [row["chunk_size"] for row in rows] == [32, 8, 8]
    for row in rows:
        assert {len(run) for runs in row["samples"].values() for run in runs} == {60}
        assert row["arrivals"]["step"]["ratio"] >= 1 and row["arrivals"]["first_mean"] > 0
        assert row["saturated"]["tokens_per_second"] > 0
    printed = capsys.readouterr().out
    assert "host share" in printed and "ms of a step" in printed


@pytest.mark.slow
def test_split_vocabularies_are_timed_and_every_token_compared(tmp_path, monkeypatch, capsys):
    def broken(*_):
        raise RuntimeError("a way that fails costs no other")

    monkeypatch.setattr(bench_sharded_gpu, "gathered", broken)
    command = ["--tiny", "--devices", "2", "--batches", "2", "--inputs", "1", "--repeats", "2"]
    assert bench_sharded_gpu.main([*command, "--draws", "2", "--output", str(tmp_path)]) == 0
    document = measure.load(tmp_path / "sharded_gpu.json")
    *times, tokens = document["rows"]
    rows = {row["way"]: row for row in times}
    assert list(rows) == [
        "split",
        "one",
        "empty",
        *(f"{x} in graphs" for x in ("split", "one", "empty")),
    ]
    assert "costs no other" in capsys.readouterr().out
    assert all(len(row["samples"]) == 2 and row["devices"] == 2 for row in times)
    assert rows["split"]["emitted_per_request"] == rows["one"]["emitted_per_request"] > 1
    split, empty = (sorted(rows[way]["collective_bytes"].values()) for way in ("split", "empty"))
    assert split == empty and len(split) == 3
    assert tokens["ok"] and tokens["decisions"] >= 2 * 2 * 3 and tokens["margins"] == []
    assert document["runs"][0]["devices"] == 2


@pytest.mark.slow
def test_every_drafter_is_timed_with_and_without_the_target(tmp_path, capsys):
    command = ["--tiny", "--batches", "2", "--prompts", "9", "--steps", "4", "--repeats", "2"]
    assert bench_steps_gpu.main([*command, "--output", str(tmp_path)]) == 0
    (row,) = measure.load(tmp_path / "steps_gpu.json")["rows"]
    drafters = ("model", "EAGLE-3 head", "n-gram")
    ways = ["plain", *(f"{name}, {kind}" for name in drafters for kind in ("step", "draft"))]
    assert list(row["ms"]) == ways and min(row["ms"].values()) > 0
    assert all(len(row["samples"][way]) == 2 for way in ways)
    model = lm.models.Llama(llamas.TINY, "bfloat16")
    sizes = jax.tree.leaves(jax.eval_shape(model.init_params, jax.random.key(0)))
    assert row["draft_bytes"]["model"] == bench_steps_gpu.K * sum(2 * x.size for x in sizes)
    assert list(row["draft_bytes"]) == ["model", "EAGLE-3 head"]
    assert "pays above" in capsys.readouterr().out


@pytest.mark.slow
def test_block_heads_are_timed_beside_other_drafters(tmp_path, capsys):
    command = ["--tiny", "--batches", "2", "--steps", "2", "--repeats", "2", "--prompt", "8"]
    assert bench_block_gpu.main([*command, "--output", str(tmp_path)]) == 0
    rows = measure.load(tmp_path / "block_gpu.json")["rows"]
    assert [(row["drafter"], row["k"]) for row in rows] == [
        *(("DSpark", 3), ("DFlash", 3), ("EAGLE-3", 3), ("model", 3)),
    ]
    assert all(min(row["ms"].values()) > 0 and row["draft_bytes"] > 0 for row in rows)
    assert "at published lengths" in capsys.readouterr().out


@pytest.mark.slow
def test_random_weights_have_the_shapes_of_the_models():
    for config, billions in ((llamas.LLAMA_3_8B, 8.03), (llamas.LLAMA_3_1B, 1.24)):
        shapes = lm.models.Llama(config).init_params
        sizes = jax.tree.leaves(jax.eval_shape(shapes, jax.random.key(0)))
        assert abs(sum(x.size for x in sizes) / 1e9 - billions) < 0.01
    model = lm.models.Llama(llamas.TINY, "bfloat16")
    params = llamas.random_params(model, 0)
    start = jnp.zeros((1,), jnp.int32)
    logits = model.apply(params, start[None, :], start, model.init_cache(1, 1)).logits
    assert jnp.isfinite(logits).all()


@pytest.mark.slow
def test_forced_tokens_are_counted_with_and_without(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "RESULTS", tmp_path)
    monkeypatch.setattr(
        bench_forced_drafts, "SCHEMAS", {"one": bench_forced_drafts.SCHEMAS["tool call"]}
    )
    bench_forced_drafts.main(["--draft", "ngram", "--requests", "2", "--repeats", "1"])
    greedy, sampled = json.loads((tmp_path / "forced_drafts.json").read_text())["rows"]
    assert [greedy["temperature"], sampled["temperature"]] == [0, 0.8]
    for row in (greedy, sampled):
        assert json.loads(row["example"])["name"] == "get_weather"
        assert row["tokens_per_pass"]["forced"] > 3 > row["tokens_per_pass"]["without"] >= 1
    assert greedy["tokens"]["forced"] == greedy["tokens"]["without"]
