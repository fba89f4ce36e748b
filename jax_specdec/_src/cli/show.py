"""How `jax-specdec generate` looks: streamed text in colours, then a table; or JSON."""

from __future__ import annotations

import dataclasses
import json

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from jax_specdec._src.cli.options import Options
from jax_specdec._src.cli.run import Report, Session

_VISIBLE = {code: "\ufffd" for code in (*range(9), *range(11, 32), 127)}

STYLES = {"accepted": "green", "recovered": "bold red", "bonus": "bold cyan"}


def printable(text: str) -> str:
    """Text without control characters other than newline and tab."""
    return text.translate(_VISIBLE)


def show_text(options: Options, console: Console) -> None:
    """Stream the text, time both kinds of decoding, print the table."""
    with console.status("loading the models and compiling"):
        session = Session(options)
        steps = session.stream()
        first = next(steps, [])
    legend = Text("  ").join(Text(name, style) for name, style in STYLES.items())
    console.print(Text("Tokens: ") + legend, highlight=False)
    console.rule(style="dim")
    console.print(Text(options.prompt, "dim"), end="", soft_wrap=True)
    for pieces in (first, *steps):
        for piece in pieces:
            text = Text(printable(piece.text), STYLES[piece.origin])
            console.print(text, end="", soft_wrap=True)
    console.print()
    console.rule(style="dim")

    with Progress(console=console, transient=True) as progress:
        runs = 2 * (options.repeats + 1)
        task = progress.add_task("timing against plain decoding", total=runs)
        report = session.measure(lambda: progress.advance(task))
    console.print(_table(options, report))
    if options.config.rejection_sample_method == "synthetic":
        console.print("Synthetic acceptance: the text is not the target's.", style="dim")


def _table(options: Options, report: Report) -> Table:
    stats = report.stats
    drafter = "n-gram lookup" if options.draft == "ngram" else "draft model"
    table = Table(
        title=f"K = {options.config.num_speculative_tokens}, {drafter}, "
        f"temperature {options.temperature:g}, {options.config.rejection_sample_method}",
        show_header=False,
        title_justify="left",
    )
    table.add_column()
    table.add_column(justify="right")
    rates = "  ".join(f"{rate:.0%}" for rate in stats.unconditional_rates)
    rows = {
        "tokens": f"{report.num_tokens}",
        "target passes": f"{report.num_target_passes}",
        "mean acceptance length": f"{stats.mean_acceptance_length:.2f}",
        "accepted up to each position": rates,
        "speculative decoding": _timing(report.seconds, report.num_tokens),
        "plain decoding": _timing(report.plain_seconds, report.num_plain_tokens),
        f"speed-up per token (median of {options.repeats})": f"{report.speedup:.2f}x",
        "greedy output identical to plain": _identity(report),
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _timing(seconds: float, tokens: int) -> str:
    return f"{seconds:.3f} s, {tokens / seconds:.0f} tokens/s"


def _identity(report: Report) -> str:
    if report.differences is None:
        return "not comparable"
    if not report.differences:
        return "yes"
    first = report.differences[0]
    return f"no: token {first.index}, logit gap {first.gap:.1e}"


def show_json(options: Options, console: Console) -> None:
    """Print one JSON object with the text, its pieces' origins and the figures."""
    session = Session(options)
    pieces = [piece for step in session.stream() for piece in step]
    report = session.measure()
    result = {
        "prompt": options.prompt,
        "text": "".join(piece.text for piece in pieces),
        "pieces": [dataclasses.asdict(piece) for piece in pieces],
        "config": options.config.to_dict(),
        "target": None if options.target is None else str(options.target),
        "draft": options.draft,
        "temperature": options.temperature,
        "options": dataclasses.asdict(options.request),
        "seed": options.seed,
        "num_tokens": report.num_tokens,
        "num_target_passes": report.num_target_passes,
        **report.stats.to_dict(),
        "seconds": report.seconds,
        "plain_seconds": report.plain_seconds,
        "num_plain_tokens": report.num_plain_tokens,
        "speedup": report.speedup,
        "identical_to_plain": None if report.differences is None else not report.differences,
        "differences": None
        if report.differences is None
        else [dataclasses.asdict(difference) for difference in report.differences],
    }
    console.print_json(json.dumps(result)) if console.is_terminal else print(json.dumps(result))
