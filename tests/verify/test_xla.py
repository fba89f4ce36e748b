"""The XLA backend, as the CPU runs it: rows read one by one."""

import pytest

from . import bad_rows, block_edges, edges, processed, suite
from .batch import OPTIMIZED, XLA


class TestOracle(suite.RaceSuite):
    verifier = staticmethod(XLA)


@pytest.mark.long
@pytest.mark.newest
@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize(
    "layout",
    [
        processed.PROCESSED[3],
        pytest.param(suite.BLOCK[1], marks=pytest.mark.slow),
        pytest.param(suite.GRID[5], marks=pytest.mark.slow),
    ],
    ids=str,
)
class TestOptimized:
    verifier = staticmethod(OPTIMIZED)
    seeds = range(12)

    def test_gives_the_tokens_of_the_oracle_as_users_compile_it(self, layout):
        suite.OracleSuite.agree(self, layout)


@pytest.mark.newest
class TestInvariance(suite.InvarianceSuite):
    verifier = staticmethod(XLA)


@pytest.mark.newest
class TestEdges(edges.EdgeSuite):
    verifier = staticmethod(XLA)


@pytest.mark.newest
class TestBadRows(bad_rows.BadRowSuite):
    verifier = staticmethod(XLA)


@pytest.mark.newest
class TestBlock(block_edges.BlockSuite):
    verifier = staticmethod(XLA)


@pytest.mark.long
@pytest.mark.newest
class TestProcessed(processed.ProcessedSuite):
    verifier = staticmethod(XLA)

    @pytest.mark.slow
    def test_gives_the_tokens_of_the_oracle_in_a_race(self):
        suite.OracleSuite.agree(self, processed.RACE)


@pytest.mark.newest
class TestProcessedEdges(processed.ProcessedEdges):
    verifier = staticmethod(XLA)
