"""Programs compiled for TPUs that are not there: what they take. And how that is counted."""

from __future__ import annotations

import hlo_text
import pytest
from ahead_of_time import Case, compile_apart

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
}


@pytest.mark.aot
@pytest.mark.parametrize(("case", "most"), CASES.items(), ids=map(str, CASES))
def test_temporaries_are_small_beside_the_logits(case, most):
    report = compile_apart(case)
    print(report)
    assert "error" not in report, report
    assert report["temporaries"] <= most


@pytest.mark.aot
def test_a_program_that_does_not_fit_is_reported():
    """Float32 rows of 40,000 requests take 100 GB, a chip has 16."""
    report = compile_apart(Case("v5e", function="apply_penalties", batch=40_000))
    assert "RESOURCE_EXHAUSTED" in report["error"], report


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


def test_a_loop_counts_by_its_trips_and_a_slice_by_what_it_takes():
    program = hlo_text.Program.of(LOOP, trips=1000)
    row, index = 2 * 50 * 4, 4  # bytes
    moved = (index + row + row) + 3 * row + 3 * index  # the slice, the sum, the counter
    counted = program.count()
    assert [trips for _, trips in program.loops()] == [7]
    assert counted.bytes == 7 * moved
    assert counted.hbm_bytes == 7 * (index + row + 3 * index)  # the slice is kept in VMEM
    assert counted.cycles == 7 * 35
    assert program.ops()["fusion"] == 1


def test_a_loop_that_depends_on_the_data_turns_as_often_as_is_said():
    text = LOOP.replace("%limit = s32[] constant(7)", "%limit = s32[] add(%i.1, %i.1)")
    assert [n for _, n in hlo_text.Program.of(text, trips=5).loops()] == [5]
    text = text.replace("body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"3"}}')
    assert [n for _, n in hlo_text.Program.of(text, trips=5).loops()] == [3]


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
