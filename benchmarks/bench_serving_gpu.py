"""What serving costs beside the engine's step.

A target of the shape of Llama 3.2 1B, or of Llama 3 8B, and a drafter of 4 narrower layers, random
weights in bfloat16; drafts by a lookup or by that drafter. Per number of slots, with the same
programs:

- *bare*: the compiled step again and again, nothing read from the device.
- *full*: all slots busy, nobody comes or goes; the host's share of a step is ``1 - bare / full``.
- *arrivals*: requests come at random times, a tenth of them with a long prompt, three quarters as
  many as the first policy can serve: how long requests that run wait for a step's results, and new
  ones for their first token. *saturated*: somebody always waits for a slot; tokens per second.

A policy says how many tokens of prompts a call reads while requests run: a number, "largest" for
the most that the engine reads at once, or "chosen" for what `EngineDriver.warm_up` takes; with
"steps-" before it, steps read so many (`prompts_in_steps`). All policies see the same requests at
the same times, in turn, in one process.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar
from unittest import mock

import jax
import llamas
import measure
import numpy as np

import jax_specdec as sd
from jax_specdec import lm
from jax_specdec.lm.decoding import programs
from jax_specdec.lm.decoding.stopwatch import measure_chunks

IDENTITY = ("target", "slots", "drafter")
K = 4
LOAD = 0.75
"""Requests that come, of those that the first policy can serve."""
_LAYER = dataclasses.replace(
    llamas.LLAMA_3_1B.layers[0], num_attention_heads=16, intermediate_size=4096
)
DRAFTER = dataclasses.replace(llamas.LLAMA_3_1B, hidden_size=1024, layers=(_LAYER,) * 4)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Tokens: of short and long prompts, of budgets, and of what one call reads."""

    target: lm.models.DecoderConfig
    drafter: lm.models.DecoderConfig
    prompt: int
    long_prompt: int
    budget: int
    prefill_sizes: tuple[int, ...]
    max_length: int


LARGE = Sizes(llamas.LLAMA_3_1B, DRAFTER, 64, 600, 64, (64, 128), 1024)
SMALL = Sizes(llamas.TINY, llamas.TINY, 8, 40, 16, (8, 32), 512)


@dataclasses.dataclass(frozen=True)
class Policy:
    """Settings of an `EngineDriver`."""

    chunk_size: int
    prompts_in_steps: bool = False


class Case:
    """An engine, compiled, and its drivers."""

    def __init__(
        self, sizes: Sizes, target: str, slots: int, drafter: str, weights: dict[str, Any]
    ) -> None:
        self.sizes, self.target, self.slots, self.drafter = sizes, target, slots, drafter
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

    def driver(self, policy: Policy | None = None) -> lm.EngineDriver:
        """By a policy, or with the largest chunks: nothing is chosen while others compile."""
        policy = policy or Policy(self.engine.chunk_size)
        weights = self.params, self.draft_params
        return lm.EngineDriver(self.engine, *weights, **dataclasses.asdict(policy))

    @functools.cached_property
    def compile_seconds(self) -> float:
        """Compiles everything, once."""
        begin = time.perf_counter()
        self.driver(Policy(self.engine.chunk_size, prompts_in_steps=True)).warm_up()
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

    def costs(self, in_steps: bool) -> dict[str, Any]:
        """What `warm_up` chooses a size from: milliseconds of a step, and of reading a prompt."""
        weights = self.params, self.draft_params
        found = measure_chunks(self.engine, *weights, in_steps=in_steps)
        prompts = {size: seconds * 1e3 for size, seconds in found.seconds.items()}
        return {"step_ms": found.step * 1e3, "prompt_ms": prompts, "chosen": found.largest}

    def prompts(self, rng: np.random.Generator) -> Iterator[list[int]]:
        """Without end; a tenth of them are long. Made beforehand, which takes time."""
        sizes = self.sizes
        lengths = [sizes.prompt] * 90 + [sizes.long_prompt] * 10
        return itertools.cycle([self.prompt(rng, n) for n in rng.permutation(lengths)])

    def saturated(self, policy: Policy, steps: int) -> Served:
        """Somebody always waits: what the engine can deliver."""
        driver, prompts = self.driver(policy), self.prompts(np.random.default_rng(1))
        served = Served()
        while len(served.step_ms) < steps:
            while driver.num_queued < self.slots:
                served.submit(driver, next(prompts), self.sizes.budget)
            served.step(driver)
        return served

    def arrivals(self, policy: Policy, steps: int, rate: float) -> Served:
        """Requests come at random times, which no policy changes."""
        driver, rng = self.driver(policy), np.random.default_rng(2)
        prompts, served, begin = self.prompts(rng), Served(), time.perf_counter()
        due = begin
        while len(served.step_ms) < steps:
            while due <= time.perf_counter():
                served.submit(driver, next(prompts), self.sizes.budget, due)
                due += rng.exponential(1 / rate)
            if driver.is_idle:
                time.sleep(max(due - time.perf_counter(), 0.0))
                served.pause()
            else:
                served.step(driver)
        return served


