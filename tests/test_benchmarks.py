"""The benchmarks count what they say and lose no result."""

import importlib
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bench_decode_cpu
import bench_pair
import bench_real_model
import chain
import inputs
import jax
import measure
import numpy as np
import pytest
import verify_cases
from verify_cases import Case, Variant

import jax_specdec as sd

pytestmark = pytest.mark.newest

ROOT = Path(__file__).parents[1]
XLA = Variant("xla")


@pytest.mark.parametrize(
    ("fields", "rows", "draft_rows"),
    [
        ({}, 12, 3),  # each emitted token visits a row; each rejection its draft row
        ({"dtype": "float32"}, 24, 6),
        ({"distribution": "none"}, 12, 0),
        ({"distribution": "probs"}, 12, 6),  # float32 beside bfloat16
        ({"distribution": "logits"}, 12, 11),  # 8 accepted and 3 rejected drafts
        ({"rates": (0.8, 0.6)}, 4, 3),  # the chosen row of each request alone
        ({"ids": "map"}, 12, 3),  # as many ids as there are
        ({"ids": "candidates"}, 12, 9),  # 2 bytes and an id of 4
    ],
)
def test_bytes_are_the_rows_that_have_to_be_read(fields, rows, draft_rows):
    case = Case("", batch=4, k=2, vocabulary=10, **fields)
    assert verify_cases.bytes_read(case, 1, emitted=12, rejected=3) == 20 * (rows + draft_rows)
    assert verify_cases.bytes_read(case, 2, emitted=24, rejected=6) == 20 * (rows + draft_rows)


@pytest.mark.long
@pytest.mark.parametrize("ids", [pytest.param("map", marks=pytest.mark.slow), "candidates"])
def test_inputs_on_listed_ids_are_those_of_all_ids(ids):
    listed, scattered = (
        inputs.make(Case("", 3, k=2, vocabulary=90, ids=ids, scattered=is_scattered), 1)
        for is_scattered in (False, True)
    )
    np.testing.assert_array_equal(listed[1].token_ids, scattered[1].token_ids)
    own, dense = listed[1].distribution, scattered[1].distribution
    assert dense.ids is None and dense.logits.shape == (6, 90)
    every = np.broadcast_to(own.ids, own.logits.shape)
    np.testing.assert_array_equal(np.take_along_axis(dense.logits, every, axis=1), own.logits)
    np.testing.assert_allclose(scattered[2].sum(axis=1), 1, rtol=1e-5)


@pytest.mark.slow
def test_a_chain_makes_every_call_on_the_last_ones_result():
    trips = 3
    case = Case("", 3, k=2, vocabulary=40, dtype="float32")
    sets = [inputs.make(case, seed, with_probs=False) for seed in range(2)]
    arguments = chain.arguments(case, XLA, sets)
    totals, _ = chain.chain(arguments, case=case, variant=XLA, trips=trips, kernel_config=None)
    expected = np.zeros((3, 3), np.int32)
    last = jax.numpy.zeros((3,), jax.numpy.int32)
    for trip in range(trips):
        for logits, drafts, _ in sets:
            output = sd.rejection_sample(
                logits,
                drafts,
                sampling=sd.SamplingParams(arguments["temperature"]),
                keys=jax.random.wrap_key_data(np.asarray(arguments["key_data"]) ^ np.uint32(trip)),
                positions=last,
                config=case.config,
                implementation="xla",
            )
            last = output.num_emitted
            expected += [output.num_emitted, output.num_accepted < 2, output.token_ids[:, 0]]
    np.testing.assert_array_equal(totals, expected)


