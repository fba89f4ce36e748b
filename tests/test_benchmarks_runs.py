"""Benchmarks whose runs take long: each at a tiny size, and which rows it saves."""

import json
from types import ModuleType
from typing import Any

import bench_block_gpu
import bench_compile_cpu
import bench_engines_gpu
import bench_gemma4_gpu
import bench_int8_gpu
import bench_pair
import bench_passes_gpu
import bench_rows_gpu
import bench_serving_gpu
import bench_sharded_gpu
import bench_steps_gpu
import bench_trees_gpu
import bench_verify_gpu
import bench_verify_tpu
import gemmas
import jax
import llamas
import measure
import pytest

from jax_specdec import lm

SERVING = "--tiny --slots 2 --drafters lookup --steps 8 --repeats 1 --arrivals 60 --rounds 1"
# The script, its arguments, the file that it saves, a field of the rows there, and its values.
# fmt: off
RUNS: list[tuple[ModuleType, str, str, str, list[Any]]] = [
    (bench_compile_cpu, "--batches 2 --vocabularies 64 --repeats 2", "compile_cpu", "when",
     [when for when in bench_compile_cpu.WHEN for _ in bench_compile_cpu.WAYS]),
    (bench_verify_tpu, "--only greedy", "verify_tpu", "margins", [[]]),
    (bench_verify_gpu, "--tiny --repeats 2 --draws 2 --inputs 2 --only greedy",
     "verify_gpu", "kind", ["time", "time", "time", "disagreements"]),
    (bench_trees_gpu, "--tiny --batches 1 --nodes 0 8 --candidates 16 --repeats 1 --steps 2",
     "trees_gpu", "nodes", [0, 8]),
    (bench_serving_gpu, f"{SERVING} --policies largest 8 steps-8", "arrivals_gpu", "chunk_size",
     [32, 8, 8]),
    # Four ways, in graphs too; are the tokens the same?
    (bench_sharded_gpu, "--tiny --devices 2 --batches 2 --inputs 1 --repeats 2 --draws 2",
     "sharded_gpu", "kind", [*["time"] * 8, "disagreements"]),
    (bench_steps_gpu, "--tiny --batches 2 --prompts 9 --steps 4 --repeats 2", "steps_gpu", "batch",
     [2]),
    (bench_engines_gpu, "--tiny --engines ours --ways eagle3 --batches 2 --repeats 1",
     "engines_gpu", "kind", ["batch", "arrivals"]),
    (bench_rows_gpu, "--tiny --batches 2 --repeats 1", "rows_of_passes_gpu", "rows", [10, 2]),
    (bench_passes_gpu, "--tiny --repeats 1", "passes_gpu", "rows", [3]),
    (bench_block_gpu, "--tiny --batches 2 --steps 2 --repeats 2 --prompt 8", "block_gpu", "drafter",
     ["DSpark", "DFlash", "EAGLE-3", "model"]),
    (bench_gemma4_gpu, "--tiny --seconds 900 --batches 2 --steps 2 --repeats 2 --prompt 8",
     "gemma4_gpu", "target", ["E4B", "31B"]),
    (bench_int8_gpu, "--tiny --batches --lengths 8 --repeats 2", "int8_gpu", "weights",
     ["bfloat16", "int8"]),
    (bench_pair, "--tiny --temperatures 0 --batches 1", "pair_cpu", "same_texts", [1.0] * 3),
]
# fmt: on


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "arguments", "file", "field", "values"), RUNS, ids=[file for _, _, file, *_ in RUNS]
)
def test_a_benchmark_saves_its_rows(
    script, arguments, file, field, values, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(measure, "RESULTS", tmp_path)
    monkeypatch.chdir(tmp_path)
    assert not script.main(arguments.split())
    rows = json.loads((tmp_path / f"{file}.json").read_text())["rows"]
    assert [row.get(field) for row in rows] == values
    for row in rows:
        assert "samples" not in row or jax.tree.leaves(row["samples"])
        assert row.get("ok", True)
    assert capsys.readouterr().out


@pytest.mark.slow
def test_tokens_that_differ_fail(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench_verify_tpu, "margins", lambda *_: [0.5])
    monkeypatch.setattr(
        bench_verify_tpu, "seconds_per_call", lambda case, forms, *_: dict.fromkeys(forms, [1.0])
    )
    command = ["--only", "greedy", "--output", str(tmp_path / "verify_tpu.json")]
    assert bench_verify_tpu.main(command) == 1
    assert "TOKENS DIFFER" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("config", "billions"),
    [
        (llamas.LLAMA_3_8B, 8.03),
        (llamas.LLAMA_3_1B, 1.24),
        (gemmas.GEMMA_4_31B, 30.70),
    ],
)
def test_random_weights_have_the_sizes_of_the_models(config, billions):
    shapes = jax.eval_shape(lm.models.Llama(config).init_params, jax.random.key(0))
    assert abs(sum(x.size for x in jax.tree.leaves(shapes)) / 1e9 - billions) < 0.01
