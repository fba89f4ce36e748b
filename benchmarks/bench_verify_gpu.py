"""`rejection_sample` on a GPU: backends and the plain formulation side by side.

For each case: microseconds per call in one compiled chain of many calls (`chain.py`), launch gaps
included; the sum of kernel times of that same program; the bytes that had to be read, and the rate
that makes; the bytes of the draft distributions. Results are saved after every case, and merged
with what is there already, so that a run may be cut short or made in pieces: `--only greedy`,
`--implementations mosaic_gpu`.

The programs of a case are compiled one after another before any of them is measured.

Inputs of a batch of one fit into the cache. They are measured as they are, and "cold": the cache
is swept after each trip over the inputs, and the time of the sweeps alone is subtracted. Launches
hide behind a sweep, so a cold figure is what memory costs, the other what launches cost.
"""

from __future__ import annotations

import math
import time
import traceback
from typing import Any

import chain as chain_lib
import disagreements
import inputs as inputs_lib
import jax
import measure
import plots
import verify_cases
from verify_cases import Case, Variant

IDENTITY = (
    *("kind", "name", "batch", "k", "vocabulary", "dtype"),
    *("implementation", "noise_given", "cold"),
)
"""What a row of the result file is about."""

ROTATED_BYTES = 150e6
INPUTS = {"mosaic_gpu": 12, "xla": 4, "plain": 2}
"""Different inputs at most: each is a call to compile."""
FIRST_SEED = 9
"""Of the inputs. Twelve inputs of one request from here on emit 2.9 tokens, as many requests do."""
CACHE_BYTES = 60e6

CALLS_PER_TRIP = 12


def num_inputs(set_bytes: float, implementation: str, most: int | None = None) -> int:
    """Inputs to rotate over: more bytes than the cache holds, as far as compile time allows."""
    most = most or INPUTS[implementation]
    return min(most, max(2, math.ceil(ROTATED_BYTES / set_bytes)))


def num_trips(case: Case, implementation: str, count: int, fewer: bool) -> int:
    """Enough calls that gaps are steady: milliseconds in all."""
    calls = 1200 if case.batch <= 8 else 480 if case.batch <= 64 else 240
    calls = {"mosaic_gpu": calls, "xla": min(calls, 240), "plain": 24}[implementation]
    return max(2, math.ceil((24 if fewer else calls) / count))


