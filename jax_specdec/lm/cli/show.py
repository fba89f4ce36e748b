"""What `generate` and `bench` print: text in colours, a line of statistics, a table, or JSON.

`command` calls `show`, which loads the models, has a `Session` decode, and prints what comes. What
was asked for goes to standard output, so that a pipe gets it alone: texts, tables, JSON. What is
about the run goes to standard error: progress, statistics, and why something failed. Exit codes are
set last, when all has been printed.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import sys
import time

import numpy as np
from rich.text import Text

from jax_specdec._src.stats.acceptance import AcceptanceStats
from jax_specdec._src.stats.emitted import StepRecord
from jax_specdec.lm import terminal
from jax_specdec.lm.cli import report
from jax_specdec.lm.cli.models import load
from jax_specdec.lm.cli.options import Bench, Decoding, Generate
from jax_specdec.lm.cli.run import Completion, Run, Session, StartedTexts, stacked

STYLES = {"accepted": "green", "recovered": "bold red", "bonus": "bold cyan", "plain": None}
LOADING = "loading the models"
_LEAST_PLAIN = 5
_LEAST_LOSS = 1.03
_LEAST_SECONDS = 1.0
"""When drafts are said not to pay: so many steps without drafts, a ratio of times, and seconds."""


class Printer:
    """Prints the texts of a batch one after another.

    The first is printed as it comes; each of the others waits until the one before it has ended.
    """

    def __init__(self, prompts: list[str], texts: list[Completion], *, with_prompts: bool) -> None:
        """Prints what stands before the first text.

        Args:
          prompts: of the texts.
          with_prompts: whether to print a prompt before its continuation.
        """
        self._prompts = prompts
        self._texts = texts
        self._with_prompts = with_prompts
        self._now = 0  # the text that is printed as it comes
        self._num_shown = 0  # pieces of it
        self._print_head()

    def print_new(self) -> None:
        """Prints what the texts have that was not printed yet."""
        while self._now < len(self._texts):
            text = self._texts[self._now]
            for piece in text.pieces[self._num_shown :]:
                terminal.write(piece.text, STYLES[piece.origin])
            self._num_shown = len(text.pieces)
            # The texts after this one are kept until it has ended.
            if not text.is_done:
                return
            terminal.write("\n")
            self._now += 1
            self._num_shown = 0
            if self._now < len(self._texts):
                self._print_head()

    def _print_head(self) -> None:
        # Alone, a text is printed as it is, for a pipe.
        total = len(self._prompts)
        if total > 1:
            terminal.write(f"==> {self._now + 1} of {total} <==\n", "bold")
        if self._with_prompts:
            terminal.write(self._prompts[self._now], "dim")


def show(options: Decoding, prompts: list[str]) -> None:
    """Runs `generate` or `bench`, and prints what comes of it.

    Raises:
      InputError: as `load` does.
    """
    if isinstance(options, Bench):
        _show_bench(options, prompts)
    elif options.json:
        _show_json(options, prompts)
    else:
        _show_text(options, prompts)


def _show_text(options: Generate, prompts: list[str]) -> None:
    """Streams the texts, then prints one line of statistics, or compares with plain decoding."""
    compares = options.repeats is not None
    session, stream, preparing = _begin(options, prompts)
    # When the first step was there, and when the text of each step was printed: S + 1 times.
    times = [time.perf_counter()]
    # --compare explains the colours, and sets the text apart from its table.
    if compares:
        legend = Text("Tokens:")
        for name, style in STYLES.items():
            if style is not None:
                legend.append("  ").append(name, style)
        terminal.show(legend)
        terminal.show_rule()
    printer = Printer(prompts, stream.texts, with_prompts=options.shows_prompts)
    records: list[StepRecord] = []
    # The first step was taken by `_begin`; each other one is taken here, when it is asked for.
    for record in stream.steps:
        printer.print_new()
        records.append(record)
        times.append(time.perf_counter())
    runs: list[Run] = []
    if compares:
        terminal.show_rule()
        runs = _compare(session)
        terminal.show(report.table(options, runs))
    else:
        count = sum(map(len, session.prompts))
        terminal.log(
            f"{count} prompt tokens read, first token after {stream.first_token:.2f} s; before "
            f"that, {preparing:.1f} s to load and compile",
            "dim",
        )
        _log_statistics(stacked(records), stream.texts, times[-1] - times[0])
        _log_costly_drafts(records, times)
    if options.config.rejection_sample_method == "synthetic":
        terminal.log("Synthetic acceptance: the text is not the target's.")
    _check_verified(stream.texts)
    _check_runs(options, runs)


def _show_json(options: Generate, prompts: list[str]) -> None:
    """Prints one JSON object with the texts, their pieces' origins and the figures."""
    session, stream, preparing = _begin(options, prompts)
    # All steps are taken before anything is printed: one object, or none.
    records = stacked(list(stream.steps))
    result: dict[str, object] = {
        "requests": [
            {
                "prompt": prompt,
                "text": "".join(piece.text for piece in text.pieces),
                "pieces": [dataclasses.asdict(piece) for piece in text.pieces],
                "num_tokens": len(text.origins),
                "verified": not text.has_failed,
            }
            for prompt, text in zip(prompts, stream.texts, strict=True)
        ],
        "config": options.config.to_dict(),
        "draft": options.drafters[0],
        "temperature": options.temperatures[0],
        "options": dataclasses.asdict(session.request(options.temperatures[0])),
        "num_tokens": int(records.num_kept.sum()),
        "num_target_passes": len(records.num_kept),
        "load_and_compile_seconds": preparing,
        "first_token_seconds": stream.first_token,
        **AcceptanceStats.from_steps(records).to_dict(),
    }
    runs = [] if options.repeats is None else _compare(session)
    report.write_json(session, result, runs or None)
    _check_verified(stream.texts)
    _check_runs(options, runs)


