"""Programs compiled for TPUs and GPUs that are not there: what they take. And how it is counted."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import ahead_of_time
import ahead_of_time_grid as grid
import bundles
import hlo_text
import jax.numpy as jnp
import numpy as np
import pytest
from ahead_of_time import ADAPTERS, Case, compile_all_apart, environment_of

MOST = 1.5
"""Temporaries, in units of the target logits."""

BOUNDS = {
    Case("v5e", kind="normalized"): dict(temporaries=0.1),
    Case("v5e", rule="block", kind="probs"): dict(temporaries=0.05, reads=7.8),
    Case("v5e", rule="synthetic", kind="logits", processed=True): dict(temporaries=MOST),
    Case("v5e", function="sample_draft_tokens", processed=True): dict(temporaries=0.1),
    Case("v5e", function="token_logprobs"): dict(temporaries=0.1),
    Case("v5e", function="process_logits"): dict(temporaries=0.1),
    Case("v5e", kind="normalized", parts=4): dict(temporaries=MOST),
    Case("v5e", rule="block", kind="normalized", ids="candidates"): dict(temporaries=0.1),
    Case("v5e", kind="normalized", ids="map"): dict(temporaries=0.15),
    Case("v5e", rule="agreement"): dict(temporaries=0.1),
    Case("v5e", rule="greedy"): dict(reads=1.1),
    Case("v5e"): dict(reads=2.5),
    Case("v5e", kind="probs"): dict(temporaries=0.05, reads=6.0),
    Case("v5e", kind="logits"): dict(temporaries=0.05, reads=7.3),
    Case("v5e", kind="probs", filtered=True): dict(reads=26.3, reads_listed=8.7),
    Case("v5e", kind="probs", processed=True): dict(reads=27.9, reads_listed=10.3),
    Case("h200", kind="normalized", implementation="xla", ids="map"): dict(temporaries=0.1),
}
"""Of a program the most temporaries, and the most cycles, in units of one read of its logits.

