"""What `generate` and `bench` do: decode prompts, stream their texts, time both kinds of decoding.

Nothing is printed here. `show` makes a `Session` of the models that `models` has loaded. It prints
the `Completion`s of `Session.begin` while it takes the steps, and gives the `Run`s of
`Session.compare` to `report`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypedDict

import jax
import numpy as np
from jax import monitoring

from jax_specdec._src.base.config import SpecDecodeConfig
from jax_specdec._src.stats.acceptance import AcceptanceStats
from jax_specdec._src.stats.emitted import StepRecord
from jax_specdec.lm.cli.options import Decoding
from jax_specdec.lm.decoding.differences import GreedyDifference, greedy_differences
from jax_specdec.lm.decoding.generate import (
    GenerateOutput,
    generate,
    generate_plain,
    generate_stream,
)
from jax_specdec.lm.decoding.options import RequestOptions
from jax_specdec.lm.drafting.drafter import Drafter
from jax_specdec.lm.loading import Models
from jax_specdec.lm.models.fields import reason
from jax_specdec.lm.models.protocol import Params
from jax_specdec.lm.text.tokenizer import TextStream


@dataclasses.dataclass(frozen=True)
class TextPiece:
    """Some generated text and where it came from.

    Attributes:
      text: what the tokens so far complete.
      origin: "accepted", "recovered", "bonus", or "plain" where there were no drafts.
    """

    text: str
    origin: str


class Completion:
    """The text of one request as it grows.

    Attributes:
      pieces: its parts so far.
      origins: of each of its tokens; see `TextPiece`.
      is_done: whether the request has ended.
      has_failed: whether it has because it could not be verified.
    """

    def __init__(self, stream: TextStream, stop_token_ids: Sequence[int], budget: int) -> None:
        self.pieces: list[TextPiece] = []
        self.origins: list[str] = []
        self.is_done = False
        self.has_failed = False
        self._stream = stream
        self._stop_token_ids = stop_token_ids
        self._budget = budget

    def add(self, token_ids: list[int], num_accepted: int, num_proposed: int) -> None:
        """Adds the tokens of a step; without any, the request could not be verified."""
        # Of the last token, which the target adds behind the accepted drafts.
        last_origin = "plain"
        if num_proposed > 0:
            last_origin = "bonus" if num_accepted == num_proposed else "recovered"
        # Of what was accepted, a stop token or the budget may have cut the end off.
        origins = [*["accepted"] * num_accepted, last_origin][: len(token_ids)]
        self.origins += origins
        # A piece for each token, so that each has its colour; a stop token counts, without a piece.
        self.pieces += [
            TextPiece(self._stream.decode([token]), origin)
            for token, origin in zip(token_ids, origins, strict=True)
            if token not in self._stop_token_ids
        ]
        self.has_failed = not token_ids
        is_full = len(self.origins) >= self._budget
        self.is_done = self.has_failed or is_full or token_ids[-1] in self._stop_token_ids
        # U+FFFD for a character that the text ends within.
        if self.is_done and (ending := self._stream.decode([], final=True)):
            self.pieces.append(TextPiece(ending, last_origin))


@dataclasses.dataclass(frozen=True)
class StartedTexts:
    """Texts whose first step was taken.

    Attributes:
      texts: of each request.
      steps: the record of each step, from the first on. The next is taken, and its tokens are
        added to the texts, when it is asked for.
      compiling: seconds in which JAX traced and compiled.
      first_token: the other seconds before the first step was done: prompts were read, mostly.
    """

    texts: list[Completion]
    steps: Iterator[StepRecord]
    compiling: float
    first_token: float


@dataclasses.dataclass
class Run:
    """One way of decoding the prompts, run several times after it was compiled.

    Attributes:
      temperature: of all requests.
      drafter: as the options name it; None for plain decoding.
      config: how it drafted and verified; None for plain decoding.
      plain: plain decoding of the same requests; None for that itself.
      outputs: what it generated: greedy texts once, sampled ones for each seed.
      seconds: wall time of each run.
      errors: why it failed, if it did; it is then run no more.
      differences: of greedy texts from those of plain decoding; None if they need not agree.
    """

    temperature: float
    drafter: str | None = None
    config: SpecDecodeConfig | None = None
    plain: Run | None = None
    outputs: list[GenerateOutput] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)
    errors: list[str] = dataclasses.field(default_factory=list)
    differences: list[GreedyDifference] | None = None

    @contextlib.contextmanager
    def containing_errors(self) -> Iterator[None]:
        """Notes an error of what may fail for this kind alone, as where it needs much memory."""
        try:
            yield
        except Exception as error:
            self.errors.append(f"{type(error).__name__}: {reason(error)}")

    @property
    def name(self) -> str:
        """What it is, for a person."""
        if self.config is None:
            return "plain decoding"
        return f"{self.drafter} with K = {self.config.num_speculative_tokens}"

    @property
    def stats(self) -> AcceptanceStats:
        """Acceptance, over all seeds."""
        steps = [output.steps for output in self.outputs]
        # [S, B, ...] of each seed, which has its own S -> [sum of S, B, ...]
        return AcceptanceStats.from_steps(jax.tree.map(lambda *x: np.concatenate(x), *steps))

    @property
    def num_tokens(self) -> int:
        """Tokens generated, of all requests and seeds."""
        return sum(len(ids) for output in self.outputs for ids in output.completions)

    @property
    def num_target_passes(self) -> int:
        """Target passes over all seeds, without those that read the prompts."""
        # Arrays of a record are [S, B, ...]: a step is one pass for all requests.
        return sum(len(output.steps.num_kept) for output in self.outputs)

    @property
    def total_seconds(self) -> float:
        """Time for `num_tokens`: the median of equal runs, or the sum over seeds."""
        if len(self.outputs) == 1:
            return statistics.median(self.seconds)
        return sum(self.seconds)

    @property
    def tokens_per_second(self) -> float:
        """Tokens generated per second, of all requests."""
        return self.num_tokens / self.total_seconds

    @property
    def standard_error(self) -> float | None:
        """The standard error of tokens per target pass over seeds; None without several."""
        if self.config is None or len(self.outputs) < 2:
            return None
        tokens_per_pass = [
            AcceptanceStats.from_steps(output.steps).tokens_per_target_pass
            for output in self.outputs
        ]
        return statistics.stdev(tokens_per_pass) / math.sqrt(len(tokens_per_pass))

    @property
    def is_identical(self) -> bool | None:
        """Whether all texts are those of plain decoding; None if they need not be."""
        return None if self.differences is None else not self.differences

    @property
    def identity(self) -> str:
        """`is_identical` for a person, with how close the first decision was that differs."""
        if self.errors:
            return "failed"
        if not self.differences:
            return "" if self.differences is None else "yes"
        return f"no, gap {self.differences[0].gap:.0e}"

    @property
    def speedup(self) -> float | None:
        """Time per token of plain decoding, divided by its own; None if one of them has failed."""
        plain = self.plain or self
        if self.errors or plain.errors:
            return None
        return self.tokens_per_second / max(plain.tokens_per_second, 1e-9)


@contextlib.contextmanager
def compilations(on_program: Callable[[str], None]) -> Iterator[list[tuple[float, float]]]:
    """Yields the spans of time in which JAX traces or compiles; they grow while the body runs.

    Args:
      on_program: called with the name of each program when it is compiled.
    """
    spans: list[tuple[float, float]] = []

    def listen(event: str, duration_secs: float, **about: str | int) -> None:
        if not event.startswith("/jax/core/compile/"):
            return
        end = time.perf_counter()
        begin = end - duration_secs
        # JAX traces functions while it traces others, so spans lie within each other. An event is
        # reported when it ends: what came inside of it counts once.
        while spans and spans[-1][0] >= begin:
            spans.pop()
        spans.append((begin, end))
        if event.endswith("backend_compile_duration"):
            on_program(str(about.get("fun_name")))

    monitoring.register_event_duration_secs_listener(listen)
    try:
        yield spans
    finally:
        monitoring.unregister_event_duration_listener(listen)


class _Drafting(TypedDict):
    drafter: Drafter
    draft_params: Params | None
    config: SpecDecodeConfig


def stacked(records: list[StepRecord]) -> StepRecord:
    """Returns the records of S steps of B requests as one, with arrays ``[S, B, ...]``."""
    return jax.tree.map(lambda *leaves: np.stack(leaves), *records)


@dataclasses.dataclass(frozen=True)
class Session:
    """Models that are loaded, and the prompts and the budget of the requests to decode."""

    options: Decoding
    models: Models
    prompts: list[list[int]]
    prediction: list[int] | None
    max_new_tokens: int

    def begin(self, say: Callable[[str], None]) -> StartedTexts:
        """Compiles, reads the prompts and takes the first step.

        The first drafter, temperature and K of the options are used.

        Args:
          say: called with what is going on.
        """
        text = self.models.text
        texts = [
            Completion(text.stream(prompt), text.stop_token_ids, self.max_new_tokens)
            for prompt in self.prompts
        ]

        # The program that reads prompts is called as soon as it is compiled.
        def on_program(name: str) -> None:
            if "prefill" in name:
                say(f"reading {sum(map(len, self.prompts))} prompt tokens")

        say("compiling")
        steps = self._steps(texts)
        begin = time.perf_counter()
        # `_steps` is a generator: here requests are laid out, both programs are compiled, and the
        # prompts are read.
        with compilations(on_program) as spans:
            first = next(steps)
        seconds = time.perf_counter() - begin
        compiling = sum(end - begin for begin, end in spans)
        return StartedTexts(texts, itertools.chain([first], steps), compiling, seconds - compiling)

    def _steps(self, texts: list[Completion]) -> Iterator[StepRecord]:
        """Yields the record of each step, after adding its tokens to the texts."""
        steps = generate_stream(
            *self.models.target,
            self.prompts,
            **self._drafting(self.options.drafters[0], self.options.config),
            options=self.request(self.options.temperatures[0]),
            key=jax.random.key(np.uint32(self.options.seed)),
            exact=self.options.exact,
        )
        for record in steps:
            for b, text in enumerate(texts):
                # A step goes on with all requests until the last has ended. token_ids [B, K + 1].
                if not text.is_done:
                    token_ids = record.token_ids[b, : int(record.num_kept[b])].tolist()
                    text.add(token_ids, int(record.num_accepted[b]), int(record.num_proposed[b]))
            yield record

    def compare(self, temperature: float, on_run: Callable[[str], None]) -> list[Run]:
        """Times plain decoding, then every drafter with every config, at one temperature.

        The runs take turns, so that a busy machine slows all of them. At a temperature each run of
        one kind has a seed of its own, and stop tokens do not end texts: else a text that happens
        to be easy or short would look like a good K.

        Args:
          temperature: of all requests.
          on_run: called with a name before each run, of which there are `num_runs`.

        Returns:
          One entry for each kind; the first compares plain decoding with itself. One that fails
          has no results, and the others go on.
        """
        repeats = self.options.repeats
        assert repeats is not None
        plain = Run(temperature)
        kinds = itertools.product(self.options.drafters, self.options.configs)
        runs = [plain, *(Run(temperature, *kind, plain) for kind in kinds)]
        # Seeds: the compiling run and the first that is timed have the first one.
        for repeat in range(repeats + 1):  # the first compiles
            for run in runs:
                on_run(f"timing: {run.name} at temperature {temperature:g}")
                # It has its turn on the progress bar all the same.
                if run.errors:
                    continue
                number = max(repeat - 1, 0) if temperature > 0 else 0
                begin = time.perf_counter()
                with run.containing_errors():
                    output = self._generate(run, (self.options.seed + number) % 2**32)
                    if repeat > 0:
                        run.seconds.append(time.perf_counter() - begin)
                    # Greedy texts are the same in each run: one is kept.
                    if repeat == 1 or (repeat > 1 and temperature > 0):
                        run.outputs.append(output)
        for run in runs:
            with run.containing_errors():
                run.differences = self._differences(run)
        return runs

    @property
    def num_runs(self) -> int:
        """How many runs `compare` makes, those that compile among them."""
        options = self.options
        assert options.repeats is not None
        num_kinds = 1 + len(options.drafters) * len(options.configs)
        return num_kinds * (options.repeats + 1)

    def request(self, temperature: float, *, stops: bool = True) -> RequestOptions:
        """Returns what every request asks for, with or without stop tokens."""
        return dataclasses.replace(
            self.options.request,
            temperature=temperature,
            prediction=self.prediction,
            max_new_tokens=self.max_new_tokens,
            stop_token_ids=self.models.text.stop_token_ids if stops else (),
        )

    def _generate(self, run: Run, seed: int) -> GenerateOutput:
        """Decodes the requests in one compiled loop."""
        target = self.models.target
        options = self.request(run.temperature, stops=run.temperature == 0)
        key = jax.random.key(np.uint32(seed))
        exact = self.options.exact
        # Plain decoding has the first config: its rule decides how tokens are drawn, and under
        # --exact its K how many rows a pass has.
        if run.drafter is None or run.config is None:
            config = self.options.config
            return generate_plain(
                *target, self.prompts, config=config, options=options, key=key, exact=exact
            )
        drafting = self._drafting(run.drafter, run.config)
        return generate(*target, self.prompts, **drafting, options=options, key=key, exact=exact)

    def _differences(self, run: Run) -> list[GreedyDifference] | None:
        """Returns how greedy texts differ from those of plain decoding; None if they may."""
        # Synthetic acceptance emits what the target would not.
        is_synthetic = self.options.config.rejection_sample_method == "synthetic"
        plain = run.plain
        if plain is None or run.errors or plain.errors or run.temperature > 0 or is_synthetic:
            return None
        return greedy_differences(
            *self.models.target,
            self.prompts,
            run.outputs[0],
            plain.outputs[0],
            self.options.request,
        )

    def _drafting(self, name: str, config: SpecDecodeConfig) -> _Drafting:
        """Returns the arguments of `generate` that say how it drafts."""
        # With trees the config becomes that of all nodes, and K the depth of the drafter's trees.
        draft = self.models.drafters[name]
        drafter, config = draft.drafting(config, self.options.tree)
        return {"drafter": drafter, "draft_params": draft.params, "config": config}