def test_merging_replaces_rows_and_forgets_runs_without_rows():
    identity = ("name", "batch")
    a = {"name": "a", "batch": 1, "x": 1}
    b = {"name": "b", "batch": 1, "x": 2}
    document = measure.merge(None, {"date": 1}, [a, b], identity)
    document = measure.merge(document, {"date": 2}, [{**b, "x": 3}], identity)
    assert [(r["name"], r["x"], r["run"]) for r in document["rows"]] == [("a", 1, 0), ("b", 3, 1)]
    document = measure.merge(document, {"date": 3}, [a], identity)
    assert document["runs"] == [{"date": 2}, {"date": 3}]
    assert [(r["name"], r["run"]) for r in document["rows"]] == [("b", 0), ("a", 1)]
    document = measure.merge(document, {"date": 4, "k": 2}, [a], (*identity, "k"))  # a key of runs
    assert [(r["name"], r["run"]) for r in document["rows"]] == [("b", 0), ("a", 1), ("a", 2)]


@pytest.mark.slow
def test_decoding_of_a_checkpoint_directory_is_measured_saved_and_shown(
    tmp_path, capsys, monkeypatch
):
    checkpoints = Path(__file__).parent / "formats" / "huggingface"
    monkeypatch.setattr(measure, "RESULTS", tmp_path)
    monkeypatch.setattr(bench_decode_cpu, "TEXT_PROMPTS", {"again": "one two three one two"})
    monkeypatch.setattr(bench_decode_cpu, "LOOKUP_CASES", bench_decode_cpu.LOOKUP_CASES[:1])
    command = ["--target", str(checkpoints / "qwen2")]
    bench_decode_cpu.main([*command, "--repeats", "1", "--new-tokens", "12"])
    rows = json.loads((tmp_path / "decode_cpu_qwen2.json").read_text())["rows"]
    cases = [(row["draft"], row["k"], row["temperature"]) for row in rows]
    assert cases == [("ngram", 2, 0)]
    for row in rows:
        assert row["differences"] == []
        assert 1 <= row["tokens_per_target_pass"] <= row["mean_acceptance_length"] <= row["k"] + 1
        for samples in (row["samples"], row["cpu_samples"]):
            assert {name: len(times) for name, times in samples.items()} == {
                "speculative": 1,
                "plain": 1,
            }
    assert "12 new tokens" in capsys.readouterr().out
    rows[0]["samples"] = {"speculative": [1.0, 4.0, 2.0], "plain": [3.0]}
    assert bench_decode_cpu.speeds(rows[0]) == (6, 4)


def test_a_drafter_alone_is_not_measured(capsys):
    with pytest.raises(SystemExit):
        bench_decode_cpu.main(["--draft", "somewhere"])
    assert "--draft needs --target" in capsys.readouterr().err


def test_the_tables_of_a_real_model_are_those_of_its_results() -> None:
    docs = measure.RESULTS.parents[1] / "docs"
    page, tables = (
        (docs / f"{x}.md").read_text("utf-8") for x in ("real_model", "benchmarks_decoding")
    )
    page += tables.partition("## A real model\n")[2].partition("## Lookup\n")[0]
    rows = re.findall(r"^\| .*\d (?:\(\d|tokens/s).*$", page, re.MULTILINE)
    shown: set[str] = set()
    for path in measure.RESULTS.glob("real_model_*.json"):
        results = json.loads(path.read_text("utf-8"))
        shown |= {*"\n".join(bench_real_model.shown(results)).splitlines()}
    assert len(rows) > 80 and [row for row in rows if row not in shown] == []


def test_a_cell_that_fails_or_comes_too_late_costs_no_other(tmp_path, capsys):
    results = measure.Results("cells", folder=tmp_path)
    clock = measure.Clock()

    def measured(size, also):
        if size == 2:
            raise ValueError("two")
        if size == 3:
            clock._seconds = 0.0  # nothing is begun from now on
        return [{"size": size, "also": also}]

    cells = {f"B = {size}": (size, "x") for size in (1, 2, 3, 4)}
    assert measure.measure_cells(results, clock, measured, cells) == 1
    rows = json.loads((tmp_path / "cells.json").read_text())["rows"]
    assert [(row["size"], row["also"]) for row in rows] == [(1, "x"), (3, "x")]
    said = capsys.readouterr().out
    assert "B = 1: measured" in said and "left out: B = 4" in said
    assert "B = 2: FAILED" in said and "ValueError: two" in said
    assert measure.measure_cells(results, measure.Clock(), measured, {"B = 1": (1, "y")}) == 0


