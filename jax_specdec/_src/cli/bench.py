"""`jax-specdec bench`: acceptance and speed over drafters, temperatures and numbers of drafts."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from typing import Any

from rich import box
from rich.table import Table

from jax_specdec._src.cli import terminal
from jax_specdec._src.cli.models import load_models
from jax_specdec._src.cli.options import Options
from jax_specdec._src.cli.run import Comparison, Session, measure
from jax_specdec._src.config import SpecDecodeConfig
from jax_specdec._src.serving.generate import GenerateOutput, GreedyDifference


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
      temperature: of all requests.
      drafter: as the options name it; None for plain decoding.
      config: how it drafted and verified; None for plain decoding.
      comparison: with plain decoding.
    """

    temperature: float
    drafter: str | None
    config: SpecDecodeConfig | None
    comparison: Comparison


def show_bench(options: Options, prompts: list[str]) -> None:
    """Run every combination, then print a table, or one JSON object."""
    with terminal.spinner("loading the models"):
        session = Session(options, load_models(options, prompts))
    assert options.repeats is not None
    num_kinds = 1 + len(options.drafters) * len(options.configs)
    total = len(options.temperatures) * num_kinds * (options.repeats + 1)
    rows = []
    with terminal.progress_bar("bench", total) as on_run:
        for temperature in options.temperatures:
            rows += _measure(session, temperature, on_run)
    if options.json:
        terminal.write(json.dumps(_as_json(options, prompts, rows)) + "\n")
    else:
        terminal.show(_table(options, rows))


def _measure(session: Session, temperature: float, on_run: Callable[[str], None]) -> list[Row]:
    """The rows of one temperature: plain decoding first."""
    options = session.options
    combinations: dict[str, tuple[str, SpecDecodeConfig]] = {
        f"{drafter}, K = {config.num_speculative_tokens}": (drafter, config)
        for drafter in options.drafters
        for config in options.configs
    }
    kinds: dict[str, Callable[[], GenerateOutput]] = {
        "plain": functools.partial(session.plain, temperature)
    }
    for name, (drafter, config) in combinations.items():
        kinds[name] = functools.partial(session.speculative, drafter, config, temperature)
    assert options.repeats is not None
    runs = measure(
        kinds, options.repeats, lambda name: on_run(f"temperature {temperature:g}, {name}")
    )
    plain = runs["plain"]
    rows = [Row(temperature, None, None, Comparison(plain, plain, None))]
    for name, (drafter, config) in combinations.items():
        comparison = session.compare(runs[name], plain, temperature)
        rows.append(Row(temperature, drafter, config, comparison))
    return rows


def _table(options: Options, rows: list[Row]) -> Table:
    table = Table(
        title=f"{options.configs[0].rejection_sample_method} verification at temperatures T, "
        f"median of {options.repeats}",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    table.add_column("T", justify="right", no_wrap=True)
    table.add_column("drafter", overflow="fold")
    headers = ("K", "tokens", "tokens per\ntarget pass", "mean\nacceptance\nlength", "tokens/s")
    for name in (*headers, "speed-up"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("greedy\nas plain", no_wrap=True)
    for row in rows:
        run, config = row.comparison.run, row.config
        table.add_row(
            f"{row.temperature:g}",
            "plain" if row.drafter is None else row.drafter,
            "" if config is None else f"{config.num_speculative_tokens}",
            f"{run.num_tokens}",
            f"{run.stats.tokens_per_target_pass:.2f}",
            "" if config is None else f"{run.stats.mean_acceptance_length:.2f}",
            f"{run.tokens_per_second:.0f}",
            "" if config is None else f"{row.comparison.speedup:.2f}x",
            _identity(row.comparison.differences),
            end_section=row is rows[-1] or rows[rows.index(row) + 1].drafter is None,
        )
    return table


def _identity(differences: list[GreedyDifference] | None) -> str:
    if differences is None:
        return ""
    return f"no, gap {differences[0].gap:.0e}" if differences else "yes"


def _as_json(options: Options, prompts: list[str], rows: list[Row]) -> dict[str, Any]:
    return {
        "prompts": prompts,
        "target": None if options.target is None else str(options.target),
        "options": dataclasses.asdict(options.request),
        "seed": options.seed,
        "repeats": options.repeats,
        "rows": [_row_as_json(row) for row in rows],
    }


def _row_as_json(row: Row) -> dict[str, Any]:
    run = row.comparison.run
    return {
        "temperature": row.temperature,
        "draft": row.drafter,
        "config": None if row.config is None else row.config.to_dict(),
        "num_tokens": run.num_tokens,
        "num_target_passes": run.num_target_passes,
        "seconds": run.seconds,
        "tokens_per_second": run.tokens_per_second,
        "speedup": row.comparison.speedup,
        "identical_to_plain": row.comparison.is_identical,
        **run.stats.to_dict(),
    }
