"""What both adapters share: checks, keys, splitting over a mesh, and the call itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_specdec._src.arrays import Sizes, check_array, check_type, refuse, require
from jax_specdec._src.config import SpecDecodeConfig
from jax_specdec._src.logprobs import TokenLogprobs, token_logprobs
from jax_specdec._src.noise import check_keys
from jax_specdec._src.sampling import SamplingParams
from jax_specdec._src.serving.options import LogprobsConfig
from jax_specdec._src.types import Drafts, RejectionSampleOutput
from jax_specdec._src.verify import sharding as sharding_lib
from jax_specdec._src.verify.api import rejection_sample
from jax_specdec._src.verify.sharding import VerifySharding
from jax_specdec.integrations.keys import step_keys

_IMPL_OF_WORDS = {2: "threefry2x32", 4: "rbg"}
"""Of raw keys. Noise is the same for both kinds of four words, rbg and unsafe_rbg."""


def check_arrays(sizes: Sizes, arrays: dict[str, tuple[Any, str]]) -> None:
    """Check shapes as the caller sees them, before a mesh splits them.

    Args:
      sizes: what letters stand for; those of the arrays are added.
      arrays: by name, an array or None, and its shape in letters.

    Raises:
      TypeError: something is not an array.
      ValueError: an array of another shape.
    """
    for name, (array, declared) in arrays.items():
        if array is not None or name in ("logits", "target_logits"):
            check_array(name, array, declared, sizes)


def keys_of_requests(
    keys: jax.Array | None, positions: jax.Array | None, batch: int
) -> tuple[jax.Array, jax.Array]:
    """Keys and positions ``[B]`` for a verification.

    Args:
      keys: ``[]``, one for this step; or ``[B]``, one per request, the same on every step; or None,
        where no request samples. Typed, or raw (``[2]``, ``[4]``, ``[B, 2]``, ``[B, 4]`` uint32).
      positions: ``[B]`` int32, or None, which ``[B]`` keys do not allow.
      batch: B.

    Raises:
      TypeError: `keys` are not keys.
      ValueError: keys of another shape, or keys per request without positions.
    """
    zeros = jnp.zeros((batch,), jnp.int32)
    if keys is None:
        return jnp.broadcast_to(jax.random.key(0), (batch,)), zeros
    words = keys.shape[-1] if getattr(keys, "dtype", None) == jnp.uint32 and keys.ndim else 0
    if words in _IMPL_OF_WORDS:
        keys = jax.random.wrap_key_data(jnp.asarray(keys), impl=_IMPL_OF_WORDS[words])
    check_keys("keys", keys)
    if keys.ndim == 0:
        slots = jnp.arange(batch, dtype=jnp.int32)
        return step_keys(keys, slots), zeros if positions is None else positions
    check_array("keys", keys, "[] or [B]", {"B": batch})
    if positions is None:
        hint = "with the same key on every step, noise repeats where a position repeats"
        refuse(ValueError, "positions", "be given where keys are one per request", None, hint)
    return keys, positions


def check_keys_given(name: str, temperature: jax.Array | None, keys: jax.Array | None) -> None:
    """Check that there are keys where requests may sample.

    Raises:
      ValueError: there are none.
    """
    must, hint = f"be given with {name}", "one for this step, or one for each request"
    require(temperature is None or keys is not None, "keys", must, keys, hint)


def check_bitmask(
    token_bitmask: Any, logits: jax.Array, rows: str, sharding: VerifySharding | None
) -> None:
    """Check a bitmask of ``[rows, ceil(V/32)]``, whose words cover the whole vocabulary.

    Raises:
      TypeError: it is not an array.
      ValueError: it has another shape.
    """
    parts = sharding_lib.vocabulary_parts(sharding)
    sizes = {rows: logits.shape[0], "ceil(V/32)": -(-logits.shape[1] * parts // 32)}
    check_arrays(sizes, {"token_bitmask": (token_bitmask, f"[{rows}, ceil(V/32)]")})


def check_sharding(
    logits_name: str, logits: jax.Array, sharding: Any, sizes: dict[str, int]
) -> None:
    """Check that every size that is split over a mesh divides by its devices.

    Args:
      logits_name: name of the argument.
      logits: the target logits, whole.
      sharding: a `VerifySharding` or None.
      sizes: of what is split over the batch axis.

    Raises:
      TypeError: `sharding` is something else.
      ValueError: a size that does not divide, or logits that are split while `sharding` is None.
    """
    if sharding is None:
        place = jax.typeof(logits).sharding
        explicit = isinstance(place, NamedSharding) and AxisType.Explicit in place.mesh.axis_types
        is_split = explicit and any(axis is not None for axis in place.spec)
        must = f"be given where {logits_name} are split over explicit mesh axes"
        hint = f"VerifySharding(mesh, vocab_axis=..., batch_axis=...) for {place.spec}"
        require(not is_split, "sharding", must, None, hint)
        return
    check_type("sharding", sharding, VerifySharding, None)
    if sharding.mesh is None:
        return
    by_axis = [(sharding.batch_axis, name, size) for name, size in sizes.items()]
    by_axis.append((sharding.vocab_axis, f"{logits_name}.shape[1]", logits.shape[1]))
    for axis, name, size in by_axis:
        if axis is not None:
            count = sharding.mesh.shape[axis]
            require(size % count == 0, name, f"divide over the {count} devices of {axis!r}", size)


def on_parts(
    function: Callable[[Any, VerifySharding | None], Any],
    sharding: VerifySharding | None,
    arrays: Any,
    specs: Callable[[P, P], Any],
) -> Any:
    """Call `function` on each device's part of the arrays; each part is a batch of its own.

    Args:
      function: of the arrays and how the vocabulary of its part is split.
      sharding: with a mesh, `function` runs under `jax.shard_map`; without, it is just called.
      arrays: a pytree.
      specs: of what is split by rows, and of what is split by rows and vocabulary, the specs of
        `arrays`.

    Returns:
      What `function` returns, all of it split over the batch axis.
    """
    if sharding is None or sharding.mesh is None:
        return function(arrays, sharding)
    mesh, vocab_axis, batch_axis = sharding.mesh, sharding.vocab_axis, sharding.batch_axis
    is_split = vocab_axis is not None and mesh.shape[vocab_axis] > 1
    within = VerifySharding(vocab_axis=vocab_axis if is_split else None)
    return sharding_lib.over_mesh(
        lambda arrays: function(arrays, within),
        mesh,
        specs(P(batch_axis), P(batch_axis, vocab_axis)),
        P(batch_axis),
        arrays,
    )


def verify_with_logprobs(
    target_logits: jax.Array,
    drafts: Drafts,
    *,
    sampling: SamplingParams,
    keys: jax.Array,
    positions: jax.Array,
    config: SpecDecodeConfig,
    bonus_token_ids: jax.Array | None = None,
    active: jax.Array | None,
    vocab_size: int | None,
    token_bitmask: jax.Array | None,
    padded_rows: bool = False,
    sharding: VerifySharding | None,
    logprobs: LogprobsConfig | None,
) -> tuple[RejectionSampleOutput, TokenLogprobs | None]:
    """`rejection_sample`, and `token_logprobs` of what it emitted if they are wanted."""
    given: dict[str, Any] = dict(
        sampling=sampling,
        config=config,
        vocab_size=vocab_size,
        token_bitmask=token_bitmask,
        padded_rows=padded_rows,
        sharding=sharding,
    )
    output = rejection_sample(
        target_logits,
        drafts,
        keys=keys,
        positions=positions,
        bonus_token_ids=bonus_token_ids,
        active=active,
        **given,
    )
    if logprobs is None:
        return output, None
    wanted: dict[str, Any] = dict(num_top=logprobs.num_top, distribution=logprobs.distribution)
    return output, token_logprobs(target_logits, drafts, output, **wanted, **given)