class Served:
    """What requests of one run waited for.

    Attributes:
      step_ms: of each call of `step` in which a request that had tokens waited for more.
      quiet_ms: of those in which, and before which, no prompt was read.
      gap_ms: from the results before to those of that step.
      first_ms: from the arrival of a request to its first token.
    """

    num_reads: ClassVar[int] = 0  # calls that read prompts, of all runs

    def __init__(self) -> None:
        self.step_ms: list[float] = []
        self.quiet_ms: list[float] = []
        self.gap_ms: list[float] = []
        self.first_ms: dict[str, list[float]] = {"short": [], "long": []}
        self.num_tokens = 0
        self.seconds = 0.0
        self._arrived: dict[int, tuple[float, str]] = {}
        self._last: float | None = None
        self._reads = 0, 0  # so far, before the last step and before this one

    def submit(
        self, driver: lm.EngineDriver, prompt: list[int], budget: int, due: float | None = None
    ) -> None:
        request_id = driver.submit(prompt, max_new_tokens=budget, temperature=0.8)
        kind = "short" if len(prompt) <= driver.engine.chunk_sizes[0] else "long"
        self._arrived[request_id] = time.perf_counter() if due is None else due, kind

    def pause(self) -> None:
        """Nobody waits for what comes next."""
        self._last = None

    def step(self, driver: lm.EngineDriver) -> None:
        begin = time.perf_counter()
        updates = driver.step()
        now = time.perf_counter()
        self._reads, before = (self._reads[1], Served.num_reads), self._reads[0]
        if any(update.request_id not in self._arrived for update in updates):
            self.step_ms.append((now - begin) * 1e3)
            self.quiet_ms += self.step_ms[-1:] * (before == Served.num_reads)
            self.gap_ms.append((now - (self._last or begin)) * 1e3)
        for update in updates:
            if update.request_id in self._arrived:
                arrived, kind = self._arrived.pop(update.request_id)
                self.first_ms[kind].append((now - arrived) * 1e3)
        self.num_tokens += sum(len(update.token_ids) for update in updates)
        self.seconds += now - (self._last or begin)
        self._last = now


def summary(runs: list[Served]) -> dict[str, Any]:
    """Percentiles over all runs of one kind."""

    def percentiles(samples: list[float]) -> dict[str, float]:
        p50, p99 = (float(np.percentile(samples or [math.nan], q)) for q in (50, 99))
        return {"p50": p50, "p99": p99, "ratio": p99 / p50}

    def pooled(name: str) -> list[float]:
        return [x for run in runs for x in getattr(run, name)]

    first = {kind: [x for run in runs for x in run.first_ms[kind]] for kind in ("short", "long")}
    return {
        "step": percentiles(pooled("step_ms")),
        "quiet": percentiles(pooled("quiet_ms")),
        "gap": percentiles(pooled("gap_ms")),
        "first": percentiles(first["short"] + first["long"]),
        "first_mean": float(np.mean(first["short"] + first["long"])),
        "first_short": percentiles(first["short"]),
        "first_long": percentiles(first["long"]),
        "tokens_per_second": sum(x.num_tokens for x in runs) / sum(x.seconds for x in runs),
    }


