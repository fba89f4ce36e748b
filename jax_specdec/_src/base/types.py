"""The pytrees that drafting and verification exchange.

The letters for shapes, here and everywhere:

======  =====================================================================
``B``   requests in the batch
``K``   ``num_speculative_tokens``: the most drafts a request may have
``N``   length of the flattened draft axis, at least the sum of draft counts
``M``   rows of target logits, ``N + B`` unless said otherwise
``R``   rows of a draft distribution's storage
``V``   vocabulary of the target
``Vd``  vocabulary of the drafter, ``Vd <= V``
``C``   candidates of a draft row that lists its own ids
======  =====================================================================

Request ``b`` owns the drafts ``cu[b] .. cu[b+1]-1`` of the flattened axis, where ``cu`` is
``cu_num_draft_tokens``, and the ``count + 1`` rows of ``target_logits [N+B, V]`` from
``cu[b] + b`` on: one per draft position, then the bonus row.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_specdec._src.base.arrays import (
    LOGITS,
    Sizes,
    as_int32,
    check_array,
    check_entries,
    check_outside_jit,
    check_tree,
    check_type,
    known_values,
    pytree,
    require,
)

# What public functions take where they do not need a JAX array.
Array = jax.Array | np.ndarray
Integers = Array | Sequence[int]
IntegerRows = Array | Sequence[Sequence[int]]
Numbers = ArrayLike | Sequence[float]

PLACEHOLDER_TOKEN_ID = -1
"""Fills ``token_ids`` after the last emitted token, and marks a position without a proposal."""

TILE = 2048
"""Ids of a tile of the vocabulary, counted from id 0; the last tile may have fewer."""

MAX_LOG_NORMALIZER = 2.0**10
"""From this size on a stored log-normalizer is not used: q would not be exact in float32."""


class Status(enum.IntEnum):
    """How the verification of a request ended. Only a request that is ``OK`` emits tokens.

    Example:
      >>> Status(2).name
      'BAD_TARGET_ROW'
    """

    OK = 0
    """The request emitted ``num_emitted`` tokens."""
    INACTIVE = 1
    """The slot is empty; none of its rows were read."""
    BAD_TARGET_ROW = 2
    """A visited row of target logits holds NaN or +inf, or has no finite entry."""
    BAD_DRAFT_ROW = 3
    """A visited draft row is not a distribution, or its index is out of range."""
    BAD_INPUT = 4
    """A sampling parameter, a position or an offset is out of range, offsets are not sorted, or a
    count is above K."""


@pytree(
    probs="[R, Vd] float32",
    rows="[N] int32",
    valid="[B] bool",
    ids="[Vd] or [R, Vd] int32",
)
@dataclasses.dataclass(frozen=True)
class DraftProbs:
    """Draft distributions stored as probabilities, used as they are.

    Attributes:
      probs: ``[R, Vd]`` float32. Row ``rows[n]`` is the distribution draft ``n`` was drawn from.
      rows: ``[N]`` int32, or None if row ``n`` belongs to draft ``n`` (then ``R == N``).
      valid: ``[B]`` bool, or None for all true. A request whose entry is false is verified
        one-hot, as if no distribution were stored for it, and its rows are not read.
      ids: the target ids that the columns of `probs` stand for:

        - None: column ``j`` is id ``j``.
        - ``[Vd]`` int32, for a drafter with its own vocabulary: column ``j`` of every row is id
          ``ids[j]``.
        - ``[R, C]`` int32, for a drafter with a few candidates per position, where `probs` is
          ``[R, C]``: column ``j`` of row ``r`` is id ``ids[r, j]``, in any order.

        Ids without a column have ``q = 0``. Listed ids must be in the vocabulary, each listed once.
        A row of candidates that breaks this is BAD_DRAFT_ROW for requests that visit it. A shared
        map that does raises if its values are known; if not, it makes every row bad.

    Example:
      >>> import jax.numpy as jnp
      >>> distribution = DraftProbs(jnp.array([[0.5, 0.5], [0.1, 0.9]]))
      >>> distribution.probs.shape
      (2, 2)

      Two candidates for each of two drafts:

      >>> candidates = DraftProbs(distribution.probs, ids=jnp.array([[12, 7], [3, 99]]))
    """

    probs: jax.Array
    rows: jax.Array | None = None
    valid: jax.Array | None = None
    ids: jax.Array | None = None


@pytree(
    logits=f"[R, Vd] {LOGITS}",
    rows="[N] int32",
    valid="[B] bool",
    log_normalizer="[R] float32",
    row_max="[R] float32",
    threshold="[R] float32",
    ids="[Vd] or [R, Vd] int32",
)
@dataclasses.dataclass(frozen=True)
class DraftLogits:
    """Draft distributions stored as raw logits: ``q = softmax(float32(row) / temperature)``.

    Attributes:
      logits: ``[R, Vd]``, float32, bfloat16 or float16, before temperature. Row ``rows[n]`` is
        what draft ``n`` was drawn from. It must be rounded to this dtype *before* the draft is
        drawn.
      rows: ``[N]`` int32, or None if row ``n`` belongs to draft ``n`` (then ``R == N``).
      valid: ``[B]`` bool, or None for all true; see `DraftProbs`.
      log_normalizer: ``[R]`` float32, or None to have it computed. Entry ``r`` is
        ``logsumexp((float32(logits[r]) - row_max[r]) / temperature)`` over the ids the drafter
        could draw, and then ``q = exp((float32(row) - row_max) / temperature - log_normalizer)``.
        Storing it saves one read of every draft row except the one that is resampled from. A draft
        whose entry is ``2**10`` or more in size is verified one-hot, and
        `DraftStore.count_fallbacks` counts its request.
      row_max: ``[R]`` float32, the maximum of each row, or None for 0. Give it: without it,
        `log_normalizer` is about as large as ``max(logits) / temperature``, and the error of q
        grows with it. Just below ``2**10``, q is off by a factor of about ``1 + 2**-14``, at most
        ``1 + 2**-12``.
      threshold: ``[R]`` float32, or None for none. Logits of row ``r`` below ``threshold[r]`` were
        left out (by min-p, top-k or top-p) when the draft was drawn: they have ``q = 0``.
      ids: ``[Vd]`` or ``[R, C]`` int32, the target ids that the columns of `logits` stand for, or
        None; see `DraftProbs`. `log_normalizer` is then the sum over the listed ids.

    Example:
      >>> import jax.numpy as jnp
      >>> distribution = DraftLogits(jnp.zeros((3, 8), jnp.bfloat16))
      >>> distribution.log_normalizer is None
      True
    """

    logits: jax.Array
    rows: jax.Array | None = None
    valid: jax.Array | None = None
    log_normalizer: jax.Array | None = None
    row_max: jax.Array | None = None
    threshold: jax.Array | None = None
    ids: jax.Array | None = None


ROW_NUMBERS = ("log_normalizer", "row_max", "threshold")
"""The fields of `DraftLogits` that are a number for each row."""

DraftDistribution = DraftProbs | DraftLogits


@pytree(
    token_ids="[N] int32",
    cu_num_draft_tokens="[B+1] int32",
    distribution=(DraftProbs, DraftLogits),
    parents="[N] int32",
)
@dataclasses.dataclass(frozen=True)
class Drafts:
    """The proposed tokens of a batch, flattened, and where each request's begin.

    Attributes:
      token_ids: ``[N]`` int32, one request after another; ids past the last offset are padding.
        An id outside ``[0, V)`` means that no token was proposed there: verification of that
        request ends, and its token is sampled from the target, as a bonus token would be. Write -1
        for it: outside of `jax.jit`, where `rejection_sample` sees the ids, it refuses others.
      cu_num_draft_tokens: ``[B+1]`` int32, exclusive cumulative offsets with a leading 0.
      distribution: what the drafts were drawn from; None for drafts without probabilities
        (n-gram lookup, a greedy drafter), which are verified one-hot.
      parents: ``[N]`` int32, what each draft follows; None if the drafts of a request follow one
        another. With parents the drafts of each request are a tree, whose node 0 is the sequence so
        far and whose node i is the request's draft ``i - 1``. Draft ``j`` follows a node from 0 to
        ``j``, and siblings differ. Target row i of a request scores the token after node i. Nodes
        without a proposal may be anywhere; their parents are not looked at. Only the agreement rule
        verifies trees.

    A draft that a grammar forbids keeps its id here. Give `rejection_sample` the mask of its row:
    then ``p(x) = 0`` rejects it, and the residual is right.

    Example:
      Two requests, one with two drafts, one with none:

      >>> import jax.numpy as jnp
      >>> drafts = Drafts.from_flat(jnp.array([7, 3]), jnp.array([2, 0]))
      >>> drafts.cu_num_draft_tokens.tolist()
      [0, 2, 2]
    """

    token_ids: jax.Array
    cu_num_draft_tokens: jax.Array
    distribution: DraftDistribution | None = None
    parents: jax.Array | None = None

    @classmethod
    def from_flat(
        cls,
        token_ids: Integers,
        num_draft_tokens: Integers,
        distribution: DraftDistribution | None = None,
        parents: Integers | None = None,
    ) -> Drafts:
        """Makes drafts of flattened ids and a count per request.

        Args:
          token_ids: ``[N]`` integers in the range of int32.
          num_draft_tokens: ``[B]`` integers, each at most K, their sum at most N.
          distribution: what the flattened drafts were drawn from, or None for one-hot.
          parents: ``[N]`` integers, the node that each draft follows, or None for chains.

        Returns:
          Drafts; `target_logits` is then ``[N+B, V]``.

        Raises:
          TypeError: not integers, or a `distribution` of another type.
          ValueError: not one-dimensional, or not one parent for each draft; an integer out of the
            range of int32; or, if their values are known, counts that are negative or more than N
            together.

        Example:
          >>> import jax.numpy as jnp
          >>> Drafts.from_flat(jnp.array([5, 6, 9]), jnp.array([1, 2])).cu_num_draft_tokens.tolist()
          [0, 1, 3]
        """
        ids = as_int32("token_ids", token_ids)
        check_array("token_ids", ids, "[N]", {}, "from_dense takes [B, K]")
        counts = as_int32("num_draft_tokens", num_draft_tokens, "[B]")
        check_type("distribution", distribution, DraftProbs, DraftLogits, None)
        # Under jit the counts are not known: a request out of range gets a status instead.
        if (known := known_values(num_draft_tokens)) is not None and known.size:
            check_entries("num_draft_tokens[{}]", known, known >= 0, "be at least 0")
            most = f"be at most N = {len(ids)}"
            hint = "they are counts, not offsets"
            require(known.sum() <= len(ids), "num_draft_tokens, summed,", most, known.sum(), hint)
        # [B] -> [B+1]: counts to offsets
        cu = jnp.concatenate([jnp.zeros((1,), jnp.int32), jnp.cumsum(counts, dtype=jnp.int32)])
        if parents is not None:
            parents = as_int32("parents", parents, "[N]", {"N": len(ids)})
        return cls(ids, cu, distribution, parents)

    @classmethod
    def from_dense(
        cls,
        token_ids: IntegerRows,
        num_draft_tokens: Integers | None = None,
        distribution: DraftDistribution | None = None,
        parents: IntegerRows | None = None,
    ) -> Drafts:
        """Makes drafts of a rectangle of ids. Nothing of the vocabulary's size is copied.

        Every request owns K draft positions and K + 1 target rows: pass
        ``target_logits.reshape(B * (K + 1), V)``. Ids past a request's count become -1 (no
        proposal), so the row after its last draft is used as its bonus row.

        Args:
          token_ids: ``[B, K]`` integers in the range of int32.
          num_draft_tokens: ``[B]`` integers, or None if all K ids are proposals.
          distribution: None, or a `DraftProbs` or `DraftLogits` with storage ``[B, K, Vd]`` or
            ``[B*K, Vd]``. Its ``log_normalizer``, ``row_max`` and ``threshold`` are ``[B, K]`` or
            ``[B*K]``, and the ``ids`` of candidates ``[B, K, C]`` or ``[B*K, C]``.
          parents: ``[B, K]`` integers, the node that each draft follows, or None for chains.

        Returns:
          Drafts with ``N = B * K``.

        Raises:
          TypeError: not integers, or a `distribution` of another type or of what is no array.
          ValueError: `token_ids` or `parents` are not ``[B, K]``, or `num_draft_tokens` not
            ``[B]``; an integer out of the range of int32; or, if their values are known, a count
            outside [0, K].

        Example:
          >>> import jax.numpy as jnp
          >>> drafts = Drafts.from_dense(jnp.array([[7, 3], [4, 0]]), jnp.array([2, 1]))
          >>> drafts.token_ids.tolist(), drafts.cu_num_draft_tokens.tolist()
          ([7, 3, 4, -1], [0, 2, 4])

          A tree: token 7, or else token 4, comes next, and 3 after 7.

          >>> Drafts.from_dense(jnp.array([[7, 4, 3]]), parents=jnp.array([[0, 0, 1]])).parents
          Array([0, 0, 1], dtype=int32)
        """
        ids = as_int32("token_ids", token_ids, "[B, K]")
        batch, k = ids.shape
        if num_draft_tokens is not None:
            counts = check_counts(num_draft_tokens, batch, k)
            # [B, K]: ids past a request's count become -1, as no proposal
            past_count = jnp.arange(k, dtype=jnp.int32)[None, :] >= counts[:, None]
            ids = jnp.where(past_count, PLACEHOLDER_TOKEN_ID, ids)
        # [B+1]: each request owns K places, whatever its count
        cu = jnp.arange(batch + 1, dtype=jnp.int32) * k
        if parents is not None:
            sizes = {"B": batch, "K": k}
            parents = as_int32("parents", parents, "[B, K]", sizes).reshape(-1)
        # [B, K] -> [N], and so the rows of storage
        return cls(ids.reshape(-1), cu, flatten_storage(distribution), parents)


def check_drafts(drafts: Any, sizes: Sizes) -> None:
    """Checks drafts, but for what they were drawn from, which is not read.

    Raises:
      TypeError: not a `Drafts`, or an array of another dtype.
      ValueError: an array of another shape.
    """
    check_type("drafts", drafts, Drafts)
    check_tree("drafts", dataclasses.replace(drafts, distribution=None), (Drafts,), sizes)


def check_counts(num_draft_tokens: Any, batch: int, k: int) -> jax.Array:
    """Returns counts of drafts ``[B]`` as int32.

    Raises:
      TypeError: not integers.
      ValueError: not ``[B]``; an integer out of the range of int32; or, if their values are known,
        a count outside [0, K].
    """
    counts = as_int32("num_draft_tokens", num_draft_tokens, "[B]", {"B": batch})
    known = known_values(num_draft_tokens)
    if known is not None:
        holds = (known >= 0) & (known <= k)
        check_entries("num_draft_tokens[{}]", known, holds, f"be in [0, K] = [0, {k}]")
    return counts


def flatten_storage(distribution: DraftDistribution | None) -> DraftDistribution | None:
    """Returns storage ``[B, K, Vd]`` as ``[B*K, Vd]``; flat storage stays as it is.

    Raises:
      TypeError: a distribution of another type, or of lists in place of arrays.
    """
    check_type("distribution", distribution, DraftProbs, DraftLogits, None)
    if distribution is None:
        return None
    given = {name: x for name, x in vars(distribution).items() if x is not None}
    for name, x in given.items():
        check_array(f"distribution.{name}", x, "", {})
    rows = {name: x for name, x in given.items() if name in ("probs", "logits", "ids")}
    # [B, K, C] -> [R, C]; a map [Vd] that all rows share stays
    flat = {name: x.reshape(-1, x.shape[-1]) for name, x in rows.items() if x.ndim > 2}
    # [B, K] -> [N], or [R]: a number of each draft, or of each row
    flat |= {name: x.reshape(-1) for name, x in given.items() if name not in rows}
    return dataclasses.replace(distribution, **flat)


@pytree(accept="[B, K] float32", recover="[B, 2] float32")
@dataclasses.dataclass(frozen=True)
class Noise:
    """Explicit randomness of one verification: independent uniforms on [0, 1).

    Attributes:
      accept: ``[B, K]`` float32. Entry ``[b, j]`` belongs to draft ``j`` of request ``b``, which is
        accepted iff ``accept[b, j] * q(x) < p(x)``.
      recover: ``[B, 2]`` float32: the first picks a tile of the vocabulary, the second a
        token inside it, each by inverse CDF.

    Example: see `rejection_sample_with_noise`.
    """

    accept: jax.Array
    recover: jax.Array


@pytree(accept="[B, K] float32", exponential="[B, V] or [B, K+1, T+L] float32")
@dataclasses.dataclass(frozen=True)
class RaceNoise:
    """Explicit randomness that draws tokens by exponential races (XLA only).

    A race of weights is won by ``argmax(weight / exponential)``; ties go to the lowest id.

    Attributes:
      accept: ``[B, K]`` float32 uniforms on [0, 1), one per draft position of each request; not
        used by the agreement rule.
      exponential: float32, Exp(1) samples. ``[B, V]`` for one race over the vocabulary, which gives
        the recovered or bonus token: for comparing with other systems token by token. Under the
        agreement rule ``[B, K+1, T+L]``, two races for each position: of the T = ceil(V / 2048)
        tiles by mass, then of the ids of the winner, which has L = min(V, 2048) of them at most.

    Example:
      >>> import jax.numpy as jnp
      >>> RaceNoise(accept=jnp.zeros((2, 4)), exponential=jnp.ones((2, 8))).exponential.shape
      (2, 8)
    """

    accept: jax.Array
    exponential: jax.Array


@pytree(
    token_ids="[B, K+1] int32",
    num_accepted="[B] int32",
    num_emitted="[B] int32",
    status="[B] int32",
    path="[B, K+1] int32",
)
@dataclasses.dataclass(frozen=True)
class RejectionSampleOutput:
    """The output of one verification.

    Attributes:
      token_ids: ``[B, K+1]`` int32: accepted tokens, then one recovered or bonus token, then
        `PLACEHOLDER_TOKEN_ID`.
      num_accepted: ``[B]`` int32, drafts kept.
      num_emitted: ``[B]`` int32, tokens emitted: accepted + 1, or 0 if `status` is not OK.
      status: ``[B]`` int32, a `Status`.
      path: ``[B, K+1]`` int32, the node whose row each token was drawn from, -1 after the last
        one: node 0, then those of the drafts kept. None for drafts without parents, where node j
        gives token j.

    Example:
      The first of two requests has drafts 2 and 0, and accepts one; the second accepts its draft:

      >>> import jax, jax.numpy as jnp
      >>> import jax_specdec as sd
      >>> likeliest = jnp.array([2, 3, 0, 1, 2])  # of each of 3 + 2 rows
      >>> output = sd.rejection_sample(
      ...     jnp.log(jnp.eye(4)[likeliest]),
      ...     sd.Drafts.from_flat(jnp.array([2, 0, 1]), jnp.array([2, 1])),
      ...     sampling=sd.SamplingParams(temperature=jnp.array([0.0, 1.0])),
      ...     keys=jax.random.split(jax.random.key(0), 2), positions=jnp.array([5, 9]),
      ...     config=sd.SpecDecodeConfig(num_speculative_tokens=2))
      >>> output.token_ids.tolist(), output.num_accepted.tolist(), output.num_emitted.tolist()
      ([[2, 3, -1], [1, 2, -1]], [1, 1], [2, 2])
    """

    token_ids: jax.Array
    num_accepted: jax.Array
    num_emitted: jax.Array
    status: jax.Array
    path: jax.Array | None = None


def parse_output(output: RejectionSampleOutput) -> list[list[int]]:
    """Returns the emitted tokens of each request, as Python lists, read on the host.

    Args:
      output: what `rejection_sample` returned, outside jit.

    Returns:
      One list per request, `num_emitted` long; empty if `status` is not OK.

    Raises:
      TypeError: `output` is not a `RejectionSampleOutput` of int32, or is traced.
      ValueError: its shapes do not fit.

    Example:
      >>> import jax.numpy as jnp
      >>> ids = jnp.array([[4, 2, -1], [-1, -1, -1]])
      >>> output = RejectionSampleOutput(
      ...     ids, jnp.array([1, 0]), jnp.array([2, 0]), jnp.array([0, int(Status.INACTIVE)])
      ... )
      >>> parse_output(output)
      [[4, 2], []]
    """
    check_type("output", output, RejectionSampleOutput)
    check_outside_jit("parse_output", output=output)
    # [B, K+1] and [B], in one copy from the device
    token_ids, num_emitted = jax.device_get((output.token_ids, output.num_emitted))
    sizes: Sizes = {}
    check_array("output.token_ids", token_ids, "[B, K+1] int32", sizes)
    check_array("output.num_emitted", num_emitted, "[B] int32", sizes)
    return [row[:n].tolist() for row, n in zip(token_ids, num_emitted, strict=True)]
