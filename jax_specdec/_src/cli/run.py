"""What the commands do: decode the prompts, stream their texts, time both kinds of decoding."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from jax_specdec._src.cli.models import Models
from jax_specdec._src.cli.options import Options
from jax_specdec._src.config import SpecDecodeConfig
from jax_specdec._src.drafting.draft_model import ModelDrafter
from jax_specdec._src.drafting.ngram import NGramDrafter
from jax_specdec._src.serving.batch import StepRecord
from jax_specdec._src.serving.generate import (
    GenerateOutput,
    GreedyDifference,
    generate,
    generate_plain,
    generate_stream,
    greedy_differences,
)
from jax_specdec._src.serving.metrics import AcceptanceStats


@dataclasses.dataclass(frozen=True)
class Piece:
    """Some generated text and where it came from.

    Attributes:
      text: what the tokens so far complete.
      origin: "accepted", "recovered", "bonus", or "plain" where there were no drafts.
    """

    text: str
    origin: str


@dataclasses.dataclass(frozen=True)
class TextStep:
    """What one step of a batch adds to its texts.

    Attributes:
      pieces: the new text of each request.
      done: whether each request has ended.
      failed: whether each request ended because it could not be verified.
      record: what `generate_stream` yielded.
    """

    pieces: list[list[Piece]]
    done: list[bool]
    failed: list[bool]
    record: StepRecord


@dataclasses.dataclass(frozen=True)
class Run:
    """One kind of decoding, timed.

    Attributes:
      output: what it generated.
      seconds: median wall time, without compiling.
    """

    output: GenerateOutput
    seconds: float

    @property
    def stats(self) -> AcceptanceStats:
        """Acceptance."""
        return AcceptanceStats.from_steps(self.output.steps)

    @property
    def num_tokens(self) -> int:
        """Tokens generated, of all requests."""
        return sum(map(len, self.output.completions))

    @property
    def num_target_passes(self) -> int:
        """Target passes, without those that read the prompts."""
        return len(self.output.steps.num_kept)

    @property
    def tokens_per_second(self) -> float:
        """Tokens generated per second, of all requests."""
        return self.num_tokens / self.seconds


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A run, and plain decoding of the same requests.

    Attributes:
      run: with drafts, or plain decoding itself.
      plain: without drafts.
      differences: of greedy texts from those of plain decoding; None if they need not agree.
    """

    run: Run
    plain: Run
    differences: list[GreedyDifference] | None

    @property
    def is_identical(self) -> bool | None:
        """Whether all texts are those of plain decoding; None if they need not be."""
        return None if self.differences is None else not self.differences

    @property
    def speedup(self) -> float:
        """Time per token of plain decoding, divided by the time per token of the run."""
        return self.run.tokens_per_second / max(self.plain.tokens_per_second, 1e-9)


def stacked(records: list[StepRecord]) -> StepRecord:
    """The records of steps as one, with a leading axis of steps."""
    return jax.tree.map(lambda *leaves: np.stack(leaves), *records)


class Session:
    """Models that are loaded, and the requests to decode with them."""

    def __init__(self, options: Options, models: Models) -> None:
        """Keep both.

        Args:
          options: of the command line.
          models: those that the options name.
        """
        self.options = options
        self.models = models

    def stream(self) -> Iterator[TextStep]:
        """The text of each step as it is decoded, with the first drafter, temperature and K."""
        models, stops = self.models, self.models.stop_token_ids
        size = len(models.prompts)
        decoders = [models.stream(prompt) for prompt in models.prompts]
        num_tokens, origins = [0] * size, ["plain"] * size
        done, failed = [False] * size, [False] * size
        steps = generate_stream(
            models.target.model,
            models.target.params,
            models.prompts,
            **self._drafting(self.options.drafters[0], self.options.config),
            **self._sampling(self.options.temperatures[0]),
        )
        for record in steps:
            pieces: list[list[Piece]] = [[] for _ in range(size)]
            for b in range(size):
                if done[b]:
                    continue
                accepted, proposed = int(record.num_accepted[b]), int(record.num_proposed[b])
                own = "bonus" if accepted == proposed else "recovered"
                origins[b] = own if proposed else "plain"
                tokens = record.token_ids[b, : int(record.num_kept[b])].tolist()
                pieces[b] = [
                    Piece(decoders[b].decode([token]), "accepted" if i < accepted else origins[b])
                    for i, token in enumerate(tokens)
                    if token not in stops
                ]
                num_tokens[b] += len(tokens)
                failed[b] = not tokens
                ends = num_tokens[b] >= models.max_new_tokens
                done[b] = failed[b] or ends or tokens[-1] in stops
                if done[b] and (rest := decoders[b].decode([], final=True)):
                    pieces[b].append(Piece(rest, origins[b]))
            yield TextStep(pieces, list(done), list(failed), record)

    def speculative(
        self, drafter: str, config: SpecDecodeConfig, temperature: float
    ) -> GenerateOutput:
        """The requests with drafts, in one compiled loop."""
        return generate(
            self.models.target.model,
            self.models.target.params,
            self.models.prompts,
            **self._drafting(drafter, config),
            **self._sampling(temperature),
        )

    def plain(self, temperature: float) -> GenerateOutput:
        """The requests without drafts, in one compiled loop."""
        target = self.models.target
        return generate_plain(*target, self.models.prompts, **self._sampling(temperature))

    def compare(self, run: Run, plain: Run, temperature: float) -> Comparison:
        """Compare a run with plain decoding at the same temperature."""
        if temperature > 0 or self.options.config.rejection_sample_method == "synthetic":
            return Comparison(run, plain, None)
        differences = greedy_differences(
            *self.models.target,
            self.models.prompts,
            run.output,
            plain.output,
            self.options.request,
        )
        return Comparison(run, plain, differences)

    def _drafting(self, drafter: str, config: SpecDecodeConfig) -> dict[str, Any]:
        draft = self.models.drafters[drafter]
        if draft is None:
            return {"drafter": NGramDrafter(), "config": config}
        return {
            "drafter": ModelDrafter(draft.model),
            "draft_params": draft.params,
            "config": config,
        }

    def _sampling(self, temperature: float) -> dict[str, Any]:
        return {
            "options": dataclasses.replace(
                self.options.request,
                temperature=temperature,
                max_new_tokens=self.models.max_new_tokens,
                stop_token_ids=self.models.stop_token_ids,
            ),
            "key": jax.random.key(self.options.seed),
        }


def measure(
    kinds: dict[str, Callable[[], GenerateOutput]],
    repeats: int,
    on_run: Callable[[str], None] = lambda name: None,
) -> dict[str, Run]:
    """Time several kinds of decoding, in turn, after compiling them all.

    Args:
      kinds: what to run, by name.
      repeats: timed runs of each.
      on_run: called with a name before each run, of which there are ``repeats + 1`` of each kind.
    """
    times: dict[str, list[float]] = {name: [] for name in kinds}
    outputs: dict[str, GenerateOutput] = {}
    for repeat in range(repeats + 1):
        for name, run in kinds.items():
            on_run(name)
            begin = time.perf_counter()
            outputs[name] = run()
            if repeat > 0:
                times[name].append(time.perf_counter() - begin)
    return {name: Run(outputs[name], statistics.median(times[name])) for name in kinds}