def samples(runs: list[Served]) -> dict[str, list[list[float]]]:
    return {
        name: [np.round(getattr(run, name), 3).tolist() for run in runs]
        for name in ("step_ms", "gap_ms")
    }


@contextlib.contextmanager
def counting_reads() -> Iterator[None]:
    """Every call that reads prompts counts for `Served`."""
    with contextlib.ExitStack() as stack:
        for name in ("admit", "step"):
            stack.enter_context(mock.patch.object(programs, name, _counted(name)))
        yield


def _counted(name: str) -> Callable[..., Any]:
    function = getattr(programs, name)

    def call(*args: Any, **static: Any) -> Any:
        Served.num_reads += isinstance(args[-1], programs.PackedRequests)
        return function(*args, **static)

    return call


@counting_reads()
def measure_arrivals(case: Case, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each policy: first all are saturated, then requests come at the same times."""
    print(f"       compiled in {case.compile_seconds:.0f} s")
    policies, costs = {}, {in_steps: case.costs(in_steps) for in_steps in (False, True)}
    for in_steps, found in costs.items():
        each = ", ".join(f"{size} tokens {ms:.2f}" for size, ms in found["prompt_ms"].items())
        where = "within steps" if in_steps else "between steps"
        print(f"       ms of a step {found['step_ms']:.2f}, of a prompt {where} of {each}")
    for name in options.policies:
        in_steps, size = name.startswith("steps-"), name.removeprefix("steps-")
        named = {"largest": case.engine.chunk_size, "chosen": costs[in_steps]["chosen"]}
        policies[name] = Policy(named.get(size) or int(size), in_steps)
    full: dict[str, list[Served]] = {name: [] for name in policies}
    random: dict[str, list[Served]] = {name: [] for name in policies}
    for _ in range(options.rounds):
        for name, policy in policies.items():
            full[name].append(case.saturated(policy, options.arrivals))
    tokens = summary(full[options.policies[0]])["tokens_per_second"]
    rate = LOAD * tokens / case.sizes.budget
    for _ in range(options.rounds):
        for name, policy in policies.items():
            random[name].append(case.arrivals(policy, options.arrivals, rate))
    return [
        {
            "target": case.target,
            "slots": case.slots,
            "drafter": case.drafter,
            "policy": name,
            "chunk_size": policy.chunk_size,
            "costs": costs[policy.prompts_in_steps],
            "requests_per_second": rate,
            "saturated": summary(full[name]),
            "arrivals": summary(random[name]),
            "samples": samples(random[name]),
        }
        for name, policy in policies.items()
    ]


def measure_case(case: Case, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row of steps with all slots busy."""
    print(f"       compiled in {case.compile_seconds:.0f} s")
    bare, busy = [case.bare(options.steps)], []
    for _ in range(options.repeats):
        busy.append(case.busy(options.steps))
        bare.append(case.bare(options.steps))
    bare_ms = measure.median([one["ms"] for one in bare[1:]])
    full = {key: measure.median([one[key] for one in busy]) for key in busy[0]}
    row = {
        "target": case.target,
        "slots": case.slots,
        "drafter": case.drafter,
        "bare_ms": bare_ms,
        "full": full,
        "host_share": 1 - bare_ms / full["ms"],
        "samples": {"bare": bare, "full": busy},
    }
    return [row]


def cells(row: dict[str, Any]) -> dict[str, Any]:
    full = row["full"]
    return {
        "target": row["target"],
        "slots": row["slots"],
        "drafter": row["drafter"],
        "bare": f"{row['bare_ms']:.2f}",
        "full": f"{full['ms']:.2f}",
        "host share": f"{row['host_share']:.1%}",
        "tokens/s": f"{full['tokens_per_second']:.0f}",
        "waits": f"{full['wait_ms']:.2f}",
    }


def arrival_cells(row: dict[str, Any]) -> dict[str, Any]:
    found, full = row["arrivals"], row["saturated"]
    return {
        "target": row["target"],
        "slots": row["slots"],
        "drafter": row["drafter"],
        "policy": f"{row['policy']} ({row['chunk_size']})",
        **{name: f"{found['step'][name]:.2f}" for name in ("p50", "p99")},
        "p99/p50": f"{found['step']['ratio']:.2f}",
        "quiet": f"{found['quiet']['ratio']:.2f}",
        "between": f"{found['gap']['ratio']:.2f}",
        "saturated": f"{full['step']['ratio']:.2f}",
        "first p50": f"{found['first']['p50']:.1f}",
        "first p99": f"{found['first']['p99']:.1f}",
        "mean": f"{found['first_mean']:.1f}",
        "long": f"{found['first_long']['p50']:.1f}",
        "tokens/s": f"{full['tokens_per_second']:.0f}",
    }


def _slots(row: dict[str, Any]) -> int:
    return int(row["slots"])


def main(command_line: list[str] | None = None) -> int:
    parser = measure.gpu_parser(__doc__, repeats=3, seconds=210)
    add = parser.add_argument
    add("--slots", type=int, nargs="+", default=[8, 32, 1])
    add("--drafters", nargs="+", default=["lookup", "model"])
    add("--steps", type=int, default=60, help="of a run with all slots busy; some 80 at most")
    add("--arrivals", type=int, default=600, help="steps of a run while requests arrive")
    add("--rounds", type=int, default=2, help="such runs of each policy")
    add("--policies", nargs="+", default=["largest", "chosen", "steps-chosen"])
    add("--only", choices=("full", "arrivals"), help="one half of it")
    add("--target", choices=("1B", "8B"), default="1B", help="its shape")
    add("--piece", type=int, help="tokens of a prompt that one call reads; 128, and 32 if tiny")
    options = parser.parse_args(command_line)
    clock = measure.begin(options)
    if clock is None:
        return 0
    sizes = SMALL if options.tiny else LARGE
    if options.target == "8B":
        sizes = dataclasses.replace(sizes, target=llamas.LLAMA_3_8B)
    if options.piece is not None:
        powers = itertools.takewhile(
            lambda n: n < options.piece, (sizes.prompt << i for i in itertools.count())
        )
        sizes = dataclasses.replace(sizes, prefill_sizes=(*powers, options.piece))
    weights = {
        name: llamas.random_params(lm.models.Llama(getattr(sizes, name), "bfloat16"), seed)
        for seed, name in enumerate(("target", "drafter"))
    }
    jax.block_until_ready(weights)
    clock.say("weights")
    cases = [
        Case(sizes, options.target, slots, drafter, weights)
        for slots in options.slots
        for drafter in options.drafters
    ]
    about = dict(sizes=dataclasses.asdict(sizes), k=K)
    results = measure.Results("serving_gpu", IDENTITY, options.output, **about)
    arrivals = measure.Results("arrivals_gpu", (*IDENTITY, "policy"), options.output, **about)
    halves = {"full": (results, measure_case), "arrivals": (arrivals, measure_arrivals)}
    status = 0
    for case, (half, (found, measured)) in itertools.product(cases, halves.items()):
        if options.only in (None, half):
            cell = {f"{case.slots} slots, {case.drafter}, {half}": (case, options)}
            status |= measure.measure_cells(found, clock, measured, cell)
    title = "Milliseconds of a step; host share with all slots busy"
    measure.show(title, list(map(cells, sorted(results.rows, key=_slots))))
    title = (
        "Milliseconds of a step and to the first token while requests arrive; tokens/s saturated"
    )
    measure.show(title, list(map(arrival_cells, sorted(arrivals.rows, key=_slots))), width=150)
    return status


if __name__ == "__main__":
    raise SystemExit(main())
