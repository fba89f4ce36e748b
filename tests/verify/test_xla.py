"""The XLA backend, as the CPU runs it: rows read one by one."""

import pytest

from . import bad_rows, block_edges, edges, processed, suite
from .batch import OPTIMIZED, XLA


class TestOracle(suite.RaceSuite):
    verifier = staticmethod(XLA)


@pytest.mark.long
@pytest.mark.newest
@pytest.mark.usefixtures("optimized")
class TestOptimized:
    verifier = staticmethod(OPTIMIZED)
    seeds = range(12)

    def test_gives_the_tokens_of_the_oracle_as_users_compile_it(self):
        suite.OracleSuite.agree(self, processed.PROCESSED[3])


@pytest.mark.newest
class TestInvariance(suite.InvarianceSuite):
    verifier = staticmethod(XLA)


@pytest.mark.newest
class TestEdges(edges.EdgeSuite):
    verifier = staticmethod(XLA)


@pytest.mark.long
@pytest.mark.newest
class TestBadRows(bad_rows.BadRowSuite):
    verifier = staticmethod(XLA)


@pytest.mark.long
@pytest.mark.newest
class TestBlock(block_edges.BlockSuite):
    verifier = staticmethod(XLA)


@pytest.mark.long
@pytest.mark.newest
class TestProcessed(processed.ProcessedSuite):
    verifier = staticmethod(XLA)


@pytest.mark.long
@pytest.mark.newest
class TestProcessedEdges(processed.ProcessedEdges):
    verifier = staticmethod(XLA)
