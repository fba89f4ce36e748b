"""What both adapters share: checks, keys, splitting over a mesh, and the call itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jax_specdec._src.base.arrays import Sizes, check_array, check_type, refuse, require
from jax_specdec._src.base.config import SpecDecodeConfig
from jax_specdec._src.base.noise import check_keys
from jax_specdec._src.base.sampling import SamplingParams
from jax_specdec._src.base.types import DraftProbs, Drafts, RejectionSampleOutput
from jax_specdec._src.logits.logprobs import LogprobsConfig, TokenLogprobs, token_logprobs
from jax_specdec._src.rows.blocks import explicit_place
from jax_specdec._src.verify import sharding as sharding_lib
from jax_specdec._src.verify.api import rejection_sample
from jax_specdec._src.verify.sharding import VerifySharding
from jax_specdec.adapters.keys import step_keys

UNVERIFIED_TOKEN_ID = 0
"""The one token of an active request that could not be verified: a request without tokens would run
for ever in both engines, whose own verification gives the argmax of NaN."""

_IMPL_OF_WORDS = {2: "threefry2x32", 4: "rbg"}
"""Of raw keys. Noise is the same for both kinds of four words, rbg and unsafe_rbg."""


class AdapterStatic(NamedTuple):
    """Arguments of both adapters that are no arrays."""

    config: SpecDecodeConfig
    vocab_size: int | None
    logprobs: LogprobsConfig | None

    def check(self) -> None:
        """Raises `TypeError` for an argument of another type."""
        check_type("config", self.config, SpecDecodeConfig)
        check_type("logprobs", self.logprobs, LogprobsConfig, None)


class Arrays(NamedTuple):
    """Arguments of both adapters that a mesh splits; the first two over the vocabulary as well."""

    # [M, V] and [N, Vd]
    target_logits: jax.Array
    draft_probs: jax.Array | None
    # [N] of a flat batch, [bs, n] or [bs*n] of chains
    draft_token_ids: jax.Array
    # [B] each, from here on
    lengths: jax.Array
    sampling: SamplingParams
    keys: jax.Array | None
    positions: jax.Array | None
    slots: jax.Array
    """``[B]``, the place of each request in the whole batch."""
    # [M, ceil(V/32)]
    token_bitmask: jax.Array | None
    # [B] each
    active: jax.Array | None
    bonus_token_ids: jax.Array | None = None

    @property
    def distribution(self) -> DraftProbs | None:
        """What drafts were drawn from; None for drafts that were not drawn."""
        return None if self.draft_probs is None else DraftProbs(self.draft_probs)


def check_arrays(sizes: Sizes, arrays: dict[str, tuple[Any, str]]) -> None:
    """Checks shapes (name: array or None, letters) as the caller sees them: not yet split."""
    for name, (array, declared) in arrays.items():
        if array is not None or name in ("logits", "target_logits"):
            check_array(name, array, declared, sizes)


def keys_of_requests(
    keys: jax.Array | None,
    positions: jax.Array | None,
    batch: int,
    *,
    sampled_by: tuple[str, Any],
    split_over: frozenset[str] = frozenset(),
) -> tuple[jax.Array | None, jax.Array | None]:
    """Returns keys and positions ``[B]`` for a verification.

    Args:
      keys: ``[]``, one for this step; or ``[B]``, one per request, the same on every step; or None,
        where no request samples. Typed, or raw (``[2]``, ``[4]``, ``[B, 2]``, ``[B, 4]`` uint32).
      positions: ``[B]`` int32, or None, which ``[B]`` keys do not allow.
      sampled_by: the name of the temperatures, and these.
      split_over: the axes of a `jax.shard_map` that requests are split over.

    Raises:
      TypeError: `keys` are not keys.
      ValueError: no keys where requests may sample, keys of another shape, or keys per request
        without positions.
    """
    if keys is None:
        hint = "one for this step, or one for each request"
        name, temperatures = sampled_by
        require(temperatures is None, "keys", f"be given with {name}", keys, hint)
        return None, positions
    is_raw = isinstance(keys, (jax.Array, np.ndarray)) and keys.dtype == jnp.uint32 and keys.ndim
    # [..., 2] or [..., 4] words -> [...] typed keys: the number of words says of which kind
    if is_raw and keys.shape[-1] in _IMPL_OF_WORDS:
        keys = jax.random.wrap_key_data(jnp.asarray(keys), impl=_IMPL_OF_WORDS[keys.shape[-1]])
    check_keys("keys", keys)
    if keys.ndim == 0:
        # Parts must share no noise; a key that varies is another one on each device already.
        for axis in sorted(split_over - _varying(keys)):
            keys = jax.random.fold_in(keys, jax.lax.axis_index(axis))
        # [] -> [B]: of a fresh key, slots make the noise of requests differ, and positions need not
        slots = jnp.arange(batch, dtype=jnp.int32)
        if positions is None:
            positions = jnp.zeros_like(slots)
        return step_keys(keys, slots), positions
    # [B]: the same keys on every step, which only positions distinguish
    check_array("keys", keys, "[] or [B]", {"B": batch})
    if positions is None:
        hint = "with the same key on every step, noise repeats where a position repeats"
        refuse(ValueError, "positions", "be given where keys are one per request", None, hint)
    return keys, positions


def axes_of_requests(lengths: jax.Array, sharding: VerifySharding | None) -> frozenset[str]:
    """Returns the axes of a `jax.shard_map` that requests are split over, as far as known."""
    axes = _varying(lengths)
    if sharding is None or sharding.mesh is not None:
        return axes
    # Without a mesh, `sharding` names axes of the shard_map around; over the vocabulary's axis all
    # devices have the same requests, and must have the same noise.
    named = filter(_is_bound, sharding.batch_axes)
    return axes.union(named) - {sharding.vocab_axis}


def _is_bound(axis: str) -> bool:
    """Returns whether a `jax.shard_map` around has an axis; JAX says so by an error alone."""
    try:
        jax.lax.axis_size(axis)
    except NameError:
        return False
    return True


def _varying(array: jax.Array) -> frozenset[str]:
    """Returns the axes of a `jax.shard_map` over whose devices an array is known to differ."""
    return frozenset(jax.typeof(array).manual_axis_type.varying)


def check_sharding(
    logits_name: str, logits: jax.Array, sharding: Any, sizes: dict[str, int]
) -> None:
    """Checks that each size split over the batch axis, and the vocabulary, divides by its devices.

    Raises:
      TypeError: `sharding` is no `VerifySharding`.
      ValueError: a size that does not divide, logits that are split while `sharding` is None, or a
        mesh without devices.
    """
    if sharding is None:
        # Logits over explicit mesh axes have the split in their type, so that it can be known.
        place = explicit_place(logits)
        axes = place and place.spec
        must = f"be given where {logits_name} are split over explicit mesh axes"
        hint = f"VerifySharding(mesh, vocab_axis=..., batch_axis=...) for {axes}"
        require(not any(axes or ()), "sharding", must, None, hint)
        return
    check_type("sharding", sharding, VerifySharding, None)
    if sharding.mesh is None:
        return
    sharding_lib.check_devices(sharding, logits)
    # Each split size with the axis that splits it
    by_axis = [(sharding.batch_axis, name, size) for name, size in sizes.items()]
    by_axis.append((sharding.vocab_axis, f"{logits_name}.shape[1]", logits.shape[1]))
    for axis, name, size in by_axis:
        count = sharding_lib.num_devices(sharding.mesh, axis)
        require(size % count == 0, name, f"divide over the {count} devices of {axis!r}", size)


def on_parts(
    function: Callable[[Arrays, AdapterStatic, VerifySharding | None], Any],
    arrays: Arrays,
    static: AdapterStatic,
    sharding: VerifySharding | None,
) -> Any:
    """Returns ``function(arrays, static, sharding)``, by `jax.shard_map` if there is a mesh.

    Each device's part is then a batch of its own, and all results are split over the batch axis.
    """
    if sharding is None or sharding.mesh is None:
        return function(arrays, static, sharding)
    mesh = sharding.mesh
    vocab_axis = sharding.vocab_axis
    batch_axis = sharding.batch_axis
    # A vocabulary on one device is whole: nothing is to be exchanged.
    is_split = sharding_lib.num_devices(mesh, vocab_axis) > 1
    within = VerifySharding(vocab_axis=vocab_axis if is_split else None)
    # Logits and draft probabilities are split over both axes, all else over requests.
    by_row = P(batch_axis)
    by_vocabulary = P(batch_axis, vocab_axis)
    specs: Any = [by_vocabulary, by_vocabulary, *[by_row] * (len(arrays) - 2)]
    return sharding_lib.over_mesh(
        lambda arrays: function(arrays, static, within),
        mesh,
        Arrays(*specs),
        by_row,
        arrays,
    )


def verify(
    arrays: Arrays,
    static: AdapterStatic,
    sharding: VerifySharding | None,
    drafts: Drafts,
    sampling: SamplingParams,
    *,
    padded_rows: bool = False,
) -> tuple[RejectionSampleOutput, TokenLogprobs | None]:
    """Returns the output of `rejection_sample`, and its `token_logprobs` if they are wanted."""
    # Both must read the same rows under the same mask, by the same parameters.
    given: dict[str, Any] = dict(
        sampling=sampling,
        config=static.config,
        vocab_size=static.vocab_size,
        token_bitmask=arrays.token_bitmask,
        padded_rows=padded_rows,
        sharding=sharding,
    )
    output = rejection_sample(
        arrays.target_logits,
        drafts,
        keys=arrays.keys,
        positions=arrays.positions,
        bonus_token_ids=arrays.bonus_token_ids,
        active=arrays.active,
        **given,
    )
    # Tokens were emitted; their rows are read once more, where that is wanted.
    if static.logprobs is None:
        return output, None
    given |= dataclasses.asdict(static.logprobs)
    return output, token_logprobs(arrays.target_logits, drafts, output, **given)
