"""Checks of shapes, and splitting over a mesh, for both adapters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_specdec._src.arrays import Sizes, check_array, check_type, require
from jax_specdec._src.config import SpecDecodeConfig
from jax_specdec._src.logprobs import TokenLogprobs, token_logprobs
from jax_specdec._src.sampling import SamplingParams
from jax_specdec._src.serving.options import LogprobsConfig
from jax_specdec._src.types import Drafts, RejectionSampleOutput
from jax_specdec._src.verify import sharding as sharding_lib
from jax_specdec._src.verify.api import rejection_sample
from jax_specdec._src.verify.sharding import VerifySharding


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
