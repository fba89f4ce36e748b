"""The pytrees that flow between the stages of speculative decoding.

Letters used for shapes, here and everywhere:

======  =====================================================================
``B``   requests in the batch
``K``   ``num_speculative_tokens``: the most drafts a request may have
``N``   length of the flattened draft axis, at least the sum of draft counts
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
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

PLACEHOLDER_TOKEN_ID = -1
"""Fills ``token_ids`` after the last emitted token, and marks a position without a proposal."""


class Status(enum.IntEnum):
    """What became of a request; anything but ``OK`` emits no token.

    Example:
      >>> Status(2).name
      'BAD_TARGET_ROW'
    """

    OK = 0
    """The request emitted ``num_emitted`` tokens."""
    INACTIVE = 1
    """The slot is empty; none of its rows were read."""
    BAD_TARGET_ROW = 2
    """A visited row of target logits holds NaN or +inf, or nothing finite."""
    BAD_DRAFT_ROW = 3
    """A visited draft row is not a distribution, or its index is out of range."""
    BAD_INPUT = 4
    """A sampling parameter, a position or an offset out of range, offsets not sorted, or a count
    above K."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DraftProbs:
    """Draft distributions stored as probabilities, used as given.

    Attributes:
      probs: ``[R, Vd]`` float32. Row ``rows[n]`` is the distribution draft ``n`` was drawn from.
      rows: ``[N]`` int32, or None where row ``n`` belongs to draft ``n`` (then ``R == N``).
      valid: ``[B]`` bool, or None for all true. A request whose entry is false is verified
        one-hot, as if no distribution had been stored for it; its rows are not read.
      ids: which target ids the columns of `probs` stand for. None: column ``j`` is id ``j``, and
        ids from Vd on have ``q = 0``. ``[Vd]`` int32: column ``j`` of every row is id ``ids[j]``,
        as of a drafter with a vocabulary of its own. ``[R, C]`` int32, where `probs` is ``[R, C]``:
        column ``j`` of row ``r`` is id ``ids[r, j]``, as of a drafter with a few candidates for
        each position, in any order. Ids that are not listed have ``q = 0``. Listed ids must be
        those of the vocabulary, each once. A row that lists others is BAD_DRAFT_ROW for who visits
        it; a shared map that does raises where its values are known, and else makes every row so.

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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DraftLogits:
    """Draft distributions stored as raw logits: ``q = softmax(float32(row) / temperature)``.

    Attributes:
      logits: ``[R, Vd]``, float32, bfloat16 or float16, before temperature. Row ``rows[n]`` is
        what draft ``n`` was drawn from, rounded to this dtype *before* it was drawn.
      rows: ``[N]`` int32, or None where row ``n`` belongs to draft ``n`` (then ``R == N``).
      valid: ``[B]`` bool, or None for all true; see `DraftProbs`.
      log_normalizer: ``[R]`` float32, or None to have it computed. Entry ``r`` is
        ``logsumexp(float32(logits[r]) / temperature)`` over the ids the drafter could draw.
        Storing it spares one read of every draft row but the one that is resampled from.
      threshold: ``[R]`` float32, or None for none. Entries of row ``r`` below entry ``r`` were left
        out when it was drawn from (by min-p, top-k or top-p): they have ``q = 0``.
      ids: ``[Vd]`` or ``[R, C]`` int32, the target ids that the columns of `logits` stand for, or
        None; see `DraftProbs`. The sum of `log_normalizer` is then over the listed ids.

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
    threshold: jax.Array | None = None
    ids: jax.Array | None = None


