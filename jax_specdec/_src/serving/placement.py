"""Where the arrays of a loop lie when its target is spread over many devices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_specdec._src.models.protocol import CausalModel, sharding_of


def on_all_devices(arrays: Any, model: CausalModel) -> Any:
    """Arrays that nobody has placed yet, copied to each device of the model's mesh.

    Once, rather than with every call; and so that a step finds its state where it leaves it, and is
    compiled once.

    Args:
      arrays: a pytree.
      model: the target; one that is not spread over a mesh leaves everything where it is.
    """
    sharding = sharding_of(model)
    if sharding is None or sharding.mesh is None:
        return arrays
    everywhere = NamedSharding(sharding.mesh, P())

    def copied(x: Any) -> Any:
        if getattr(x, "committed", False):
            return x
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):  # device_put keeps keys to one process
            data = jax.device_put(jax.random.key_data(x), everywhere)
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
        return jax.device_put(x, everywhere)

    return jax.tree.map(copied, arrays)
