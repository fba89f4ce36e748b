"""How likely drafts are to be accepted, learned from those that were: of chains, and of trees."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jax_specdec._src.arrays import Sizes, as_float32, as_int32, pytree
from jax_specdec._src.config import check_num_speculative_tokens
from jax_specdec._src.types import Integers

_MOST_LOG_ODDS = 40.0
_FIRST_SLOPE, _FIRST_INTERCEPT = 0.5, -0.2
_DECAY = 0.99
"""What remains of the past after a step: a memory of about 100 steps."""

_PRIOR_RATE, _PRIOR_VISITS = 0.7, 2.0
_RIDGE = 1.0
"""Added to the curvature: the weight of four drafts whose chance of acceptance is a half."""

_MOST_SLOPE_STEP, _MOST_INTERCEPT_STEP = 0.25, 1.0


@pytree(
    slope="[] float32",
    intercepts="[K] float32",
    curvature="[3, K] float32",
    visited="[K] float32",
    accepted="[K] float32",
)
@dataclasses.dataclass(frozen=True)
class AcceptanceEstimator:
    """An online model of the chance that draft k is accepted, if those before it were.

    For a draft that was sampled from q, it is a logistic regression on the largest probability::

        log_odds(c_k) = slope * log_odds(max q_k) + intercepts[k]

    with the log-odds of max q clamped to [-40, 40]. One Newton step follows each verification;
    the past fades by 1% with each step that visits a position. For a draft without a distribution,
    such as one by lookup, ``c_k`` is how often draft k was accepted before (`rates`).

    Only positions that the verification visited teach anything: those up to the first rejection.
    Whether later drafts would have been accepted is not known, so they are left out. A drafter that
    says how likely its drafts are to be accepted is believed: what it expects is then counted, of
    all drafts, in place of what was accepted.

    Attributes:
      slope: ``[]`` float32, shared by all positions; 0.5 at first.
      intercepts: ``[K]`` float32; -0.2 at first.
      curvature: ``[3, K]`` float32, for each position the sum of ``w``, ``w x`` and ``w x^2`` with
        x the log-odds of max q and ``w = c (1 - c)``, faded.
      visited: ``[K]`` float32, how many drafts were visited, faded.
      accepted: ``[K]`` float32, how many of them were accepted, faded.

    Example:
      >>> import jax.numpy as jnp
      >>> estimator = AcceptanceEstimator.create(2)
      >>> for _ in range(8):  # the first draft is always accepted, the second never
      ...     estimator = estimator.update(
      ...         num_drafts=jnp.array([2, 2]), num_accepted=jnp.array([1, 1]))
      >>> [round(rate, 2) for rate in estimator.rates.tolist()]
      [0.97, 0.11]

    References:
      A regression of this form is in vLLM 0.33.
    """

    slope: jax.Array
    intercepts: jax.Array
    curvature: jax.Array
    visited: jax.Array
    accepted: jax.Array

    @classmethod
    def create(cls, num_speculative_tokens: int) -> AcceptanceEstimator:
        """An estimator that has seen nothing.

        Args:
          num_speculative_tokens: K, 1 to 1024.

        Raises:
          TypeError: K is not an int.
          ValueError: K is out of range.
        """
        k = check_num_speculative_tokens(num_speculative_tokens)
        return cls(
            slope=jnp.float32(_FIRST_SLOPE),
            intercepts=jnp.full((k,), _FIRST_INTERCEPT, jnp.float32),
            curvature=jnp.zeros((3, k), jnp.float32),
            visited=jnp.zeros((k,), jnp.float32),
            accepted=jnp.zeros((k,), jnp.float32),
        )

    @property
    def rates(self) -> jax.Array:
        """``[K]`` float32: how often draft k was accepted, if those before it were.

        Two made-up drafts are added at each position, which were accepted at the rate of the
        position before (70% at the first): a position that was never visited has that rate.
        """

        def rate(
            before: jax.Array, counts: tuple[jax.Array, jax.Array]
        ) -> tuple[jax.Array, jax.Array]:
            visited, accepted = counts
            here = (accepted + _PRIOR_VISITS * before) / (visited + _PRIOR_VISITS)
            return here, here

        return lax.scan(rate, jnp.float32(_PRIOR_RATE), (self.visited, self.accepted))[1]

    def confidences(self, log_normalizer: ArrayLike) -> jax.Array:
        """The chance that each draft is accepted, if those before it were; for `plan_drafts`.

        Draft k itself is not looked at, only the largest probability of its distribution.

        Args:
          log_normalizer: ``[B, K]`` floating point, ``-log(max q)`` at the request's temperature:
            what `sample_draft_tokens` returns under this name. NaN for a draft without a
            distribution.

        Returns:
          ``[B, K]`` float32, `rates` where `log_normalizer` is NaN.

        Raises:
          TypeError: `log_normalizer` is not floating point.
          ValueError: it is not ``[B, K]``.
        """
        x, known = self._log_odds(log_normalizer, {})
        logits = self.slope * x + self.intercepts[None, :]
        return jnp.where(known, jax.nn.sigmoid(logits), self.rates[None, :])

    def update(
        self,
        *,
        num_drafts: Integers,
        num_accepted: Integers,
        log_normalizer: ArrayLike | None = None,
        confidences: ArrayLike | None = None,
    ) -> AcceptanceEstimator:
        """Learn from one verification of a batch. Pure; for use inside jit.

        Args:
          num_drafts: ``[B]`` integers, drafts offered to each request; 0 for one to leave out.
          num_accepted: ``[B]`` integers, as `rejection_sample` returns it.
          log_normalizer: ``[B, K]`` as for `confidences`; None if no draft has a distribution.
          confidences: ``[B, K]`` floating point, the drafter's own: the chance that each draft is
            accepted if those before it were, for all that it drafted, verified or not. NaN where it
            says none; None if it says none at all.

        Returns:
          The new estimator.

        Raises:
          TypeError: `num_drafts` or `num_accepted` do not hold integers, or `log_normalizer` or
            `confidences` are not floating point.
          ValueError: shapes that do not fit.
        """
        sizes: Sizes = {}
        num_drafts = as_int32("num_drafts", num_drafts, "[B]", sizes)
        num_accepted = as_int32("num_accepted", num_accepted, "[B]", sizes)
        position = jnp.arange(self.intercepts.shape[0], dtype=jnp.int32)[None, :]
        offered = position < num_drafts[:, None]
        visited = offered & (position <= num_accepted[:, None])
        accepted = offered & (position < num_accepted[:, None])
        visits, successes = visited.astype(jnp.float32), accepted.astype(jnp.float32)
        if confidences is not None:
            sizes = sizes | {"K": position.shape[1]}
            c = as_float32("confidences", confidences, "[B, K]", sizes)
            survival = jnp.cumprod(c, axis=1)
            reached = jnp.concatenate([jnp.ones_like(c[:, :1]), survival[:, :-1]], axis=1)
            visits = jnp.where(jnp.isnan(survival), visits, reached)
            successes = jnp.where(jnp.isnan(survival), successes, survival)
        decay = jnp.where((visits > 0).any(axis=0), _DECAY, 1.0)
        new = dataclasses.replace(
            self,
            visited=decay * self.visited + visits.sum(axis=0),
            accepted=decay * self.accepted + successes.sum(axis=0),
        )
        if log_normalizer is None:
            return new
        x, known = self._log_odds(log_normalizer, sizes)
        return new._newton_step(x, visited & known, accepted, decay)

    def _newton_step(
        self, x: jax.Array, visited: jax.Array, accepted: jax.Array, decay: jax.Array
    ) -> AcceptanceEstimator:
        """One step of the regression, whose matrix is diagonal but for the slope's row."""
        c = jax.nn.sigmoid(self.slope * x + self.intercepts[None, :])
        error = jnp.where(visited, accepted.astype(jnp.float32) - c, 0)
        w = jnp.where(visited, c * (1 - c), 0)
        sums = jnp.stack([(w * x**n).sum(axis=0) for n in range(3)])
        curvature = decay[None, :] * self.curvature + sums
        diagonal, mixed = curvature[0] + _RIDGE, curvature[1]
        gradient = error.sum(axis=0)
        # Eliminate the intercepts, solve for the slope, and substitute.
        schur = jnp.maximum(curvature[2].sum() + _RIDGE - (mixed**2 / diagonal).sum(), _RIDGE)
        slope = ((error * x).sum() - (mixed * gradient / diagonal).sum()) / schur
        slope = jnp.clip(slope, -_MOST_SLOPE_STEP, _MOST_SLOPE_STEP)
        intercepts = (gradient - mixed * slope) / diagonal
        intercepts = jnp.clip(intercepts, -_MOST_INTERCEPT_STEP, _MOST_INTERCEPT_STEP)
        return dataclasses.replace(
            self,
            slope=self.slope + slope,
            intercepts=self.intercepts + intercepts,
            curvature=curvature,
        )

    def _log_odds(self, log_normalizer: ArrayLike, sizes: Sizes) -> tuple[jax.Array, jax.Array]:
        """Log-odds of max q, ``[B, K]``, 0 where it is not known; and whether it is."""
        sizes = sizes | {"K": self.intercepts.shape[0]}
        array = as_float32("log_normalizer", log_normalizer, "[B, K]", sizes)
        known = ~jnp.isnan(array)
        # With q = exp(-n): log(q / (1 - q)) = -log(exp(n) - 1).
        x = -jnp.log(jnp.expm1(jnp.maximum(array, jnp.exp(-_MOST_LOG_ODDS))))
        x = jnp.clip(x, -_MOST_LOG_ODDS, _MOST_LOG_ODDS)
        return jnp.where(known, x, 0), known