DraftDistribution = DraftProbs | DraftLogits


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Drafts:
    """The proposed tokens of a batch, flattened, and where each request's begin.

    Attributes:
      token_ids: ``[N]`` int32, one request after another; what lies past the last offset is
        padding. An id outside ``[0, V)`` means that no proposal was made there: verification
        of that request ends and its token is sampled from the target, as a bonus would be.
      cu_num_draft_tokens: ``[B+1]`` int32, exclusive cumulative offsets with a leading 0.
      distribution: what the drafts were drawn from; None for drafts without probabilities
        (n-gram lookup, a greedy drafter), which are verified as one-hot.

    A token that a grammar forbids keeps its id here; give `rejection_sample` the mask of its row.
    Then ``p(x) = 0`` rejects it and the residual is right.

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

    @classmethod
    def from_flat(
        cls,
        token_ids: jax.Array,
        num_draft_tokens: jax.Array,
        distribution: DraftDistribution | None = None,
    ) -> Drafts:
        """Drafts from flattened ids and a count per request.

        Args:
          token_ids: ``[N]`` integers that int32 holds.
          num_draft_tokens: ``[B]`` integers, each at most K, their sum at most N.
          distribution: rows per flattened draft, or None for one-hot.

        Returns:
          Drafts; `target_logits` is then ``[N+B, V]``.

        Raises:
          TypeError: not integers; or traced, of a dtype whose values int32 may not hold.
          ValueError: not one-dimensional, an integer that int32 does not hold, or, where their
            values are known, counts that are negative or more than N together.

        Example:
          >>> import jax.numpy as jnp
          >>> Drafts.from_flat(jnp.array([5, 6, 9]), jnp.array([1, 2])).cu_num_draft_tokens.tolist()
          [0, 1, 3]
        """
        ids = as_int32("token_ids", token_ids)
        counts = as_int32("num_draft_tokens", num_draft_tokens)
        if ids.ndim != 1:
            raise ValueError(
                f"token_ids must be [N], one request after another, but its shape is "
                f"{list(ids.shape)}; from_dense takes [B, K]"
            )
        if counts.ndim != 1:
            raise ValueError(f"num_draft_tokens must be [B], but its shape is {list(counts.shape)}")
        if (known := known_values(num_draft_tokens)) is not None and known.size:
            if known.min() < 0:
                raise ValueError(f"num_draft_tokens must not be negative, but one is {known.min()}")
            if known.sum() > len(ids):
                raise ValueError(
                    f"num_draft_tokens must be at most N = {len(ids)} together, but they are "
                    f"{known.sum()}; they are counts, not offsets"
                )
        cu = jnp.concatenate([jnp.zeros((1,), jnp.int32), jnp.cumsum(counts, dtype=jnp.int32)])
        return cls(ids, cu, distribution)

    @classmethod
    def from_dense(
        cls,
        token_ids: jax.Array,
        num_draft_tokens: jax.Array | None = None,
        distribution: DraftDistribution | None = None,
    ) -> Drafts:
        """Drafts from a rectangle of ids; nothing of the vocabulary's size is copied.

        Every request owns K draft positions and K + 1 target rows: pass
        ``target_logits.reshape(B * (K + 1), V)``. Ids past a request's count become -1 (no
        proposal), so the row after its last draft serves as its bonus row.

        Args:
          token_ids: ``[B, K]`` integers that int32 holds.
          num_draft_tokens: ``[B]`` integers, or None where all K ids are proposals.
          distribution: `DraftProbs` or `DraftLogits` whose storage is ``[B, K, Vd]`` or
            ``[B*K, Vd]`` (then ``log_normalizer`` and ``threshold`` are ``[B, K]`` or ``[B*K]``,
            and candidates ``ids`` are ``[B, K, C]`` or ``[B*K, C]``), or None.

        Returns:
          Drafts with ``N = B * K``.

        Raises:
          TypeError: not integers; or traced, of a dtype whose values int32 may not hold; or a
            `distribution` of another type.
          ValueError: `token_ids` is not ``[B, K]``, or `num_draft_tokens` not ``[B]``; an integer
            that int32 does not hold; or, where their values are known, a count outside [0, K].

        Example:
          >>> import jax.numpy as jnp
          >>> drafts = Drafts.from_dense(jnp.array([[7, 3], [4, 0]]), jnp.array([2, 1]))
          >>> drafts.token_ids.tolist(), drafts.cu_num_draft_tokens.tolist()
          ([7, 3, 4, -1], [0, 2, 4])
        """
        ids = as_int32("token_ids", token_ids)
        if ids.ndim != 2:
            raise ValueError(f"token_ids must be [B, K], but its shape is {list(ids.shape)}")
        batch, k = ids.shape
        if num_draft_tokens is not None:
            counts = check_counts(num_draft_tokens, batch, k)
            past_count = jnp.arange(k, dtype=jnp.int32)[None, :] >= counts[:, None]
            ids = jnp.where(past_count, PLACEHOLDER_TOKEN_ID, ids)
        cu = jnp.arange(batch + 1, dtype=jnp.int32) * k
        return cls(ids.reshape(-1), cu, flatten_storage(distribution))


def as_int32(name: str, values: Any) -> jax.Array:
    """`values` as int32, where that changes none of them.

    Raises:
      TypeError: not integers; or traced, of a dtype whose values int32 may not hold.
      ValueError: an integer that int32 does not hold.
    """
    if isinstance(values, jax.Array) and jnp.issubdtype(values.dtype, jnp.integer):
        if np.can_cast(values.dtype, np.int32):
            return jnp.asarray(values, jnp.int32)
        if isinstance(values, jax.core.Tracer):
            raise TypeError(
                f"{name} must be int32 where their values are not known, under jit for example, "
                f"but they are {values.dtype}"
            )
    return jnp.asarray(host_int32(name, values))


def host_int32(name: str, values: Any) -> np.ndarray:
    """Values on the host as int32, where that changes none of them.

    Raises:
      TypeError: not integers.
      ValueError: an integer that int32 does not hold.
    """
    if not isinstance(values, (jax.Array, np.ndarray)):
        values = np.asarray(values)
        if values.size == 0:  # NumPy takes an empty list for floats
            values = values.astype(np.int32)
    if not jnp.issubdtype(values.dtype, jnp.integer):
        raise TypeError(f"{name} must be integers, but they are {values.dtype}: {values!r:.80}")
    values, limits = np.asarray(values), np.iinfo(np.int32)
    too_large = values[(values < limits.min) | (values > limits.max)]
    if too_large.size:
        raise ValueError(f"{name} must be integers that int32 holds, but one is {too_large[0]}")
    return values.astype(np.int32)


def as_positions(positions: Any) -> Any:
    """Positions as an array: those of JAX as they are, lists and others of NumPy's as int32.

    Raises:
      TypeError: not integers.
      ValueError: an integer that int32 does not hold.
    """
    return positions if isinstance(positions, jax.Array) else host_int32("positions", positions)


def check_counts(num_draft_tokens: Any, batch: int, k: int) -> jax.Array:
    """Counts of drafts as int32.

    Raises:
      TypeError: not integers; or traced, of a dtype whose values int32 may not hold.
      ValueError: not ``[B]``; an integer that int32 does not hold; or, where their values are
        known, a count outside [0, K].
    """
    counts = as_int32("num_draft_tokens", num_draft_tokens)
    if counts.shape != (batch,):
        raise ValueError(
            f"num_draft_tokens must be [B] = [{batch}], but its shape is {list(counts.shape)}"
        )
    known = known_values(num_draft_tokens)
    if known is not None and ((known < 0) | (known > k)).any():
        wrong = known[(known < 0) | (known > k)][0]
        raise ValueError(f"num_draft_tokens must be in [0, K] = [0, {k}], but one is {wrong}")
    return counts


def known_values(values: Any) -> np.ndarray | None:
    """Values, read on the host; None where they are traced or on other hosts."""
    if isinstance(values, jax.core.Tracer):
        return None
    if isinstance(values, jax.Array) and not values.is_fully_addressable:
        return None
    return np.asarray(values)


def described(value: Any) -> str:
    """A value in a message, in one line: an array by its dtype and shape."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"an array of {value.dtype}{list(value.shape)}"
    return " ".join(f"{value!r:.80}".split())


