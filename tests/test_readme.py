"""The README's examples run, print what it shows, and its first figures are those of their file."""

import itertools
import json
import re
from pathlib import Path

import bench_pair
import bench_real_model
import measure
import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text("utf-8")
STEPS = ROOT / "benchmarks" / "results" / "steps_gpu.json"


def block(fence: str) -> str:
    (code,) = re.findall(rf"^```{fence}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    return str(code)


def test_the_readme_is_short() -> None:
    assert 110 <= len(README.splitlines()) <= 140


def test_the_call_prints_what_the_readme_shows(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(block("python verify"), "README.md", "exec"), {})
    assert capsys.readouterr().out == block("text")


@pytest.mark.long
@pytest.mark.newest
@pytest.mark.xdist_group("examples")  # the example of `generate` has the same programs
def test_the_loop_decodes(capsys: pytest.CaptureFixture[str]) -> None:
    code = block("python").replace("max_new_tokens=100", "max_new_tokens=60")
    exec(compile(code, "README.md", "exec"), {})
    text, tokens_per_target_pass = capsys.readouterr().out.rstrip("\n").rsplit("\n", 1)
    assert text.strip() and 1 < float(tokens_per_target_pass) <= 5


def test_what_drafting_gains_is_what_was_measured() -> None:
    measured = json.loads(STEPS.read_text("utf-8"))["rows"]
    rows = [row for row in measured if row["prompt"] == 512]
    assert [(row["batch"], row["k"]) for row in rows] == [(1, 4), (8, 4), (32, 4)]
    ratios = [row["ms"]["EAGLE-3 head, step"] / row["ms"]["plain"] for row in rows]
    prose = " ".join(README.split())
    assert "takes {:.2f}, {:.2f} and {:.2f} plain steps".format(*ratios) in prose
    longer = [row["ms"] for row in measured if row["prompt"] == 4096]
    every = ratios + [ms["EAGLE-3 head, step"] / ms["plain"] for ms in longer]
    row = "| EAGLE-3 head | {:.2f} | {:.2f} | {:.2f} | {:.2f} | {:.2f} | {:.2f} |\n".format(*every)
    assert row in (ROOT / "docs" / "benchmarks_decoding.md").read_text("utf-8")


@pytest.mark.parametrize("file", ["vllm_gpu.json", "vllm_gpu_h100.json"])
def test_how_others_compare_is_what_was_measured(file: str) -> None:
    rows = json.loads((STEPS.parent / file).read_text("utf-8"))["rows"]
    us = {(x["way"], x["temperature"], x["batch"]): x["call_us"] for x in rows if "call_us" in x}
    vllm = {key: us["vllm", *key] for key in itertools.product((0.8, 1.0), (1, 8, 64, 256))}
    page = " ".join((ROOT / "docs" / "benchmarks.md").read_text("utf-8").split())
    for way, digits in (("ours", 0), ("ours, no normalizer", 1)):
        ratios = [time / us[way, *key] for key, time in vllm.items()]
        assert f"{min(ratios):.1f} to {max(ratios):.{digits}f} times" in page
    slower = [key for key, time in vllm.items() if us["xla", *key] > time]
    assert slower == [(0.8, 1), (0.8, 8), (1.0, 1), (1.0, 8), (1.0, 64)]


def cells(line: str) -> tuple[str, ...]:
    """Returns what a line of a table has, without its name and what was not measured."""
    _, *own = line.strip("| ").split(" | ")
    return tuple(cell for cell in own if cell != "not measured")


def test_the_gains_of_the_first_screen_are_those_of_its_files() -> None:
    shown = {"real_model_gpu": bench_real_model.shown, "pair_gpu": bench_pair.first_screen}
    known = {
        cells(line)
        for name, lines in shown.items()
        if (document := measure.load(measure.RESULTS / f"{name}.json"))
        for line in lines(document)
    }
    found = re.findall(r"^ *\| .*, temperature .*$", README, re.MULTILINE)
    assert len(found) == 4 and [line for line in found if cells(line) not in known] == []