@pytree(offered="[K] float32", kept="[K] float32")
@dataclasses.dataclass(frozen=True)
class TreeEstimator:
    """How often the drafts of trees are accepted, by their rank: the best one of a tree is first.

    The past fades by 1% with each step that offers a rank.

    Attributes:
      offered: ``[K]`` float32, how many drafts of each rank were offered, faded.
      kept: ``[K]`` float32, how many of them were accepted, faded.

    Example:
      >>> import jax.numpy as jnp
      >>> estimator = TreeEstimator.create(3)
      >>> for _ in range(8):  # of two drafts, always the second
      ...     estimator = estimator.update(num_drafts=jnp.array([2]), path=jnp.array([[0, 2, -1]]))
      >>> [round(rate, 2) for rate in estimator.rates.tolist()]
      [0.14, 0.81, 0.54]
    """

    offered: jax.Array
    kept: jax.Array

    @classmethod
    def create(cls, num_speculative_tokens: int) -> TreeEstimator:
        """An estimator that has seen nothing.

        Args:
          num_speculative_tokens: K, 1 to 1024.

        Raises:
          TypeError: K is not an int.
          ValueError: K is out of range.
        """
        k = check_num_speculative_tokens(num_speculative_tokens)
        return cls(offered=jnp.zeros((k,), jnp.float32), kept=jnp.zeros((k,), jnp.float32))

    @property
    def rates(self) -> jax.Array:
        """``[K]`` float32: how often the draft of each rank was accepted.

        Two made-up drafts are added at each rank. They were accepted at the rate of the rank
        before, times i / (i + 1) at rank i (70% at the first): so the chance of ranks that were
        never offered falls as 1 / (i + 1).
        """

        def rate(
            before: jax.Array, counts: tuple[jax.Array, jax.Array, jax.Array]
        ) -> tuple[jax.Array, jax.Array]:
            offered, kept, fall = counts
            here = (kept + _PRIOR_VISITS * fall * before) / (offered + _PRIOR_VISITS)
            return here, here

        rank = jnp.arange(self.offered.shape[0], dtype=jnp.float32)
        fall = jnp.where(rank > 0, rank / (rank + 1), 1)
        return lax.scan(rate, jnp.float32(_PRIOR_RATE), (self.offered, self.kept, fall))[1]

    def update(self, *, num_drafts: Integers, path: Integers) -> TreeEstimator:
        """Learn from one verification of a batch. Pure; for use inside jit.

        Args:
          num_drafts: ``[B]`` integers, drafts offered to each request; 0 for one to leave out.
          path: ``[B, P]`` integers, the nodes that were kept, as `rejection_sample` returns them.

        Returns:
          The new estimator.

        Raises:
          TypeError: an argument does not hold integers.
          ValueError: shapes that do not fit.
        """
        sizes: Sizes = {}
        num_drafts = as_int32("num_drafts", num_drafts, "[B]", sizes)
        path = as_int32("path", path, "[B, P]", sizes)
        rank = jnp.arange(self.offered.shape[0], dtype=jnp.int32)[None, :]
        offered = rank < num_drafts[:, None]
        # [B, K]: draft i is node i + 1
        kept = offered & jnp.any(path[:, :, None] == rank[:, None, :] + 1, axis=1)
        decay = jnp.where(offered.any(axis=0), _DECAY, 1.0)
        return TreeEstimator(
            offered=decay * self.offered + offered.sum(axis=0, dtype=jnp.float32),
            kept=decay * self.kept + kept.sum(axis=0, dtype=jnp.float32),
        )
