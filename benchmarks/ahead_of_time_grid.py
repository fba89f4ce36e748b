"""Compiles every case for TPUs and GPUs that are not there; writes the tables of docs/tpu.md.

    make test-aot-all                                             # everything: half an hour
    python benchmarks/ahead_of_time_grid.py --only device=v6e     # cases whose name has this in it
    python benchmarks/ahead_of_time_grid.py --tables              # of the results that are there

Results are saved after each case, to results/ahead_of_time.json. Fails where a TPU program takes
more than `BOUNDS`, or does not compile.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ahead_of_time import ADAPTERS, LISTED, TPUS, Case, compile_apart
from measure import environment, merge

RESULTS = Path(__file__).parent / "results" / "ahead_of_time.json"
DOCUMENT = Path(__file__).parents[1] / "docs" / "tpu.md"
BEGIN, END = "<!-- tables: benchmarks/ahead_of_time_grid.py -->\n", "<!-- end of tables -->\n"

BOUNDS = {"temporaries": 1.5, "hbm_bytes": 20.0}
"""The most, in units of the target logits."""

BATCHES = (8, 64)
RULES = [("greedy", "none")]
RULES += itertools.product(
    ("standard", "block", "synthetic"), ("none", "normalized", "logits", "probs")
)
KINDS = {
    "none": "none",
    "normalized": "logits, normalizers stored",
    "logits": "logits",
    "probs": "probabilities",
}
FUNCTIONS = ("sample_draft_tokens", "token_logprobs", "process_logits")
SPLIT = [("greedy", "none"), ("standard", "normalized"), ("standard", "probs"), ("block", "probs")]
GPUS = ("a100", "h200", "l4", "t4")
ON_GPUS = [("standard", "normalized"), ("greedy", "none")]
IDENTITY = tuple(field.name for field in dataclasses.fields(Case))


def cases() -> Iterator[Case]:
    for device, batch, (rule, kind) in itertools.product(TPUS, BATCHES, RULES):
        yield Case(device, rule=rule, kind=kind, batch=batch, implementation="xla")
    for device in TPUS:
        yield Case(device, kind="probs", implementation="xla", processed=True)
    for device, function, processed in itertools.product(TPUS, FUNCTIONS, (False, True)):
        if not (processed and function == "process_logits"):
            yield Case(device, function, processed=processed)
    for device, (rule, kind) in itertools.product(TPUS, SPLIT):
        yield Case(device, rule=rule, kind=kind, parts=4)
    for device in TPUS:
        yield Case(device, kind="normalized", parts=4, processed=True)
    for device, ids, rule in itertools.product(TPUS, LISTED, ("standard", "block")):
        yield Case(device, rule=rule, kind="normalized", implementation="xla", ids=ids)
    for device, ids in itertools.product(TPUS, LISTED):
        yield Case(device, kind="normalized", parts=4, ids=ids)
    for device, function, processed in itertools.product(TPUS, ADAPTERS, (False, True)):
        yield Case(device, function, parts=2, processed=processed)
    for device, (rule, kind) in itertools.product(GPUS, ON_GPUS):
        yield Case(device, rule=rule, kind=kind, implementation="xla")


def violations(row: dict[str, Any]) -> list[str]:
    """What a row of results should not be."""
    if row["device"] not in TPUS:
        return []
    if "error" in row:
        return [row["error"]]
    return [
        f"{name} {row[name]}, at most {most}"
        for name, most in BOUNDS.items()
        if row[name] is not None and row[name] > most
    ]


def tables(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    by_case = {Case(**{name: row[name] for name in IDENTITY}): row for row in rows}
    found = {case: by_case[case] for case in cases() if case in by_case}
    lines: list[str] = []
    for device in TPUS:
        lines += [f"### TPU {device}", ""]
        lines += table(
            ["rule", "draft distribution"],
            [f"{what}, B = {b}" for what in ("temporaries", "HBM", "reads") for b in BATCHES],
            _by_rule(found, device),
        )
    lines += ["### Filters and a bitmask, other functions, and a vocabulary on four chips", ""]
    lines += table(
        ["B = 64", "device"],
        ["temporaries", "HBM", "reads"],
        (
            [_name(case), case.device, *(_cell(row, what) for what in MEASURES)]
            for case, row in found.items()
            if case.device in TPUS
            and (
                case.parts > 1
                or case.processed
                or case.ids is not None
                or case.function != "rejection_sample"
            )
        ),
    )
    lines += ["### GPUs: kernels that XLA fuses, all rows at once, B = 64", ""]
    by_gpu = {device: [device.upper()] for device in GPUS}
    for device, (rule, kind) in itertools.product(GPUS, ON_GPUS):
        case = Case(device, rule=rule, kind=kind, implementation="xla")
        row = found.get(case)
        by_gpu[device].append("" if row is None else str(row["ops"]["fusion"]))
    lines += table(["GPU"], ["standard, normalizers stored", "greedy"], by_gpu.values())
    return "\n".join(lines)


MEASURES = ("temporaries", "hbm_bytes", "reads")


def _by_rule(found: dict[Case, dict[str, Any]], device: str) -> Iterator[list[str]]:
    for rule, kind in RULES:
        rows = [
            found.get(Case(device, rule=rule, kind=kind, batch=batch, implementation="xla"))
            for batch in BATCHES
        ]
        cells = [_cell(row, what) for what in MEASURES for row in rows]
        yield [rule, KINDS[kind], *cells]


def _cell(row: dict[str, Any] | None, what: str) -> str:
    if row is None:
        return ""
    if "error" in row:
        return "does not fit" if "RESOURCE_EXHAUSTED" in row["error"] else "fails"
    if row.get(what) is None:  # `reads` of rows from before 2026-11-24, or if they are not known
        return ""
    return f"{row[what]:.2f}"


def _name(case: Case) -> str:
    processed = ", with filters and a bitmask" if case.processed else ""
    if case.function in ADAPTERS:
        return f"`{case.function}`{processed}, on a mesh of 2 x {case.parts} chips"
    if case.function != "rejection_sample":
        return f"`{case.function}`{processed}"
    name = f"{case.rule}, {KINDS[case.kind]}" if case.kind != "none" else case.rule
    if case.ids is not None:
        name += f", {LISTED[case.ids]} ids in {'a map' if case.ids == 'map' else 'each row'}"
    if case.parts > 1:
        return f"{name}{processed}, over {case.parts} chips"
    return f"{name}{processed}"


def table(labels: list[str], numbers: list[str], rows: Iterable[list[str]]) -> list[str]:
    rule = ["---"] * len(labels) + ["---:"] * len(numbers)
    lines = [[*labels, *numbers], rule, *rows]
    return [*(f"| {' | '.join(line)} |" for line in lines), ""]


def write_tables(document: Path, rows: list[dict[str, Any]]) -> None:
    before, _, rest = document.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    document.write_text(f"{before}{BEGIN}\n{tables(rows)}\n{END}{after}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--tables", action="store_true", help="compile nothing")
    options = parser.parse_args(arguments)

    before = json.loads(RESULTS.read_text()) if RESULTS.exists() else None
    wanted = [] if options.tables else [c for c in cases() if options.only in str(c)]
    run = environment() | {"device": "none: compiled, never run"}
    new: list[dict[str, Any]] = []
    document = before
    for case in wanted:
        new.append(dataclasses.asdict(case) | compile_apart(case))
        print(
            f"{case}: {_cell(new[-1], 'temporaries')} {'; '.join(violations(new[-1]))}", flush=True
        )
        document = merge(before, run | {"libtpu": version("libtpu")}, new, IDENTITY)
        RESULTS.write_text(json.dumps(document, indent=1) + "\n")
    rows = document["rows"] if document else []
    write_tables(DOCUMENT, rows)
    bad = [row for row in rows if violations(row)]
    for row in bad:
        print(f"{Case(**{name: row[name] for name in IDENTITY})}: {'; '.join(violations(row))}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
