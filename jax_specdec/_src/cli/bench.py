"""`jax-specdec bench`: acceptance and speed over drafters, temperatures and numbers of drafts."""

from __future__ import annotations

import dataclasses
import itertools
import json

from rich.text import Text

from jax_specdec._src.cli import report, terminal
from jax_specdec._src.cli.costs import measure_costs
from jax_specdec._src.cli.models import load_models
from jax_specdec._src.cli.options import Options
from jax_specdec._src.cli.run import Comparison, Session


def show_bench(options: Options, prompts: list[str]) -> None:
    """Run every combination; print a table and what follows from it, or one JSON object."""
    with terminal.spinner("loading the models"):
        session = Session(options, load_models(options, prompts))
    comparisons = []
    total = len(options.temperatures) * session.num_runs
    with terminal.progress_bar("bench", total) as on_run:
        for temperature in options.temperatures:
            comparisons += session.compare(temperature, on_run)
    with terminal.spinner("timing the models alone"):
        costs = measure_costs(session)
    if options.json:
        found = {
            "prompts": prompts,
            "target": None if options.target is None else str(options.target),
            "seed": options.seed,
            "repeats": options.repeats,
            "rows": report.rows_as_json(session, comparisons),
            "costs": dataclasses.asdict(costs),
        }
        terminal.write(json.dumps(found) + "\n")
    else:
        terminal.show(report.table(options, comparisons))
        terminal.show(Text(f"{costs} {_fastest(comparisons)}"))


def _fastest(comparisons: list[Comparison]) -> str:
    """The fastest way of decoding at each temperature, in a sentence."""
    found = []
    for temperature, group in itertools.groupby(comparisons, lambda x: x.run.temperature):
        best = max(group, key=lambda comparison: comparison.speedup)
        speed = "" if best.run is best.plain else f" ({best.speedup:.2f} times plain decoding)"
        found.append(f"{best.run.name}{speed} at temperature {temperature:g}")
    return f"Fastest on these prompts: {', '.join(found)}."
