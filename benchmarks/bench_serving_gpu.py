"""What serving costs beside the engine's step: the driver of steps ahead, and the one without.

A target of the shape of Llama 3.2 1B and a drafter of 4 narrower layers, random weights in
bfloat16; drafts by a lookup or by that drafter. Per number of slots, with the same programs:

- *bare*: the compiled step again and again, nothing read from the device.
- *full*: all slots busy, nobody comes or goes; the host's share of a step is ``1 - bare / full``.
- *arrivals*: requests come at random, a tenth of them with a long prompt, and slots are three
  quarters busy; the median and the 99th percentile of how long requests that run wait for a step's
  results.

The ways, in turn: "new" is `EngineDriver` with its defaults; "old" dispatches a step when the last
one's results are read, and reads the prompts of whoever fits one after another before a step.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import itertools
import pathlib
import time
import traceback
from typing import Any

import jax
import measure
import numpy as np
import plots
import serving_programs
from rich.console import Console
from rich.table import Table

import jax_specdec as sd
from jax_specdec._src.serving import programs
from jax_specdec._src.serving.bookkeeping import ServedRequest

IDENTITY = ("kind", "slots", "drafter", "way")
K = 4
DRAFTER = dataclasses.replace(
    serving_programs.LLAMA_3_1B,
    hidden_size=1024,
    intermediate_size=4096,
    num_hidden_layers=4,
    num_attention_heads=16,
)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Tokens: of short and long prompts, of budgets, and of what one call reads."""

    target: sd.models.LlamaConfig
    drafter: sd.models.LlamaConfig
    prompt: int
    long_prompt: int
    budget: int
    prefill_sizes: tuple[int, int]
    max_length: int


LARGE = Sizes(serving_programs.LLAMA_3_1B, DRAFTER, 64, 600, 64, (64, 128), 1024)
SMALL = Sizes(serving_programs.TINY, serving_programs.TINY, 8, 40, 16, (8, 32), 512)


class OneByOne(sd.EngineDriver):
    """Reads the prompt of one request per call."""

    def _next_group(self) -> dict[int, ServedRequest]:
        return dict(itertools.islice(super()._next_group().items(), 1))


