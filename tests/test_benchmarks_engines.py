"""The comparison of whole engines counts what it says, and makes vLLM of a folder."""

import importlib.metadata
import math
import pathlib
import re
import sys

import bench_engines_gpu as bench
import engine_load
import numpy as np
import pytest
import vllm_engine

pytestmark = pytest.mark.newest
ROOT = pathlib.Path(__file__).parents[1]
PARTS = "steady", "with ends"

# Seconds, and events: a request, its tokens, whether it has ended. Two requests, then a third.
LOG = [
    (1.0, [(0, 3, False)]),
    (2.0, [(0, 3, False), (1, 1, False)]),
    (2.5, [(0, 3, False), (1, 3, False)]),
    (3.0, [(0, 3, False), (1, 2, True)]),
    (5.0, [(0, 2, True), (2, 1, False)]),
    (6.0, [(2, 3, True)]),
]


def test_requests_depend_on_the_seed_alone_and_fit():
    sizes = engine_load.Sizes(prompt=5, least=4, most=8, max_length=13)
    requests = sizes.requests(200, seed=3)
    assert requests == sizes.requests(200, seed=3) != sizes.requests(200, seed=4)
    assert requests[:9] != sizes.requests(9, seed=4)
    assert {len(one.prompt) for one in requests} == {5}
    assert {one.budget for one in requests} == {4, 5, 6, 7, 8}
    assert abs(np.mean([one.budget for one in requests]) - sizes.mean) < 0.3
    assert max(token for one in requests for token in one.prompt) < engine_load.ALPHABET


def test_arrivals_are_a_poisson_process():
    due = engine_load.poisson(20_000, rate=4.0, seed=1)
    gaps = np.diff([0.0, *due])
    assert (gaps > 0).all() and due == engine_load.poisson(20_000, rate=4.0, seed=1)
    assert abs(gaps.mean() - 0.25) < 0.01 and abs(gaps.std() - 0.25) < 0.01
    counts = np.bincount(np.array(due, int))[:-1]  # in each second: mean and variance are the rate
    assert abs(counts.mean() - 4) < 0.1 and abs(counts.var() - 4) < 0.3
    assert abs(np.corrcoef(gaps[1:], gaps[:-1])[0, 1]) < 0.03


def test_tokens_are_counted_from_when_all_have_begun_until_the_first_ends_and_the_last():
    found = engine_load.batch_figures(LOG[:4] + [(5.0, [(0, 2, True)])])
    assert found["prompts_s"] == 2.0 and found["seconds"] == 5.0
    steady, with_ends = found["steady"], found["with_ends"]
    assert steady == {"tokens_per_second": 11.0, "step_ms": 500.0, "emitted": 11 / 4}
    assert with_ends["tokens_per_second"] == 13 / 3 and with_ends["step_ms"] == 1000.0
    assert engine_load.step_ms(LOG[:4] + [(5.0, [(0, 2, True)])]) == [500.0, 500.0, 2000.0]
    assert math.isnan(engine_load.between(LOG, 5.0, 5.5)["step_ms"])


def test_an_engine_is_saturated_while_others_wait():
    # From the second first token, at 2 s, to the last one, at 5 s.
    assert engine_load.saturated_tokens(LOG, batch=2) == (6 + 5 + 3) / 3


def test_waiting_is_counted_from_when_a_request_came():
    due = [0.5, 1.5, 2.0]
    budgets = [14, 6, 4]
    requests = [engine_load.Request([], budget) for budget in budgets]
    found = engine_load.arrival_figures(LOG, due, requests)
    assert found["samples"] == {"due": due, "first": [1.0, 2.0, 5.0], "end": [5.0, 3.0, 6.0]}
    assert found["tokens_per_second"] == 24 / 5.5
    assert found["first_ms"]["p50"] == 500 and 2900 < found["first_ms"]["p99"] < 3000
    # 4 s for 11 tokens, 1 s for 5, and 1 s for 3.
    assert found["token_ms"]["p50"] == pytest.approx(1000 / 3)


class Scripted(engine_load.Engine):
    """Gives every running request a token a step, and at most two run."""

    def __init__(self):
        self.left, self.submitted = {}, []

    def submit(self, number, request):
        self.submitted.append(number)
        self.left[number] = request.budget

    def step(self):
        events = [(number, 1, self.left[number] == 1) for number in list(self.left)[:2]]
        for number, count, ended in events:
            self.left[number] -= count
            if ended:
                del self.left[number]
        return events

    @property
    def is_idle(self):
        return not self.left


def test_every_token_of_every_request_is_served_in_the_order_of_arrival():
    requests = [engine_load.Request([1], budget) for budget in (2, 1, 3)]
    for due in (None, [0.0, 0.01, 0.02]):
        engine = Scripted()
        log = engine.serve(requests, due)
        counts = {number: 0 for number in range(3)}
        for _, events in log:
            for number, count, _ in events:
                counts[number] += count
        assert list(counts.values()) == [2, 1, 3] and engine.submitted == [0, 1, 2]
        assert sorted(engine_load.ends(log)) == [0, 1, 2]
        seconds = [one for one, _ in log]
        assert seconds == sorted(seconds)
        assert due is None or all(engine_load.firsts(log)[i] >= due[i] for i in range(3))


def batch_row(engine, way, batch, steady, with_ends, step_ms=1.0):
    figures = {"step_ms": step_ms, "emitted": 1.0}
    return {
        "kind": "batch",
        "engine": engine,
        "way": way,
        "batch": batch,
        "slots": batch,
        "steady": {"tokens_per_second": steady, **figures},
        "with_ends": {"tokens_per_second": with_ends, **figures},
    }


