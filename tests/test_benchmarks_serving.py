"""The serving study runs both ways and reports what it says."""

import bench_serving_gpu as bench
import measure
import numpy as np
import pytest

pytestmark = pytest.mark.slow


def test_the_study_measures_both_ways(tmp_path, capsys):
    command = ["--small", "--slots", "2", "--drafters", "lookup", "--steps", "8", "--repeats", "1"]
    assert bench.main([*command, "--arrivals", "60", "--output", str(tmp_path)]) == 0
    old, new = measure.load(tmp_path / "serving_small.json")["rows"]
    assert (old["way"], new["way"]) == ("old", "new")
    assert old["full"]["steps_ahead"] == 0 < new["full"]["steps_ahead"] <= 1
    for row in (old, new):
        full, arrivals = row["full"], row["arrivals"]
        np.testing.assert_allclose(row["host_share"], 1 - row["bare_ms"] / full["ms"])
        rate = full["tokens_per_step"] / full["ms"] * 1e3
        np.testing.assert_allclose(full["tokens_per_second"], rate)
        assert len(arrivals["step_ms"]) == len(arrivals["admitted"]) == 60
        assert sum(arrivals["admitted"]) == arrivals["num_admitted"] > 0
    drawn = sorted(path.name for path in tmp_path.glob("*.png"))
    assert drawn == ["serving_small_arrivals.png", "serving_small_step.png"]
    assert "host share" in capsys.readouterr().out
