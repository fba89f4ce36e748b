"""How the arrays of a verification are split over a mesh, and calling a function on each part."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_specdec._src.base.arrays import check_choice, check_type, require
from jax_specdec._src.base.types import (
    DraftLogits,
    DraftProbs,
    Drafts,
    RaceNoise,
    RejectionSampleOutput,
)
from jax_specdec._src.rows.rows import storage_of
from jax_specdec._src.verify.requests import CallArrays


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class VerifySharding:
    """Over which mesh axes the arrays of a verification are split. Static.

    With a mesh, arrays are whole: at top level or under `jax.jit`. Target logits ``[M, V]`` are
    split over `vocab_axis` along V and over `batch_axis` along M. Without a mesh, the call is
    inside the caller's own `jax.shard_map` and arrays are its parts: target logits are
    ``[M, V / devices]``, and every array without a vocabulary axis is the same on all devices of
    `vocab_axis`. Each part is then a batch of its own: `batch_axis` tells the adapters alone, which
    make keys for it.

    ``VerifySharding()`` asks for a verification without a mesh, wherever the arrays are.

    **Vocabulary.** V must be a multiple of the number of devices: pad the vocabulary axis, and pass
    ``vocab_size``, the number of real ids. Draft distributions are read where they are: whole rows
    on every device or, if ``Vd == V``, the same ids there as of the target. Inside a
    `jax.shard_map`, storage as wide as the target's part is taken for a part, and wider storage for
    whole rows. Narrower storage could be either; it is taken for whole rows only if ``check_vma``
    shows that it is. Rows that list their own ids are whole on every device.

    **Batch.** Requests, drafts and rows are split evenly over `batch_axis`, so N and B must be
    multiples of its size n. A request and its drafts must be on the same device: the requests of
    device i own the drafts from ``i * N / n`` on, as in `Drafts.from_dense`. A request whose drafts
    are elsewhere ends with status BAD_INPUT. Draft storage without row indices is split in the same
    way. Storage with row indices stays as it is: if it comes split, each row must be on the device
    of its request; if not, every device reads all of it.

    Attributes:
      mesh: the mesh, or None inside `jax.shard_map`. An `AbstractMesh` has no devices: it takes
        those of `jax.set_mesh`, or of the arrays of the call.
      vocab_axis: name of the mesh axis that the vocabulary is split over, or None.
      batch_axis: name of the mesh axis that requests are split over, a tuple of such names, or
        None.

    Raises:
      TypeError: `mesh` is not a mesh, or an axis is not a string.
      ValueError: an axis that the mesh lacks, the same axis twice, or a mesh without an axis.

    Example:
      >>> import jax
      >>> mesh = jax.make_mesh((1,), ("model",), devices=jax.devices()[:1])
      >>> VerifySharding(mesh, vocab_axis="model").batch_axis is None
      True
    """

    mesh: Mesh | AbstractMesh | None = None
    vocab_axis: str | None = None
    batch_axis: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        """Checks names against the mesh."""
        check_type("mesh", self.mesh, Mesh, AbstractMesh, None)
        check_type("vocab_axis", self.vocab_axis, str, None)
        check_type("batch_axis", self.batch_axis, str, tuple, None)
        by_name = {"vocab_axis": names_of(self.vocab_axis), "batch_axis": self.batch_axes}
        for name, axes in by_name.items():
            for axis in axes:
                check_type(name, axis, str)
                # Without a mesh, the names are those of the caller's `jax.shard_map`.
                if self.mesh is not None:
                    check_choice(name, axis, (*self.mesh.axis_names, None))
        given = self.vocab_axis, self.batch_axis
        names = "vocab_axis and batch_axis"
        # Each axis once, and at least one of a mesh.
        both = [*by_name["vocab_axis"], *by_name["batch_axis"]]
        require(len({*both}) == len(both), names, "differ", given)
        require(self.mesh is None or both, names, "not both be None", given)

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The names of all axes that requests are split over."""
        return names_of(self.batch_axis)