class Case:
    """An engine, compiled, and its drivers."""

    def __init__(self, sizes: Sizes, slots: int, drafter: str, weights: dict[str, Any]) -> None:
        self.sizes, self.slots, self.drafter = sizes, slots, drafter
        models = {name: sd.models.Llama(getattr(sizes, name), "bfloat16") for name in weights}
        self.engine = sd.Engine(
            models["target"],
            sd.NGramDrafter() if drafter == "lookup" else sd.ModelDrafter(models["drafter"]),
            sd.SpecDecodeConfig(num_speculative_tokens=K),
            num_slots=slots,
            max_length=sizes.max_length,
            prefill_sizes=sizes.prefill_sizes,
        )
        self.params = weights["target"]
        self.draft_params = None if drafter == "lookup" else weights["drafter"]

    def driver(self, way: str) -> sd.EngineDriver:
        if way == "old":
            settings: dict[str, Any] = dict(max_steps_ahead=0, max_prefills=None)
            return OneByOne(self.engine, self.params, self.draft_params, **settings)
        return sd.EngineDriver(self.engine, self.params, self.draft_params)

    def compile(self) -> float:
        begin = time.perf_counter()
        self.driver("new").warm_up()
        return time.perf_counter() - begin

    def prompt(self, rng: np.random.Generator, length: int) -> list[int]:
        return rng.integers(0, self.sizes.target.vocab_size, length).tolist()

    def budget(self, steps: int) -> int:
        """Tokens that nobody has spent after so many steps, and those in which slots are filled."""
        return (steps + 10 + self.slots // 2) * (K + 1)

    def full(self, way: str, budget: int) -> sd.EngineDriver:
        """A driver all of whose slots are busy, for `budget` tokens."""
        driver, rng = self.driver(way), np.random.default_rng(0)
        for seed in range(self.slots):
            prompt = self.prompt(rng, self.sizes.prompt)
            driver.submit(prompt, max_new_tokens=budget, temperature=0.8 * (seed % 2))
        while driver.num_queued:
            driver.step()
        for _ in range(4):
            driver.step()
        return driver

    def bare(self, steps: int) -> dict[str, float]:
        driver = self.full("new", self.budget(steps))
        weights, state = (self.params, self.draft_params), driver.state
        before = np.asarray(state.batch.lengths)
        begin = time.perf_counter()
        for _ in range(steps):
            state, _ = programs.step(self.engine, *weights, state)
        jax.block_until_ready(state)
        seconds = time.perf_counter() - begin
        tokens = int((np.asarray(state.batch.lengths) - before).sum())
        return {"ms": seconds / steps * 1e3, "tokens_per_step": tokens / steps}

    def busy(self, way: str, steps: int) -> dict[str, float]:
        driver = self.full(way, self.budget(steps))
        before = driver.serving_stats()
        tokens, begin = 0, time.perf_counter()
        for _ in range(steps):
            tokens += sum(len(update.token_ids) for update in driver.step())
        seconds = time.perf_counter() - begin
        spent = driver.serving_stats() - before
        return {
            "ms": seconds / steps * 1e3,
            "tokens_per_step": tokens / steps,
            "tokens_per_second": tokens / seconds,
            "wait_ms": spent.mean_host_wait * 1e3,
            "steps_ahead": spent.mean_steps_ahead,
        }

    def arrivals(self, way: str, steps: int, tokens_per_step: float) -> dict[str, Any]:
        """Times of steps; percentiles of those at whose beginning somebody ran."""
        driver, rng, sizes = self.driver(way), np.random.default_rng(1), self.sizes
        rate = 0.75 * tokens_per_step / sizes.budget
        milliseconds: list[float] = []
        admitted: list[int] = []
        waited: list[float] = []
        while len(milliseconds) < steps:
            for _ in range(rng.poisson(rate)):
                long = rng.random() < 0.1
                prompt = self.prompt(rng, sizes.long_prompt if long else sizes.prompt)
                driver.submit(prompt, max_new_tokens=sizes.budget, temperature=0.8)
            if driver.is_idle:
                continue
            before, is_running = driver.serving_stats().num_admitted, driver.num_running > 0
            begin = time.perf_counter()
            driver.step()
            milliseconds.append((time.perf_counter() - begin) * 1e3)
            waited += milliseconds[-1:] * is_running
            admitted.append(driver.serving_stats().num_admitted - before)
        stats = driver.serving_stats()
        return {
            "p50": float(np.percentile(waited, 50)),
            "p99": float(np.percentile(waited, 99)),
            "num_admitted": stats.num_admitted,
            "busy_slots": stats.mean_busy_slots,
            "queue_ms": stats.mean_queue_time * 1e3,
            "step_ms": milliseconds,
            "admitted": admitted,
        }


def measure_case(case: Case, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per way."""
    rows: dict[str, dict[str, Any]] = {
        way: {"kind": "serving", "slots": case.slots, "drafter": case.drafter, "way": way}
        for way in ("old", "new")
    }
    bare = [case.bare(options.steps)]
    full: dict[str, list[dict[str, float]]] = {way: [] for way in rows}
    for _ in range(options.repeats):
        for way in rows:
            full[way].append(case.busy(way, options.steps))
        bare.append(case.bare(options.steps))
    bare_ms = measure.median([one["ms"] for one in bare[1:]])
    for way, row in rows.items():
        found = {key: measure.median([one[key] for one in full[way]]) for key in full[way][0]}
        row |= {"bare_ms": bare_ms, "full": found, "host_share": 1 - bare_ms / found["ms"]}
        row["arrivals"] = case.arrivals(way, options.arrivals, bare[0]["tokens_per_step"])
        row["samples"] = {"bare": bare, "full": full[way]}
    return [*rows.values()]


def table(rows: list[dict[str, Any]]) -> Table:
    result = Table(title="Milliseconds of a step; host share with all slots busy")
    for column in ("slots", "drafter", "way", "bare", "full", "host share", "tokens/s", "waits",
                   "p50", "p99", "p99/p50", "queue"):  # fmt: skip
        result.add_column(column, justify="left" if column in ("drafter", "way") else "right")
    for row in rows:
        full, arrivals = row["full"], row["arrivals"]
        result.add_row(
            str(row["slots"]),
            row["drafter"],
            row["way"],
            f"{row['bare_ms']:.2f}",
            f"{full['ms']:.2f}",
            f"{row['host_share']:.1%}",
            f"{full['tokens_per_second']:.0f}",
            f"{full['wait_ms']:.2f}",
            f"{arrivals['p50']:.2f}",
            f"{arrivals['p99']:.2f}",
            f"{arrivals['p99'] / arrivals['p50']:.2f}",
            f"{arrivals['queue_ms']:.1f}",
        )
    return result


def parse(command_line: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--slots", default="8,32,1")
    add("--drafters", default="lookup,model")
    add("--steps", type=int, default=60, help="of a run with all slots busy; some 80 at most")
    add("--arrivals", type=int, default=400, help="steps while requests arrive")
    add("--repeats", type=int, default=3)
    add("--threads", type=int, default=6, help="that compile")
    add("--seconds", type=float, default=210, help="measure nothing more after these")
    add("--output", type=pathlib.Path, default=measure.RESULTS, help="folder of results and plots")
    add("--piece", type=int, help="tokens of a prompt that one call reads; 128, and 32 if small")
    add("--small", action="store_true", help="tiny models on any device: does it work?")
    return parser.parse_args(command_line)


def main(command_line: list[str] | None = None) -> int:
    options = parse(command_line)
    if jax.default_backend() != "gpu" and not options.small:
        print(f"bench_serving_gpu: nothing to measure, JAX runs on {jax.default_backend()}")
        return 0
    begin = time.perf_counter()

    def say(text: str) -> None:
        print(f"{time.perf_counter() - begin:4.0f} s  {text}", flush=True)

    sizes = SMALL if options.small else LARGE
    if options.piece is not None:
        sizes = dataclasses.replace(sizes, prefill_sizes=(sizes.prompt, options.piece))
    weights = {
        name: serving_programs.random_params(
            sd.models.Llama(getattr(sizes, name), "bfloat16"), seed
        )
        for seed, name in enumerate(("target", "drafter"))
    }
    jax.block_until_ready(weights)
    run = {**measure.environment(), "sizes": dataclasses.asdict(sizes), "k": K}
    say("weights")
    cases = [
        Case(sizes, int(slots), drafter, weights)
        for slots in options.slots.split(",")
        for drafter in options.drafters.split(",")
    ]
    path = options.output / ("serving_small.json" if options.small else "serving_gpu.json")
    before, rows = measure.load(path), []
    with concurrent.futures.ThreadPoolExecutor(options.threads) as pool:
        compiled = [pool.submit(case.compile) for case in cases]
        concurrent.futures.wait(compiled)
    for case, seconds in zip(cases, compiled, strict=True):
        name = f"{case.slots} slots, {case.drafter}"
        if time.perf_counter() - begin > options.seconds:
            say(f"left out: {name}")
            continue
        try:
            say(f"{name}: compiled in {seconds.result():.0f} s")
            rows += measure_case(case, options)
        except Exception:  # one must not cost the others
            say(f"{name}: {traceback.format_exc(limit=-3)}")
            continue
        measure.write(path, measure.merge(before, run, rows, IDENTITY))
        say(f"{name}: measured")
    Console(width=130).print(table(sorted(rows, key=lambda row: row["slots"])))
    print("wrote", path.name, *(p.name for p in plots.draw(path)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
