"""Programs compiled for TPUs and GPUs that are not there: what they take. And how it is counted."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import ahead_of_time_grid as grid
import bundles
import hlo_text
import jax.numpy as jnp
import numpy as np
import pytest
from ahead_of_time import ADAPTERS, Case, compile_all_apart, compile_apart

MOST = 1.5
"""Temporaries, in units of the target logits."""

CASES = {
    Case("v5e", kind="normalized"): 0.1,
    Case("v5e", rule="block", kind="probs"): 0.1,
    Case("v5e", rule="synthetic", kind="logits", processed=True): MOST,
    Case("v5e", kind="probs", implementation="xla_lazy"): 0.1,
    Case("v5e", function="sample_draft_tokens", processed=True): 0.1,
    Case("v5e", function="token_logprobs"): 0.1,
    Case("v5e", function="apply_penalties"): 0.1,
    Case("v5e", kind="normalized", parts=4): MOST,
    Case("v5e", rule="block", kind="normalized", ids="candidates"): 0.1,
    Case("v5e", kind="normalized", ids="map"): 0.15,
    Case("h200", kind="normalized", implementation="xla_batched", ids="map"): 0.1,
    Case("v5e", rule="agreement"): 0.1,
}


@pytest.mark.aot
@pytest.mark.parametrize(("case", "most"), CASES.items(), ids=map(str, CASES))
def test_temporaries_are_small_beside_the_logits(case, most):
    report = compile_apart(case)
    print(report)
    assert "error" not in report, report
    assert report["temporaries"] <= most


READS = {
    Case("v5e", rule="greedy"): 1.2,
    Case("v5e"): 3.1,
    Case("v5e", kind="probs"): 4.7,
    Case("v5e", rule="block", kind="probs"): 9.5,
    Case("v5e", kind="probs", filtered=True): 25.0,
    Case("v5e", kind="probs", processed=True): 26.0,
    Case("v5e", rule="greedy", implementation="mosaic_tpu"): 1.1,
    Case("v5e", implementation="mosaic_tpu"): 1.9,
    Case("v5e", kind="probs", implementation="mosaic_tpu"): 2.9,
    Case("v5e", rule="block", kind="probs", implementation="mosaic_tpu"): 5.8,
    Case("v5e", kind="probs", filtered=True, implementation="mosaic_tpu"): 23.5,
}
"""The most cycles, in units of those in which the target rows are read once."""

LISTED_READS = {
    Case("v5e", kind="probs", filtered=True): 7.5,
    Case("v5e", kind="probs", processed=True): 9.2,
    Case("v5e", kind="probs", filtered=True, implementation="mosaic_tpu"): 5.0,
}
"""The same where the largest entries of rows decide all thresholds."""


@pytest.mark.aot
def test_cycles_are_few_beside_one_read_of_the_rows():
    for (case, most), report in zip(READS.items(), compile_all_apart([*READS]), strict=True):
        print(case, report)
        assert 1.0 <= report["reads"] <= most, case
        assert report["reads_listed"] <= LISTED_READS.get(case, most), case


@pytest.mark.aot
@pytest.mark.parametrize("function", ADAPTERS)
def test_requests_and_vocabulary_over_explicit_axes_gather_no_logits(function):
    report = compile_apart(Case("v5e", function, parts=2, processed=True))
    print(report)
    assert "error" not in report, report
    assert report["temporaries"] <= MOST and 0 < report["largest_exchange"] < 0.02


@pytest.mark.aot
def test_a_program_that_does_not_fit_is_reported():
    """Float32 rows of 40,000 requests take 100 GB, a chip has 16."""
    report = compile_apart(Case("v5e", function="apply_penalties", batch=40_000))
    assert "RESOURCE_EXHAUSTED" in report["error"], report


KERNEL = Case("b200", kind="normalized", batch=256, implementation="mosaic_gpu")
MAIN_CASES = {
    KERNEL: 80,
    dataclasses.replace(KERNEL, rule="greedy", kind="none"): 56,
    dataclasses.replace(KERNEL, rule="synthetic"): 84,
    dataclasses.replace(KERNEL, rule="block"): 85,
    dataclasses.replace(KERNEL, kind="probs"): 72,
    dataclasses.replace(KERNEL, ids="map"): 71,
    dataclasses.replace(KERNEL, ids="candidates"): 71,
}
KERNELS = {
    "h200": ("sm_90a", MAIN_CASES),
    "b200": ("sm_100a", MAIN_CASES),
    "b300": ("sm_103a", {KERNEL: 79}),
    "rtx6000": ("sm_120a", {KERNEL: 83}),
}
"""Of each GPU what it is compiled for, and the most registers of a thread."""


@pytest.mark.aot
@pytest.mark.parametrize("device", KERNELS)
def test_the_kernel_fits_its_registers(device):
    """Fewer blocks run at once if it needs more; and what spills goes to memory and back."""
    architecture, most = KERNELS[device]
    cases = [dataclasses.replace(case, device=device) for case in most]
    for case, registers, report in zip(cases, most.values(), compile_all_apart(cases), strict=True):
        print(case, report)
        assert (report["architecture"], report["spills"]) == (architecture, 0), case
        assert report["registers"] <= registers, case


# What is counted in a program's text.

LOOP = """HloModule jit_f

