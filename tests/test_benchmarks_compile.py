"""The benchmark of compile time measures every step of both, in every situation."""

import json

import bench_compile_cpu as bench
import measure
import pytest


def rows():
    """Seconds by step, 1 with 2 in CPU time, ten times as long for us."""
    seconds = {f"{step}_{clock}": [n] * 3 for step in bench.STEPS for clock, n in
               (("s", 1), ("cpu_s", 2))}  # fmt: skip
    return [
        {
            "way": way,
            "when": when,
            "batch": 2,
            "vocabulary": 64,
            "lines": 5,
            "samples": {
                k: [x * (10 if way == "ours" else 1) for x in v] for k, v in seconds.items()
            },
        }
        for when in bench.WHEN
        for way in bench.WAYS
    ]


def test_totals_are_medians_of_sums():
    row = {"samples": {"trace_s": [1, 5, 9], "lower_s": [9, 1, 0], "compile_s": [0, 0, 1]}}
    assert bench.total(row) == 10


def test_ratios_are_to_the_plain_formulation():
    columns = {column.header: list(column.cells) for column in bench.table(rows()).columns}
    assert columns["all"] == ["30000", "3000"] * 3
    assert columns["CPU"] == ["60000", "6000"] * 3
    assert columns["ratio"] == ["10.00", "1.00"] * 3


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
