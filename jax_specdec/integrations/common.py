"""What both adapters share: checks, keys, splitting over a mesh, and the call itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_specdec._src.config import SpecDecodeConfig
from jax_specdec._src.logprobs import TokenLogprobs, token_logprobs
from jax_specdec._src.noise import check_keys
from jax_specdec._src.serving.options import LogprobsConfig
from jax_specdec._src.types import Drafts, RejectionSampleOutput, SamplingParams, described
from jax_specdec._src.verify import sharding as sharding_lib
from jax_specdec._src.verify.api import rejection_sample
from jax_specdec._src.verify.sharding import VerifySharding
from jax_specdec.integrations.keys import step_keys

_IMPL_OF_WORDS = {2: "threefry2x32", 4: "rbg"}
"""Of raw keys. Noise is the same for both kinds of four words, rbg and unsafe_rbg."""


def check_arrays(arrays: dict[str, tuple[Any, str, tuple[int | None, ...]]]) -> None:
    """Check shapes as the caller sees them, before a mesh splits them.

    Args:
      arrays: by name, an array or None, its shape in letters, and in numbers where they are fixed.

    Raises:
      TypeError: something is not an array.
      ValueError: an array of another shape.
    """
    for name, (array, letters, sizes) in arrays.items():
        if array is None and name not in ("logits", "target_logits"):
            continue
        shape = getattr(array, "shape", None)
        if shape is None:
            raise TypeError(f"{name} must be an array {letters}, but it is {described(array)}")
        fits = len(shape) == len(sizes) and all(
            want in (None, got) for want, got in zip(sizes, shape, strict=True)
        )
        if not fits:
            numbers = "" if None in sizes else f" = {list(sizes)}"
            raise ValueError(f"{name} must be {letters}{numbers}, but its shape is {list(shape)}")


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
    if keys.shape != (batch,):
        raise ValueError(
            f"keys must be one key for the step, or [B] = [{batch}], but their shape is "
            f"{list(keys.shape)}"
        )
    if positions is None:
        raise ValueError(
            "positions must be given where keys are one per request: with the same key on every "
            f"step, noise repeats where a position repeats; keys are {described(keys)}"
        )
    return keys, positions


def check_keys_given(name: str, temperature: jax.Array | None, keys: jax.Array | None) -> None:
    """Check that there are keys where requests may sample.

    Raises:
      ValueError: there are none.
    """
    if temperature is not None and keys is None:
        raise ValueError(
            f"keys must be given with {name}, a fresh one for this step or one for each "
            "request, but they are None"
        )


def check_bitmask(
    token_bitmask: Any, logits: jax.Array, letters: str, sharding: VerifySharding | None
) -> None:
    """Check a bitmask, whose words cover the whole vocabulary.

    Raises:
      TypeError: it is not an array.
      ValueError: it has another shape.
    """
    parts = sharding_lib.vocabulary_parts(sharding)
    sizes = (logits.shape[0], -(-logits.shape[1] * parts // 32))
    check_arrays({"token_bitmask": (token_bitmask, letters, sizes)})


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
        if explicit and any(axis is not None for axis in place.spec):
            raise ValueError(
                f"sharding must be given where {logits_name} are split over explicit mesh axes, "
                f"here {place.spec}: VerifySharding(mesh, vocab_axis=..., batch_axis=...)"
            )
        return
    if not isinstance(sharding, VerifySharding):
        raise TypeError(f"sharding must be a VerifySharding or None, but it is {sharding!r:.80}")
    if sharding.mesh is None:
        return
    vocab_axis, batch_axis = sharding.vocab_axis, sharding.batch_axis
    if batch_axis is not None:
        for name, size in sizes.items():
            _check_divides(name, size, sharding.mesh.shape[batch_axis], batch_axis)
    if vocab_axis is not None:
        name = f"V of {logits_name}"
        _check_divides(name, logits.shape[1], sharding.mesh.shape[vocab_axis], vocab_axis)


def _check_divides(name: str, size: int, parts: int, axis: str) -> None:
    if size % parts:
        raise ValueError(f"{name} must divide over the {parts} devices of {axis!r}, but is {size}")


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
