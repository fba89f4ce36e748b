"""Checks of shapes, and splitting over a mesh, for both adapters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_specdec._src.arrays import described
from jax_specdec._src.config import SpecDecodeConfig
from jax_specdec._src.logprobs import TokenLogprobs, token_logprobs
from jax_specdec._src.sampling import SamplingParams
from jax_specdec._src.serving.options import LogprobsConfig
from jax_specdec._src.types import Drafts, RejectionSampleOutput
from jax_specdec._src.verify import sharding as sharding_lib
from jax_specdec._src.verify.api import rejection_sample
from jax_specdec._src.verify.sharding import VerifySharding


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