def _show_bench(options: Bench, prompts: list[str]) -> None:
    """Runs every combination; prints a table and what follows from it, or one JSON object."""
    with terminal.progress(LOADING):
        session = Session(options, *load(options, prompts))
    runs = _compare(session)
    if options.json:
        report.write_json(session, dict(prompts=prompts, repeats=options.repeats), runs)
        _check_runs(options, runs)
        return
    terminal.show(report.table(options, runs))
    # One phrase for each temperature, of what has not failed; runs are in the order of these.
    fastest = []
    comparable = [run for run in runs if run.speedup is not None]
    for temperature, group in itertools.groupby(comparable, lambda x: x.temperature):
        best = max(group, key=lambda run: run.tokens_per_second)
        speed = "" if best.plain is None else f" ({best.speedup:.2f} times plain decoding)"
        fastest.append(f"{best.name}{speed} at temperature {temperature:g}")
    if fastest:
        terminal.show(Text(f"Fastest on these prompts: {', '.join(fastest)}."))
    _check_runs(options, runs)


def _check_runs(options: Decoding, runs: list[Run]) -> None:
    """Exits with code 1 if a way of decoding has failed, after one line for each."""
    failed = [run for run in runs if run.errors]
    for run in failed:
        which = f"{run.name} at temperature {run.temperature:g}"
        terminal.log(f"jax-specdec {options.command}: {which} failed: {run.errors[0]:.500}")
    if failed:
        sys.exit(1)


def _check_verified(texts: list[Completion]) -> None:
    """Exits with code 1 and one line if a text broke off."""
    broken = [str(b + 1) for b, text in enumerate(texts) if text.has_failed]
    if broken:
        which = f" {', '.join(broken)} of {len(texts)}" if len(texts) > 1 else ""
        terminal.log(
            f"jax-specdec: text{which} broke off: the target's logits there are not finite"
        )
        sys.exit(1)


def _begin(options: Generate, prompts: list[str]) -> tuple[Session, StartedTexts, float]:
    """Returns a session, its texts, and the seconds to load and to compile."""
    begin = time.perf_counter()
    # The moving line is gone before the first text is printed.
    with terminal.progress(LOADING) as say:
        session = Session(options, *load(options, prompts))
        loading = time.perf_counter() - begin
        stream = session.begin(say)
    return session, stream, loading + stream.compiling


def _log_statistics(steps: StepRecord, texts: list[Completion], seconds: float) -> None:
    """Writes one line about all steps, which came in so many seconds after the first."""
    stats = AcceptanceStats.from_steps(steps)
    num_kept = np.asarray(steps.num_kept)  # [S, B]
    origins = collections.Counter(origin for text in texts for origin in text.origins)
    # The first step is not timed: it includes compiling.
    speed = f" at {num_kept[1:].sum() / seconds:.0f} per second" if len(num_kept) > 1 else ""
    # One line in pieces, each origin in the colour of its tokens; `log` ends it.
    terminal.write(f"{num_kept.sum()} tokens{speed}: ", "dim", stream=sys.stderr)
    for i, name in enumerate(name for name in STYLES if origins[name]):
        terminal.write(", " if i else "", "dim", stream=sys.stderr)
        terminal.write(f"{origins[name]} {name}", STYLES[name], stream=sys.stderr)
    terminal.log(
        f"; {stats.tokens_per_target_pass:.2f} per target pass, mean acceptance length "
        f"{stats.length_text}",
        "dim",
    )


def _log_costly_drafts(records: list[StepRecord], times: list[float]) -> None:
    """Writes one line if drafts made a text late.

    Steps of one request without drafts show what plain decoding takes: on CPUs they are faster.

    Args:
      records: of all steps.
      times: when the first one was there, and when the text of each was printed.
    """
    # [S - 1]: of all but the first step, which was taken before the first time
    num_kept = np.array([record.num_kept.sum() for record in records[1:]])
    is_plain = np.array([not record.num_proposed.any() for record in records[1:]], bool)
    # [S + 1] -> [S] -> [S - 1]
    seconds = np.diff(times)[1:]
    # Of one request alone, for which plain decoding takes a step for each token.
    if records[0].num_kept.size > 1 or is_plain.sum() < _LEAST_PLAIN:
        return
    plain = float(np.median(seconds[is_plain]) * num_kept.sum())
    if seconds.sum() > max(_LEAST_LOSS * plain, plain + _LEAST_SECONDS):
        terminal.log(
            f"Drafts cost more than they brought: {seconds.sum():.1f} s, and about {plain:.1f} s "
            "with --draft none",
            "dim",
        )


def _compare(session: Session) -> list[Run]:
    """Times every way of decoding, at every temperature."""
    temperatures = session.options.temperatures
    total = len(temperatures) * session.num_runs
    with terminal.progress("timing", total) as on_run:
        return [run for temperature in temperatures for run in session.compare(temperature, on_run)]
