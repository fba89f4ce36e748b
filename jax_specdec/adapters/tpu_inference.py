"""The flat layout of vllm-project/tpu-inference, which is now called vllm-jax.

Its runner holds logits in the order of its final logits indices: a request's ``draft_length + 1``
rows, one request after another, padded to some L; requests padded to some B; a greedy request has
temperature -1. Its output is flat: what was emitted at each draft's place, then each request's
bonus token.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_specdec._src.base.arrays import as_int32
from jax_specdec._src.base.config import SpecDecodeConfig
from jax_specdec._src.base.sampling import SamplingParams
from jax_specdec._src.base.types import (
    PLACEHOLDER_TOKEN_ID,
    Drafts,
    Integers,
    RejectionSampleOutput,
    Status,
)
from jax_specdec._src.logits.logprobs import LogprobsConfig, TokenLogprobs
from jax_specdec._src.verify.sharding import VerifySharding
from jax_specdec.adapters import common

GREEDY_TEMPERATURE = -1.0
"""Says that a request is greedy, as does a temperature from 0 to below `GREEDY_BELOW`."""

GREEDY_BELOW = 1e-5


class FlatVerification(NamedTuple):
    """What a step emitted, in two forms.

    Attributes:
      token_ids: ``[N + B]`` int32. Entry n of the first N is the token emitted at draft n's place:
        the draft, or what replaced it; entry N + b is the bonus token of request b. -1 where
        nothing was emitted. An active request that could not be verified has 0 as its bonus token,
        so that it ends as others do. Split over a mesh axis, each part is such an array of its own.
      output: the same, request by request, but nothing for a request that could not be verified:
        its status says why.
      logprobs: of the emitted tokens, as they stand in `output`; None where not asked for.
    """

    token_ids: jax.Array
    output: RejectionSampleOutput
    logprobs: TokenLogprobs | None


def verify_flat(
    logits: jax.Array,
    draft_token_ids: Integers,
    draft_lengths: Integers,
    *,
    config: SpecDecodeConfig,
    temperature: jax.Array | None,
    top_k: jax.Array | None = None,
    top_p: jax.Array | None = None,
    min_p: jax.Array | None = None,
    keys: jax.Array | None = None,
    positions: jax.Array | None = None,
    draft_probs: jax.Array | None = None,
    bonus_token_ids: jax.Array | None = None,
    active: jax.Array | None = None,
    token_bitmask: jax.Array | None = None,
    vocab_size: int | None = None,
    logprobs: LogprobsConfig | None = None,
    sharding: VerifySharding | None = None,
) -> FlatVerification:
    """Verifies a flat batch; replaces both bonus sampling and the rejection sampler.

    Args:
      logits: ``[L, V]``: request b's ``draft_lengths[b] + 1`` rows after those of the requests
        before it, whatever L is. ``[N, V]`` where `bonus_token_ids` is given: draft n's row is n.
      draft_token_ids: ``[N]`` int32, one request after another, then padding.
      draft_lengths: ``[B]`` int32, each at most ``config.num_speculative_tokens``, K.
      temperature: ``[B]`` or ``[1]`` float32; -1, and 0 to below 1e-5, are greedy. None: all
        requests are.
      top_k: ``[B]`` or ``[1]`` int32, or None; -1 and 0 leave out nothing.
      top_p: ``[B]`` or ``[1]`` float32, or None; 1 leaves out nothing.
      min_p: ``[B]`` or ``[1]`` float32, or None; 0 leaves out nothing.
      keys: ``[]``, a fresh key for this step (see `step_keys`: request b's slot is b); or
        ``[B]``, one for each request, the same on every step. Typed, or raw with a last axis of
        two or four words. May be None where `temperature` is. Inside a `jax.shard_map` that splits
        requests, the device's index is folded into one key for all parts: over the axes that
        `draft_lengths` vary over and the key does not, and over the batch axis of `sharding`.
        (With ``check_vma=False`` JAX does not know what varies: name the batch axis.)
      positions: ``[B]`` int32, or None with a key per step.
      draft_probs: ``[N, V]`` float32, what each draft was drawn from, or None for drafts that were
        not drawn (an n-gram, an argmax).
      bonus_token_ids: ``[B]`` int32 where bonus tokens are sampled elsewhere. Without them, they
        are drawn here, under the same filters as everything else.
      active: ``[B]`` bool, false for slots that are padding; None for all true.
      token_bitmask: ``[L, ceil(V/32)]``, or None; see `jax_specdec.rejection_sample`.
      vocab_size: static; ids from it on are padding.
      logprobs: static; which log-probabilities of emitted tokens are wanted, or None.
      sharding: with a mesh, arrays are whole, and over its batch axis each part of L, N and B is
        a batch of its own. Inside a `jax.shard_map`, without a mesh: the vocabulary's axis, and
        the batch's for `keys`.

    Returns:
      `FlatVerification`. A request whose numbers make no sense (a length that is negative or above
      K, rows past L, drafts past N, a temperature below 0 but -1, top-k below -1, top-p outside
      (0, 1], min-p outside [0, 1]) could not be verified, as one whose logits are NaN: its status
      says so, and its neighbours are untouched. Outside of `jax.jit` bad numbers raise instead.

    Raises:
      TypeError: an argument of the wrong type or dtype, at trace time.
      ValueError: shapes that do not fit; no keys although `temperature` is given.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jax_specdec as sd
      >>> config = sd.SpecDecodeConfig(num_speculative_tokens=2)
      >>> logits = jax.nn.one_hot(jnp.array([5, 6, 7, 3, 0, 0]), 8)  # 3 + 1 rows, then padding
      >>> verify_flat(
      ...     logits, jnp.array([5, 4, 0]), jnp.array([2, 0]), config=config, temperature=None,
      ... ).token_ids.tolist()  # two at drafts' places, padding, no bonus, a bonus
      [5, 6, -1, -1, 3]
    """
    static = common.AdapterStatic(config, vocab_size, logprobs)
    static.check()
    ids = as_int32("draft_token_ids", draft_token_ids, "[N]")
    lengths = as_int32("draft_lengths", draft_lengths, "[B]")
    n = ids.shape[0]
    batch = lengths.shape[0]
    # [1] -> [B]: one number for all requests
    given = temperature, top_k, top_p, min_p
    temperature, top_k, top_p, min_p = (_of_all(x, batch) for x in given)
    requests = dict(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        positions=positions,
        bonus_token_ids=bonus_token_ids,
        active=active,
    )
    # With bonus tokens sampled elsewhere there are rows for drafts alone.
    rows = "L" if bonus_token_ids is None else "N"
    # L is whatever it is padded to; more rows or fewer are found from values, request by request.
    common.check_arrays(
        {"N": n, "B": batch},
        {
            "logits": (logits, f"[{rows}, V]"),
            "draft_probs": (draft_probs, "[N, Vd]"),
            "token_bitmask": (token_bitmask, f"[{rows}, ceil(V/32)]"),
            **{name: (array, "[B]") for name, array in requests.items()},
        },
    )
    # Keys are made before a mesh splits the batch: request b's slot is b in the whole of it.
    common.check_sharding("logits", logits, sharding, {"L": logits.shape[0], "N": n, "B": batch})
    split_over = common.axes_of_requests(lengths, sharding)
    keys, positions = common.keys_of_requests(
        keys, positions, batch, sampled_by=("temperature", temperature), split_over=split_over
    )
    arrays = common.Arrays(
        logits,
        draft_probs,
        ids,
        lengths,
        SamplingParams(temperature, min_p, top_k, top_p),
        keys,
        positions,
        jnp.arange(batch, dtype=jnp.int32),
        token_bitmask,
        active,
        bonus_token_ids,
    )
    found: FlatVerification = common.on_parts(_verify, arrays, static, sharding)
    return found


def _of_all(array: jax.Array | None, batch: int) -> jax.Array | None:
    """Returns ``[1]`` as ``[B]``, and anything else as it is."""
    if isinstance(array, (jax.Array, np.ndarray)) and array.shape == (1,):
        return jnp.broadcast_to(array, (batch,))
    return array


def _verify(
    arrays: common.Arrays, static: common.AdapterStatic, sharding: VerifySharding | None
) -> FlatVerification:
    """Verifies a flat batch, or this device's part of it, after the checks."""
    # [B]: a request of negative length has a negative position: BAD_INPUT, and its neighbours stay.
    counts = jnp.maximum(arrays.lengths, 0)
    positions = jnp.zeros_like(counts) if arrays.positions is None else arrays.positions
    arrays = arrays._replace(positions=jnp.where(arrays.lengths < 0, -1, positions))
    # [B] -> [B+1]: where the drafts of each request begin, from 0 on
    first = jnp.zeros((1,), jnp.int32)
    drafts = Drafts(
        arrays.draft_token_ids,
        jnp.concatenate([first, jnp.cumsum(counts, dtype=jnp.int32)]),
        arrays.distribution,
    )
    has_bonus_rows = arrays.bonus_token_ids is None
    output, found = common.verify(
        arrays, static, sharding, drafts, _sampling(arrays.sampling), padded_rows=has_bonus_rows
    )
    return FlatVerification(flat_token_ids(output, drafts), output, found)


def _sampling(given: SamplingParams) -> SamplingParams:
    """Returns parameters in our terms: a greedy request has temperature 0."""
    temperature = given.temperature
    # Nobody samples.
    if temperature is None:
        return given
    # [B]: another negative temperature stays, and the checks refuse it
    is_greedy = (temperature >= 0) & (temperature < GREEDY_BELOW)
    is_greedy |= temperature == GREEDY_TEMPERATURE
    return dataclasses.replace(given, temperature=jnp.where(is_greedy, 0.0, temperature))


def flat_token_ids(output: RejectionSampleOutput, drafts: Drafts) -> jax.Array:
    """Returns ``[N + B]`` int32: tokens at drafts' places, then bonus tokens; -1 for none.

    The bonus token of an active request that could not be verified is `UNVERIFIED_TOKEN_ID`.

    Example:
      >>> import jax.numpy as jnp
      >>> import jax_specdec as sd
      >>> drafts = sd.Drafts.from_flat(jnp.array([4, 5]), jnp.array([1, 1]))
      >>> ids, one = jnp.array([[4, 2], [7, -1]]), jnp.ones((2,), int)
      >>> output = sd.RejectionSampleOutput(ids, jnp.array([1, 0]), jnp.array([2, 1]), one - 1)
      >>> flat_token_ids(output, drafts).tolist()
      [4, 7, 2, -1]
    """
    cu = drafts.cu_num_draft_tokens
    n = drafts.token_ids.shape[0]
    # [B]: the place of each request's first draft, and how many it has
    first = cu[:-1]
    count = cu[1:] - cu[:-1]
    # [B, K+1] -> [N]: token j of request b goes to the place of draft j; past its drafts it is N,
    # which is dropped
    offset = jnp.arange(output.token_ids.shape[1], dtype=jnp.int32)[None, :]
    place = jnp.where(offset < count[:, None], first[:, None] + offset, n)
    none = jnp.full((n,), PLACEHOLDER_TOKEN_ID, jnp.int32)
    at_drafts = none.at[place].set(output.token_ids, mode="drop")
    # [B, K+1] -> [B]: what was emitted after all drafts, or -1: the largest, as all others are -1
    is_bonus = offset == count[:, None]
    bonus = jnp.where(is_bonus, output.token_ids, PLACEHOLDER_TOKEN_ID).max(axis=1)
    # Those that could not be verified, but not those that are not in use
    bonus = jnp.where(output.status > Status.INACTIVE, common.UNVERIFIED_TOKEN_ID, bonus)
    # [N] and [B] -> [N + B]
    return jnp.concatenate([at_drafts, bonus])
