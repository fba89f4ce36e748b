"""How the blocks of a cluster exchange values: every interleaving, in a model of the protocol.

The model shares two functions with the kernel: those that give a round its slot and its parity.
It is searched through all states that can be reached, every state once. Blocks are interchangeable
and so are senders: a state keeps its blocks sorted, and how many values have arrived, not whose. A
state that must not be is a sentence.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lower_floor import SLOTS, parity_of, slot_of

pytestmark = pytest.mark.newest  # a model in plain Python

NOT_FILLED = "reads a slot before it is filled"
NOT_READ = "fills a slot before it is read"
FOR_EVER = "waits for ever"
NOT_BEGUN = "stores into a block that has not begun"
HAS_LEFT = "stores into a block that has left"
TWO_ARRIVALS = "two arrivals in one phase"

OfRound = Callable[[int, int], int]


class Found(NamedTuple):
    """What a search found: how many states, and which failures."""

    states: int
    failures: set[str]


def search(start: tuple, moves: Callable[[tuple], Iterable[tuple | str]]) -> Found:
    """All states that can be reached from the first one."""
    states, unexplored, failures = {start}, [start], set()
    while unexplored:
        for state in moves(unexplored.pop()):
            if isinstance(state, str):
                failures.add(state)
            elif state not in states:
                states.add(state)
                unexplored.append(state)
    return Found(len(states), failures)


# Exchanges between blocks.


class Barrier(NamedTuple):
    """An mbarrier that expects one arrival in each phase.

    Attributes:
      phase: phases completed.
      pending: whether the arrival is still to come.
      missing: values that are still to come; negative where they came before the arrival.
    """

    phase: int = 0
    pending: bool = True
    missing: int = 0

    def arrive(self, values: int) -> Barrier:
        """The arrival, which says how many values to expect."""
        return Barrier(self.phase, False, self.missing + values)._completed()

    def receive(self) -> Barrier:
        return self._replace(missing=self.missing - 1)._completed()

    def _completed(self) -> Barrier:
        return Barrier(self.phase + 1) if not self.pending and self.missing == 0 else self

    def is_past(self, parity: int) -> bool:
        """Whether a wait for this parity ends: the phase under way has the other one."""
        return self.phase % 2 != parity


SEND, WAIT, READ = range(3)
"""The steps of a warp in an exchange: at step ``3 e + s`` it is about to do s in exchange e."""


class Block(NamedTuple):
    """A block of a cluster.

    Attributes:
      ready: whether its barriers are initialized.
      end: the step at which a warp leaves.
      warps: the step of each: of the one that arrives at barriers, then of the others, sorted.
      arrived: values that have arrived of each exchange.
      barriers: one for each slot.
    """

    ready: bool
    end: int
    warps: tuple[int, ...]
    arrived: tuple[int, ...]
    barriers: tuple[Barrier, ...]


@dataclass(frozen=True)
class Exchanges:
    """Every warp sends a value to every block and waits for the values of all, again and again.

    Attributes:
      blocks: of the cluster.
      warps: of a block.
      rounds: how many exchanges.
      slots: that they take in turn.
      slot_of: from a round and the number of slots to the slot.
      parity_of: likewise to the parity to wait for.
      begins_with_barrier: whether nobody sends before the barriers of every block are initialized.
      leaves_early: whether one block leaves before the last exchange.
      waits_last: whether warps wait for the values of the last exchange.
    """

    blocks: int
    warps: int
    rounds: int
    slots: int = SLOTS
    slot_of: OfRound = slot_of
    parity_of: OfRound = parity_of
    begins_with_barrier: bool = True
    leaves_early: bool = False
    waits_last: bool = True

    @functools.cached_property
    def places(self) -> list[tuple[int, int]]:
        """The slot and the parity of each round."""
        rounds = range(self.rounds)
        return [(self.slot_of(i, self.slots), self.parity_of(i, self.slots)) for i in rounds]

    @property
    def values(self) -> int:
        """That a block receives in an exchange."""
        return self.blocks * self.warps

    def check(self) -> Found:
        """Search every state."""
        block = Block(
            ready=False,
            end=3 * self.rounds if self.waits_last else 3 * (self.rounds - 1) + WAIT,
            warps=(SEND,) * self.warps,
            arrived=(0,) * self.rounds,
            barriers=(Barrier(),) * self.slots,
        )
        first = block._replace(end=block.end - 3) if self.leaves_early else block
        return search((first, *[block] * (self.blocks - 1)), self.moves)

    def moves(self, cluster: tuple[Block, ...]) -> list[tuple[Block, ...] | str]:
        """What may happen next: the states after it."""
        steps = [step for block in cluster for step in block.warps]
        sent = [sum(x > 3 * e + SEND for x in steps) for e in range(self.rounds)]
        all_ready = all(block.ready for block in cluster)
        found: list[tuple[Block, ...] | str] = []
        for i, block in enumerate(cluster):
            if i and block == cluster[i - 1]:
                continue
            may_send = all_ready if self.begins_with_barrier else block.ready
            for after in self._of_block(block, sent, may_send):
                if isinstance(after, str):
                    found.append(after)
                else:
                    found.append(tuple(sorted((*cluster[:i], after, *cluster[i + 1 :]))))
        if not found and any(x != block.end for block in cluster for x in block.warps):
            found.append(FOR_EVER)
        return found

    def _of_block(self, block: Block, sent: list[int], may_send: bool) -> Iterator[Block | str]:
        """States of a block after what may happen to it."""
        if not block.ready:
            yield block._replace(ready=True)
        for e, count in enumerate(sent):
            if block.arrived[e] < count:
                yield self._arrival(block, e)
        for i, x in enumerate(block.warps):
            is_repeated = i > 1 and x == block.warps[i - 1]
            if x < block.end and not is_repeated and (may_send or x > SEND):
                yield from self._of_warp(block, i)

    def _of_warp(self, block: Block, i: int) -> Iterator[Block | str]:
        (e, step), barriers = divmod(block.warps[i], 3), list(block.barriers)
        slot, parity = self.places[e]
        if step == SEND and i == 0:
            if not barriers[slot].pending:
                yield TWO_ARRIVALS
                return
            barriers[slot] = barriers[slot].arrive(self.values)
        if step == WAIT and not barriers[slot].is_past(parity):
            return
        if step == READ and block.arrived[e] < self.values:
            yield NOT_FILLED
            return
        first, *others = (*block.warps[:i], block.warps[i] + 1, *block.warps[i + 1 :])
        yield block._replace(warps=(first, *sorted(others)), barriers=tuple(barriers))

    def _arrival(self, block: Block, e: int) -> Block | str:
        """One value of an exchange arrives."""
        slot, _ = self.places[e]
        if not block.ready:
            return NOT_BEGUN
        if min(block.warps) == block.end:
            return HAS_LEFT
        earlier = [3 * x + READ for x in range(e) if self.places[x][0] == slot]
        if earlier and min(block.warps) <= earlier[-1]:
            return NOT_READ
        arrived, barriers = list(block.arrived), list(block.barriers)
        arrived[e] += 1
        barriers[slot] = barriers[slot].receive()
        return block._replace(arrived=tuple(arrived), barriers=tuple(barriers))


ROUNDS = 5  # both slots in both parities, and the first once more


@pytest.mark.parametrize(("blocks", "warps"), [(2, 1), (2, 2), (4, 1)])
def test_in_every_interleaving_slots_are_filled_then_read_then_filled_again(blocks, warps):
    found = Exchanges(blocks, warps, ROUNDS).check()
    assert found.failures == set()
    assert found.states > 100


@pytest.mark.parametrize("slots", [2, 4])
def test_more_slots_are_right_too(slots):
    assert Exchanges(2, 2, 2 * slots + 1, slots).check().failures == set()


WRONG: dict[str, tuple[dict[str, Any], set[str]]] = {
    "one slot": ({"slots": 1}, {NOT_READ}),
    "one slot of two": ({"slot_of": lambda i, n: 0, "parity_of": lambda i, n: i % 2}, {NOT_READ}),
    "other parity": ({"parity_of": lambda i, n: 1 - parity_of(i, n)}, {NOT_FILLED, FOR_EVER}),
    "parity of the round": ({"parity_of": lambda i, n: i % 2}, {NOT_FILLED, FOR_EVER}),
    "parity of more slots": ({"parity_of": lambda i, n: parity_of(i, 2 * n)}, {NOT_FILLED}),
    "parity never changes": ({"parity_of": lambda i, n: 0}, {NOT_FILLED}),
    "no cluster barrier at the beginning": ({"begins_with_barrier": False}, {NOT_BEGUN}),
    "nobody waits for the last": ({"waits_last": False}, {HAS_LEFT}),
    "one block leaves early": ({"leaves_early": True}, {FOR_EVER, HAS_LEFT}),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("warps", [1, 2])
def test_a_wrong_protocol_fails(name, warps):
    changes, failures = WRONG[name]
    assert failures <= Exchanges(2, warps, ROUNDS, **changes).check().failures


# The two functions.


@pytest.mark.parametrize("slots", [1, 2, 4])
def test_rounds_take_slots_in_turn_and_parities_change_when_all_were_taken(slots):
    rounds = np.arange(4 * slots + 1)
    by_int = [(slot_of(i, slots), parity_of(i, slots)) for i in rounds.tolist()]
    expected = np.stack([rounds % slots, rounds // slots % 2], axis=1)
    np.testing.assert_array_equal(by_int, expected)
    traced = jax.jit(lambda i: (slot_of(i, slots), parity_of(i, slots)))
    by_array = traced(jnp.asarray(rounds, jnp.int32))
    assert all(x.dtype == jnp.int32 for x in by_array)
    np.testing.assert_array_equal(jnp.stack(by_array, axis=1), expected)
