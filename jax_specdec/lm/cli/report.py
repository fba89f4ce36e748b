"""The table and the JSON of a comparison with plain decoding, for `bench` and `--compare`.

`show` prints the table; JSON is one line on standard output. Both have a row for each `Run`.
"""

from __future__ import annotations

import dataclasses
import json

from rich import box
from rich.table import Table
from rich.text import Text

from jax_specdec.lm import terminal
from jax_specdec.lm.cli.options import Decoding
from jax_specdec.lm.cli.run import Run, Session


def table(options: Decoding, done: list[Run]) -> Table:
    """Returns a row for each way of decoding; plain decoding is first at each temperature."""
    runs = f"{options.repeats} runs" if options.repeats != 1 else "1 run"
    title = f"{options.config.rejection_sample_method} verification at temperature T, {runs} each"
    if options.tree is not None:
        title += f"\ntrees of {options.tree} nodes, of paths of at most K"
    if any(run.standard_error is not None for run in done):
        title += "\n\u00b1: standard error over seeds"
    rows = Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    rows.add_column("T", justify="right", no_wrap=True)
    rows.add_column("drafter", overflow="fold")
    headers = ("K", "tokens", "tokens per\ntarget pass", "mean\nacceptance\nlength", "tokens/s")
    for name in (*headers, "speed-up"):
        rows.add_column(name, justify="right", no_wrap=True)
    rows.add_column("greedy\nas plain", no_wrap=True)
    for i, run in enumerate(done):
        config = run.config
        rows.add_row(
            f"{run.temperature:g}",
            Text(terminal.printable(run.drafter or "plain")),
            "" if config is None else f"{config.num_speculative_tokens}",
            # Tokens, tokens per target pass, mean acceptance length, tokens per second.
            *(["-"] * 4 if run.errors else _figures(run)),
            "" if config is None or run.speedup is None else f"{run.speedup:.2f}x",
            run.identity,
            # A line after the last row of each temperature: plain decoding begins the next one.
            end_section=i + 1 == len(done) or done[i + 1].config is None,
        )
    return rows


def _figures(run: Run) -> list[str]:
    """Returns the cells of a run: its tokens, how many a pass emitted, and how fast."""
    stats = run.stats
    plus_minus = "" if run.standard_error is None else f" \u00b1{run.standard_error:.2f}"
    per_pass = f"{stats.tokens_per_target_pass:.2f}{plus_minus}"
    return [f"{run.num_tokens}", per_pass, stats.length_text, f"{run.tokens_per_second:.0f}"]


def write_json(session: Session, result: dict[str, object], runs: list[Run] | None) -> None:
    """Writes a result as one object, with an entry for each row of the table, if any."""
    options = session.options
    result["target"] = None if options.target is None else str(options.target)
    result["seed"] = options.seed
    result["tree"] = options.tree
    if runs is not None:
        result["rows"] = [_row(session, run) for run in runs]
    terminal.write(json.dumps(result) + "\n")


def _row(session: Session, run: Run) -> dict[str, object]:
    """Returns one way of decoding for JSON: without figures if it has failed."""
    of_run = run.differences
    differences = None if of_run is None else [dataclasses.asdict(first) for first in of_run]
    row: dict[str, object] = {
        "temperature": run.temperature,
        "draft": run.drafter,
        "config": None if run.config is None else run.config.to_dict(),
        # As in `Session.compare`: no stop token ends a sampled text.
        "options": dataclasses.asdict(session.request(run.temperature, stops=run.temperature == 0)),
        "error": run.errors[0] if run.errors else None,
    }
    if run.errors:
        return row
    return row | {
        "num_tokens": run.num_tokens,
        "num_target_passes": run.num_target_passes,
        "seconds": run.total_seconds,
        "seconds_per_run": run.seconds,
        "tokens_per_second": run.tokens_per_second,
        "standard_error": run.standard_error,
        "speedup": run.speedup,
        "identical_to_plain": run.is_identical,
        "differences": differences,
        **run.stats.to_dict(),
    }
