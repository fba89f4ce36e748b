"""What `jax-specdec generate` does: decode twice, time both, compare."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jax_specdec._src.cli.models import load_models
from jax_specdec._src.cli.options import Options
from jax_specdec._src.drafting.draft_model import ModelDrafter
from jax_specdec._src.drafting.drafter import Drafter
from jax_specdec._src.drafting.ngram import NGramDrafter
from jax_specdec._src.serving.batch import GenerateOutput
from jax_specdec._src.serving.loop import generate, generate_stream
from jax_specdec._src.serving.metrics import AcceptanceStats
from jax_specdec._src.serving.plain import GreedyDifference, generate_plain, greedy_differences


@dataclasses.dataclass(frozen=True)
class Piece:
    """Some generated text and where it came from: "accepted", "recovered" or "bonus"."""

    text: str
    origin: str


@dataclasses.dataclass(frozen=True)
class Report:
    """What the runs showed.

    Attributes:
      num_tokens: tokens generated.
      num_target_passes: target passes after the prompt's.
      stats: acceptance.
      seconds: median wall time of speculative decoding, compiled.
      plain_seconds: the same of plain decoding.
      num_plain_tokens: tokens that plain decoding generated.
      differences: first differences from plain decoding; None where the two need not agree.
    """

    num_tokens: int
    num_target_passes: int
    stats: AcceptanceStats
    seconds: float
    plain_seconds: float
    num_plain_tokens: int
    differences: list[GreedyDifference] | None

    @property
    def speedup(self) -> float:
        """Time per token of plain decoding over that of speculative decoding."""
        per_token = self.seconds / max(self.num_tokens, 1)
        return (self.plain_seconds / max(self.num_plain_tokens, 1)) / per_token


class Session:
    """The models, and one request to them.

    Raises:
      InputError: the models cannot be read, or the request does not fit them.
    """

    def __init__(self, options: Options) -> None:
        self.models = models = load_models(options)
        self.model, self.params = models.target
        self.options = options
        self.prompts = [models.prompt]
        self.drafter: Drafter = ModelDrafter(models.draft.model) if models.draft else NGramDrafter()
        self.draft_params = models.draft.params if models.draft else None
        self._sampling: dict[str, Any] = {
            "temperature": options.temperature,
            "key": jax.random.key(options.seed),
            "max_new_tokens": options.max_new_tokens,
            "stop_token_ids": models.stop_token_ids,
            "options": options.request,
        }

    def stream(self) -> Iterator[list[Piece]]:
        """The text of each step, as it is decoded."""
        decoder = self.models.stream()
        last = "bonus"
        steps = generate_stream(
            self.model,
            self.params,
            self.prompts,
            drafter=self.drafter,
            draft_params=self.draft_params,
            config=self.options.config,
            **self._sampling,
        )
        for step in steps:
            accepted = int(step.num_accepted[0])
            last = "bonus" if accepted == int(step.num_proposed[0]) else "recovered"
            tokens = step.token_ids[0, : int(step.num_kept[0])].tolist()
            yield [
                Piece(decoder.decode([token]), "accepted" if i < accepted else last)
                for i, token in enumerate(tokens)
                if token not in self.models.stop_token_ids
            ]
        if rest := decoder.decode([], final=True):
            yield [Piece(rest, last)]

    def speculative(self) -> GenerateOutput:
        """The same request in one compiled loop."""
        return generate(
            self.model,
            self.params,
            self.prompts,
            drafter=self.drafter,
            draft_params=self.draft_params,
            config=self.options.config,
            **self._sampling,
        )

    def plain(self) -> GenerateOutput:
        """The same request without drafts, in one compiled loop."""
        return generate_plain(self.model, self.params, self.prompts, **self._sampling)

    def measure(self, on_run: Callable[[], None] = lambda: None) -> Report:
        """Time both kinds of decoding, alternating, after compiling both.

        Args:
          on_run: called after every run, of which there are ``2 * (repeats + 1)``.
        """
        times: dict[str, list[float]] = {"speculative": [], "plain": []}
        outputs: dict[str, GenerateOutput] = {}
        for repeat in range(self.options.repeats + 1):
            for name, run in (("speculative", self.speculative), ("plain", self.plain)):
                begin = time.perf_counter()
                outputs[name] = run()
                if repeat > 0:
                    times[name].append(time.perf_counter() - begin)
                on_run()
        output, plain = outputs["speculative"], outputs["plain"]
        comparable = (
            self.options.temperature == 0
            and self.options.config.rejection_sample_method != "synthetic"
        )
        return Report(
            num_tokens=len(output.completions[0]),
            num_target_passes=len(output.steps.num_kept),
            stats=AcceptanceStats.from_steps(output.steps),
            seconds=statistics.median(times["speculative"]),
            plain_seconds=statistics.median(times["plain"]),
            num_plain_tokens=len(plain.completions[0]),
            differences=(
                greedy_differences(
                    self.model, self.params, self.prompts, output, plain, self.options.request
                )
                if comparable
                else None
            ),
        )
