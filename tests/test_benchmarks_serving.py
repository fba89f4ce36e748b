"""The serving study reports what it says."""

import bench_serving_gpu as bench
import measure
import numpy as np
import pytest

pytestmark = pytest.mark.slow


def test_the_study_measures_full_slots_and_arrivals(tmp_path, capsys):
    command = ["--tiny", "--slots", "2", "--drafters", "lookup", "--steps", "8", "--repeats", "1"]
    assert bench.main([*command, "--arrivals", "60", "--output", str(tmp_path)]) == 0
    (row,) = measure.load(tmp_path / "serving_gpu.json")["rows"]
    full, arrivals = row["full"], row["arrivals"]
    assert 0 < full["steps_ahead"] <= 1
    np.testing.assert_allclose(row["host_share"], 1 - row["bare_ms"] / full["ms"])
    rate = full["tokens_per_step"] / full["ms"] * 1e3
    np.testing.assert_allclose(full["tokens_per_second"], rate)
    assert len(arrivals["step_ms"]) == len(arrivals["admitted"]) == 60
    assert sum(arrivals["admitted"]) == arrivals["num_admitted"] > 0
    assert "host share" in capsys.readouterr().out
