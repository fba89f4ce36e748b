"""Clusters of several blocks in interpret mode: what they exchange, round by round.

On a GPU an exchange is one piece of assembly; interpreted, it goes through global memory and a
barrier of the cluster, with the slots, phases and parities that the GPU would be given. A wait for
the wrong phase reads NaN.
"""

import pytest
from lower_floor import gpu_cluster as cluster

from jax_specdec.testing import KernelConfig

from .backends import interpreted
from .batch import Request
from .layouts import GIVEN_BONUS, KERNEL, KERNEL_BLOCK, few
from .test_mosaic_gpu import agrees, answers, far_entries, logits

pytestmark = [pytest.mark.newest, pytest.mark.long]  # older versions do not interpret clusters
TWO = KernelConfig(max_cluster=2)


def test_clusters_give_the_tokens_of_the_oracle():
    agrees(few(KERNEL_BLOCK[1]), interpreted(TWO), range(2))


# Of one request: an interpreted scatter writes a whole output, and two would race.
ALONE = few(GIVEN_BONUS, num_requests=1, num_drafts=4)
watched = interpreted(TWO, detect_races=True)  # a race is an error


@pytest.mark.slow
def test_tokens_are_the_oracles_and_nothing_being_filled_is_read():
    """Neither slots of exchanges nor rows that are copied."""
    agrees(ALONE, watched, range(12))


def test_entries_far_from_drafts_with_distributions_are_summed_too():
    for middle, possible in far_entries(ALONE):
        assert answers([middle], ALONE, watched) == possible


@pytest.mark.slow
def test_a_wrong_phase_is_noticed(monkeypatch):
    monkeypatch.setattr(cluster, "parity_of", lambda round: round & 0)  # right in two rounds
    layout, ids = few(KERNEL[0]), [3, 5, 7, 9]  # all are kept: a round for each of five rows
    target = logits([[x] for x in [*ids, 11]], vocab=layout.vocab)
    with pytest.raises(AssertionError, match="the oracle"):
        answers([Request(target, ids, temperature=0.0)], layout, interpreted(TWO))
