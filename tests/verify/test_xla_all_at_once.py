"""The XLA backend, as GPUs run it: all rows read at once. The CPU can do that too."""

import pytest

from . import processed, suite
from .batch import on

all_at_once = on("cuda")

pytestmark = [pytest.mark.long, pytest.mark.newest]


class TestOracle:
    verifier = staticmethod(all_at_once)
    seeds = range(8)

    @pytest.mark.parametrize(
        "layout",
        [
            suite.GRID[1],
            *(pytest.param(x, marks=pytest.mark.slow) for x in (suite.GRID[16], suite.RACE)),
        ],
        ids=str,
    )
    def test_gives_the_tokens_of_the_oracle(self, layout):
        suite.OracleSuite.agree(self, layout)

    @pytest.mark.slow
    def test_gives_the_tokens_of_the_oracle_under_the_agreement_rule(self):
        suite.OracleSuite.agree(self, suite.AGREEMENT)

    @pytest.mark.slow
    def test_gives_the_tokens_of_the_oracle_under_the_block_rule(self):
        suite.OracleSuite.agree(self, suite.BLOCK[2])


class TestProcessed:
    verifier = staticmethod(all_at_once)
    seeds = range(8)

    def test_gives_the_tokens_of_the_oracle(self):
        suite.OracleSuite.agree(self, processed.PROCESSED[1])
