"""Cases of verification in the flat layout, as data.

THEIRS are the inputs and expected outputs of vllm-project/tpu-inference's
tests/layers/jax/sample/test_rejection_sampler.py (commit b8692ff, 2026-08-22), where what is
expected does not depend on random numbers; of sampled cases it asserts less than stands here.
OURS fill up what those leave out. `defect` says what that project's sampler (same commit, run on a
CPU) gave instead, and why.
"""

from __future__ import annotations

import dataclasses
from typing import Any

Row = int | dict[int, float] | None
"""Of logits or probabilities: the one id that has it all, entries by id, or NaN everywhere."""


@dataclasses.dataclass(frozen=True)
class Case:
    """Requests of one call, of which each has drafts and as many target rows."""

    name: str
    drafts: list[list[int]]
    targets: list[list[Row]]
    bonus: list[Row]
    expected: list[list[int]]
    temperature: list[float] | None = None  # None: greedy
    top_k: list[int] | None = None
    top_p: list[float] | None = None
    probs: list[list[Row]] | None = None
    lengths: list[int] | None = None  # None: those of the drafts
    bad: tuple[int, ...] = ()  # requests whose status is BAD_INPUT
    defect: str | None = None


def split(flat: list[int], counts: list[int]) -> list[list[int]]:
    starts = [sum(counts[:i]) for i in range(len(counts))]
    return [flat[start : start + count] for start, count in zip(starts, counts, strict=True)]


def flat_case(
    name: str,
    drafts: list[int],
    targets: list[int],
    counts: list[int],
    bonus: list[int],
    expected: list[list[int]],
    **given: Any,
) -> Case:
    return Case(name, split(drafts, counts), split(targets, counts), list(bonus), expected, **given)


def sampled(name: str, drafts: list[int], targets: list[int], counts: list[int], *to: Any) -> Case:
    """At temperature 1, of rows of p and q so peaked that nothing is left to chance."""
    probs = split(drafts, counts)
    hot = [1.0] * len(counts)
    return flat_case(name, drafts, targets, counts, *to, temperature=hot, probs=probs)