def names_of(axis: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Returns the mesh axes that an entry of a `PartitionSpec` names."""
    return (axis,) if isinstance(axis, str) else axis or ()


def num_devices(mesh: Mesh | AbstractMesh, axis: str | tuple[str, ...] | None) -> int:
    """Returns over how many devices of a mesh an entry of a `PartitionSpec` splits."""
    return math.prod(mesh.shape[name] for name in names_of(axis))


class ArrayLayout(NamedTuple):
    """Which arrays of one call are split, and over which axes. Static.

    Attributes:
      mesh: the mesh, or None inside `jax.shard_map`.
      vocab_axis: the axis that target logits are split over by id; None if rows are whole.
      batch_axis: the axis or the axes that requests are split over; None if they are not.
      draft_vocab: whether draft storage is split over `vocab_axis` too.
      draft_batch: whether draft storage is split over `batch_axis` too.
    """

    mesh: Mesh | AbstractMesh | None = None
    vocab_axis: str | None = None
    batch_axis: str | tuple[str, ...] | None = None
    draft_vocab: bool = False
    draft_batch: bool = False


def vocabulary_parts(sharding: VerifySharding | None) -> int:
    """Returns how many parts the vocabulary is in, if `target_logits` is one of them; else 1.

    `target_logits` is a part only inside the caller's `jax.shard_map`.

    Raises:
      TypeError: `sharding` is not a `VerifySharding`.
      ValueError: it names an axis and no mesh, and the call is not inside a `jax.shard_map`.
    """
    check_type("sharding", sharding, VerifySharding, None)
    if sharding is None or sharding.mesh is not None or sharding.vocab_axis is None:
        return 1
    try:
        return lax.axis_size(sharding.vocab_axis)
    except NameError:
        # No such axis is bound: the call is outside of any `jax.shard_map` over it.
        raise ValueError(
            f"sharding names the axis {sharding.vocab_axis!r} and no mesh, so the call must be "
            "inside a jax.shard_map over that axis, but it is not"
        ) from None


def resolve(
    sharding: VerifySharding | None,
    target_logits: jax.Array,
    drafts: Drafts,
    noise: Any,
) -> ArrayLayout:
    """Returns how the arrays of a call are split.

    Args:
      sharding: what the caller gave. None to go by where `target_logits` is; XLA then serves what
        this module cannot, as if nothing were split.
      target_logits: of the call, after the checks.
      noise: explicit noise, or keys and positions.

    Raises:
      ValueError: an axis that does not divide; draft storage that could be whole or a part; or a
        mesh without devices.
      NotImplementedError: what is not supported over a split vocabulary.
    """
    if sharding is not None:
        check_devices(sharding, (target_logits, drafts))
        return _layout_of(sharding, target_logits, drafts, noise)
    # Where the logits lie gives the axes, if the vocabulary's is one.
    mesh, rows, columns = place_of(target_logits)
    named = isinstance(rows, str | tuple | None) and isinstance(columns, str | None)
    if mesh is None or (rows, columns) == (None, None) or not named:
        return ArrayLayout()
    try:
        derived = VerifySharding(mesh, vocab_axis=columns, batch_axis=rows)
        return _layout_of(derived, target_logits, drafts, noise)
    except (ValueError, NotImplementedError):
        return ArrayLayout()


def check_devices(sharding: VerifySharding, arrays: Any) -> None:
    """Checks that a mesh without devices takes them from elsewhere, as far as this can be known.

    Raises:
      ValueError: an `AbstractMesh`, outside of `jax.set_mesh`, and no array lies on a mesh.
    """
    mesh = sharding.mesh
    if not isinstance(mesh, AbstractMesh) or not jax.sharding.get_abstract_mesh().empty:
        return
    # Of an array under `jax.jit` it is not known where it will lie.
    has_devices = any(
        isinstance(x, jax.core.Tracer) or isinstance(getattr(x, "sharding", None), NamedSharding)
        for x in jax.tree.leaves(arrays)
    )
    hint = "pass the Mesh itself, or call inside jax.set_mesh(mesh)"
    require(has_devices, "sharding.mesh", "have devices", mesh, hint)


def place_of(matrix: Any) -> tuple[Any, Any, Any]:
    """Returns the mesh, and the axes of rows and columns, if they are known.

    Under `jit` only explicit axes are.
    """
    is_traced = isinstance(matrix, jax.core.Tracer)
    sharding = jax.typeof(matrix).sharding if is_traced else getattr(matrix, "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.mesh.empty:
        return None, None, None
    # A spec may leave out axes at the end.
    rows, columns = (*sharding.spec, None, None)[:2]
    return sharding.mesh, _single(rows), _single(columns)


def _single(axes: Any) -> Any:
    """Returns an entry of a PartitionSpec, as a name if it is a tuple of one."""
    return axes[0] if isinstance(axes, tuple) and len(axes) == 1 else axes or None


def _layout_of(
    sharding: VerifySharding,
    target_logits: jax.Array,
    drafts: Drafts,
    noise: Any,
) -> ArrayLayout:
    """Returns the layout of a call, by axes that were given or derived."""
    mesh = sharding.mesh
    vocab_axis = sharding.vocab_axis
    batch_axis = sharding.batch_axis
    if mesh is not None and vocab_axis is not None and mesh.shape[vocab_axis] == 1:
        # A mesh of one device splits nothing.
        vocab_axis = None  # rows are whole, which every backend reads
    # Races of tiles are split, a race of all ids is not.
    is_race = isinstance(noise, RaceNoise) and jnp.ndim(noise.exponential) == 2
    if vocab_axis is not None and is_race:
        raise NotImplementedError(
            "RaceNoise of one race is not supported over a split vocabulary: pass Noise"
        )
    distribution = drafts.distribution
    storage: Any = None if distribution is None else storage_of(distribution)
    lists_ids = distribution is not None and distribution.ids is not None
    # Inside the caller's `jax.shard_map` arrays are parts already: only whether the draft rows are
    # is to be found out.
    if mesh is None:
        if vocab_axis is None:
            return ArrayLayout()
        may_be_part = storage is not None and not lists_ids
        split = may_be_part and _is_part(storage, target_logits, vocab_axis)
        return ArrayLayout(vocab_axis=vocab_axis, draft_vocab=split)

    # Whole arrays: each axis must divide what it splits.
    vocabulary = target_logits.shape[1]
    batch = drafts.cu_num_draft_tokens.shape[0] - 1
    n = drafts.token_ids.shape[0]
    hint = "pad the vocabulary, and pass vocab_size"
    for name, size, axis, advice in (
        ("target_logits.shape[1]", vocabulary, vocab_axis, hint),
        ("B", batch, batch_axis, None),
        ("N", n, batch_axis, None),
    ):
        if axis is not None:
            count = num_devices(mesh, axis)
            must = f"divide over the {count} devices of {axis!r}"
            require(size % count == 0, name, must, size, advice)
    if distribution is None:
        return ArrayLayout(mesh, vocab_axis, batch_axis)
    # Draft rows are split by id if they come so, or if nothing is known of them and they are as
    # wide as the target's; and by request if they stand in the order of the drafts, or come so.
    place, rows, columns = place_of(storage)
    is_traced = isinstance(storage, jax.core.Tracer)
    is_known = place is not None and (not is_traced or AxisType.Explicit in place.axis_types)
    is_split = vocab_axis is not None and columns == vocab_axis and not lists_ids
    by_vocab = vocab_axis is not None and storage.shape[1] == vocabulary and not lists_ids
    by_vocab &= is_split or not is_known
    must = (
        f"have V = {vocabulary} columns, as the target has, where it is split over {vocab_axis!r}"
    )
    require(by_vocab or not is_split, "drafts.distribution", must, storage)
    # Rows in the order of the drafts go with their requests; a store only if it comes so.
    by_batch = batch_axis is not None
    if distribution.rows is not None:
        by_batch &= rows == batch_axis
    return ArrayLayout(mesh, vocab_axis, batch_axis, by_vocab, by_batch)


def _is_part(storage: jax.Array, target_logits: jax.Array, vocab_axis: str) -> bool:
    """Returns whether draft storage inside `jax.shard_map` is split over the vocabulary axis."""
    width = storage.shape[1]
    part = target_logits.shape[1]
    # Of the target and of the storage, whether JAX knows that it differs from device to device.
    varies = [
        vocab_axis in jax.typeof(x).manual_axis_type.varying for x in (target_logits, storage)
    ]
    # As wide as the target's part: a part too, unless JAX knows that all devices have the same.
    if width == part:
        return varies[1] or not varies[0]
    # Narrower storage could be whole rows of a small vocabulary, or parts of such rows.
    is_unclear = width < part and not varies[0]
    must = f"have {part} columns, as the part of the target has"
    hint = "fewer could be whole rows: let check_vma be true, or pad the drafter's vocabulary"
    fits = not (is_unclear or varies[1])
    require(fits, "drafts.distribution", must, storage, hint)
    return False


def over_parts(
    function: Callable[[CallArrays], RejectionSampleOutput],
    layout: ArrayLayout,
    arrays: CallArrays,
) -> RejectionSampleOutput:
    """Calls a function on each device's part of the arrays.

    Args:
      function: takes one part, whose offsets begin at 0.
      layout: how the arrays are split.

    Returns:
      The outputs of all parts as one batch.
    """
    if layout.mesh is None:
        return without_vma(function, arrays, layout.vocab_axis)
    batch = layout.batch_axis
    distribution = arrays.drafts.distribution
    # A spec for each array of a call, as `jax.shard_map` takes them.
    stored = batch if layout.draft_batch else None
    own: Any = P(batch)
    whole: Any = P()
    matrix: Any = P(stored, layout.vocab_axis if layout.draft_vocab else None)
    number: Any = P(stored)
    # A list that all rows share is whole on every device.
    lists = None if distribution is None else distribution.ids
    ids: Any = whole if lists is None or lists.ndim == 1 else number
    of_distribution: Any = None
    if isinstance(distribution, DraftProbs):
        of_distribution = DraftProbs(matrix, own, own, ids)
    elif isinstance(distribution, DraftLogits):
        of_distribution = DraftLogits(matrix, own, own, number, number, number, ids)
    logits: Any = P(batch, layout.vocab_axis)
    drafts: Any = Drafts(own, whole, of_distribution, own)
    specs = CallArrays(logits, drafts, own, own, own, own, own)
    parts = num_devices(layout.mesh, batch)

    def on_part(arrays: CallArrays) -> RejectionSampleOutput:
        """Calls it with offsets and draft rows counted from the first of this device."""
        if batch is None:
            return function(arrays)
        # The requests and drafts of this device, counted from its own first.
        me = lax.axis_index(batch)
        drafts = arrays.drafts
        cu = drafts.cu_num_draft_tokens
        n = len(drafts.token_ids)
        distribution = drafts.distribution
        # Offsets are whole on every device: of B / n requests those that are here.
        count = (cu.shape[0] - 1) // parts
        cu = lax.dynamic_slice(cu, (me * count,), (count + 1,)) - me * n
        if distribution is not None and distribution.rows is not None and layout.draft_batch:
            rows = distribution.rows - me * storage_of(distribution).shape[0]
            distribution = dataclasses.replace(distribution, rows=rows)
        own = dataclasses.replace(drafts, cu_num_draft_tokens=cu, distribution=distribution)
        return function(dataclasses.replace(arrays, drafts=own))

    return over_mesh(on_part, layout.mesh, specs, P(batch), arrays)


MOST_GATHERED = 10 * 2**20
"""Bytes of whole rows, of target and draft together, up to which a GPU gathers them first.

On two H100s gathering takes 49, 69 and 98 us for 2, 9 and 18 MiB, and split rows 72, 75 and 76."""


def gathered_if_small(arrays: CallArrays, layout: ArrayLayout) -> tuple[CallArrays, ArrayLayout]:
    """Returns one device's part of a call with whole rows, if these are small; else as it is."""
    axis = layout.vocab_axis
    if axis is None:
        return arrays, layout
    distribution = arrays.drafts.distribution if layout.draft_vocab else None
    # Logits, and draft storage without a list of ids: the only matrices.
    matrices = [x for x in jax.tree.leaves((arrays.target_logits, distribution)) if x.ndim == 2]
    if lax.axis_size(axis) * sum(x.nbytes for x in matrices) > MOST_GATHERED:
        return arrays, layout

    # [M, V / devices] -> [M, V], and draft rows likewise; lists and numbers are whole already
    def gathered(x: jax.Array) -> jax.Array:
        if x.ndim < 2:
            return x
        return lax.all_gather(x, axis, axis=1, tiled=True, to="invarying")

    drafts = arrays.drafts
    if distribution is not None:
        drafts = dataclasses.replace(drafts, distribution=jax.tree.map(gathered, distribution))
    arrays = dataclasses.replace(
        arrays, target_logits=gathered(arrays.target_logits), drafts=drafts
    )
    return arrays, layout._replace(vocab_axis=None, draft_vocab=False)


def over_mesh(
    function: Callable[[Any], Any],
    mesh: Mesh | AbstractMesh,
    specs: Any,
    out_spec: P,
    arrays: Any,
) -> Any:
    """Returns ``function(arrays)``, by `jax.shard_map`; `specs` is a pytree prefix of them."""
    # Kernels know nothing of varying mesh axes (vma).
    on_parts = jax.shard_map(
        function, mesh=mesh, in_specs=(specs,), out_specs=out_spec, check_vma=False
    )
    return on_parts(_placed(arrays, specs, mesh))


def without_vma(function: Callable[[Any], Any], arrays: Any, vocab_axis: str | None) -> Any:
    """Returns ``function(arrays)``, traced without varying mesh axes (vma) of `jax.shard_map`.

    If arrays vary over an axis that requests are split over, loops and branches that begin with
    constants do not match them. An inner `jax.shard_map` over no axis traces them as not varying.

    Args:
      function: returns the same on all devices of `vocab_axis`.
      arrays: a pytree, one device's part.
      vocab_axis: the axis that the vocabulary is split over, or None.
    """
    # All axes that any array varies over, but the one that the function exchanges over.
    varying: set[str] = set()
    for x in jax.tree.leaves(arrays):
        varying |= jax.typeof(x).manual_axis_type.varying
    # By those alone: an inner call over no axis sees arrays that do not vary.
    axes = tuple(sorted(varying - {vocab_axis}))
    if not axes:
        return function(arrays)
    inner = jax.shard_map(
        function,
        mesh=jax.sharding.get_abstract_mesh(),
        in_specs=P(),
        out_specs=P(),
        axis_names=set(),
        check_vma=False,
    )
    return jax.tree.map(lambda x: lax.pcast(x, axes, to="varying"), inner(arrays))


def _placed(arrays: Any, specs: Any, mesh: Mesh | AbstractMesh) -> Any:
    """Returns arrays laid out by `specs` over explicit axes.

    `jax.shard_map` sees to all other axes.
    """
    # Over explicit axes arrays must lie as the specs of `jax.shard_map` say: it moves none of them.
    named = zip(mesh.axis_names, mesh.axis_types, strict=True)
    explicit = [name for name, kind in named if kind == AxisType.Explicit]
    if not explicit:
        return arrays
    flat, tree = jax.tree.flatten(specs)
    places = [
        NamedSharding(
            mesh, P(*[tuple(x for x in names_of(axis) if x in explicit) or None for axis in spec])
        )
        for spec in flat
    ]
    return jax.reshard(arrays, jax.tree.unflatten(tree, places))