def num_laps(implementation: str, count: int) -> int:
    """Laps per trip: what is done once per trip must not show in the time of a call."""
    return max(1, CALLS_PER_TRIP // count) if implementation == "mosaic_gpu" else 1


class Job:
    """A variant of a case, compiled."""

    def __init__(self, case: Case, variant: Variant, sets: list[Any], options: Any) -> None:
        size = sum(x.nbytes for x in jax.tree.leaves(sets[0][:2]))
        count = num_inputs(size, variant.implementation, options.inputs)
        laps = num_laps(variant.implementation, count)
        trips = num_trips(case, variant.implementation, count * laps, options.tiny)
        self.case, self.variant = case, variant
        distribution = sets[0][1].distribution
        self.draft_bytes = sum(x.nbytes for x in jax.tree.leaves(distribution))
        self.inputs, self.rotated_bytes, self.calls = count, count * size, count * laps * trips
        self.arguments = chain_lib.arguments(case, variant, sets[:count])
        static = {
            "case": case,
            "variant": variant,
            "trips": trips,
            "laps": laps,
            "kernel_config": options.kernel_config,
        }
        begin = time.perf_counter()
        self.program = chain_lib.chain.lower(arguments=self.arguments, **static).compile()
        self.compile_seconds = time.perf_counter() - begin
        self.sweeps: Any = None
        if variant.cold:
            self.no_calls = {**self.arguments, "sets": []}
            self.sweeps = chain_lib.chain.lower(arguments=self.no_calls, **static).compile()
        self.totals = jax.device_get(self.run()[0])  # warms up, and fails here rather than later

    def run(self) -> Any:
        return self.program(arguments=self.arguments)

    def run_sweeps(self) -> Any:
        return self.sweeps(arguments=self.no_calls)

    def row(self, samples: list[float], sweeps: list[float] | None, profile: bool) -> dict:
        base = measure.median(sweeps) if sweeps else 0.0
        emitted, rejected = (int(t.sum()) for t in (self.totals.emitted, self.totals.rejected))
        stats = self.program.memory_analysis()
        return {
            "kind": "time",
            **{
                k: v
                for k, v in self.case._asdict().items()
                if k not in ("variants", "rates", "block")
            },
            **self.variant._asdict(),
            "inputs": self.inputs,
            "rotated_bytes": self.rotated_bytes,
            "fits_cache": self.rotated_bytes < CACHE_BYTES and not self.variant.cold,
            "draft_bytes": self.draft_bytes,
            "calls": self.calls,
            "emitted_per_request": emitted / self.calls / self.case.batch,
            "bytes_read": verify_cases.bytes_read(self.case, self.calls, emitted, rejected),
            "call_us": (measure.median(samples) - base) / self.calls * 1e6,
            **(self._kernels() if profile else {"kernel_us": None, "launches": None}),
            "temporary_bytes": None if stats is None else stats.temp_size_in_bytes,
            "compile_seconds": self.compile_seconds,
            "samples": samples,
            "sweep_samples": sweeps,
        }

    def _kernels(self) -> dict[str, Any]:
        try:
            kernels = measure.kernel_times(self.program, {"arguments": self.arguments})
            total, count = (sum(k[i] for k in kernels.values()) for i in (1, 0))
            if self.sweeps is not None:
                swept = measure.kernel_times(self.sweeps, {"arguments": self.no_calls}).values()
                total, count = total - sum(k[1] for k in swept), count - sum(k[0] for k in swept)
        except Exception:
            print(f"{self.case.label}: no kernel times:", traceback.format_exc(limit=-1))
            return {"kernel_us": None, "launches": None}
        return {
            "kernel_us": total / self.calls,
            "launches": count / self.calls,
            "kernels": {
                name: [n / self.calls, us / self.calls] for name, (n, us) in kernels.items()
            },
        }


def compile_jobs(case: Case, options: Any) -> list[Job]:
    """Returns all programs of a case; one that fails is reported and left out."""
    wanted = [v for v in case.variants if v.implementation in options.implementations]
    if not wanted:
        return []
    with_probs = case.temperature > 0 and any(v.implementation == "plain" for v in wanted)
    first = inputs_lib.make(case, FIRST_SEED, with_probs and case.distribution != "none")
    size = sum(x.nbytes for x in jax.tree.leaves(first[:2]))
    count = max(num_inputs(size, v.implementation, options.inputs) for v in wanted)
    sets = [first]
    for i in range(1, count):
        logits, drafts, probs = inputs_lib.make(case, FIRST_SEED + i, first[2] is not None)
        sets.append((logits, drafts, probs if i < INPUTS["plain"] else None))
    without_probs = [(logits, drafts, None) for logits, drafts, _ in jax.block_until_ready(sets)]
    jobs = []
    for variant in wanted:
        given = sets if variant.implementation == "plain" else without_probs
        try:
            jobs.append(Job(case, variant, given, options))
        except Exception:  # one must not cost the others
            print(f"{case.label}, {variant.label}:", traceback.format_exc(limit=-2), flush=True)
    return jobs


def measure_case(jobs: list[Job], repeats: int, profile: bool) -> list[dict[str, Any]]:
    """Returns rows of one case: its variants in turn, then their kernels if they are profiled."""
    runs = {}
    for i, job in enumerate(jobs):
        runs[f"{i}"] = job.run
        if job.sweeps is not None:
            runs[f"{i} sweeps"] = job.run_sweeps
    samples = measure.alternate(runs, repeats, warm_up=1) if runs else {}
    return [
        job.row(samples[f"{i}"], samples.get(f"{i} sweeps"), profile) for i, job in enumerate(jobs)
    ]


def cells(row: dict[str, Any], bandwidth: float | None) -> dict[str, str]:
    def number(x: float | None, digits: int = 1) -> str:
        return "-" if x is None else f"{x:.{digits}f}"

    rate = row["bytes_read"] / ((row["kernel_us"] or row["call_us"]) * 1e-6)
    how = "cold" if row["cold"] else "noise given" if row["noise_given"] else "keys"
    return {
        "case": row["name"],
        "B": str(row["batch"]),
        "backend": row["implementation"],
        "how": how + (", in cache" if row["fits_cache"] else ""),
        "emitted": number(row["emitted_per_request"], 2),
        "call us": number(row["call_us"]),
        "goal": number(row["goal"] if row["implementation"] == "mosaic_gpu" else None, 0),
        "kernels us": number(row["kernel_us"]),
        "launches": number(row["launches"], 2),
        "MB": number(row["bytes_read"] / 1e6, 2),
        "drafts MB": number(row["draft_bytes"] / 1e6, 2) if "draft_bytes" in row else "-",
        "us/MB": number(row["call_us"] / row["bytes_read"] * 1e6, 3),
        "TB/s": number(rate / 1e12, 2),
        "of copy": "-" if bandwidth is None else f"{rate / bandwidth:.0%}",
    }


def kernel_config(text: str) -> Any:
    """``max_cluster=4,rows_at_once=2`` to a `KernelConfig`."""
    from jax_specdec._src.verify.mosaic_gpu.config import KernelConfig

    pairs = (part.split("=") for part in text.split(","))
    return KernelConfig(**{name: int(value) for name, value in pairs})


def main(command_line: list[str] | None = None) -> int:
    parser = measure.gpu_parser(__doc__, repeats=7, seconds=3600)
    add = parser.add_argument
    add("--only", action="append", help="cases whose 'NAME, B=N' contains this; may be repeated")
    add("--implementations", nargs="+", choices=INPUTS, default=list(INPUTS))
    add("--kernels", action="store_true", help="time kernels, which makes calls after it slower")
    add("--draws", type=int, default=500, help="batches per case compared; 0 for none")
    add("--inputs", type=int, help="different inputs at most; each is a call to compile")
    add("--kernel-config", type=kernel_config, help="such as max_cluster=4,rows_at_once=2")
    add("--name", default="verify_gpu", help="of the result file")
    options = parser.parse_args(command_line)
    clock = measure.begin(options)
    if clock is None:
        return 0
    on_gpu = jax.default_backend() == "gpu"
    about = {"copy_bytes_per_second": measure.copy_bandwidth()} if on_gpu else {}
    results = measure.Results(options.name, IDENTITY, options.output, **about)
    clock.say(results.run["device"], about)

    def chosen(case: Case, kind: str = "") -> bool:
        return not options.only or any(part in kind + case.label for part in options.only)

    cases = [c for c in (verify_cases.TINY if options.tiny else verify_cases.CASES) if chosen(c)]
    swept = [c for c in verify_cases.TINY if options.tiny] or verify_cases.SWEPT
    swept = [c for c in swept if options.draws and chosen(c, "disagreements: ")]
    if not {"mosaic_gpu", "xla"} <= set(options.implementations):
        swept = []

    def timed(case: Case) -> list[dict[str, Any]]:
        rows = measure_case(
            compile_jobs(case, options), options.repeats, on_gpu and options.kernels
        )
        for row in rows:
            shown = cells(row, about.get("copy_bytes_per_second"))
            clock.say(*(f"{name} {cell}," for name, cell in shown.items()))
        return rows

    def disagreed(case: Case) -> list[dict[str, Any]]:
        backends = ("xla", "mosaic_gpu" if on_gpu else "xla")
        config = options.kernel_config
        row = disagreements.sweep(case, options.draws, backends=backends, kernel_config=config)
        clock.say({k: v for k, v in row.items() if k != "kind"})
        return [row]

    status = measure.measure_cells(results, clock, timed, {c.label: (c,) for c in cases})
    sweeps = {f"disagreements: {case.label}": (case,) for case in swept}
    status |= measure.measure_cells(results, clock, disagreed, sweeps)
    document = results.document
    if not document["rows"]:
        print("nothing was measured")
        return 1
    measure.show(
        "Rates are bytes over kernel time, or over call time where there is none",
        [
            cells(row, document["runs"][row["run"]].get("copy_bytes_per_second"))
            for row in document["rows"]
            if row["kind"] == "time"
        ],
        width=160,
    )
    print("wrote", results.path.name, *(p.name for p in plots.draw(results.path)))
    bad = [r for r in document["rows"] if r["kind"] == "disagreements" and not r["ok"]]
    for row in bad:
        print(f"FAILED: backends differ by more than rounding: {row['name']}: {row['margins']}")
    return 1 if bad else status


if __name__ == "__main__":
    raise SystemExit(main())
