"""The benchmark of compile time measures every step of both, in every situation."""

import json

import bench_compile_cpu as bench
import measure
import pytest


@pytest.mark.long
def test_every_step_of_both_is_measured_and_saved(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(measure, "RESULTS", tmp_path)
    bench.main(["--batches", "2", "--vocabularies", "64", "--repeats", "2"])
    saved = json.loads((tmp_path / "compile_cpu.json").read_text())["rows"]
    assert [(r["when"], r["way"]) for r in saved] == [
        (when, way) for when in bench.WHEN for way in bench.WAYS
    ]
    assert all(len(samples) == 2 for row in saved for samples in row["samples"].values())
    compile_s = {(r["when"], r["way"]): bench.measure.median(r["samples"]["compile_s"])
                 for r in saved}  # fmt: skip
    assert min(compile_s.values()) > 0
    assert "from disk" in capsys.readouterr().out
    assert bench.jax.config.jax_compilation_cache_dir is None
