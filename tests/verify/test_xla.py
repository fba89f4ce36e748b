"""The XLA backend, as the CPU runs it: rows read one by one."""

import pytest

from . import bad_rows, batch, block_edges, edges, processed, suite
from .batch import FILTERS, HALF, OPTIMIZED, XLA, Layout
from .suite import suite_of

TestOracle = suite_of(suite.RaceSuite, XLA)


@pytest.mark.long
@pytest.mark.newest
@pytest.mark.usefixtures("optimized")
class TestOptimized:
    verifier = staticmethod(OPTIMIZED)
    seeds = range(12)

    def test_gives_the_tokens_of_the_oracle_as_users_compile_it(self):
        suite.OracleSuite.agree(self, processed.PROCESSED[3])


@pytest.mark.long
@pytest.mark.newest
@pytest.mark.parametrize("block", [False, True], ids=["standard", "block"])
def test_gives_the_tokens_of_the_oracle_with_the_vocabulary_of_gemma(block: bool) -> None:
    """262,144 ids, with a distribution of drafts, filters and masks of a grammar."""
    sizes = dict(num_speculative_tokens=2, num_requests=3, num_drafts=5)
    layout = Layout(vocab=262144, kind="logits", block=block, **sizes, **HALF, **FILTERS)
    batch.agree(suite.random_batches(layout, range(3)), XLA)


newest, long = pytest.mark.newest, pytest.mark.long
TestInvariance = suite_of(suite.InvarianceSuite, XLA, newest)
TestEdges = suite_of(edges.EdgeSuite, XLA, newest)
TestBadRows = suite_of(bad_rows.BadRowSuite, XLA, newest, long)
TestBlock = suite_of(block_edges.BlockSuite, XLA, newest, long)
TestProcessed = suite_of(processed.ProcessedSuite, XLA, newest, long)
TestProcessedEdges = suite_of(processed.ProcessedEdges, XLA, newest, long)
