"""Requests of chain verification, as data.

THEIRS are the inputs and expected outputs of sgl-project/sglang-jax's
python/sgl_jax/test/speculative/test_dflash_info.py and test_eagle_utils.py (commit cddbf6f,
2026-08-21), all that verify chains; cases of trees have no counterpart here. What they expect past
the emitted tokens (the argmax of rows that nobody reads) is left out. OURS fill up what those leave
out. `defect` says what that project's sampled verification (same commit, run on a CPU) or its block
drafter gave instead, and why.
"""

from __future__ import annotations

import dataclasses

Row = int | dict[int, float] | None
"""Of logits or probabilities: the one id that has it all, entries by id, or NaN everywhere."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One request: a chain of four tokens, the row after each, and the tokens it emits."""

    name: str
    chain: list[int]
    rows: list[Row]
    expected: list[int]
    temperature: float = 0.0
    top_k: int = 2**30
    top_p: float = 1.0
    min_p: float = 0.0
    seq_len: int = 9
    is_bad: bool = False  # BAD_INPUT
    defect: str | None = None


THEIRS = [
    Case("block, all accepted", [10, 11, 12, 13], [11, 12, 13, 99], [11, 12, 13, 99]),
    Case("block, one accepted", [20, 21, 22, 23], [21, 77, 88, 99], [21, 77]),
    Case("block, sharded", [10, 11, 12, 13], [11, 12, 13, 99], [11, 12, 13, 99]),
    Case("chain, none", [10, 11, 12, 13], [99, 12, 13, 14], [99], seq_len=100),
    Case("chain, one", [20, 21, 22, 23], [21, 99, 23, 24], [21, 99], seq_len=200),
    Case("chain, two", [30, 31, 32, 33], [31, 32, 99, 34], [31, 32, 99], seq_len=300),
    Case("chain, three", [40, 41, 42, 43], [41, 42, 43, 44], [41, 42, 43, 44], seq_len=400),
    Case("chain, padding", [0, 0, 0, 0], [0, 0, 0, 0], [], seq_len=0),
    Case("chain beside padding", [20, 21, 22, 23], [21, 22, 99, 24], [21, 22, 99], seq_len=10),
]

HOT = 1.0
TIE: Row = {3: 1.0, 2: 1.0}
BLOCK_DRAFTER = "refused: its block drafter verifies greedy requests alone"
CHAIN, NEXT = [1, 2, 3, 4], [2, 3, 4, 5]
# fmt: off
OURS = [
    Case("sampled, all accepted", CHAIN, NEXT, [2, 3, 4, 5], HOT, defect=BLOCK_DRAFTER),
    Case("sampled, one accepted", CHAIN, [2, 9, 4, 5], [2, 9], HOT, defect=BLOCK_DRAFTER),
    Case("sampled, two accepted", CHAIN, [2, 3, 9, 5], [2, 3, 9], HOT),
    Case("sampled, padding", CHAIN, NEXT, [], HOT, seq_len=0),
    Case("column 0 is not read", [-7, 2, 3, 4], NEXT, [2, 3, 4, 5]),
    Case("the longest length", CHAIN, [2, 9, 4, 5], [2, 9], HOT, seq_len=2**31 - 1),
    Case("top-k 1 is greedy", CHAIN, [{2: 1.0, 3: 0.9}, 3, 4, 5], [2, 3, 4, 5], HOT, 1),
    Case("top-k 1 takes the lowest of a tie", [1, 3, 3, 4], [TIE, 3, 4, 5], [2], HOT, 1),
    Case("temperature 0 takes the lowest of a tie", [1, 3, 3, 4], [TIE, 3, 4, 5], [2],
         defect="token 0 at temperature 0 beside sampled requests: it divides by it, and draws "
                "from NaN; its requests get temperature 1 and top-k 1 instead"),
    Case("top-k 0 leaves out nothing", CHAIN, NEXT, [2, 3, 4, 5], HOT, 0),
    Case("top-k 2 of three", CHAIN, [{5: 0.0, 6: -0.001, 2: -0.01}, 9, 9, 9], [5], HOT, 2,
         top_p=0.4, min_p=1.0),
    Case("top-p leaves the likeliest", CHAIN, [{2: 0.0, 7: 1.0}, 3, 4, 5], [7], HOT, top_p=0.5),
    Case("temperature comes before top-p", CHAIN, [{2: 0.5, 7: 1.0}, 3, 4, 5], [7], 0.25,
         top_p=0.7),
    Case("min-p leaves the likeliest", CHAIN, [{2: 0.0, 7: 1.0}, 3, 4, 5], [7], HOT, min_p=0.9,
         defect="min-p is not applied where chains are verified"),
    Case("greedy ignores top-p", CHAIN, [{2: 1.1, 7: 1.0}, 3, 4, 5], [2, 3, 4, 5], top_p=0.1),
    Case("a token of no probability", CHAIN, [{7: 0.0}, 3, 4, 5], [7], HOT),
    Case("NaN hurts its own request", CHAIN, [None, 3, 4, 5], [], HOT,
         defect="token 0 was emitted: it counts sums that are not above u, of which NaN has none"),
    Case("NaN hurts its own greedy request", CHAIN, [None, 3, 4, 5], []),
    Case("NaN where nobody looks", CHAIN, [9, None, None, None], [9], HOT),
    Case("nothing allowed", CHAIN, [{}, 3, 4, 5], [], HOT),
    Case("no proposal at first", [1, -1, 3, 4], [7, 3, 4, 5], [7], HOT),
    Case("an id past the vocabulary is no proposal", [1, 2, 128, 4], [2, 7, 4, 5], [2, 7], HOT),
    Case("a negative temperature is bad input", CHAIN, NEXT, [], -1.0, is_bad=True),
    Case("a negative length is bad input", CHAIN, NEXT, [], HOT, seq_len=-1, is_bad=True),
    Case("top-k -2 is bad input", CHAIN, NEXT, [], HOT, -2, is_bad=True),
    Case("top-p 0 is bad input", CHAIN, NEXT, [], HOT, top_p=0.0, is_bad=True),
    Case("min-p 2 is bad input", CHAIN, NEXT, [], HOT, min_p=2.0, is_bad=True),
    Case("after bad input", CHAIN, [2, 9, 4, 5], [2, 9], HOT),
    Case("greedy at the end", CHAIN, NEXT, [2, 3, 4, 5]),
]
