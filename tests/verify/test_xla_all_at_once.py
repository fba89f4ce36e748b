"""The XLA backend, as other devices run it: all rows read at once. The CPU can do that too."""

import functools
from unittest import mock

import pytest

import jax_specdec as sd
from jax_specdec._src.verify import api, xla

from . import bad_rows, block_edges, processed, suite
from .batch import jitted

at_once = functools.partial(xla.verify, lazy=False)


@jitted
def all_at_once(*args, config, vocab_size, **kwargs):
    inner = api._rejection_sample.__wrapped__  # not traced before, with rows read one by one
    with (
        mock.patch.object(xla, "verify", at_once),
        mock.patch.object(api, "_rejection_sample", inner),
    ):
        return sd.rejection_sample_with_noise(*args, config=config, vocab_size=vocab_size, **kwargs)


pytestmark = pytest.mark.newest


class TestOracle:
    verifier = staticmethod(all_at_once)
    seeds = range(8)

    @pytest.mark.parametrize("layout", [*suite.GRID[1::8], *suite.RACES[1:2]], ids=str)
    def test_gives_the_tokens_of_the_oracle(self, layout):
        suite.OracleSuite.agree(self, layout)

    @pytest.mark.slow
    @pytest.mark.parametrize("layout", suite.GRID[5::8], ids=str)
    def test_gives_the_tokens_of_the_oracle_too(self, layout):
        suite.OracleSuite.agree(self, layout)

    @pytest.mark.parametrize("layout", suite.BLOCK[:2], ids=str)
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

    @pytest.mark.parametrize("layout", processed.PROCESSED[1::2], ids=str)
    def test_gives_the_tokens_of_the_oracle(self, layout):
        suite.OracleSuite.agree(self, layout)
