"""What a request emits, written to global memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_specdec._src.types import PLACEHOLDER_TOKEN_ID, Status
from jax_specdec._src.verify.mosaic_gpu.request import Request
from jax_specdec._src.verify.mosaic_gpu.threads import WARP


def write(
    request: Request,
    num_accepted: jax.Array,
    token_id: jax.Array,
    status: jax.Array,
    is_writer: jax.Array,
) -> None:
    """The accepted drafts and one more token, or nothing where the status is not OK.

    Args:
      request: the request.
      num_accepted: ``[]`` int32.
      token_id: ``[]`` or ``[128]`` int32, the last token.
      status: ``[]`` int32.
      is_writer: ``[128]`` bool, true in one warp of the cluster.
    """
    lane, ok = request.lane, status == Status.OK
    emitted = jnp.where(lane == num_accepted, token_id, request.token_ids)
    kept = ok & (lane <= num_accepted)
    _store(
        request,
        jnp.where(kept, emitted, PLACEHOLDER_TOKEN_ID),
        jnp.where(ok, num_accepted, 0),
        jnp.where(ok, num_accepted + 1, 0),
        status,
        is_writer,
    )


def write_status(request: Request, block: jax.Array, status: jax.Array) -> None:
    """Nothing but why."""
    index = request.threads.index()
    zero = jnp.int32(0)
    nothing = request.threads.filled(PLACEHOLDER_TOKEN_ID, jnp.int32)
    _store(request, nothing, zero, zero, status, (block == 0) & (index < WARP))


def _store(
    request: Request,
    token_ids: jax.Array,
    num_accepted: jax.Array,
    num_emitted: jax.Array,
    status: jax.Array,
    is_writer: jax.Array,
) -> None:
    threads, refs, size = request.threads, request.refs, request.call.k + 1
    lane = threads.index() & (WARP - 1)
    place = request.index * size + lane
    threads.scatter(refs["token_ids_out"], place, token_ids, is_writer & (lane < size))
    for name, value in (
        ("num_accepted", num_accepted),
        ("num_emitted", num_emitted),
        ("status", status),
    ):
        everywhere = jnp.zeros_like(lane)
        once = is_writer & (lane == 0)
        threads.scatter(refs[name], everywhere + request.index, everywhere + value, once)
