"""What serving costs beside the engine's step.

A target of the shape of Llama 3.2 1B and a drafter of 4 narrower layers, random weights in
bfloat16; drafts by a lookup or by that drafter. Per number of slots, with the same programs:

- *bare*: the compiled step again and again, nothing read from the device.
- *full*: all slots busy, nobody comes or goes; the host's share of a step is ``1 - bare / full``.
- *arrivals*: requests come at random, a tenth of them with a long prompt, and slots are three
  quarters busy; the median and the 99th percentile of how long requests that run wait for a step's
  results.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import time
import traceback
from typing import Any

import jax
import llamas
import measure
import numpy as np

import jax_specdec as sd
from jax_specdec import lm
from jax_specdec.lm.decoding import programs

IDENTITY = ("kind", "slots", "drafter")
K = 4
DRAFTER = dataclasses.replace(
    llamas.LLAMA_3_1B,
    hidden_size=1024,
    intermediate_size=4096,
    num_hidden_layers=4,
    num_attention_heads=16,
)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Tokens: of short and long prompts, of budgets, and of what one call reads."""

    target: lm.models.LlamaConfig
    drafter: lm.models.LlamaConfig
    prompt: int
    long_prompt: int
    budget: int
    prefill_sizes: tuple[int, int]
    max_length: int


LARGE = Sizes(llamas.LLAMA_3_1B, DRAFTER, 64, 600, 64, (64, 128), 1024)
SMALL = Sizes(llamas.TINY, llamas.TINY, 8, 40, 16, (8, 32), 512)


