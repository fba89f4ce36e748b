"""Fixed numbers of drafts against the engine's choice, at several loads and acceptance rates.

python benchmarks/bench_draft_budget.py             # by a model of the cost, and by this device
python benchmarks/bench_draft_budget.py --model-only
python benchmarks/bench_draft_budget.py --target llama-8b --slots 1 8 32 128    # on a large GPU

Acceptance is synthetic, so that nothing depends on how good a small drafter is, and drafting is
free. Runs on whatever device JAX has; what it showed of other devices stays in the results.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from typing import Any

import jax
import jax.numpy as jnp
import llamas
import measure
import numpy as np
from matplotlib.figure import Figure

import jax_specdec as sd
from jax_specdec import lm
from jax_specdec._src.drafts.rates import DraftRates

K = 6
FIXED = (0, 2, 4, 6)
BUDGET = (0, 1, 2, 4, 6)
SLOTS = (1, 8, 32, 128)
RATES = {
    "good": tuple(round(0.9 - 0.1 * i, 1) for i in range(K)),
    "poor": tuple(0.5 ** (i + 1) for i in range(K)),
}
"""Unconditional: the chance that drafts 0 .. i are all accepted."""

FREE_ROWS = 64
"""Of the model: a pass costs the reading of the weights, up to as many rows, and then by rows."""

MODEL_STEPS = 2000
STEPS, LEARNING_STEPS = 30, 15


class Fixed(lm.DraftChoice):
    """The largest number, in every step."""

    def next(self) -> int:
        return self.draft_budget[-1]


def choice_of(k: int | str, costs: lm.StepCosts) -> lm.DraftChoice:
    rates = np.asarray(DraftRates.create(K).values)
    if isinstance(k, int):
        return Fixed((k,), rates)
    return lm.DraftChoice(costs.draft_budget, rates, costs)


# By rows


def model_costs(slots: int) -> lm.StepCosts:
    seconds = tuple(max(1.0, slots * (k + 1) / FREE_ROWS) for k in BUDGET)
    return lm.StepCosts(slots, BUDGET, seconds)


@jax.jit
def _learned(
    rates: DraftRates, offered: jax.Array, accepted: jax.Array
) -> tuple[DraftRates, jax.Array]:
    rates = rates.update(offered, accepted)
    return rates, rates.values


def by_model(slots: int, rates: tuple[float, ...], k: int | str) -> dict[str, Any]:
    """Tokens per time of one plain pass for one request, expected or of a simulated run."""
    costs = model_costs(slots)
    if isinstance(k, int):
        seconds = costs.seconds[BUDGET.index(k)]
        return {"tokens_per_second": slots * (1 + sum(rates[:k])) / seconds}
    choice, learned = choice_of(k, costs), DraftRates.create(K)
    tokens, seconds, rng = 0, 0.0, np.random.default_rng(slots)
    for draws in rng.random((MODEL_STEPS, slots)):
        number = choice.next()
        # One draw for a request: the rates are those of runs of accepted drafts.
        accepted = (draws[:, None] < np.array(rates[:number])).sum(axis=1, dtype=np.int32)
        offered = np.full(slots, number, np.int32)
        learned, found = _learned(learned, offered, accepted)
        choice.rates = np.asarray(found)
        tokens += slots + int(accepted.sum())
        seconds += costs.seconds[BUDGET.index(number)]
    return {"tokens_per_second": tokens / seconds, "best": choice.best}


# By a device


@dataclasses.dataclass(frozen=True)
class FreeDrafter(lm.Drafter):
    """Proposes one token again and again, at no cost: acceptance is synthetic."""

    def propose(
        self, params: Any, context: lm.DraftContext, cache: Any, store: None
    ) -> tuple[lm.Proposal, Any]:
        shape = context.lengths.shape[0], context.config.num_speculative_tokens
        return lm.Proposal(jnp.full(shape, 32, jnp.int32)), cache


def target_of(name: str) -> tuple[Any, Any]:
    """The embedded target, or one of the sizes of Llama 3 with random weights, in bfloat16."""
    if name == "embedded":
        return lm.load_embedded_pair()[0]
    config = {
        "llama-1b": llamas.LLAMA_3_1B,
        "llama-8b": llamas.LLAMA_3_8B,
        "tiny": llamas.TINY,
    }[name]
    model = lm.models.Llama(config, dtype=jnp.bfloat16)
    return model, llamas.random_params(model, 0)


def engine_of(
    target: tuple[Any, Any], slots: int, rates: tuple[float, ...]
) -> tuple[lm.Engine, Any]:
    model, params = target
    config = sd.SpecDecodeConfig(
        num_speculative_tokens=K,
        rejection_sample_method="synthetic",
        synthetic_acceptance_rates=rates,
    )
    length = 16 + (K + 1) * (STEPS + LEARNING_STEPS)
    engine = lm.Engine(
        model, FreeDrafter(), config, num_slots=slots, max_length=length, draft_budget=BUDGET,
        prefill_sizes=(8, length),
    )  # fmt: skip
    return engine, params


def by_device(
    target: tuple[Any, Any], slots: int, rates: tuple[float, ...], repeats: int
) -> tuple[list[float], list[dict[str, Any]]]:
    """The measured costs, and tokens per second of each number of drafts."""
    engine, params = engine_of(target, slots, rates)
    first = lm.EngineDriver(engine, params)
    first.warm_up()
    assert first.draft_choice is not None
    costs = first.draft_choice.costs
    assert costs is not None
    samples: dict[int | str, list[float]] = {k: [] for k in (*FIXED, "adaptive")}
    best = None
    for _, k in itertools.product(range(repeats), samples):
        driver = lm.EngineDriver(engine, params, step_costs=costs)
        driver.draft_choice = choice_of(k, costs)
        for _ in range(slots):
            driver.submit([100] * 4, max_new_tokens=engine.max_length - 4)
        while driver.num_queued:
            driver.step()
        for _ in range(LEARNING_STEPS):
            driver.step()
        begin, tokens = time.perf_counter(), 0
        for _ in range(STEPS):
            tokens += sum(len(update.token_ids) for update in driver.step())
        samples[k].append(tokens / (time.perf_counter() - begin))
        if k == "adaptive":
            best = driver.draft_choice.best
    rows = [
        {"k": k, "tokens_per_second": measure.median(found), "samples": found}
        | ({"best": best} if k == "adaptive" else {})
        for k, found in samples.items()
    ]
    return list(costs.seconds), rows


def draw(all_rows: list[dict[str, Any]]) -> Figure:
    """Tokens per second over slots, against no speculation, wherever all of `SLOTS` were run."""
    slots: dict[str, set[int]] = {r["by"]: set() for r in all_rows}
    for row in all_rows:
        slots[row["by"]].add(row["slots"])
    shown = [by for by, found in slots.items() if found == {*SLOTS}]
    figure = Figure(figsize=(9, 3.8 * len(shown)), layout="constrained")
    all_axes = figure.subplots(len(shown), len(RATES), sharex=True, sharey=True, squeeze=False)
    for ax, (by, name) in zip(all_axes.flat, itertools.product(shown, RATES), strict=True):
        rows = [r for r in all_rows if r["by"] == by and r["rates"] == name]
        plain = {r["slots"]: r["tokens_per_second"] for r in rows if r["k"] == 0}
        for k in (*FIXED, "adaptive"):
            mine = [r for r in rows if r["k"] == k]
            y = [r["tokens_per_second"] / plain[r["slots"]] for r in mine]
            label = "no speculation" if k == 0 else k if k == "adaptive" else f"K = {k}"
            style = dict(color="k", linewidth=2.5) if k == "adaptive" else dict(linestyle="--")
            ax.plot([r["slots"] for r in mine], y, label=label, marker="o", markersize=4, **style)
        first, second, *_ = RATES[name]
        title = "cost by rows" if by == "rows" else by
        ax.set(xscale="log", title=f"{title}; accepted: {first}, {second}, ...")
        ax.set_xticks(SLOTS, [str(n) for n in SLOTS])
        ax.minorticks_off()
        ax.grid(alpha=0.3)
    for ax in all_axes[-1]:
        ax.set_xlabel("slots")
    for ax in all_axes[:, 0]:
        ax.set_ylabel("tokens per second / no speculation")
    all_axes[0, 0].legend(fontsize="small")
    return figure


def main() -> None:
    parser = measure.parser(__doc__, repeats=2)
    parser.add_argument("--model-only", action="store_true", help="keep what the device showed")
    parser.add_argument("--slots", type=int, nargs="*", default=(1, 8, 32), help="on the device")
    parser.add_argument("--target", default="embedded", help="embedded, llama-1b or llama-8b")
    given = parser.parse_args()
    results = measure.Results("draft_budget", ("by", "rates", "slots", "k"))
    for (name, rates), slots in itertools.product(RATES.items(), SLOTS):
        case = {"by": "rows", "rates": name, "slots": slots}
        for k in (*FIXED, "adaptive"):
            results.add([{**case, "k": k, **by_model(slots, rates, k)}])
    if not given.model_only:
        target = target_of(given.target)
        here = f"{given.target} on {jax.devices()[0].device_kind}"
        for (name, rates), slots in itertools.product(RATES.items(), given.slots):
            costs, found = by_device(target, slots, rates, given.repeats)
            case = {"by": here, "rates": name, "slots": slots, "costs": costs}
            results.add([{**case, **row} for row in found])
    rows = results.document["rows"]
    cells = []
    for by, name, slots in sorted({(r["by"], r["rates"], r["slots"]) for r in rows}):
        mine = [r for r in rows if (r["by"], r["rates"], r["slots"]) == (by, name, slots)]
        speeds = {r["k"]: r["tokens_per_second"] for r in mine}
        share = speeds["adaptive"] / max(speed for k, speed in speeds.items() if k != "adaptive")
        best = next(r["best"] for r in mine if r["k"] == "adaptive")
        shown = {str(k): f"{speed:.1f}" for k, speed in speeds.items()}
        case = {"by": by, "accepted": name, "slots": slots}
        cells.append(case | shown | {"of the best": f"{share:.3f}", "best now": best})
    measure.show("tokens per second by the number of drafts", cells)
    path = results.path.with_suffix(".png")
    draw(rows).savefig(path, dpi=120, metadata={"Software": None})


if __name__ == "__main__":
    main()