def flatten_storage(distribution: DraftDistribution | None) -> DraftDistribution | None:
    """Storage ``[B, K, Vd]`` as ``[B*K, Vd]``; what is flat stays as it is."""
    if distribution is None:
        return None
    if not isinstance(distribution, (DraftProbs, DraftLogits)):
        raise TypeError(
            "distribution must be None, a DraftProbs or a DraftLogits, but it is "
            f"{described(distribution)}"
        )
    rows = None if distribution.rows is None else distribution.rows.reshape(-1)
    ids = None if distribution.ids is None else _flatten_rows(distribution.ids)
    if isinstance(distribution, DraftProbs):
        probs = distribution.probs
        return dataclasses.replace(distribution, probs=_flatten_rows(probs), rows=rows, ids=ids)
    normalizer, threshold = distribution.log_normalizer, distribution.threshold
    return dataclasses.replace(
        distribution,
        logits=_flatten_rows(distribution.logits),
        rows=rows,
        log_normalizer=None if normalizer is None else normalizer.reshape(-1),
        threshold=None if threshold is None else threshold.reshape(-1),
        ids=ids,
    )


def _flatten_rows(storage: jax.Array) -> jax.Array:
    return storage.reshape(-1, storage.shape[-1]) if storage.ndim > 2 else storage


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How each request samples: by temperature, then min-p, then top-k, then top-p.

    Each of the three leaves out the entries of a row below a threshold, and what is left is
    normalized again. Entries equal to the threshold all stay. Where a field is None, nothing is
    compiled for it; where no request uses one, nothing is computed. Greedy requests ignore them.

    Functions that take a `SamplingParams` also take one number for all requests, a list and a NumPy
    array of any width in each field. A JAX array must have the dtype that is written here.

    Attributes:
      temperature: ``[B]`` float32. ``p = softmax(float32(logits) / temperature)``; 0 is greedy.
      min_p: ``[B]`` float32 in [0, 1], or None. Tokens with ``p < min_p * max(p)`` are left out;
        0 leaves out none.
      top_k: ``[B]`` int32, not negative, or None. Tokens less likely than the k-th likeliest are
        left out; 0 leaves out none.
      top_p: ``[B]`` float32 in (0, 1], or None. The likeliest tokens stay, as many as it takes to
        have `top_p` of the mass left so far; 1 leaves out none.

    Example:
      >>> import jax.numpy as jnp
      >>> sampling = SamplingParams(jnp.array([0.0, 0.8]), top_p=jnp.array([1.0, 0.95]))
      >>> sampling.temperature.shape, sampling.top_k is None
      ((2,), True)
    """

    temperature: jax.Array
    min_p: jax.Array | None = None
    top_k: jax.Array | None = None
    top_p: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Noise:
    """Explicit randomness of one verification, all of it independent uniforms on [0, 1).

    Attributes:
      accept: ``[B, K]`` float32, one per draft position of each request (not flattened: entry
        ``[b, j]`` belongs to draft ``j`` of request ``b``): accept iff ``u * q(x) < p(x)``.
      recover: ``[B, 2]`` float32: the first picks a tile of the vocabulary, the second a
        token inside it, each by inverse CDF.

    Example:
      >>> import jax.numpy as jnp
      >>> Noise(accept=jnp.zeros((2, 4)), recover=jnp.zeros((2, 2))).recover.shape
      (2, 2)
    """

    accept: jax.Array
    recover: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RaceNoise:
    """Explicit randomness whose last token is the winner of an exponential race.

    For comparing with other systems token by token (XLA only): the recovered or bonus token is
    ``argmax(weight / exponential)``, ties to the lowest id.

    Attributes:
      accept: ``[B, K]`` float32 uniforms on [0, 1), one per draft position of each request.
      exponential: ``[B, V]`` float32, Exp(1) samples.

    Example:
      >>> import jax.numpy as jnp
      >>> RaceNoise(accept=jnp.zeros((2, 4)), exponential=jnp.ones((2, 8))).exponential.shape
      (2, 8)
    """

    accept: jax.Array
    exponential: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RejectionSampleOutput:
    """What one verification emits.

    Attributes:
      token_ids: ``[B, K+1]`` int32: accepted tokens, then one recovered or bonus token, then
        `PLACEHOLDER_TOKEN_ID`.
      num_accepted: ``[B]`` int32, drafts kept.
      num_emitted: ``[B]`` int32, tokens emitted: accepted + 1, or 0 where `status` is not OK.
      status: ``[B]`` int32, a `Status`.

    Example:
      >>> import jax.numpy as jnp
      >>> zero = jnp.zeros((1,), jnp.int32)
      >>> output = RejectionSampleOutput(jnp.array([[4, 2, -1]]), zero + 1, zero + 2, zero)
      >>> parse_output(output)
      [[4, 2]]
    """

    token_ids: jax.Array
    num_accepted: jax.Array
    num_emitted: jax.Array
    status: jax.Array


def parse_output(output: RejectionSampleOutput) -> list[list[int]]:
    """The emitted tokens of each request, as Python lists (reads the arrays on the host).

    Args:
      output: what `rejection_sample` returned, outside jit.

    Returns:
      One list per request, `num_emitted` long; empty where `status` is not OK.

    Raises:
      TypeError: `output` is something else.

    Example:
      >>> import jax.numpy as jnp
      >>> ids = jnp.array([[4, 2, -1], [-1, -1, -1]])
      >>> output = RejectionSampleOutput(
      ...     ids, jnp.array([1, 0]), jnp.array([2, 0]), jnp.array([0, int(Status.INACTIVE)])
      ... )
      >>> parse_output(output)
      [[4, 2], []]
    """
    if not isinstance(output, RejectionSampleOutput):
        raise TypeError(f"output must be a RejectionSampleOutput, but it is {described(output)}")
    token_ids, num_emitted = jax.device_get((output.token_ids, output.num_emitted))
    return [row[:n].tolist() for row, n in zip(token_ids, num_emitted, strict=True)]


for _type in (
    DraftProbs,
    DraftLogits,
    Drafts,
    SamplingParams,
    Noise,
    RaceNoise,
    RejectionSampleOutput,
):
    # Lets `jax.export` serialize functions that take or return them.
    export.register_pytree_node_serialization(
        _type,
        serialized_name=f"jax_specdec.{_type.__name__}",
        serialize_auxdata=lambda _: b"",
        deserialize_auxdata=lambda _: (),
    )
