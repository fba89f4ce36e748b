"""The XLA backend, as the CPU runs it: rows read one by one."""

from . import bad_rows, block_edges, edges, suite
from .batch import XLA


class TestOracle(suite.RaceSuite):
    verifier = staticmethod(XLA)


class TestInvariance(suite.InvarianceSuite):
    verifier = staticmethod(XLA)


class TestEdges(edges.EdgeSuite):
    verifier = staticmethod(XLA)


class TestBadRows(bad_rows.BadRowSuite):
    verifier = staticmethod(XLA)


class TestBlock(block_edges.BlockSuite):
    verifier = staticmethod(XLA)
