"""The benchmark of split vocabularies times the collectives it says, and compares every token."""

import bench_sharded_gpu as bench
import measure
import pytest

pytestmark = pytest.mark.slow


def test_the_harness_measures_compares_and_saves(tmp_path, monkeypatch, capsys):
    def broken(*_):
        raise RuntimeError("a way that fails costs no other")

    monkeypatch.setattr(bench, "gathered", broken)
    command = ["--tiny", "--devices", "2", "--batches", "2", "--inputs", "1", "--repeats", "2"]
    assert bench.main([*command, "--draws", "2", "--output", str(tmp_path)]) == 0
    document = measure.load(tmp_path / "sharded_gpu.json")
    *times, tokens = document["rows"]
    rows = {row["way"]: row for row in times}
    assert list(rows) == ["split", "one", "empty", "split in graphs", "empty in graphs"]
    assert "costs no other" in capsys.readouterr().out
    assert all(len(row["samples"]) == 2 and row["devices"] == 2 for row in times)
    assert rows["split"]["emitted_per_request"] == rows["one"]["emitted_per_request"] > 1
    split, empty = (sorted(rows[way]["collective_bytes"].values()) for way in ("split", "empty"))
    assert split == empty and len(split) == 3
    assert tokens["ok"] and tokens["decisions"] >= 2 * 2 * 3 and tokens["margins"] == []
    assert document["runs"][0]["devices"] == 2