def pair_row(rng: np.random.Generator, way: str, **fields: Any) -> dict[str, Any]:
    """A row of `bench_pair.py`: each prompt once, made up numbers."""
    passes = rng.integers(10, 60, size=40)
    row = {"engine": "ours", "way": way, "batch": 1, "k": 4, "temperature": 0, "alone": 8}
    row |= {
        "seconds": 9.0,
        "tokens": (passes * rng.uniform(1, 3, size=40)).astype(int).tolist(),
        "passes": passes.tolist(),
        "decoding": rng.uniform(0.1, 0.2, size=40).tolist(),
        **fields,
    }
    return row | {"tokens_per_second": bench_pair.rates(row)}


def test_tokens_per_pass_of_a_pair_are_a_ratio_of_sums_with_its_error():
    row = pair_row(np.random.default_rng(0), "draft")
    tokens, passes = (np.array(row[name], float) for name in ("tokens", "passes"))
    for kind, some in (("all", slice(0, 40)), ("code", slice(8, 16))):
        ratio, error = bench_pair.per_pass(row, kind)
        t, p = tokens[some], passes[some]
        assert ratio == pytest.approx(t.sum() / p.sum())
        # The jackknife: the ratio without each text in turn.
        n = len(t)
        without = (t.sum() - t) / (p.sum() - p)
        jackknife = np.sqrt((n - 1) / n * np.square(without - without.mean()).sum())
        assert error == pytest.approx(jackknife, rel=0.1)
    again = row | {name: row[name] * 4 for name in ("tokens", "passes")}
    assert bench_pair.per_pass(again, "JSON")[0] == bench_pair.per_pass(row, "JSON")[0]


def test_a_gain_of_a_pair_is_over_the_faster_plain_way():
    rng = np.random.default_rng(1)
    plain = pair_row(rng, "plain", k=None, decoding=[0.5] * 40)
    wide = pair_row(rng, "plain, K + 1 rows", k=0, decoding=[0.4] * 40, tokens=plain["tokens"])
    draft = pair_row(rng, "draft")
    many = [pair_row(rng, way, batch=8, k=k) for way, k in (("plain", None), ("draft", 4))]
    runs = [{"date": "2026-11-28T20:00:00", "device": "gpu: NVIDIA H100 80GB HBM3"}]
    document = {"rows": [plain, wide, draft, *many], "runs": runs}
    gain, tokens_per_pass = (
        # Of a kind, over the plain speed of all kinds: 40 texts of .4 seconds.
        sum(draft["tokens"][8:16]) / sum(draft["decoding"][8:16]) / (sum(wide["tokens"]) / 16),
        sum(draft["tokens"][8:16]) / sum(draft["passes"][8:16]),
    )
    cell = f"{gain:.2f} ({tokens_per_pass:.2f})"
    name = "| draft model, temperature 0 |"
    (line,) = [line for line in bench_pair.first_screen(document) if line.startswith(name)]
    assert line.split(" | ")[2] == cell
    lines = [*bench_pair.shown("pair_gpu_h100", document)]
    source = "Measured on an [H100, 2026-11-28](../benchmarks/results/pair_gpu_h100.json)."
    assert lines[0].startswith("### Lookups") and lines[2] == source
    (line,) = [line for line in lines if line.startswith("| draft | ")]
    assert line.split(" | ")[2] == cell
    # Of several slots, all tokens by all seconds, each text's first one included.
    rates = [(sum(row["tokens"]) + 40) / 9 for row in many]
    assert f"| plain | {rates[0]:.0f} tokens/s |" in "\n".join(lines)
    assert f"| draft, K = 4 | {rates[1] / rates[0]:.2f} (" in "\n".join(lines)
    assert not any("suffix" in line for line in lines)  # what was not measured has no line


