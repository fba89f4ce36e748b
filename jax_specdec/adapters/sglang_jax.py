"""The rectangle of sgl-project/sglang-jax: chains of n tokens, of which column 0 is verified.

Each request owns n target rows. Row j of request b follows token j of its chain, so rows 0 to
n - 2 judge the drafts in columns 1 to n - 1, and row n - 1 gives the bonus token. A request of
length 0 is padding; a greedy one has top-k 1.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_specdec._src.base.arrays import Sizes, as_int32, check_array
from jax_specdec._src.base.config import SpecDecodeConfig
from jax_specdec._src.base.sampling import SamplingParams
from jax_specdec._src.base.types import (
    Array,
    Drafts,
    IntegerRows,
    Integers,
    RejectionSampleOutput,
)
from jax_specdec._src.logits.logprobs import LogprobsConfig, TokenLogprobs
from jax_specdec._src.verify.sharding import VerifySharding
from jax_specdec.adapters import common


class ChainVerification(NamedTuple):
    """What a step emitted, as a scheduler of chains reads it, and in our types.

    Attributes:
      accept_lens: ``[bs]`` int32, tokens emitted, the recovered or bonus one among them; 0 for
        padding. A request that could not be verified has one token, 0, so that it ends as others
        do.
      accept_index: ``[bs*n]`` int32: entry ``b*n + j``, for j below ``accept_lens[b]``, is
        ``b*n + j``, the place in the flat chains whose row emitted the j-th token; -1 elsewhere.
      predict: ``[bs*n]`` int32: at place ``b*n + j`` the token that follows token j of chain b; 0
        where nothing was emitted. ``predict[accept_index]`` are the emitted tokens.
      verified_ids: ``[bs]`` int32, the last token emitted: column 0 of the next chain; 0 for none.
      output: the same, request by request, but nothing for a request that could not be verified:
        its status says why.
      logprobs: of the emitted tokens, as they stand in `output`; None where not asked for.
      gather_index: ``[bs*n]`` int32, `accept_index` with a place of the same request instead of -1:
        that of its last emitted token, or its first place. Gather hidden states with it.
    """

    accept_lens: jax.Array
    accept_index: jax.Array
    predict: jax.Array
    verified_ids: jax.Array
    output: RejectionSampleOutput
    logprobs: TokenLogprobs | None
    gather_index: jax.Array


def verify_chains(
    target_logits: jax.Array,
    draft_tokens: Integers | IntegerRows,
    seq_lens: Integers,
    *,
    config: SpecDecodeConfig,
    temperatures: jax.Array | None,
    top_ks: jax.Array | None = None,
    top_ps: jax.Array | None = None,
    min_ps: jax.Array | None = None,
    keys: jax.Array | None = None,
    draft_probs: jax.Array | None = None,
    token_bitmask: jax.Array | None = None,
    vocab_size: int | None = None,
    logprobs: LogprobsConfig | None = None,
    sharding: VerifySharding | None = None,
) -> ChainVerification:
    """Verifies chains; replaces both the greedy and the sampled verification of a chain.

    Greedy and sampled requests may be mixed. Penalties go first, with `process_logits`.

    Args:
      target_logits: ``[bs*n, V]``, n rows for each request.
      draft_tokens: ``[bs, n]`` or ``[bs*n]`` int32, n = K + 1 with K =
        ``config.num_speculative_tokens``. Column 0 is the token verified before, and not read.
      seq_lens: ``[bs]`` int32, the length of each sequence; 0 is padding. It is the position of
        the noise: it must grow on every step where keys are one per request.
      temperatures: ``[bs]`` or ``[bs, 1]`` float32; 0 is greedy. None: all requests are greedy.
      top_ks: ``[bs]`` int32 or None; 1 is greedy, whatever the temperature. -1, 0, and V or more
        (such as 2**30) leave out nothing.
      top_ps: ``[bs]`` float32 or None; 1 leaves out nothing.
      min_ps: ``[bs]`` float32 or None; 0 leaves out nothing.
      keys: ``[]``, a fresh key for this step (see `step_keys`: request b's slot is b); or
        ``[bs]``, one for each request, the same on every step. Typed, or raw with a last axis of
        two or four words. May be None where `temperatures` is. Inside a `jax.shard_map` that splits
        requests, the device's index is folded into one key for all parts: over the axes that
        `seq_lens` vary over and the key does not, and over the batch axis of `sharding`. (With
        ``check_vma=False`` JAX does not know what varies: name the batch axis.)
      draft_probs: ``[bs*(n-1), V]`` or ``[bs, n-1, V]`` float32, what each draft was drawn from, or
        None for drafts that were not drawn (an argmax).
      token_bitmask: ``[bs*n, ceil(V/32)]``, or None; see `jax_specdec.rejection_sample`.
      vocab_size: static; ids from it on are padding.
      logprobs: static; which log-probabilities of emitted tokens are wanted, or None.
      sharding: with a mesh, arrays are whole, and requests are split over its batch axis. Inside a
        `jax.shard_map`, without a mesh: the vocabulary's axis, and the batch's for `keys`; places
        are then those of the part.

    Returns:
      `ChainVerification`. A request whose numbers make no sense (a negative length or temperature,
      top-k below 0, top-p outside (0, 1]) could not be verified, as one whose logits are NaN: its
      status says so. Outside of `jax.jit` bad numbers raise instead.

    Raises:
      TypeError: an argument of the wrong type or dtype, at trace time.
      ValueError: shapes that do not fit; no keys although `temperatures` are given.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jax_specdec as sd
      >>> config = sd.SpecDecodeConfig(num_speculative_tokens=2)
      >>> logits = jax.nn.one_hot(jnp.array([5, 6, 7]), 8)
      >>> found = verify_chains(
      ...     logits, jnp.array([[1, 5, 4]]), jnp.array([9]), config=config, temperatures=None)
      >>> found.accept_lens.tolist(), found.accept_index.tolist(), found.predict.tolist()
      ([2], [0, 1, -1], [5, 6, 0])
    """
    static = common.AdapterStatic(config, vocab_size, logprobs)
    static.check()
    tokens = as_int32("draft_tokens", draft_tokens)
    lengths = as_int32("seq_lens", seq_lens, "[bs]")
    batch = lengths.shape[0]
    k = config.num_speculative_tokens
    n = k + 1
    sizes: Sizes = {"bs": batch, "n": n, "bs*n": batch * n, "bs*(n-1)": batch * k}
    # Drafts alone are refused by the column that is missing.
    without = tokens.shape in ((batch, k), (batch * k,))
    hint = "column 0, the token verified before, is missing" if without else None
    check_array("draft_tokens", tokens, "[bs, n] or [bs*n]", sizes, hint)
    # [bs, 1] -> [bs], and [bs, n-1, V] -> [bs*(n-1), V]; other shapes are refused below
    if isinstance(temperatures, Array) and temperatures.shape == (batch, 1):
        temperatures = temperatures.reshape(batch)
    if isinstance(draft_probs, Array) and draft_probs.ndim == 3:
        draft_probs = draft_probs.reshape(-1, draft_probs.shape[2])
    requests = dict(temperatures=temperatures, top_ks=top_ks, top_ps=top_ps, min_ps=min_ps)
    common.check_arrays(
        sizes,
        {
            # Row j of a chain follows its token j; column 0 is no draft, so it has no q.
            "target_logits": (target_logits, "[bs*n, V]"),
            "draft_probs": (draft_probs, "[bs*(n-1), Vd]"),
            "token_bitmask": (token_bitmask, "[bs*n, ceil(V/32)]"),
            **{name: (array, "[bs]") for name, array in requests.items()},
        },
    )
    # Keys are made before a mesh splits the batch: request b's slot is b in the whole of it.
    common.check_sharding("target_logits", target_logits, sharding, {"bs": batch})
    split_over = common.axes_of_requests(lengths, sharding)
    keys, _ = common.keys_of_requests(
        keys, lengths, batch, sampled_by=("temperatures", temperatures), split_over=split_over
    )
    # A chain's length is the position of its noise, and says whether it is in use.
    arrays = common.Arrays(
        target_logits,
        draft_probs,
        tokens,
        lengths,
        SamplingParams(temperatures, min_p=min_ps, top_k=top_ks, top_p=top_ps),
        keys,
        lengths,
        jnp.arange(batch, dtype=jnp.int32),
        token_bitmask,
        lengths != 0,
    )
    found: ChainVerification = common.on_parts(_verify, arrays, static, sharding)
    return found


def _verify(
    arrays: common.Arrays, static: common.AdapterStatic, sharding: VerifySharding | None
) -> ChainVerification:
    """Verifies chains, or this device's part of them, after the checks."""
    # [bs*n] or [bs, n] -> [bs, n], of which columns 1 to n - 1 are the drafts
    n = static.config.num_speculative_tokens + 1
    chains = arrays.draft_token_ids.reshape(-1, n)
    drafts = Drafts.from_dense(chains[:, 1:], distribution=arrays.distribution)
    # [bs]: top-k of 1 is greedy at any temperature but a negative one, which the checks refuse
    sampling = arrays.sampling
    given = sampling.given
    if {"temperature", "top_k"} <= given.keys():
        is_greedy = (given["top_k"] == 1) & (given["temperature"] >= 0)
        temperature = jnp.where(is_greedy, 0.0, given["temperature"])
        sampling = dataclasses.replace(sampling, temperature=temperature)
    output, found = common.verify(arrays, static, sharding, drafts, sampling)
    # [bs]: tokens emitted; a request that is in use has one, verified or not
    count = jnp.where(arrays.lengths == 0, 0, jnp.maximum(output.num_emitted, 1))
    token_ids = jnp.where(output.token_ids < 0, common.UNVERIFIED_TOKEN_ID, output.token_ids)
    # [bs, n]: the places of each chain in the flat batch, the last emitted token's after it
    offset = jnp.arange(n, dtype=jnp.int32)[None, :]
    is_emitted = offset < count[:, None]
    place = arrays.slots[:, None] * n + jnp.minimum(offset, jnp.maximum(count - 1, 0)[:, None])
    # [bs, n] -> [bs]: the last token emitted; 0 of padding, where no place is count - 1
    last = jnp.where(offset == count[:, None] - 1, token_ids, 0).sum(axis=1)
    # [bs, n] -> [bs*n]
    return ChainVerification(
        count,
        jnp.where(is_emitted, place, -1).reshape(-1),
        jnp.where(is_emitted, token_ids, 0).reshape(-1),
        last.astype(jnp.int32),
        output,
        found,
        place.reshape(-1),
    )
