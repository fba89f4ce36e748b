"""A Llama decoder spread over the devices of one mesh axis.

Every device runs a `Llama` of its own under `jax.shard_map`, with fewer heads, fewer feed-forward
columns and a slice of the vocabulary. What the devices add to the residual stream is summed twice
per layer, and once for the embedding; the logits stay where they are computed.

Left to XLA's partitioner (`Llama` itself, with sharded weights), one layer on 8 devices exchanges
data 16 to 27 times in place of these 3: fused matrices cut by columns do not end where heads do,
and gate and up lie on different devices. Hence the placement of weights by hand.

References:
  Shoeybi et al., 2019, "Megatron-LM", https://arxiv.org/abs/1909.08053
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import KeyPath

from jax_specdec._src.verify.sharding import VerifySharding
from jax_specdec.lm.models.config import LayerSpec
from jax_specdec.lm.models.int8 import Int8Weight, is_int8
from jax_specdec.lm.models.layers import Weights, check_weights, is_shape
from jax_specdec.lm.models.llama import Llama
from jax_specdec.lm.models.protocol import Cache, Output, Params, Rows, Serves, Wants


@dataclasses.dataclass(frozen=True)
class TensorParallelLlama:
    """A `Llama` spread over n devices: a `CausalModel` with the same inputs and outputs.

    No size has to be divisible by n. If n does not divide the heads, they are split over as many
    groups of devices as possible, and all devices of a group compute the same; feed-forward columns
    are padded with zeros, and the vocabulary with ids whose logits are -inf (so `vocab_size` grows
    to a multiple of n).

    Params and cache have one more axis than those of the `Llama`, the first, with one entry per
    device. A device holds its own entry and reads no other. Everything else but the logits is the
    same on all devices.

    Attributes:
      model: the whole model.
      mesh: devices; those along its other axes all compute the same.
      axis: the axis of the mesh with n devices.

    Raises:
      ValueError: the mesh has no such axis.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax_specdec import lm
      >>> _, (whole, params) = lm.load_embedded_pair()
      >>> mesh = jax.make_mesh((jax.device_count(),), ("tensor",))
      >>> model = lm.models.TensorParallelLlama(whole, mesh, "tensor")
      >>> params = model.shard_params(params)
      >>> rows = lm.models.Rows(jnp.array([[104, 105]]), start=jnp.array([0]))
      >>> (output,), _ = jax.jit(model.apply)(params, [rows], model.init_cache(1, 8))
      >>> logits = output.logits
      >>> logits.shape, logits.addressable_shards[0].data.shape[2] * jax.device_count()
      ((1, 2, 256), 256)
    """

    model: Llama
    mesh: Mesh
    axis: str

    def __post_init__(self) -> None:
        if self.axis not in self.mesh.shape:
            raise ValueError(
                f"axis must be one of the mesh, {list(self.mesh.shape)}, but it is {self.axis!r}."
            )
        # Without axis types: shardings are set here.
        object.__setattr__(self, "mesh", Mesh(self.mesh.devices, self.mesh.axis_names))

    @property
    def num_devices(self) -> int:
        """n, the devices along the axis."""
        return self.mesh.shape[self.axis]

    def num_head_groups(self, spec: LayerSpec) -> int:
        """Returns how many parts a layer's heads are split into; n / parts devices have the same.

        Args:
          spec: what the layer is.
        """
        n = self.num_devices
        num_kv = spec.num_key_value_heads
        # A part of the query heads has whole heads of keys, or part of one, which is then repeated.
        fits = [
            groups
            for groups in range(1, n + 1)
            if n % groups == spec.num_attention_heads % groups == 0
            and (num_kv % groups == 0 or groups % num_kv == 0)
        ]
        return fits[-1]

    @property
    def vocab_size(self) -> int:
        """Size V of the vocabulary axis of the logits, a multiple of n."""
        return self._local.vocab_size * self.num_devices

    @property
    def serves(self) -> Serves:
        """What a `Llama` does; the devices come before the requests, and logits are split."""
        sharding = VerifySharding(self.mesh, vocab_axis=self.axis)
        return dataclasses.replace(self.model.serves, batch_axis=1, sharding=sharding)

    @property
    def _local(self) -> Llama:
        """What one device runs: a `Llama` with its share of heads, columns and ids."""
        # [V / n] ids of each device, rounded up. Which of them are padding differs from device to
        # device, so `_apply_share` masks them, and the `Llama` knows of none.
        c = self.model.config
        config = dataclasses.replace(
            c,
            vocab_size=-(-c.vocab_size // self.num_devices),
            layers=tuple(map(self._local_layer, c.layers)),
            num_token_ids=None,
        )
        return Llama(config, self.model.dtype)

    def _local_layer(self, spec: LayerSpec) -> LayerSpec:
        """Returns what one device runs of a layer."""
        groups = self.num_head_groups(spec)
        return dataclasses.replace(
            spec,
            num_attention_heads=spec.num_attention_heads // groups,
            # With more groups than heads of keys, several groups have the same one.
            num_key_value_heads=max(1, spec.num_key_value_heads // groups),
            intermediate_size=-(-spec.intermediate_size // self.num_devices),
        )

    def shard_params(self, params: Weights) -> Weights:
        """Returns the weights, each device's where it runs.

        On several hosts every process calls it with all weights and places those of its own
        devices. Weights too large for one device are read under ``jax.default_device`` of a CPU.

        Args:
          params: weights of the whole model.

        Returns:
          Arrays of the same names, with a leading axis of n.
        """
        sharding = NamedSharding(self.mesh, P(self.axis))

        def place(part: Callable[[int], np.ndarray]) -> jax.Array:
            """Returns ``[n, ...]`` of what a function gives for each device."""

            def read(index: Any) -> np.ndarray:
                # One slice of each axis: the first is the entry of one device. Its part is cut out
                # of the whole on the host, for devices of this process alone.
                return np.stack([part(device) for device in range(self.num_devices)[index[0]]])

            # All parts have one shape: [...] -> [n, ...].
            shape = (self.num_devices, *part(0).shape)
            return jax.make_array_from_callback(shape, sharding, read)

        def place_weight(path: KeyPath, x: jax.Array | Int8Weight) -> jax.Array | Int8Weight:
            """Returns a weight ``[n, ...]``; of one in 8 bits, integers and scales alike."""
            if not isinstance(x, Int8Weight):
                whole = np.asarray(x)
                return place(lambda device: self._part(path, whole, device))
            # [out, in] -> [in, out], of which a device's part -> [out, in]
            values = np.asarray(x.values).T
            # [out] -> [1, out]: a row of what is cut by outputs. Matrices that write to the
            # residual stream are cut by inputs, so each device has all their outputs, and scales.
            scale = np.asarray(x.scale)[None]
            by_outputs = path[-1].key not in ("o_proj", "down_proj")
            return Int8Weight(
                place(lambda device: self._part(path, values, device).T),
                place(lambda device: (self._part(path, scale, device) if by_outputs else scale)[0]),
            )

        return jax.tree.map_with_path(place_weight, params, is_leaf=is_int8)

    def check_params(self, name: str, params: Params) -> None:
        """Checks that weights are those of `shard_params`; see `CausalModel`."""
        n = self.num_devices
        local = self._local
        shapes = jax.tree.map(lambda shape: (n, *shape), local.weight_shapes, is_leaf=is_shape)
        check_weights(name, shapes, params, local.dtype)

    def init_cache(self, batch_size: int, max_length: int) -> Cache:
        """Returns an empty cache; see `CausalModel.init_cache`."""
        local_cache = jax.eval_shape(lambda: self._local.init_cache(batch_size, max_length))
        sharding = NamedSharding(self.mesh, P(self.axis))

        def zeros(x: jax.ShapeDtypeStruct) -> jax.Array:
            # [n, ...], a device's entry where it runs
            array = jnp.zeros((self.num_devices, *x.shape), x.dtype, device=sharding)
            return lax.with_sharding_constraint(array, sharding)  # jit ignores `device`

        return jax.tree.map(zeros, local_cache)

    def apply(
        self, params: Weights, groups: Sequence[Rows], cache: Cache, wants: Wants = Wants()
    ) -> tuple[list[Output], Cache]:
        """Runs rows of requests, all groups in one pass; see `CausalModel`.

        Args:
          params: from `shard_params`.
          groups: as in `Llama.apply`.
          cache: from `init_cache` or a previous call.
          wants: as in `Llama.apply`.

        Returns:
          For each group logits ``[G, S, V]``, sharded over V, and features, the same on all
          devices; and the cache.

        Raises:
          ValueError, TypeError: as in `Llama.apply`.
        """
        # Any: they take the places of arrays in an `Output`.
        split_vocab: Any = P(None, None, self.axis)  # [G, S, V]
        same: Any = P()  # [G, S, A H], or None
        run = jax.shard_map(
            functools.partial(self._apply_share, wants=wants),
            mesh=self.mesh,
            in_specs=(P(self.axis), P(), P(self.axis)),
            out_specs=([Output(split_vocab, same)] * len(groups), P(self.axis)),
            check_vma=False,  # which kernels do not follow
        )
        return run(params, list(groups), cache)

    def commit(self, cache: Cache, start: jax.Array, path: jax.Array) -> Cache:
        """Moves what the cache holds of the nodes of a path together; see `Llama.commit`."""

        def share(cache: Cache, start: jax.Array, path: jax.Array) -> Cache:
            # This device's part has one entry along the axis of devices.
            # [1, ...] -> [...] and back; nodes move the same way on all devices.
            local_cache = jax.tree.map(lambda x: x[0], cache)
            return jax.tree.map(lambda x: x[None], self._local.commit(local_cache, start, path))

        run = jax.shard_map(
            share, mesh=self.mesh, in_specs=(P(self.axis), P(), P()), out_specs=P(self.axis)
        )
        return run(cache, start, path)

    def _apply_share(
        self, params: Weights, groups: list[Rows], cache: Cache, *, wants: Wants
    ) -> tuple[list[Output], Cache]:
        """Returns one device's part of `apply`."""
        local = self._local
        c = self.model.config
        # []: ids first_id to first_id + V / n - 1 are this device's
        first_id = lax.axis_index(self.axis) * local.vocab_size

        # A `Llama` calls it for what attention and the feed-forward layer of each layer add.
        def sum_devices(branch: jax.Array) -> jax.Array:
            return lax.psum(branch, self.axis)

        def embed(embed_tokens: jax.Array, token_ids: jax.Array) -> jax.Array:
            """Returns rows ``[B, S, H]`` of an embedding whose ids are split over devices."""
            # [B, S] -> [B, S, H]: one device has the row of an id, the others add zeros.
            ids = jnp.clip(token_ids, 0, c.vocab_size - 1) - first_id
            is_local = (ids >= 0) & (ids < local.vocab_size)
            rows = embed_tokens.at[ids].get(mode="clip")
            return sum_devices(jnp.where(is_local[..., None], rows, 0))

        # Without the axis of devices, of which this one's part has one entry.
        params, cache = jax.tree.map(lambda x: x[0], (params, cache))
        outputs, cache = local.apply_with(params, groups, cache, wants, embed, sum_devices)
        # [G, S, V / n]: ids that are padding, of the checkpoint or up to a multiple of n
        num_token_ids = c.num_token_ids or c.vocab_size
        if num_token_ids < self.vocab_size:
            ids = first_id + jnp.arange(local.vocab_size, dtype=jnp.int32)
            is_token = (ids < num_token_ids)[None, None, :]
            outputs = [x._replace(logits=jnp.where(is_token, x.logits, -jnp.inf)) for x in outputs]
        return outputs, jax.tree.map(lambda x: x[None], cache)

    def _part(self, path: KeyPath, x: np.ndarray, device: int) -> np.ndarray:
        """Returns what one device holds of a weight, which `param_shapes` describes."""
        n = self.num_devices
        name = path[-1].key
        # What reads the residual stream is cut by outputs, what writes to it by inputs.
        if name in ("qkv_proj", "qkv_bias"):
            return self._heads(self._spec(path), x, device)
        if name == "o_proj":
            return self._head_rows(self._spec(path), x, device)
        if name in ("embed_tokens", "embed_tokens_per_layer", "down_proj"):
            return _slice(x, device, n)  # [V, H] by ids, [I, H] by feed-forward columns
        if name == "lm_head":
            return _slice(x.T, device, n).T  # [H, V] by ids
        if name == "gate_up_proj":
            # [H, 2 I] -> [H, I] twice: each device has the same columns of both
            halves = np.split(x, 2, axis=1)
            return np.concatenate([_slice(half.T, device, n).T for half in halves], axis=1)
        if name == "o_bias":
            # [H]: part of a branch that is summed over devices, so one of them adds it.
            return x if device == 0 else np.zeros_like(x)
        # All else is whole on every device: what is computed before a branch is cut, as its norm,
        # or after it is summed, as norms around it, the input of each layer, and its scalar.
        return x

    def _spec(self, path: KeyPath) -> LayerSpec:
        """Returns what the layer of a weight is."""
        _, index, _ = path  # ["layers"][index][name]
        return self.model.config.layers[index.idx]

    def _heads(self, spec: LayerSpec, x: np.ndarray, device: int) -> np.ndarray:
        """Returns query, key and value heads of the group, of ``[..., (N + 2 N_kv) D]``."""
        num_query = spec.num_attention_heads
        num_kv = spec.num_key_value_heads
        query = self._query_heads(spec, device)
        # The heads of keys that the group's query heads share: query head q reads q // per_key.
        per_key = num_query // num_kv
        keys = slice(query.start // per_key, (query.stop - 1) // per_key + 1)
        # [..., (N + 2 N_kv) D] -> [..., N + 2 N_kv, D]
        x = x.reshape(*x.shape[:-1], -1, spec.head_dim)
        # -> [..., N, D], [..., N_kv, D] twice; none of those that the layer does not compute
        q, k, v = np.split(x, [num_query, num_query + num_kv], axis=-2)
        x = np.concatenate([q[..., query, :], k[..., keys, :], v[..., keys, :]], axis=-2)
        # -> [..., (N + 2 N_kv) D] of the group's heads
        return x.reshape(*x.shape[:-2], -1)

    def _head_rows(self, spec: LayerSpec, x: np.ndarray, device: int) -> np.ndarray:
        """Returns rows of ``[N D, H]`` of the group's heads; zeros but on its first device."""
        query = self._query_heads(spec, device)
        rows = x[query.start * spec.head_dim : query.stop * spec.head_dim]
        # [N D, H] -> [N D / groups, H]. Branches are summed over devices: one of the group adds its
        # heads.
        is_first = device % (self.num_devices // self.num_head_groups(spec)) == 0
        return rows if is_first else np.zeros_like(rows)

    def _query_heads(self, spec: LayerSpec, device: int) -> slice:
        """Returns the query heads of the device's group."""
        # Neighbours are a group: devices 0 to n / groups - 1, and so on.
        groups = self.num_head_groups(spec)
        group = device // (self.num_devices // groups)
        size = spec.num_attention_heads // groups
        return slice(group * size, (group + 1) * size)


def _slice(x: np.ndarray, device: int, n: int) -> np.ndarray:
    """Returns rows of one device: an n-th of them, filled up with zeros."""
    size = math.ceil(x.shape[0] / n)
    rows = x[device * size : (device + 1) * size]
    return np.pad(rows, [(0, size - len(rows)), *[(0, 0)] * (x.ndim - 1)])