def test_the_tables_of_a_pair_are_those_of_its_results():
    page, documents = bench_pair.PAGE.read_text("utf-8"), bench_pair.read_results()
    assert [*documents] == [*bench_pair.FILES]
    assert bench_pair.drawn(page, documents) == page


def test_what_the_page_says_of_the_pair_is_what_was_measured():
    documents = {name: bench_pair.Found(found) for name, found in bench_pair.read_results().items()}
    now, before = documents.values()
    kinds, both = [*bench_pair.KINDS], (0, 0.8)

    def gain(found: Any, way: str, temperature: float, kind: str = "all", **fields: int) -> float:
        row = found.row(way, temperature, **fields)
        return row["tokens_per_second"][kind] / found.plain_speed(temperature, row["batch"])

    def emitted(found: Any, way: str, temperature: float, **fields: Any) -> float:
        return bench_pair.per_pass(found.row(way, temperature, **fields))[0]

    def rate(engine: str, way: str, batch: int = 1) -> str:
        row = now.row(way, 0, batch, engine=engine)
        return f"{row['tokens_per_second']['all']:,.0f}"

    def span(values: list[float]) -> str:
        return f"{min(values):.2f} to {max(values):.2f}"

    def pair(values: Iterator[float], word: str = " and ") -> str:
        return word.join(f"{value:.2f}" for value in values)

    cases = [*itertools.product(("ngram", "suffix"), both)]
    by_kind = {
        way: {kind: [gain(now, way, t, kind) for t in both] for kind in kinds}
        for way in ("eagle3", "draft")
    }
    steps = {way: emitted(now, way, 0) / gain(now, way, 0) for way in by_kind}
    a_draft = {way: (step - 1) / 4 for way, step in steps.items()}
    heads, drafted = (gains["code"] + gains["JSON"] for gains in by_kind.values())
    same = {way: now.row(way, 0)["same_texts"] for way in by_kind}
    several = {now.row("eagle3", 0, batch=batch)["same_texts"] for batch in (8, 32)}
    speeds = [[f.plain_speed(t, 1, kind) for t in both for kind in kinds] for f in (now, before)]
    slow = now.row("draft", 0, engine="vllm")
    ms = 1e3 * sum(slow["decoding"]) / sum(slow["passes"])
    disturbed = bench_pair.Found(measure.load(measure.RESULTS / "pair_disturbed_gpu.json"))
    elsewhere = pair(emitted(disturbed, "eagle3", t, engine="vllm") for t in both)
    here = pair(emitted(now, "eagle3", t) for t in both)
    head = json.loads((ROOT / "training" / "results_qwen2.5-coder-1.5b.json").read_text("utf-8"))
    accepted = head["results"]["own text at temperature 0"]["acceptance"]
    # Matrices of a pass: those of each layer and the output matrix, in bfloat16.
    target, draft = (
        2 * (layers * (2 * q * hidden + 2 * kv * hidden + 3 * inner * hidden) + 151936 * hidden)
        for layers, hidden, q, kv, inner in ((28, 1536, 1536, 256, 8960), (24, 896, 896, 128, 4864))
    )
    texts = {
        name: json.loads((measure.RESULTS / f"pair_texts_{name}.json").read_text("utf-8"))
        for name in ("ours_1_gpu", "ours_1_gpu_h100", "vllm_1_gpu")
    }
    ours, *others = texts.values()
    equal = [sum(a == b for a, b in zip(ours, other, strict=True)) for other in others]
    page = " ".join(bench_pair.PAGE.read_text("utf-8").split())
    for words in (
        f"comes {gain(now, 'eagle3', 0):.2f} times as fast as by plain decoding at temperature 0",
        f"and {gain(now, 'eagle3', 0.8):.2f} times at 0.8",
        f"but gains little: {pair(gain(now, 'draft', t) for t in both)} times",
        f"gives {emitted(now, 'eagle3', 0):.2f} tokens and takes {steps['eagle3']:.2f} plain steps",
        f"so each draft takes {a_draft['eagle3']:.2f} of one",
        f"gives {emitted(now, 'draft', 0):.2f} tokens and takes {steps['draft']:.1f} plain steps",
        f"plain steps: {a_draft['draft']:.2f} for each draft",
        f"{draft / 1e9:.1f} GB beside the target's {target / 1e9:.1f} GB",
        f"that draft would take {draft / target:.2f}.",
        f"code and JSON gain most, {span(heads)} times",
        f"Translations lose, {pair(by_kind['eagle3']['translation'])} times",
        f"gains on code and JSON alone, {span(drafted)} times",
        "has {:.0%}, {:.0%}, {:.0%} and {:.0%} of its drafts accepted".format(*accepted),
        f"eight requests gain {pair(gain(now, 'eagle3', t, batch=8) for t in both)} times",
        f"and 32 requests {pair(gain(now, 'eagle3', t, batch=32) for t in both)} times",
        f"{gain(before, 'draft', 0, batch=8):.2f} times as fast with four drafts",
        f"and {span([gain(before, 'draft', t, batch=8, k=8) for t in both])} with eight",
        f"vLLM 0.24 makes {rate('vllm', 'plain')} tokens a second plainly",
        f"where ours makes {rate('ours', 'plain')}, and {rate('vllm', 'plain', 32)} with 32",
        f"where ours makes {rate('ours', 'plain', 32)}.",
        f"its steps take {ms:.0f} ms, and it makes {rate('vllm', 'draft')} tokens a second",
        f"where ours makes {rate('ours', 'draft')};",
        f"and {elsewhere} tokens a pass are accepted there, {here} here",
        f"makes {rate('transformers', 'plain')} tokens a second, and "
        f"{rate('transformers', 'draft')} with the draft model",
        f"takes {span([emitted(before, *case) / gain(before, *case) for case in cases])} plain",
        f"Over all kinds they gain {span([gain(before, *case) for case in cases])} times",
        f"with {span([emitted(before, *case) for case in cases])} tokens per pass",
        f"up to {max(gain(before, *case, 'summary') for case in cases):.2f} times, on summaries",
        f"drafts of the draft model give {emitted(before, 'draft', 0, batch=8, k=2):.2f} tokens",
        f"{same['eagle3']:.0%} are those of plain decoding, word for word, with either drafter",
        f"and {several.pop():.0%} with several requests",
        f"plain texts {equal[0]} of 40 are the same on an H100 and an H200, and {equal[1]} of 40",
        f"plain decoding made {min(speeds[0]):.0f} to {max(speeds[0]):.0f} tokens/s on the H200",
        f"and {min(speeds[1]):.0f} to {max(speeds[1]):.0f} on the H100",
    ):
        assert words in page, words
    assert same["draft"] == same["eagle3"] and not several
    others = "chat", "summary", "translation"
    assert max(x for kind in others for x in by_kind["draft"][kind]) < min(1.02, *drafted)
    assert max(x for kind in others for x in by_kind["eagle3"][kind]) < min(heads)
    assert all(emitted(before, "suffix+draft", t) < emitted(before, "draft", t) for t in both)
    assert accepted[0] > head["results"]["own text at temperature 0.8"]["acceptance"][0]


SCRIPTS = sorted(path.stem for path in Path(measure.__file__).parent.glob("bench_*_gpu.py"))


@pytest.mark.parametrize("script", [name for name in SCRIPTS if name != "bench_exact_gpu"])
def test_without_a_gpu_a_benchmark_of_one_says_so_and_does_not_fail(script, capsys):
    assert importlib.import_module(script).main([]) == 0
    assert "nothing to measure, JAX runs on cpu" in capsys.readouterr().out