`reads_listed` are those where the largest entries of rows decide all thresholds.
"""

SPLIT = [Case("v5e", function, parts=2, processed=True) for function in ADAPTERS]
LATER = {
    SPLIT[1],
    Case("v5e", rule="block", kind="normalized", ids="candidates"),
    Case("v5e", rule="agreement"),
    Case("v5e"),
    Case("v5e", kind="normalized"),
    Case("v5e", kind="normalized", parts=4),
    Case("v5e", rule="synthetic", kind="logits", processed=True),
    Case("v5e", rule="greedy"),
    Case("v5e", kind="probs"),
    Case("v5e", kind="logits"),
    Case("v5e", kind="probs", filtered=True),
}
"""Those whose reads and forms others have: `make test-aot-all` compiles them."""

TOO_LARGE = Case("v5e", function="process_logits", batch=40_000)


def asks_cycles(case: Case) -> bool:
    """Only then libtpu writes its bundles, which can take it three times as long as to compile."""
    return "reads" in BOUNDS.get(case, {})


def groups() -> list[list[Case]]:
    """Cases of one device that a process compiles: few, because no test may take five minutes."""

    def kind(case: Case) -> tuple[str, bool, bool]:
        return case.device, asks_cycles(case), case in LATER

    cases = sorted([*SPLIT, TOO_LARGE, *BOUNDS], key=kind)
    each = [list(of) for _, of in itertools.groupby(cases, kind)]
    return [alike[i : i + 5] for alike in each for i in range(0, len(alike), 5)]


GROUP = {case: i for i, cases in enumerate(groups()) for case in cases}


@functools.cache
def reports(group: int) -> dict[Case, dict[str, Any]]:
    cases = groups()[group]
    return dict(zip(cases, compile_all_apart(cases, asks_cycles(cases[0])), strict=True))


def in_its_group(case: Case) -> Any:
    marks = [pytest.mark.xdist_group(f"programs {GROUP[case]}")]
    return pytest.param(case, marks=marks + [pytest.mark.slow] * (case in LATER), id=str(case))


def report_of(case: Case) -> dict[str, Any]:
    report = reports(GROUP[case])[case]
    print(report)
    return report


@pytest.mark.aot
@pytest.mark.parametrize("case", [*map(in_its_group, SPLIT)])
def test_requests_and_vocabulary_over_explicit_axes_gather_no_logits(case):
    report = report_of(case)
    assert "error" not in report, report
    assert report["temporaries"] <= MOST and 0 < report["largest_exchange"] < 0.02


@pytest.mark.aot
@pytest.mark.parametrize("case", [in_its_group(TOO_LARGE)])
def test_a_program_that_does_not_fit_is_reported(case):
    """Float32 rows of 40,000 requests take 100 GB, a chip has 16."""
    report = report_of(case)
    assert "RESOURCE_EXHAUSTED" in report["error"], report


@pytest.mark.aot
@pytest.mark.parametrize("case", [*map(in_its_group, BOUNDS)])
def test_temporaries_and_cycles_are_few_beside_one_read_of_the_logits(case):
    report, most = report_of(case), BOUNDS[case]
    assert "error" not in report, report
    for name, bound in most.items():
        assert report[name] <= bound, name
    assert "reads" not in most or report["reads"] >= 1.0


KERNEL = Case("b200", kind="normalized", batch=256, implementation="mosaic_gpu")
BY_BLOCK = dataclasses.replace(KERNEL, rule="block")
MAPPED = dataclasses.replace(KERNEL, ids="map")
DRAFTING = dataclasses.replace(KERNEL, function="sample_draft_tokens", kind="none")
MAIN_CASES = {
    KERNEL: 80,
    dataclasses.replace(KERNEL, rule="greedy", kind="none"): 56,
    dataclasses.replace(KERNEL, rule="synthetic"): 84,
    BY_BLOCK: 85,
    dataclasses.replace(KERNEL, kind="probs"): 72,
    MAPPED: 71,
    dataclasses.replace(KERNEL, ids="candidates"): 71,
    DRAFTING: 40,
    dataclasses.replace(DRAFTING, filtered=True): 64,
}
ATTENTION = Case("h200", "decode_attention", batch=32, implementation="mosaic_gpu")
SMALL = dataclasses.replace(ATTENTION, function="decode_attention, small", batch=1)
PAGES = dataclasses.replace(ATTENTION, function="decode_attention, pages")
LARGE = dataclasses.replace(ATTENTION, function="decode_attention, 256", batch=1)
ATTENTIONS = {
    ATTENTION: 158,
    dataclasses.replace(ATTENTION, batch=1): 158,  # joined by a second launch
    SMALL: 158,  # by the kernel
    dataclasses.replace(ATTENTION, processed=True): 246,  # of caches that may hold NaN
    PAGES: 192,
    dataclasses.replace(PAGES, batch=1, processed=True): 246,
    LARGE: 224,
    dataclasses.replace(LARGE, processed=True): 255,
}
PRODUCT = Case("h200", "int8_matmul", batch=40, implementation="mosaic_gpu")
PRODUCTS = {
    PRODUCT: 85,  # two blocks fit on a multiprocessor
    dataclasses.replace(PRODUCT, batch=160): 144,
    dataclasses.replace(PRODUCT, batch=512): 168,
}
ROTATION = Case("h200", "rotate_and_write", batch=32, implementation="mosaic_gpu")
ALL = MAIN_CASES | ATTENTIONS | PRODUCTS | {ROTATION: 32}
FURTHER = [
    dataclasses.replace(KERNEL, kind="probs"),
    dataclasses.replace(KERNEL, ids="candidates"),
    dataclasses.replace(KERNEL, rule="synthetic"),
    DRAFTING,
    dataclasses.replace(ATTENTION, batch=1),
    LARGE,
    dataclasses.replace(PRODUCT, batch=160),
]
"""Forms that need no more registers than another of their kind: `make test-aot-all` has them."""
KERNELS = {
    "h200": ("sm_90a", {case: n for case, n in MAIN_CASES.items() if case not in FURTHER}),
    "h200, attention and products": (
        "sm_90a",
        {case: n for case, n in ALL.items() if case not in (*MAIN_CASES, *FURTHER)},
    ),
    "h200, further": ("sm_90a", {case: ALL[case] for case in FURTHER}),
    "b200": ("sm_100a", {case: ALL[case] for case in (KERNEL, BY_BLOCK)}),
    "b200, further": ("sm_100a", {case: ALL[case] for case in (MAPPED, DRAFTING)}),
    "b300": ("sm_103a", {KERNEL: 79}),
    "rtx6000": ("sm_120a", {KERNEL: 83}),
}
"""Of each GPU what it is compiled for, and the most registers of a thread."""


@pytest.mark.aot
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=[pytest.mark.xdist_group(f"kernel for {name}")]
            + [pytest.mark.slow] * name.endswith("further"),
        )
        for name in KERNELS
    ],
)
def test_the_kernel_fits_its_registers(name):
    """Fewer blocks run at once if it needs more; and what spills goes to memory and back."""
    (architecture, most), device = KERNELS[name], name.partition(",")[0]
    cases = [dataclasses.replace(case, device=device) for case in most]
    for case, registers, report in zip(cases, most.values(), compile_all_apart(cases), strict=True):
        print(case, report)
        assert (report["architecture"], report["spills"]) == (architecture, 0), case
        assert report["registers"] <= registers, case


COMMIT = """
import jax
import jax.numpy as jnp
from ahead_of_time import devices_of
from jax.sharding import SingleDeviceSharding
from jax_specdec import lm

where = SingleDeviceSharding(devices_of("h200")[0])
layer = lm.models.LayerSpec(
    num_attention_heads=8, num_key_value_heads=8, head_dim=128, intermediate_size=8)
config = lm.models.DecoderConfig(vocab_size=8, hidden_size=8, layers=(layer,) * 2)
model = lm.models.Llama(config, jnp.bfloat16)
shapes = jax.eval_shape(lambda: (
    model.init_cache(4, 4096), jnp.zeros((4,), jnp.int32), jnp.zeros((4, 8), jnp.int32)))
given = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), shapes)
traced = jax.jit(model.commit, donate_argnums=0).trace(*given)
compiled = traced.lower(lowering_platforms=("cuda",)).compile()
print(compiled.memory_analysis().temp_size_in_bytes)
"""


@pytest.mark.aot
def test_a_path_of_a_tree_is_kept_in_place():
    """On GPUs; the keys of a layer take 34 MB, and all that is moved 0.5 MB."""
    environment = environment_of("h200")
    paths = str(Path(ahead_of_time.__file__).parent), environment.get("PYTHONPATH", "")
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    command = [sys.executable, "-c", COMMIT]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    print(done.stdout)
    assert int(done.stdout) < 2**22


LAUNCHES = """
import re
from unittest import mock
import jax
import jax.numpy as jnp
import llamas
from ahead_of_time import devices_of
from jax.sharding import SingleDeviceSharding
from jax_specdec import lm
from jax_specdec._src.mosaic import gpus

where = SingleDeviceSharding(devices_of("h200")[0])
free = "parameter|get-tuple-element|tuple|constant|bitcast"

def launches(config, batch, rows, layers):
    model = lm.models.Llama(llamas.cut(config, layers), jnp.dtype("bfloat16"))
    shapes = jax.eval_shape(lambda: (
        model.init_params(jax.random.key(0)),
        lm.models.Rows(jnp.zeros((batch, rows), jnp.int32), jnp.zeros((batch,), jnp.int32)),
        model.init_cache(batch, 1024)))
    given = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), shapes)

    def run(params, rows, cache):
        (output,), cache = model.apply(params, [rows], cache)
        return output.logits, cache

    with mock.patch.object(gpus, "no_device", lambda: None):
        traced = jax.jit(run, donate_argnums=2).trace(*given)
        text = traced.lower(lowering_platforms=("cuda",)).compile().as_text()
    entry = text[text.index("\\nENTRY"):]
    found = re.findall(r"^  (?:ROOT )?%\\S+ = .*? ([a-z-]+)\\(", entry, re.MULTILINE)
    return len([name for name in found if name not in free.split("|")])

for config, batch, rows in ((llamas.QWEN2_05B, 1, 1), (llamas.LLAMA_3_8B, 32, 5)):
    print(launches(config, batch, rows, 3) - launches(config, batch, rows, 2))
"""


@pytest.mark.aot
def test_a_layer_is_few_launches_on_a_hopper_gpu():
    """Two norms, four products, rotation, attention, the gate, and sums of a product's parts.

    Of many rows XLA takes the product for heads in parts, too, as long as nothing is timed.
    """
    environment = environment_of("h200")
    paths = str(Path(ahead_of_time.__file__).parent), environment.get("PYTHONPATH", "")
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    command = [sys.executable, "-c", LAUNCHES]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    assert list(map(int, done.stdout.split())) == [10, 11]


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
   0x6   :  { %23 = dma.vmem_to_hbm (!%p6_p1), /*vmem=*/[#a], /*size_in_granules=*/%s8_s2, %s1 }
   0x7   :  {}
   0x8   :  {}
   0x9   : > { %22 = dma.hbm_to_vmem [thread:$0]  /*hbm=*/%s1_s5, /*size_in_granules=*/64, %s1 }
   0xa PF: > { %21 = sbr.rel (!%p5_p0) target = $region3 } /* Start/End empty region 4 */
   0xb   :  {}
   0xc   :  {}
   0xd   :  {}
   0xe   :  {}
"""


def test_bundles_are_followed_through_loops_and_branches():
    """The counter is 2, 4, 6, 8: four turns, of which the last two pass the first branch.

    These issue a bundle more, with a copy, and write as many granules as a register says.
    """
    assert bundles.follow(BUNDLES) == (1 + 4 * 13 + 2, 32 * (2 * 64 + 2 * 5))


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


# The grid, and the page that has its tables.

PAGE = Path(__file__).parents[1] / "docs" / "tpu.md"


@pytest.fixture
def run_grid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the grid in a folder of its own; each program takes what is said."""
    page = tmp_path / "tables.md"
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
    code, text = run_grid("--only", "v5e,rule=greedy,batch=8,implementation=xla", reads=7.0)
    assert code == 0
    assert text.startswith("Before.\n") and text.endswith("After.\n") and "old" not in text
    assert "| greedy | none | 0.10 | 0.10 | 1.00 | 1.00 | 7.00 | 2.00 |" in text
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert len(rows) == 3  # two batches, and the split vocabulary
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
    code, text = run_grid("--only", "v6e,rule=block,batch=8,implementation=xla", **takes)
    assert code == 1
    assert said in capsys.readouterr().out
    assert ("does not fit" in text) == ("error" in takes)


def test_the_tables_are_those_of_the_results():
    rows = json.loads(grid.RESULTS.read_text())["rows"]
    assert len(rows) == len(list(grid.cases()))
    text = PAGE.read_text()
    assert grid.DOCUMENT == PAGE
    assert f"{grid.BEGIN}\n{grid.tables(rows)}\n{grid.END}" in text
    assert "compiled, never run" in text


@pytest.mark.long
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
