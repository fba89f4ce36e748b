"""The rules: the formulas that every backend traces, and a class for each rule.

**Greedy**: a draft is accepted if it is the target's argmax.

**Standard**: a draft ``x`` drawn from ``q`` is accepted with probability ``min(1, p(x) / q(x))``.
At the first rejection the emitted token is drawn from the normalized residual ``(p - q)+``. It is
then distributed as ``p``, whatever ``q`` is.

**Block**: the prefix of i drafts has the joint weight ``w_i = min(1, w_{i-1} p(x_i) / q(x_i))``,
with ``w_0 = 1``, and the residual mass ``S_i = sum((w_i p - q)+)`` over the tokens that may follow.
It passes with probability ``h_i = S_i / (S_i + 1 - w_i)``. The longest prefix that passes is
accepted: a draft that the standard rule would reject may be accepted because of those after it. The
next token is drawn from ``(w_i p - q)+``. After the last draft nothing is proposed, which is
``q = 0``, so ``S = w`` and ``h = w``. The emitted tokens are distributed as ``p``, and no rule of
this kind accepts more drafts in expectation. If ``q`` is one-hot at x, ``S_i = w_i (1 - p(x))``. A
greedy request is the case that ``p`` is one-hot at the argmax as well.

**Agreement**: at each position the target's own token is drawn from ``p`` with the noise of that
position, and a draft is accepted if it equals it. The emitted tokens are those that plain decoding
draws with the same noise, whatever is drafted: ``q`` is not read. With the drawn token in place of
the argmax, every request is judged as a greedy one.

**Synthetic**: drafts are accepted at a configured rate, whatever the models say. This is for
benchmarks of a serving system: it does the same work, but its tokens are not the target's.

References:
  Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", arXiv 2211.17192.
  Chen et al., "Accelerating Large Language Model Decoding with Speculative Sampling",
  arXiv 2302.01318.
  Sun et al., "Block Verification Accelerates Speculative Decoding", arXiv 2403.10444.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import lax

from jax_specdec._src.base.config import SpecDecodeConfig
from jax_specdec._src.base.types import Status
from jax_specdec._src.rows.blocks import FEW, entry_of
from jax_specdec._src.verify.position import Position
from jax_specdec._src.verify.requests import Request


def accepts_greedy(token_id: jax.Array, best_id: jax.Array) -> jax.Array:
    """Returns whether a greedy request accepts a draft: it is the target's argmax, `best_id`."""
    return token_id == best_id


def accepts(u: jax.Array, p: jax.Array, q: jax.Array) -> jax.Array:
    """Returns whether a sampled request accepts a draft: ``u * q < p``, and ``q > 0``.

    The inequality is strict, so a token of zero target probability is never accepted, even at
    ``u = 0``. If ``p = q``, the draft is always accepted.

    Args:
      u: ``[]`` float32 uniform on [0, 1).
      p: ``[]`` float32, target probability of the proposed token.
      q: ``[]`` float32, its draft probability; 1 for a one-hot draft.

    Returns:
      ``[]`` bool.
    """
    return (q > 0) & (u * q < p)


def accepts_synthetic(u: jax.Array, conditional_rate: jax.Array) -> jax.Array:
    """Returns whether a request, greedy or sampled, accepts a draft, after all before it."""
    return u < conditional_rate


def residual(weight: jax.Array, p: jax.Array, q: jax.Array) -> jax.Array:
    """Returns weights ``(weight * p - q)+`` of the token after a prefix.

    Their sum is the residual mass of the prefix.

    `q` is used once: XLA may write to memory what is used twice, here an exponential for each id.

    Args:
      weight: float32, joint weight of the prefix; 1 gives the standard rule's residual.
      p: float32 target probabilities of any shape.
      q: float32 draft probabilities of the same shape, not negative.

    Returns:
      float32 weights of the same shape, not normalized; NaN where `q` is infinite or NaN.
    """
    left = weight * p - q
    # A comparison with NaN is false, and so is that of -inf: both stay NaN.
    return jnp.where(left > -jnp.inf, jnp.maximum(left, 0.0), jnp.nan)


def joint_weight(weight: jax.Array, p: jax.Array, q: jax.Array) -> jax.Array:
    """Returns the joint weight of a prefix with one more draft: ``min(1, weight * p / q)``.

    Once it is 0 it stays 0, and no longer prefix passes.

    Args:
      weight: ``[]`` float32 in [0, 1], joint weight of the prefix; 1 for the empty one.
      p: ``[]`` float32, target probability of the draft.
      q: ``[]`` float32, draft probability of the draft; 1 for a one-hot draft.

    Returns:
      ``[]`` float32 in [0, 1]; 0 if `q` is 0.
    """
    possible = (weight > 0) & (q > 0)
    # The ratio comes first, because weight * p may underflow when weight * (p / q) does not. An
    # approximate division, as on a GPU, need not give 1 for equal numbers.
    ratio = jnp.where(p == q, 1.0, p / jnp.where(possible, q, 1.0))
    return jnp.where(possible, jnp.minimum(weight * ratio, 1.0), 0.0)


