"""How `jax-specdec generate` looks: text in colours and a line of statistics, a table, or JSON."""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
import time
from typing import Any

import numpy as np
from rich.table import Table

from jax_specdec._src.cli import terminal
from jax_specdec._src.cli.models import load_models
from jax_specdec._src.cli.options import Options
from jax_specdec._src.cli.run import (
    Comparison,
    Run,
    Session,
    TextStep,
    measure,
    stacked,
)
from jax_specdec._src.serving.batch import StepRecord
from jax_specdec._src.serving.generate import GreedyDifference
from jax_specdec._src.serving.metrics import AcceptanceStats

STYLES = {"accepted": "green", "recovered": "bold red", "bonus": "bold cyan", "plain": None}
COMPILING = "loading the models and compiling"


class Texts:
    """Prints the texts of a batch one after another.

    The first is printed as it comes; each of the others waits until the one before it has ended.
    """

    def __init__(self, prompts: list[str], *, with_prompts: bool) -> None:
        """Prints the first prompt.

        Args:
          prompts: texts.
          with_prompts: whether to print a prompt before its continuation.
        """
        self._prompts, self._with_prompts = prompts, with_prompts
        self._waiting: list[list[tuple[str, str | None]]] = [[] for _ in prompts]
        self._now = 0
        self._head()

    def add(self, step: TextStep) -> None:
        """Print what a step has made ready."""
        for waiting, pieces in zip(self._waiting, step.pieces, strict=True):
            waiting += [(terminal.printable(p.text), STYLES[p.origin]) for p in pieces]
        while self._now < len(self._prompts):
            for text, style in self._waiting[self._now]:
                terminal.write(text, style)
            self._waiting[self._now].clear()
            if not step.done[self._now]:
                return
            terminal.write("\n")
            self._now += 1
            if self._now < len(self._prompts):
                self._head()

    def _head(self) -> None:
        total = len(self._prompts)
        if total > 1:
            terminal.write(f"==> {self._now + 1} of {total} <==\n", "bold")
        if self._with_prompts:
            terminal.write(terminal.printable(self._prompts[self._now]), "dim")


def show_text(options: Options, prompts: list[str]) -> None:
    """Stream the texts, then print one line of statistics, or compare with plain decoding."""
    compares = options.repeats is not None
    begin = time.perf_counter()
    with terminal.spinner(COMPILING):
        session = Session(options, load_models(options, prompts))
        steps = session.stream()
        first = next(steps)
    started = time.perf_counter()
    if compares:
        terminal.write("Tokens:")
        for name, style in STYLES.items():
            if style is not None:
                terminal.write("  ")
                terminal.write(name, style)
        terminal.write("\n")
        terminal.show_rule()
    texts, seen = Texts(prompts, with_prompts=not options.chat), []
    for step in itertools.chain([first], steps):
        texts.add(step)
        seen.append(step)
    seconds = time.perf_counter() - started
    if compares:
        terminal.show_rule()
        terminal.show(_table(options, _compare(session)))
    else:
        _print_statistics([step.record for step in seen], started - begin, seconds)
    if options.config.rejection_sample_method == "synthetic":
        terminal.write("Synthetic acceptance: the text is not the target's.\n", stream=sys.stderr)
    check_verified(seen[-1])


def show_json(options: Options, prompts: list[str]) -> None:
    """Print one JSON object with the texts, their pieces' origins and the figures."""
    with terminal.spinner(COMPILING):
        session = Session(options, load_models(options, prompts))
        seen = list(session.stream())
    pieces = [[p for step in seen for p in step.pieces[b]] for b in range(len(prompts))]
    records = stacked([step.record for step in seen])
    stats = AcceptanceStats.from_steps(records)
    result: dict[str, Any] = {
        "requests": [
            {
                "prompt": prompt,
                "text": "".join(piece.text for piece in pieces[b]),
                "pieces": [dataclasses.asdict(piece) for piece in pieces[b]],
                "num_tokens": int(records.num_kept[:, b].sum()),
                "verified": not seen[-1].failed[b],
            }
            for b, prompt in enumerate(prompts)
        ],
        "config": options.config.to_dict(),
        "target": None if options.target is None else str(options.target),
        "draft": options.drafters[0],
        "temperature": options.temperatures[0],
        "options": dataclasses.asdict(options.request),
        "seed": options.seed,
        "num_tokens": int(records.num_kept.sum()),
        "num_target_passes": len(seen),
        **stats.to_dict(),
    }
    if options.repeats is not None:
        comparison = _compare(session)
        differences = comparison.differences
        result |= {
            "seconds": comparison.run.seconds,
            "plain_seconds": comparison.plain.seconds,
            "num_plain_tokens": comparison.plain.num_tokens,
            "speedup": comparison.speedup,
            "identical_to_plain": comparison.is_identical,
            "differences": None
            if differences is None
            else [dataclasses.asdict(difference) for difference in differences],
        }
    terminal.write(json.dumps(result) + "\n")
    check_verified(seen[-1])