class Case:
    """An engine, compiled, and its drivers."""

    def __init__(self, sizes: Sizes, slots: int, drafter: str, weights: dict[str, Any]) -> None:
        self.sizes, self.slots, self.drafter = sizes, slots, drafter
        models = {name: lm.models.Llama(getattr(sizes, name), "bfloat16") for name in weights}
        self.engine = lm.Engine(
            models["target"],
            lm.NGramDrafter() if drafter == "lookup" else lm.ModelDrafter(models["drafter"]),
            sd.SpecDecodeConfig(num_speculative_tokens=K),
            num_slots=slots,
            max_length=sizes.max_length,
            prefill_sizes=sizes.prefill_sizes,
        )
        self.params = weights["target"]
        self.draft_params = None if drafter == "lookup" else weights["drafter"]

    def driver(self) -> lm.EngineDriver:
        return lm.EngineDriver(self.engine, self.params, self.draft_params)

    def compile(self) -> float:
        begin = time.perf_counter()
        self.driver().warm_up()
        return time.perf_counter() - begin

    def prompt(self, rng: np.random.Generator, length: int) -> list[int]:
        return rng.integers(0, self.sizes.target.vocab_size, length).tolist()

    def budget(self, steps: int) -> int:
        """Tokens that nobody has spent after so many steps, and those in which slots are filled."""
        return (steps + 10 + self.slots // 2) * (K + 1)

    def full(self, budget: int) -> lm.EngineDriver:
        """A driver all of whose slots are busy, for `budget` tokens."""
        driver, rng = self.driver(), np.random.default_rng(0)
        for seed in range(self.slots):
            prompt = self.prompt(rng, self.sizes.prompt)
            driver.submit(prompt, max_new_tokens=budget, temperature=0.8 * (seed % 2))
        while driver.num_queued:
            driver.step()
        for _ in range(4):
            driver.step()
        return driver

    def bare(self, steps: int) -> dict[str, float]:
        driver = self.full(self.budget(steps))
        weights, state = (self.params, self.draft_params), driver.state
        before = np.asarray(state.batch.lengths)
        begin = time.perf_counter()
        for _ in range(steps):
            state, _ = programs.step(self.engine, *weights, state)
        jax.block_until_ready(state)
        seconds = time.perf_counter() - begin
        tokens = int((np.asarray(state.batch.lengths) - before).sum())
        return {"ms": seconds / steps * 1e3, "tokens_per_step": tokens / steps}

    def busy(self, steps: int) -> dict[str, float]:
        driver = self.full(self.budget(steps))
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

    def arrivals(self, steps: int, tokens_per_step: float) -> dict[str, Any]:
        """Times of steps; percentiles of those at whose beginning somebody ran."""
        driver, rng, sizes = self.driver(), np.random.default_rng(1), self.sizes
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


def measure_case(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    bare, busy = [case.bare(options.steps)], []
    for _ in range(options.repeats):
        busy.append(case.busy(options.steps))
        bare.append(case.bare(options.steps))
    bare_ms = measure.median([one["ms"] for one in bare[1:]])
    full = {key: measure.median([one[key] for one in busy]) for key in busy[0]}
    return {
        "kind": "serving",
        "slots": case.slots,
        "drafter": case.drafter,
        "bare_ms": bare_ms,
        "full": full,
        "host_share": 1 - bare_ms / full["ms"],
        "arrivals": case.arrivals(options.arrivals, bare[0]["tokens_per_step"]),
        "samples": {"bare": bare, "full": busy},
    }


def cells(row: dict[str, Any]) -> dict[str, Any]:
    full, arrivals = row["full"], row["arrivals"]
    return {
        "slots": row["slots"],
        "drafter": row["drafter"],
        "bare": f"{row['bare_ms']:.2f}",
        "full": f"{full['ms']:.2f}",
        "host share": f"{row['host_share']:.1%}",
        "tokens/s": f"{full['tokens_per_second']:.0f}",
        "waits": f"{full['wait_ms']:.2f}",
        "p50": f"{arrivals['p50']:.2f}",
        "p99": f"{arrivals['p99']:.2f}",
        "p99/p50": f"{arrivals['p99'] / arrivals['p50']:.2f}",
        "queue": f"{arrivals['queue_ms']:.1f}",
    }


def main(command_line: list[str] | None = None) -> int:
    parser = measure.gpu_parser(__doc__, repeats=3, seconds=210, threads=6)
    add = parser.add_argument
    add("--slots", type=int, nargs="+", default=[8, 32, 1])
    add("--drafters", nargs="+", default=["lookup", "model"])
    add("--steps", type=int, default=60, help="of a run with all slots busy; some 80 at most")
    add("--arrivals", type=int, default=400, help="steps while requests arrive")
    add("--piece", type=int, help="tokens of a prompt that one call reads; 128, and 32 if tiny")
    options = parser.parse_args(command_line)
    if measure.lacks_gpu(options):
        return 0
    clock = measure.Clock(options.seconds)
    sizes = SMALL if options.tiny else LARGE
    if options.piece is not None:
        sizes = dataclasses.replace(sizes, prefill_sizes=(sizes.prompt, options.piece))
    weights = {
        name: llamas.random_params(lm.models.Llama(getattr(sizes, name), "bfloat16"), seed)
        for seed, name in enumerate(("target", "drafter"))
    }
    jax.block_until_ready(weights)
    clock.say("weights")
    cases = [
        Case(sizes, slots, drafter, weights)
        for slots in options.slots
        for drafter in options.drafters
    ]
    results = measure.Results(
        "serving_gpu", IDENTITY, options.output, sizes=dataclasses.asdict(sizes), k=K
    )
    with concurrent.futures.ThreadPoolExecutor(options.threads) as pool:
        compiled = [pool.submit(case.compile) for case in cases]
        concurrent.futures.wait(compiled)
    for case, seconds in zip(cases, compiled, strict=True):
        name = f"{case.slots} slots, {case.drafter}"
        if clock.is_late(name):
            continue
        try:
            clock.say(f"{name}: compiled in {seconds.result():.0f} s")
            results.add([measure_case(case, options)])
        except Exception:  # one must not cost the others
            clock.say(f"{name}: {traceback.format_exc(limit=-3)}")
            continue
        clock.say(f"{name}: measured")
    rows = sorted(results.rows, key=lambda row: row["slots"])
    measure.show("Milliseconds of a step; host share with all slots busy", list(map(cells, rows)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
