"""The contract of verification, written as plainly as possible: NumPy, float64, loops.

Every implementation is tested against it, number by number, so it shares nothing with them but the
types. It is slow, runs on the host and is meant to be read from top to bottom.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from jax_specdec._src import reference_sampling
from jax_specdec._src.reference_request import BadRow, ReferenceDrafts, ReferenceRequest
from jax_specdec._src.reference_sampling import Array
from jax_specdec._src.types import (
    PLACEHOLDER_TOKEN_ID,
    Drafts,
    Noise,
    RaceNoise,
    Status,
)


@dataclasses.dataclass(frozen=True)
class ReferenceOutput:
    """What `rejection_sample` of this module returns.

    Attributes:
      token_ids: ``[B, K+1]`` int32: accepted tokens, one recovered or bonus token, then -1.
      num_accepted: ``[B]`` int32, drafts kept.
      num_emitted: ``[B]`` int32, tokens emitted: accepted + 1, or 0 where `status` is not OK.
      status: ``[B]`` int32, a `Status`.
      margin: ``[B]`` float64, the least relative distance between the two sides of a comparison
        that the request's outcome rests on; inf if every comparison is exact. An implementation in
        float32 may give other tokens only if it is at most 1e-5.
    """

    token_ids: npt.NDArray[np.int32]
    num_accepted: npt.NDArray[np.int32]
    num_emitted: npt.NDArray[np.int32]
    status: npt.NDArray[np.int32]
    margin: Array


def rejection_sample(
    target_logits: npt.ArrayLike,
    drafts: Drafts,
    noise: Noise | RaceNoise,
    *,
    temperature: npt.ArrayLike,
    min_p: npt.ArrayLike | None = None,
    top_k: npt.ArrayLike | None = None,
    top_p: npt.ArrayLike | None = None,
    method: str,
    num_speculative_tokens: int,
    conditional_rates: Sequence[float] | None = None,
    bonus_token_ids: npt.ArrayLike | None = None,
    active: npt.ArrayLike | None = None,
    vocab_size: int | None = None,
    token_bitmask: npt.ArrayLike | None = None,
) -> ReferenceOutput:
    """Verify the drafts of each request with explicit noise.

    With ``p = softmax(target row / temperature)`` and ``q`` the draft distribution, the standard
    rule keeps draft ``x`` iff ``u * q(x) < p(x)``; the first draft not kept is replaced by a
    sample from ``max(p - q, 0)``; after the last draft kept comes one bonus token from ``p``.
    The block rule judges prefixes: ``w_0 = 1`` and ``w_i = min(1, w_{i-1} p(x_i) / q(x_i))`` are
    their weights, ``S_i = sum(max(w_i p - q, 0))`` the mass left after i drafts (``S = w`` after
    the last), and the longest prefix with ``u_i < S_i / (S_i + 1 - w_i)`` is kept, followed by a
    sample of ``max(w_i p - q, 0)``. The agreement rule samples from ``p`` at each position, with
    noise of its own, and keeps a draft iff it is what was sampled.

    Args:
      target_logits: ``[N+B, V]``, or ``[N, V]`` where `bonus_token_ids` is given; any float dtype.
      drafts: as for `jax_specdec.rejection_sample`; NumPy arrays will do.
      noise: `Noise`, or `RaceNoise` to pick tokens by ``argmax(weight / exponential)``.
      temperature: ``[B]``; 0 is greedy.
      min_p: ``[B]``; tokens with ``p < min_p * max(p)`` are left out first. None for 0.
      top_k: ``[B]``; then those less likely than the k-th likeliest, unless it is 0. None for 0.
      top_p: ``[B]``; then those less likely than it takes to have this share of the rest. None
        for 1.
      method: "standard", "block", "agreement" or "synthetic".
      num_speculative_tokens: K.
      conditional_rates: ``[K]``, needed by "synthetic": draft ``i`` is kept iff
        ``u < conditional_rates[i]``.
      bonus_token_ids: ``[B]`` int32, or None to sample the bonus from the request's last row.
      active: ``[B]`` bool, or None for all true.
      vocab_size: ids from it on have weight 0; None for V.
      token_bitmask: ``[M, ceil(V/32)]``, M the rows of `target_logits`; None allows all tokens.

    Returns:
      The emitted tokens of each request, and how close a call they were.

    Raises:
      ValueError: `method` is unknown, or "synthetic" comes without rates.

    Example:
      The draft has target probability 1/2 and is one-hot, so ``u = 0.4`` keeps it:

      >>> import numpy as np
      >>> drafts = Drafts(np.array([1]), np.array([0, 1]))
      >>> noise = Noise(accept=np.array([[0.4]]), recover=np.array([[0.0, 0.9]]))
      >>> rejection_sample(
      ...     np.zeros((2, 2)), drafts, noise, temperature=[1.0],
      ...     method="standard", num_speculative_tokens=1,
      ... ).token_ids.tolist()
      [[1, 1]]

    References:
      Leviathan et al. 2023, arXiv 2211.17192. Chen et al. 2023, arXiv 2302.01318.
      Sun et al. 2024, arXiv 2403.10444 (block).
    """
    methods = ("standard", "block", "agreement", "synthetic")
    if method not in methods:
        raise ValueError(f"method must be one of {methods}, but is {method!r}")
    if method == "synthetic" and conditional_rates is None:
        raise ValueError("method 'synthetic' needs conditional_rates")

    target = reference_sampling.mask(np.asarray(target_logits, dtype=np.float64), token_bitmask)
    if vocab_size is not None:
        target = target[:, :vocab_size]
    ids = np.asarray(drafts.token_ids)
    offsets = np.asarray(drafts.cu_num_draft_tokens)
    accept = np.asarray(noise.accept, dtype=np.float64)
    temperatures = np.asarray(temperature, dtype=np.float64)
    filters = {
        name: np.full(len(temperatures), default) if values is None else np.asarray(values)
        for name, values, default in [
            ("min_p", min_p, 0.0),
            ("top_k", top_k, 0),
            ("top_p", top_p, 1.0),
        ]
    }
    bonus = None if bonus_token_ids is None else np.asarray(bonus_token_ids)
    draft_rows = ReferenceDrafts(drafts.distribution, target.shape[1])
    num_requests = len(offsets) - 1

    token_ids = np.full((num_requests, num_speculative_tokens + 1), PLACEHOLDER_TOKEN_ID, np.int32)
    num_accepted = np.zeros(num_requests, np.int32)
    num_emitted = np.zeros(num_requests, np.int32)
    status = np.zeros(num_requests, np.int32)
    margin = np.full(num_requests, np.inf)

    reached = 0  # where the drafts of the requests before end
    for b in range(num_requests):
        start, count = int(offsets[b]), int(offsets[b + 1]) - int(offsets[b])
        in_bounds = 0 <= count <= num_speculative_tokens and 0 <= start <= len(ids) - count
        in_bounds, is_after = in_bounds and (b > 0 or start == 0), start >= reached
        reached = max(reached, start + count) if in_bounds else reached
        if active is not None and not np.asarray(active)[b]:
            status[b] = Status.INACTIVE
            continue
        if (
            not (0 <= temperatures[b] < math.inf)
            or not (0 <= filters["min_p"][b] <= 1 and filters["top_k"][b] >= 0)
            or not (0 < filters["top_p"][b] <= 1)
            or not (in_bounds and is_after)
        ):
            status[b] = Status.BAD_INPUT
            continue

        first_row = start if bonus is not None else start + b
        request = ReferenceRequest(
            temperature=float(temperatures[b]),
            min_p=float(filters["min_p"][b]),
            top_k=int(filters["top_k"][b]),
            top_p=float(filters["top_p"][b]),
            draft_ids=[int(x) for x in ids[start : start + count]],
            target_rows=target[first_row : first_row + count + (bonus is None)],
            drafts=draft_rows,
            first_draft=start,
            one_hot=[draft_rows.is_one_hot(b, n) for n in range(start, start + count)],
            accept=[float(u) for u in accept[b, :count]],
            recover=None if isinstance(noise, RaceNoise) else np.asarray(noise.recover)[b],
            exponential=np.asarray(noise.exponential)[b] if isinstance(noise, RaceNoise) else None,
            bonus_token_id=None if bonus is None else int(bonus[b]),
        )
        try:
            if method == "synthetic":
                assert conditional_rates is not None
                accepted, token = _synthetic(request, conditional_rates)
            elif request.temperature == 0:
                accepted, token = _greedy(request)
            elif method == "block":
                accepted, token = _block(request)
            elif method == "agreement":
                accepted, token = _agreement(request)
            else:
                accepted, token = _standard(request)
        except BadRow as bad:
            status[b] = bad.status
        else:
            token_ids[b, :accepted] = request.draft_ids[:accepted]
            token_ids[b, accepted] = token
            num_accepted[b] = accepted
            num_emitted[b] = accepted + 1
        margin[b] = request.margin

    return ReferenceOutput(token_ids, num_accepted, num_emitted, status, margin)


# The rules. Each returns how many drafts are kept and the one token that follows them.


def _greedy(request: ReferenceRequest) -> tuple[int, int]:
    """Keep drafts while they equal the argmax; the first argmax that differs follows."""
    for i, x in enumerate(request.draft_ids):
        best = request.target_argmax(i)
        if x != best:
            return i, best
    return len(request.draft_ids), request.bonus()


def _standard(request: ReferenceRequest) -> tuple[int, int]:
    """Keep x while ``u * q(x) < p(x)``; a sample of ``max(p - q, 0)`` replaces the first other."""
    for i, x in enumerate(request.draft_ids):
        p = request.target_probs(i)
        if not request.is_proposal(x):
            return i, request.sample(p)
        q_x = request.draft_prob(i)
        kept = request.less(0.0, q_x) and request.less(request.accept[i] * q_x, p[x])
        if not kept:
            return i, request.recovered(p, i)
    return len(request.draft_ids), request.bonus()


def _block(request: ReferenceRequest) -> tuple[int, int]:
    """Keep the longest prefix that passes; a sample of ``max(w p - q, 0)`` follows it."""
    ids = request.draft_ids
    n = next((i for i, x in enumerate(ids) if not request.is_proposal(x)), len(ids))
    weight, mass = [1.0], []  # of the prefixes of 0, 1, ... drafts
    for i, x in enumerate(ids[:n]):
        p = request.target_probs(i)
        mass.append(float(request.left(p, i, weight[i]).sum()))
        q_x = request.draft_prob(i)
        weight.append(min(1.0, weight[i] * (p[x] / q_x)) if request.less(0.0, q_x) else 0.0)
        if not request.less(0.0, weight[-1]):
            break  # no longer prefix can pass
    else:
        mass.append(weight[n])
    kept = len(mass) - 1
    while kept > 0 and not request.passes(kept, weight[kept], mass[kept]):
        kept -= 1
    if kept == len(ids):
        return kept, request.bonus()
    p = request.target_probs(kept)
    return kept, request.sample(p) if kept == n else request.recovered(p, kept, weight[kept])


def _agreement(request: ReferenceRequest) -> tuple[int, int]:
    """Keep x while it is what a sample of p, with the noise of its position, gives."""
    assert request.recover is not None
    recover, count = request.recover, len(request.draft_ids)
    for i, x in enumerate(request.draft_ids):
        request.recover = recover[i]
        own = request.sample(request.target_probs(i))
        if own != x:
            return i, own
    request.recover = recover[count]
    return count, request.bonus()


def _synthetic(request: ReferenceRequest, conditional_rates: Sequence[float]) -> tuple[int, int]:
    """Keep draft i while ``u < conditional_rates[i]``, whatever the logits say."""
    for i, x in enumerate(request.draft_ids):
        proposed = request.is_proposal(x)
        if proposed and request.less(request.accept[i], float(conditional_rates[i])):
            continue
        if request.temperature == 0:
            return i, request.target_argmax(i)
        p = request.target_probs(i)
        return i, request.recovered(p, i) if proposed else request.sample(p)
    return len(request.draft_ids), request.bonus()