%cut (p.0: f32[100,50], p.1: s32[]) -> f32[2,50] {
  %p.0 = f32[100,50]{1,0} parameter(0)
  %p.1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %slice.1 = f32[2,50]{1,0} dynamic-slice(%p.0, %p.1, %zero), dynamic_slice_sizes={2,50}
}

%body (state: (s32[], f32[100,50])) -> (s32[], f32[100,50]) {
  %state = (s32[], f32[100,50]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %x = f32[100,50]{1,0} get-tuple-element(%state), index=1
  %taken = f32[2,50]{1,0:S(1)} fusion(%x, %i), calls=%cut, backend_config={"estimated_cycles":"30"}
  %doubled = f32[2,50]{1,0:S(1)} add(%taken, %taken), backend_config={"estimated_cycles":"5"}
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  ROOT %out = (s32[], f32[100,50]{1,0}) tuple(%next, %x)
}

%condition (state.1: (s32[], f32[100,50])) -> pred[] {
  %state.1 = (s32[], f32[100,50]{1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%state.1), index=0
  %limit = s32[] constant(7)
  ROOT %less = pred[] compare(%i.1, %limit), direction=LT
}

ENTRY %main (x.1: f32[100,50]) -> (s32[], f32[100,50]) {
  %x.1 = f32[100,50]{1,0} parameter(0)
  %start = s32[] constant(0)
  %initial = (s32[], f32[100,50]{1,0}) tuple(%start, %x.1)
  ROOT %loop = (s32[], f32[100,50]{1,0}) while(%initial), condition=%condition, body=%body
}
"""


def test_a_loop_counts_by_its_trips():
    program = hlo_text.Program.of(LOOP, trips=1000)
    row, index = 2 * 50 * 4, 4  # bytes
    moved = (index + row + row) + 3 * row + 3 * index  # the slice, the sum, the counter
    program = dataclasses.replace(program, cycles=lambda it, _: 5 if it.name == "doubled" else 0)
    counted = program.count()
    assert [trips for _, trips in program.loops()] == [7]
    assert counted.bytes == 7 * moved
    assert counted.hbm_bytes == 7 * (index + row + 3 * index)  # the slice is kept in VMEM
    assert counted.cycles == 7 * 5
    assert program.ops()["fusion"] == 1


BUNDLES = """
     0   :  { %s9_s1 = smov 0  ;;  %s8_s2 = smov 5 }
   0x1 LB: > { %s4_s1 = sadd.s32 2, %s9_s1  ;;  %s9_s1 = sphi %s9_s1, %s4_s1 } /* Start region 3 */
   0x2   : > { %p5_p0 = scmp.ge.s32.totalorder %s4_s1, 7 /* loop exit test */ }
   0x3   : > { %p6_p1 = scmp.lt.s32.totalorder %s4_s1, %s8_s2 }
   0x4   : > { %20 = sbr.rel (%p6_p1) target = $region4 }
   0x5   :  {}
   0x6   :  {}
   0x7   :  {}
   0x8   :  {}
   0x9   : > { %v1_v0 = vmov 0.0 }
   0xa PF: > { %21 = sbr.rel (!%p5_p0) target = $region3 } /* Start/End empty region 4 */
   0xb   :  {}
   0xc   :  {}
   0xd   :  {}
   0xe   :  {}
"""


def test_bundles_are_followed_through_loops_and_branches():
    """The counter is 2, 4, 6, 8: four turns, of which the last two issue the vector's bundle."""
    assert bundles.follow(BUNDLES) == 1 + 4 * 13 + 2


def test_a_program_loaded_too_early_is_not_nothing(tmp_path):
    with pytest.raises(RuntimeError, match="before `dumped`"):
        bundles.Code.taken(tmp_path, "v5e", LOOP)


def test_a_loop_on_data_turns_as_often_as_said():
    text = LOOP.replace("%limit = s32[] constant(7)", "%limit = s32[] add(%i.1, %i.1)")
    assert [n for _, n in hlo_text.Program.of(text, trips=5).loops()] == [5]
    text = text.replace("body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"3"}}')
    assert [n for _, n in hlo_text.Program.of(text, trips=5).loops()] == [3]


def test_a_loop_of_a_skipped_scope_does_not_count():
    text = LOOP.replace("body=%body", 'body=%body, metadata={op_name="jit(f)/rare/while"}')
    program = hlo_text.Program.of(text, trips=5)
    assert dataclasses.replace(program, skipped="rare").count().bytes == 0 < program.count().bytes
    assert dataclasses.replace(program, skipped="while").count() == program.count()


def test_of_two_branches_the_dearer_counts():
    text = LOOP[: LOOP.index("ENTRY")].replace("constant(7)", "constant(2)")
    text += """%idle (y: f32[100,50]) -> f32[100,50] {
  ROOT %y = f32[100,50]{1,0} parameter(0)
}

%busy (z: f32[100,50]) -> f32[100,50] {
  %z = f32[100,50]{1,0} parameter(0)
  ROOT %copied = f32[100,50]{1,0} copy(%z)
}

ENTRY %main (x: f32[100,50], which: s32[]) -> f32[100,50] {
  %x = f32[100,50]{1,0} parameter(0)
  %which = s32[] parameter(1)
  ROOT %chosen = f32[100,50]{1,0} conditional(%which, %x, %x), branch_computations={%idle, %busy}
}
"""
    assert hlo_text.Program.of(text, trips=1).count().bytes == 2 * 100 * 50 * 4


def test_what_runs_beside_the_program_counts_once():
    text = """%beside (a: f32[100,50], b: s32[8]) -> f32[8,50] {
  %a = f32[100,50]{1,0} parameter(0)
  %b = s32[8]{0} parameter(1)
  ROOT %gathered = f32[8,50]{1,0} gather(%a, %b), x={"estimated_cycles":"9223372036854775807"}
}

ENTRY %main (x: f32[100,50], i: s32[8]) -> f32[8,50] {
  %x = f32[100,50]{1,0} parameter(0)
  %i = s32[8]{0} parameter(1)
  %begun = ((), (), (s32[1])) call-start(), to_apply=%beside
  %given = ((f32[100,50]{1,0}, s32[8]), f32[8,50]{1,0}) call-update(%begun, %x, %i)
  ROOT %out = f32[8,50]{1,0} call-done(%given)
}
"""
    assert hlo_text.Program.of(text, trips=1).count() == (2 * 8 * 50 * 4, 2 * 8 * 50 * 4, 0)


# The grid, and the page with its tables.

PAGE = Path(__file__).parents[1] / "docs" / "tpu.md"


@pytest.fixture
def run_grid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the grid in a folder of its own; each program takes what is said."""
    page = tmp_path / "tpu.md"
    page.write_text(f"Before.\n{grid.BEGIN}old{grid.END}After.\n")
    monkeypatch.setattr(grid, "RESULTS", tmp_path / "results.json")
    monkeypatch.setattr(grid, "DOCUMENT", page)
    monkeypatch.setattr(grid, "version", lambda package: "0.0")

    def run(*arguments: str, **takes: Any) -> tuple[int, str]:
        report = {"temporaries": 0.1, "hbm_bytes": 1.0, "reads": 2.0, "ops": {"fusion": 9}}
        monkeypatch.setattr(grid, "compile_apart", lambda case: report | takes)
        return grid.main([*arguments]), page.read_text()

    return run


def test_cases_compiled_again_leave_the_others_in_the_tables(run_grid, tmp_path):
    code, _ = run_grid("--only", "v5e,rule=greedy")
    assert code == 0
    code, text = run_grid("--only", "v5e,rule=greedy,batch=8,implementation=xla_lazy", reads=7.0)
    assert code == 0
    assert text.startswith("Before.\n") and text.endswith("After.\n") and "old" not in text
    line = "| greedy | none | {} | 0.10 | 0.10 | 1.00 | 1.00 | {} | 2.00 |"
    assert line.format('`"xla_batched"`', "2.00") in text
    assert line.format('`"xla_lazy"`', "7.00") in text
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert len(rows) == 5  # two forms of two batches, and the split vocabulary
    assert run_grid("--tables") == (0, text)


@pytest.mark.parametrize(
    ("takes", "said"),
    [
        ({"temporaries": 1.6}, "temporaries 1.6, at most 1.5"),
        ({"hbm_bytes": 21.0}, "hbm_bytes 21.0, at most 20.0"),
        ({"error": "RESOURCE_EXHAUSTED: Ran out of memory"}, "Ran out of memory"),
    ],
)
def test_a_program_beyond_its_bounds_fails_the_grid(run_grid, capsys, takes, said):
    code, text = run_grid("--only", "v6e,rule=block,batch=8,implementation=xla_lazy", **takes)
    assert code == 1
    assert said in capsys.readouterr().out
    assert ("does not fit" in text) == ("error" in takes)


def test_the_pages_tables_are_those_of_the_results():
    rows = json.loads(grid.RESULTS.read_text())["rows"]
    assert len(rows) == len(list(grid.cases()))
    text = PAGE.read_text()
    assert f"{grid.BEGIN}\n{grid.tables(rows)}\n{grid.END}" in text
    assert "compiled, never run" in text.lower()


@pytest.mark.newest
def test_the_pages_program_verifies_every_request():
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    scope: dict[str, Any] = {}
    exec(compile(code, str(PAGE), "exec"), scope)
    output = scope["output"]
    assert output.status.tolist() == [0] * 4
    best = jnp.argmax(scope["logits"].reshape(4, 3, -1)[:, 0], axis=1)
    kept = np.asarray(output.num_accepted) > 0
    np.testing.assert_array_equal(output.token_ids[kept, 0], best[kept])


# The kernel for TPUs.

KERNEL_ALONE = """
import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from jax_specdec._src.verify.mosaic_tpu.statistics import row_statistics

for name in {topologies}:
    device = topologies.get_topology_desc(platform="tpu", topology_name=name).devices[0]
    for dtype in "bfloat16", "float16", "float32":
        for rows, vocab in (320, 128256), (21, 131071), (5, 100):
            shapes = (rows, vocab), (), (rows,), (rows,)
            dtypes = dtype, "int32", "float32", "bool"
            where = SingleDeviceSharding(device)
            given = [jax.ShapeDtypeStruct(s, d, sharding=where) for s, d in zip(shapes, dtypes)]
            traced = jax.jit(row_statistics).trace(*given, ranked=given[3])
            lowered = traced.lower(lowering_platforms=("tpu",))
            temporaries = lowered.compile().memory_analysis().temp_size_in_bytes
            print(name, dtype, rows, vocab, temporaries)
"""
TOPOLOGIES = "v2:2x2", "v3:2x2", "v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"


@pytest.mark.aot
def test_the_kernel_compiles_for_every_tpu_within_its_memory():
    """Of vector memory: more than it asks for would not compile. Only float16 rows are copied."""
    given = {"JAX_PLATFORMS": "cpu", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    given |= {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost"}
    command = [sys.executable, "-c", KERNEL_ALONE.format(topologies=TOPOLOGIES)]
    environment = os.environ | given | {"TPU_LOG_DIR": "disabled"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) == 9 * len(TOPOLOGIES)
    for _, dtype, rows, vocab, temporaries in lines:
        copied = 2 * int(rows) * (int(vocab) + 128) if dtype == "float16" else 0
        assert int(temporaries) <= copied + 2**20, (dtype, rows, vocab)


@pytest.mark.aot
@pytest.mark.parametrize("device", ["v5e", "v6e"])
def test_verification_by_the_kernel_takes_little_memory(device):
    cases = [
        Case(device, kind=kind, implementation="mosaic_tpu") for kind in ("none", "normalized")
    ]
    for report in compile_all_apart(cases):
        print(report)
        assert "error" not in report, report
        assert report["temporaries"] <= 0.1