NINE = [1, 2, 3, 4, 5, 6, 7, 8, 9]
SIX = NINE[:6]
GREEDY, HOT = -1.0, 1.0
# fmt: off
THEIRS = [
    flat_case("perfect match", [1, 2, 3], [1, 2, 3], [3], [4], [[1, 2, 3, 4]]),
    flat_case("early mismatch", [1, 2, 3], [1, 5, 3], [3], [4], [[1, 5]]),
    flat_case("multiple sequences", [1, 2, 3, 4], [1, 2, 3, 7], [2, 2], [5, 6],
              [[1, 2, 5], [3, 7]]),
    flat_case("single token sequence", [1], [1], [1], [2], [[1, 2]]),
    flat_case("empty sequence", [], [], [0], [5], [[5]]),
    flat_case("variable length", [1, 2, 3], [1, 5, 3], [2, 1], [6, 7], [[1, 5], [3, 7]]),
    flat_case("all different lengths", SIX, SIX, [1, 2, 3], [7, 9, 10],
              [[1, 7], [2, 3, 9], [4, 5, 6, 10]]),
    flat_case("mixed lengths", [1, 2, 3, 4, 5], [1, 2, 3, 7, 5], [2, 3], [6, 8],
              [[1, 2, 6], [3, 7]]),
    flat_case("zero length mixed", [1, 2], [1, 2], [0, 2], [5, 6], [[5], [1, 2, 6]]),
    flat_case("all zero length", [], [], [0, 0], [5, 6], [[5], [6]]),
    flat_case("immediate rejection", SIX, [9, 2, 3, 4, 5, 6], [3, 2, 1], [10, 11, 12],
              [[9], [4, 5, 11], [6, 12]]),
    flat_case("first token mismatch", [1], [2], [1], [3], [[2]]),
    flat_case("multiple mismatches", SIX, [1, 2, 7, 4, 8, 6], [3, 3], [8, 9],
              [[1, 2, 7], [4, 8]]),
    flat_case("padding ignored, extreme padding", [1, 2], [1, 5], [2], [3], [[1, 5]]),
    flat_case("all immediate mismatch", NINE, [10, 2, 3, 11, 5, 6, 12, 8, 9], [3] * 3,
              [20, 21, 22], [[10], [11], [12]]),
    flat_case("all perfect match", NINE, NINE, [3] * 3, [10, 11, 12],
              [[1, 2, 3, 10], [4, 5, 6, 11], [7, 8, 9, 12]]),
    flat_case("extreme length imbalance", [*range(1, 19)], [*range(1, 17), 20, 18], [15, 1, 2],
              [100, 101, 102], [[*range(1, 16), 100], [16, 101], [20]]),
    flat_case("mixed accept and reject", NINE, [1, 2, 3, 10, 5, 6, 7, 8, 9], [3] * 3,
              [20, 21, 22], [[1, 2, 3, 20], [10], [7, 8, 9, 22]]),
    flat_case("same position mismatch", NINE, [1, 10, 3, 4, 11, 6, 7, 12, 9], [3] * 3,
              [20, 21, 22], [[1, 10], [4, 11], [7, 12]]),
    flat_case("single long sequence", [*range(1, 31)], [*range(1, 28), 99, 29, 30], [30], [100],
              [[*range(1, 28), 99]]),
    sampled("sampled, basic", [10, 20, 30], [10, 50, 30], [3], [99], [[10, 50]]),
    sampled("sampled, with a seed", [1, 2, 3, 4], [1, 5, 3, 6], [4], [99], [[1, 5]]),
    flat_case("sampled, without q", [15, 25], [15, 35], [2], [88], [[15, 35]], temperature=[HOT]),
    sampled("sampled, multiple sequences", [1, 2, 3, 4, 5, 6, 7], [1, 5, 3, 8, 5, 6, 9], [2, 3, 2],
            [11, 12, 13], [[1, 5], [3, 8], [6, 9]]),
    sampled("sampled, all accepted", [10, 20, 30], [10, 20, 30], [3], [99], [[10, 20, 30, 99]]),
    flat_case("sampled, empty", [], [], [0, 0], [77, 88], [[77], [88]], temperature=[HOT, HOT]),
    sampled("sampled as greedy", [5, 15, 25], [5, 15, 25], [3], [99], [[5, 15, 25, 99]]),
    flat_case("greedy as sampled", [5, 15, 25], [5, 15, 25], [3], [99], [[5, 15, 25, 99]]),
]
OURS = [
    flat_case("greedy beside sampled", [1, 2, 3, 4], [1, 2, 3, 4], [2, 2], [5, 6],
              [[1, 2, 5], [3, 4, 6]], temperature=[GREEDY, HOT],
              defect="the greedy request emitted 55: its logits are divided by its temperature, "
                     "-1, which turns the least likely token into the likeliest"),
    # Top-p 0.7 keeps both at temperature 1, one at 0.25.
    Case("temperature comes before top-p", [[1]], [[{0: 1.0, 1: 0.5}]], [5], [[0]],
         temperature=[0.25], top_p=[0.7],
         defect="token 1 was accepted at times: its check filters before it divides by the "
                "temperature, while its bonus tokens are filtered after"),
    Case("a draft with q = 0 is rejected", [[20]], [[20]], [5], [[20]],
         temperature=[HOT], probs=[[10]],
         defect="the draft was accepted and a bonus emitted: it divides by q + 1e-9"),
    Case("NaN hurts its own request", [[1], [2]], [[None], [2]], [5, 6], [[], [2, 6]],
         defect="token 0 was emitted, the argmax of NaN"),
    Case("a length above K is bad input, alone", [[1] * 31, [2]], [[1] * 31, [2]], [5, 6],
         [[], [2, 6]], bad=(0,), defect="without a K, it verifies any length"),
    Case("a negative length is bad input, alone", [[], [2]], [[], [2]], [5, 6], [[], [2, 6]],
         lengths=[-1, 1], bad=(0,)),
    Case("no proposal at first", [[-1, 2]], [[7, 2]], [5], [[7]]),
    Case("no proposal, sampled", [[1, -1]], [[1, 7]], [5], [[1, 7]], temperature=[HOT]),
    Case("temperature 0 is greedy", [[1]], [[{1: 2.0, 2: 1.9}]], [5], [[1, 5]], temperature=[0.0]),
    Case("a temperature below 1e-5 is greedy", [[1]], [[{1: 2.0, 2: 2.0 - 1e-6}]], [5], [[1, 5]],
         temperature=[9e-6]),
    Case("another negative temperature is bad input", [[1], [2]], [[1], [2]], [5, 6], [[], [2, 6]],
         temperature=[-0.5, HOT], bad=(0,)),
    Case("top-k -1 and 0 leave out nothing", [[1], [2]], [[1], [2]], [5, 6], [[1, 5], [2, 6]],
         temperature=[HOT, HOT], top_k=[-1, 0]),
    Case("top-k 1 leaves the likeliest", [[2]], [[{1: 1.0, 2: 0.9}]], [5], [[1]],
         temperature=[HOT], top_k=[1]),
    Case("the greedy sentinel in the wrong field is bad input", [[1], [2], [3]], [[1], [2], [3]],
         [5, 6, 7], [[], [], [3, 7]], temperature=[HOT, HOT, HOT], top_k=[-2, 0, 0],
         top_p=[1.0, -1.0, 1.0], bad=(0, 1)),
    Case("greedy ignores filters", [[2]], [[{1: 1.0, 2: 1.1}]], [5], [[2, 5]],
         temperature=[GREEDY], top_k=[1], top_p=[0.1]),
]