def one_hot_residual_mass(weight: jax.Array, p: jax.Array) -> jax.Array:
    """Returns the sum of `residual` if the next draft is one-hot, and has probability `p`."""
    return weight * (1.0 - p)


def passes(u: jax.Array, weight: jax.Array, mass: jax.Array) -> jax.Array:
    """Returns whether a prefix of one draft or more passes: ``u < mass / (mass + 1 - weight)``.

    The inequality is strict, so a prefix of weight 0 never passes. If ``p = q`` so far, it always
    passes.

    Args:
      u: ``[]`` float32 uniform on [0, 1), that of the prefix's last draft.
      weight: ``[]`` float32, joint weight of the prefix.
      mass: ``[]`` float32, its residual mass; `weight` itself after the last draft.

    Returns:
      ``[]`` bool.
    """
    # Multiplied out: there is nothing to divide by if mass and 1 - weight are 0.
    return u * (mass + (1.0 - weight)) < mass


KernelWalk = Literal["row by row", "by residual masses", "one row"]
"""How the kernel of `mosaic_gpu` goes over the positions of a request that samples."""


class Rule(abc.ABC):
    """What is asked of a rule; nobody asks for its class. Positions are ``[B, P]``.

    Attributes:
      name: as `SpecDecodeConfig.rejection_sample_method` has it.
      is_block: whether it takes the residual mass of every position.
      reads_one_position: whether it chooses the position that is read, before any is.
      draws_every_row: whether a token is drawn from each row that is read, not from the last alone.
      reads_ahead: whether the kernel may read rows before the positions ahead of them are judged.
      kernel_walk: None if the kernel does not serve it.
      conditional_rates: at which drafts are accepted; none where the models decide.
    """

    name: ClassVar[str]
    is_block: ClassVar[bool] = False
    reads_one_position: ClassVar[bool] = False
    draws_every_row: ClassVar[bool] = False
    reads_ahead: ClassVar[bool] = False
    kernel_walk: ClassVar[KernelWalk | None] = None
    conditional_rates: tuple[float, ...] = ()

    @abc.abstractmethod
    def choose(self, requests: Request, positions: Position) -> Position:
        """Returns the positions whose rows are read, of all that there are."""

    @abc.abstractmethod
    def with_weights(self, positions: Position) -> Position:
        """Returns all positions, with the joint weight of the drafts before each."""

    @abc.abstractmethod
    def next_weight(self, positions: Position) -> jax.Array:
        """Returns ``[B, P]`` float32, the joint weight of the drafts up to each position."""

    @abc.abstractmethod
    def goes_on(self, positions: Position) -> jax.Array:
        """Returns ``[B, P]`` bool, whether the rows after a position may matter."""

    @abc.abstractmethod
    def count(
        self, requests: Request, positions: Position, residual_masses: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Counts the drafts that are accepted.

        Args:
          positions: all that were chosen, read and given their weights.
          residual_masses: ``[B, P]`` float32, ``sum((weight * p - q)+)`` where `uses_q`. Only the
            block rule takes them.

        Returns:
          ``num_accepted [B]``, and the status ``[B]`` of the rows that the decision rests on.
        """


class OneByOne(Rule):
    """Drafts are accepted one after another, up to the first rejection."""

    def choose(self, requests: Request, positions: Position) -> Position:
        return positions

    def with_weights(self, positions: Position) -> Position:
        return positions

    def next_weight(self, positions: Position) -> jax.Array:
        return positions.weight

    def count(
        self, requests: Request, positions: Position, residual_masses: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        # [B]: the first position that ends the request, which may be the bonus
        stop = first_true(~self.goes_on(positions))
        return stop, _status_at(requests, positions.status, stop, stop < requests.num_rows)


@dataclasses.dataclass(frozen=True)
class Standard(OneByOne):
    """A draft is accepted by the ratio of p and q."""

    name: ClassVar[str] = "standard"
    reads_ahead: ClassVar[bool] = True
    kernel_walk: ClassVar[KernelWalk | None] = "row by row"

    def goes_on(self, positions: Position) -> jax.Array:
        return positions.is_good & accepts(positions.uniform, positions.p, positions.q)


@dataclasses.dataclass(frozen=True)
class Block(Rule):
    """The longest prefix of drafts that passes is accepted."""

    name: ClassVar[str] = "block"
    is_block: ClassVar[bool] = True
    kernel_walk: ClassVar[KernelWalk | None] = "by residual masses"

    def choose(self, requests: Request, positions: Position) -> Position:
        return positions

    def with_weights(self, positions: Position) -> Position:
        # [P, B]: the weight goes from each position to the next.
        p = positions.p.T
        q = positions.q.T

        def step(weight: jax.Array, of: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            return joint_weight(weight, *of), weight

        _, weights = lax.scan(step, jnp.ones_like(p[0]), (p, q), unroll=len(p) <= FEW)
        return positions._replace(weight=weights.T)

    def next_weight(self, positions: Position) -> jax.Array:
        return joint_weight(positions.weight, positions.p, positions.q)

    def goes_on(self, positions: Position) -> jax.Array:
        return positions.is_good & (self.next_weight(positions) > 0)

    def count(
        self, requests: Request, positions: Position, residual_masses: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        index = positions.offset
        weight = positions.weight
        status = positions.status
        # [B, P]: the residual mass of the prefix before each position. Where nothing is proposed,
        # q = 0 and all of the weight is left.
        one_hot = one_hot_residual_mass(weight, positions.p)
        mass = jnp.where(positions.proposed, one_hot, weight)
        mass = jnp.where(positions.uses_q, residual_masses, mass)
        # A draft row that holds no probabilities makes its mass NaN.
        is_bad = positions.uses_q & jnp.isnan(mass) & (status == Status.OK)
        status = jnp.where(is_bad, Status.BAD_DRAFT_ROW, status)
        # Nothing is read past the first bad row.
        stop = first_true(~self.goes_on(positions) | (status != Status.OK))
        # [B, P]: whether the prefix passes, by the uniform of its last draft; the empty one does.
        u = jnp.roll(positions.uniform, 1, axis=1)
        can_end = (index == 0) | passes(u, weight, mass)
        can_end &= index <= stop[:, None]
        num_accepted = jnp.max(jnp.where(can_end, index, 0), axis=1)
        # The row at `stop` is read for its draft, or to draw from.
        is_visited = entry_of(positions.proposed, stop) | (num_accepted == stop)
        is_visited &= stop < requests.num_rows
        return num_accepted, _status_at(requests, status, stop, is_visited)


@dataclasses.dataclass(frozen=True)
class Agreement(OneByOne):
    """A draft is accepted if it equals the token that was drawn from its row."""

    name: ClassVar[str] = "agreement"
    draws_every_row: ClassVar[bool] = True

    def goes_on(self, positions: Position) -> jax.Array:
        return positions.is_good & accepts_greedy(positions.token_id, positions.argmax)


@dataclasses.dataclass(frozen=True)
class Synthetic(OneByOne):
    """Drafts are accepted at K conditional rates; only the position they end at is read."""

    name: ClassVar[str] = "synthetic"
    reads_one_position: ClassVar[bool] = True
    kernel_walk: ClassVar[KernelWalk | None] = "one row"
    conditional_rates: tuple[float, ...]

    def goes_on(self, positions: Position) -> jax.Array:
        # Whatever it says, no other row of the request is read.
        return positions.is_good & accepts(positions.uniform, positions.p, positions.q)

    def choose(self, requests: Request, positions: Position) -> Position:
        # [B, K+1]: whether each draft is accepted; none is proposed at the last position
        rates = jnp.array([*self.conditional_rates, 0.0], jnp.float32)
        accepted = positions.proposed & accepts_synthetic(requests.accept, rates[None, :])
        end = first_true(~accepted)
        # [B, 1]: the position that the request ends at
        return jax.tree.map(lambda x: entry_of(x, end)[:, None], positions)

    def count(
        self, requests: Request, positions: Position, residual_masses: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        num_accepted = positions.offset[:, 0]
        first = jnp.zeros_like(requests.num_drafts)
        is_visited = num_accepted < requests.num_rows
        return num_accepted, _status_at(requests, positions.status, first, is_visited)


RULES: tuple[type[Rule], ...] = (Standard, Block, Synthetic, Agreement)
"""Every rule."""


def rule_of(config: SpecDecodeConfig) -> Rule:
    """Returns the rule that a config asks for."""
    if config.conditional_rates is not None:
        return Synthetic(config.conditional_rates)
    by_name = {rule.name: rule for rule in (Standard, Block, Agreement)}
    return by_name[config.rejection_sample_method]()


def first_true(x: jax.Array) -> jax.Array:
    """Returns the index ``[B]`` of the first true entry of ``[B, P]``; P if there is none."""
    index = lax.broadcasted_iota(jnp.int32, x.shape, 1)
    return jnp.min(jnp.where(x, index, x.shape[1]), axis=1)


def _status_at(
    requests: Request, status: jax.Array, place: jax.Array, is_visited: jax.Array
) -> jax.Array:
    """Returns ``[B]``: the status known before, or else that of a place that was visited."""
    found = jnp.where(is_visited, entry_of(status, place), Status.OK)
    return jnp.where(requests.is_ok, found, requests.status)