def test_the_table_divides_ours_by_vllms():
    rows = [
        batch_row("vLLM", "plain", 8, 100.0, 90.0),
        batch_row("ours", "plain", 8, 150.0, 45.0),
        batch_row("ours", "eagle3", 8, 1500.0, 1200.0),
        batch_row("transformers", "draft", 1, 5.0, 5.0, step_ms=100.0),
        {**batch_row("ours", "plain", 8, 7.0, 7.0), "slots": 4},  # of a smaller engine
        {"kind": "arrivals", "engine": "ours", "way": "plain", "batch": 8, "slots": 8},
    ]
    table = bench.cells(rows)
    names = [(line["drafts by"], line["B"]) for line in table]
    assert names == [("nothing", 8), ("an EAGLE-3 head", 8), ("a draft model", 1)]
    plain, eagle3, assisted = table
    assert plain["steady, ours"] == "150" and plain["steady, vLLM"] == "100"
    assert plain["steady, ours / vLLM"] == "1.50" and plain["with ends, ours / vLLM"] == "0.50"
    assert eagle3["steady, ours"] == "1,500" and eagle3["steady, vLLM"] == "-"
    # Assisted decoding has no synthetic length: 3.0 tokens in each step of 100 ms.
    assert assisted["steady, transformers"] == "30"


def test_the_page_has_a_line_for_each_way_and_batch_with_device_date_and_versions(tmp_path, capsys):
    figures = {"saturated": 1000.0, "requests_per_second": 2.5, "tokens_per_second": 510.0}
    waits = {name: {"p50": 20.0, "p99": 40.25} for name in ("first_ms", "token_ms")}
    rows = [
        batch_row("ours", "plain", 8, 150.0, 45.0),
        {**batch_row("vLLM", "plain", 8, 0.0, 0.0), "kind": "arrivals", **figures, **waits},
    ]
    run = {"device": "gpu: A Card", "date": "2026-01-02T03", "jax": "0.1", "vLLM": "0.2"}
    rows = [{**row, "run": 0} for row in rows]
    bench.measure.write(tmp_path / "engines_gpu.json", {"runs": [run], "rows": rows})
    assert bench.main(["--show", "--output", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("[A Card, 2026-01-02](") for line in lines)
    assert "jax 0.1, vLLM 0.2. Tokens a second:" in lines
    # Columns of engines that did not run are left out.
    assert "| nothing | 8 | 150 | 45 |" in lines
    assert "| nothing | 8 | vLLM | 1,000 | 2.5 | 510 | 20.0 | 40.2 | 20.0 | 40.2 |" in lines


def test_the_page_and_the_readme_say_what_the_results_have():
    document = bench.measure.load(ROOT / "benchmarks/results/engines_gpu.json")
    page = (ROOT / "docs/engines.md").read_text("utf-8")
    assert "\n".join(bench.section(document)) in page
    table = bench.cells(document["rows"])
    heads = [line for line in table if line["drafts by"] == "an EAGLE-3 head"]
    gains = [float(line[f"{part}, ours / vLLM"]) for line in heads for part in PARTS]
    words = re.sub(r"\s+", " ", (ROOT / "README.md").read_text("utf-8"))
    assert f"{min(gains):.2f} to {max(gains):.2f} times the tokens of vLLM" in words


def test_a_log_of_equal_steps_spends_every_budget():
    log = engine_load.even_log([7, 4], first=1.0, last=4.0, steps=3)
    assert log[0] == (1.0, [(0, 1, False), (1, 1, False)])
    assert [seconds for seconds, _ in log] == [1.0, 2.0, 3.0, 4.0]
    assert sum(count for _, events in log for number, count, _ in events if number == 0) == 7
    assert engine_load.ends(log) == {0: 4.0, 1: 3.0}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A vLLM that imports what is absent, and asks for its version."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").write_text(
        "import importlib.metadata\n"
        "import xgrammar.contrib.hf\n"
        "from numba import njit\n"
        "@njit\n"
        "def f(x): return x\n"
        "grammars = importlib.metadata.version('xgrammar')\n"
    )
    (tmp_path / "vllm-1.2.3.dist-info").mkdir()
    metadata = "Metadata-Version: 2.1\nName: vllm\nVersion: 1.2.3\n"
    (tmp_path / "vllm-1.2.3.dist-info/METADATA").write_text(metadata)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(importlib.metadata, "version", importlib.metadata.version)
    for name in (*vllm_engine.ENVIRONMENT, "PYTHONPATH"):
        monkeypatch.setenv(name, "before")
    yield tmp_path
    made = {"vllm", "numba", "xgrammar"}
    for name in [name for name in sys.modules if name.partition(".")[0] in made]:
        del sys.modules[name]


def test_what_vllm_imports_and_never_calls_need_not_be_there(folder):
    assert vllm_engine.version(folder) == "1.2.3"
    module = vllm_engine.import_vllm(folder)
    assert module.grammars == "99.0" and importlib.metadata.version("numpy") == np.__version__
    assert vllm_engine._StandIns.num_calls() > 0  # the decorator, on import
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("no_package_of_this_name")
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("no_package_of_this_name")
    assert vllm_engine.version(folder / "vllm") is None


def test_without_a_gpu_or_an_engine_nothing_is_measured(capsys, monkeypatch, tmp_path):
    assert bench.main([]) == 0
    assert "nothing to measure, JAX runs on cpu" in capsys.readouterr().out
    monkeypatch.setattr(bench, "versions", lambda _: {"vLLM": None, "transformers": None})
    assert bench.main(["--tiny", "--engines", "vLLM", "--output", str(tmp_path)]) == 0
    assert "left out: vLLM" in capsys.readouterr().out
