"""The benchmark for TPUs compares tokens, times what it says, and fails where tokens differ."""

import json

import bench_verify_tpu as bench
import pytest

pytestmark = pytest.mark.long


def test_it_compares_times_and_says_what_to_report(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "FORMS", ("mosaic_tpu", "plain"))
    path = tmp_path / "verify_tpu.json"
    assert bench.main(["--only", "greedy", "--output", str(path)]) == 0
    document = json.loads(path.read_text())
    (row,) = document["rows"]
    assert set(row["samples"]) == {"mosaic_tpu", "plain"}
    assert all(len(samples) == 1 for samples in row["samples"].values())
    judged = row["disagreements"]
    assert judged["ok"] and judged["decisions"] >= 2 * 2 and judged["margins"] == []
    printed = capsys.readouterr().out
    assert "tokens agree" in printed and f"attach {path}" in printed.replace("\n", "")

    wrong = {"ok": False, "margins": [0.5], "decisions": 4}
    monkeypatch.setattr(bench.disagreements, "sweep", lambda *_: wrong)
    monkeypatch.setattr(
        bench, "seconds_per_call", lambda case, forms, *_: dict.fromkeys(forms, [1.0])
    )
    assert bench.main(["--only", "greedy", "--output", str(path)]) == 1
    assert "TOKENS DIFFER" in capsys.readouterr().out
