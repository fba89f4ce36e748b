"""The XLA backend, as GPUs run it: all rows read at once. The CPU can do that too."""

import pytest

from . import bad_rows, block_edges, processed, suite
from .batch import on

all_at_once = on("cuda")

pytestmark = pytest.mark.newest


class TestOracle:
    verifier = staticmethod(all_at_once)
    seeds = range(8)

    @pytest.mark.parametrize("layout", [suite.GRID[1], suite.GRID[16], suite.RACES[0]], ids=str)
    def test_gives_the_tokens_of_the_oracle(self, layout):
        suite.OracleSuite.agree(self, layout)

    @pytest.mark.slow
    @pytest.mark.parametrize("layout", [*suite.GRID[5::4], suite.BLOCK[0]], ids=str)
    def test_gives_the_tokens_of_the_oracle_too(self, layout):
        suite.OracleSuite.agree(self, layout)

    def test_gives_the_tokens_of_the_oracle_under_the_agreement_rule(self):
        suite.OracleSuite.agree(self, suite.AGREEMENT)

    @pytest.mark.parametrize("layout", suite.BLOCK[1:2], ids=str)
    def test_gives_the_tokens_of_the_oracle_under_the_block_rule(self, layout):
        suite.OracleSuite.agree(self, layout)


@pytest.mark.slow
class TestBadRows(bad_rows.BadRowSuite):
    verifier = staticmethod(all_at_once)


@pytest.mark.slow
class TestBlock(block_edges.BlockSuite):
    verifier = staticmethod(all_at_once)


class TestProcessed:
    verifier = staticmethod(all_at_once)
    seeds = range(8)

    @pytest.mark.parametrize("layout", processed.PROCESSED[1:2], ids=str)
    def test_gives_the_tokens_of_the_oracle(self, layout):
        suite.OracleSuite.agree(self, layout)
