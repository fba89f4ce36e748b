"""Sources that tests draw from, without a verification before."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from lower_floor import Request, Source, Uniforms


def source_of_rows(num_rows: int, size: int, **known: Any) -> Source:
    """``[num_rows]``: source i draws from row i; ``p`` unless `known` says otherwise."""
    requests = Request.without_drafts(jnp.ones(num_rows), None, Uniforms(jnp.zeros((num_rows, 2))))
    positions = requests.unread(size, None)
    return jax.tree.map(lambda x: x[:, 0], Source.at(positions))._replace(**known)