def check_verified(last: TextStep) -> None:
    """Exit with code 1 and one line if a text broke off."""
    broken = [str(b + 1) for b, failed in enumerate(last.failed) if failed]
    if broken:
        of = f" {', '.join(broken)} of {len(last.failed)}" if len(last.failed) > 1 else ""
        terminal.write(
            f"jax-specdec: text{of} broke off: the target's logits there are not finite\n",
            stream=sys.stderr,
        )
        sys.exit(1)


def _print_statistics(records: list[StepRecord], before: float, seconds: float) -> None:
    """One line on standard error."""
    steps = stacked(records)
    stats = AcceptanceStats.from_steps(steps)
    kept = np.asarray(steps.num_kept)
    speed = ""
    if len(kept) > 1:  # the first step includes compiling
        speed = f" at {kept[1:].sum() / seconds:.0f} per second"
    terminal.write(f"{kept.sum()} tokens{speed}: ", "dim", stream=sys.stderr)
    for i, (name, count) in enumerate(_origins(steps).items()):
        terminal.write(", " if i else "", "dim", stream=sys.stderr)
        terminal.write(f"{count} {name}", STYLES[name], stream=sys.stderr)
    terminal.write(
        f"; {stats.tokens_per_target_pass:.2f} per target pass, mean acceptance length "
        f"{stats.mean_acceptance_length:.2f}; {before:.1f} s to load and compile\n",
        "dim",
        stream=sys.stderr,
    )


def _origins(steps: StepRecord) -> dict[str, int]:
    """The number of kept tokens from each origin that has any."""
    kept, accepted = np.asarray(steps.num_kept), np.asarray(steps.num_accepted)
    proposed, last = np.asarray(steps.num_proposed), kept > accepted
    counts = {
        "accepted": np.minimum(kept, accepted).sum(),
        "recovered": (last & (accepted < proposed)).sum(),
        "bonus": (last & (accepted == proposed) & (proposed > 0)).sum(),
        "plain": (last & (proposed == 0)).sum(),
    }
    return {name: int(count) for name, count in counts.items() if count}


def _compare(session: Session) -> Comparison:
    options = session.options
    assert options.repeats is not None
    draft, temperature = options.drafters[0], options.temperatures[0]
    kinds = {
        "speculative": lambda: session.speculative(draft, options.config, temperature),
        "plain": lambda: session.plain(temperature),
    }
    total = 2 * (options.repeats + 1)
    with terminal.progress_bar("timing against plain decoding", total) as on_run:
        runs = measure(kinds, options.repeats, on_run)
    return session.compare(runs["speculative"], runs["plain"], temperature)


def _drafter_name(draft: str) -> str:
    return "n-gram lookup" if draft == "ngram" else "draft model"


def _table(options: Options, comparison: Comparison) -> Table:
    run, stats = comparison.run, comparison.run.stats
    table = Table(
        title=f"K = {options.config.num_speculative_tokens}, {_drafter_name(options.drafters[0])}, "
        f"temperature {options.temperatures[0]:g}, {options.config.rejection_sample_method}",
        show_header=False,
        title_justify="left",
    )
    table.add_column()
    table.add_column(justify="right")
    rates = "  ".join(f"{rate:.0%}" for rate in stats.unconditional_rates)
    rows = {
        "tokens": f"{run.num_tokens}",
        "target passes": f"{run.num_target_passes}",
        "tokens per target pass": f"{stats.tokens_per_target_pass:.2f}",
        "mean acceptance length": f"{stats.mean_acceptance_length:.2f}",
        "accepted up to each position": rates,
        "speculative decoding": _timing(run),
        "plain decoding": _timing(comparison.plain),
        f"speed-up per token (median of {options.repeats})": f"{comparison.speedup:.2f}x",
        "greedy output identical to plain": _identity(comparison.differences),
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _timing(run: Run) -> str:
    return f"{run.seconds:.3f} s, {run.tokens_per_second:.0f} tokens/s"


def _identity(differences: list[GreedyDifference] | None) -> str:
    if differences is None:
        return "not comparable"
    if not differences:
        return "yes"
    first = differences[0]
    return f"no: token {first.index}, logit gap {first.gap:.1e}"
