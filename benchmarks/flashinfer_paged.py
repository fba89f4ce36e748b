"""FlashInfer's paged attention as JAX calls it, by jax-tvm-ffi.

A folder holds `decode.so` and `rows.so`: the modules `batch_decode` and `batch_prefill` (fa2) of
FlashInfer for bfloat16, heads of 128 numbers and int32 indices, as its `flashinfer.jit` builds
them. `decode` takes one row of a request; `rows` takes several, a chain, and is what FlashInfer's
decode wrapper calls for these, and for one row with `use_tensor_cores`.

Both are planned on the host from the lengths: in the first call, which is not counted.
"""

from __future__ import annotations

import itertools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_names = (f"flashinfer.{i}" for i in itertools.count())
_WORK = {"floats": 128 << 20, "ints": 8 << 20}  # bytes of its workspaces


def compiled(
    folder: pathlib.Path,
    kind: str,
    query: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    pages: jax.Array,
    start: jax.Array,
) -> tuple[Any, dict[str, Any]]:
    """A program that attends as `decode_attention` does over pages, and what it is called with.

    Args:
      folder: see the module.
      kind: "decode" or "rows".
      query: of a call of `decode_attention`, as the rest.
      keys: likewise.
      values: likewise.
      pages: likewise.
      start: likewise.
    """
    import jax_tvm_ffi
    import tvm_ffi

    library = tvm_ffi.load_module(str((folder / f"{kind}.so").resolve()))
    batch, count, heads, dim = query.shape
    page, num_kv = keys.shape[1:3]
    lengths = np.asarray(start, np.int32) + count
    used = -(-lengths // page)  # pages of each request
    host = {
        "rows_end": np.arange(batch + 1, dtype=np.int32) * count,
        "pages_end": np.concatenate([[0], np.cumsum(used)]).astype(np.int32),
        "work": np.zeros(_WORK["ints"], np.uint8),
        "lengths": lengths,
    }
    views = {name: tvm_ffi.from_dlpack(x) for name, x in host.items()}
    plans: list[Any] = []

    def call(q: Any, k: Any, v: Any, rows_end: Any, pages_end: Any, *rest: Any) -> None:
        indices, last, floats, ints, out = rest
        work = floats, ints, views["work"]
        sizes = heads, num_kv, page, False
        scales = 0.0, dim**-0.5, 1.0, 1e-4  # soft cap, scale, and two of rotary embeddings
        if kind == "decode":
            if not plans:
                end = views["pages_end"]
                given = *work, end, batch, *sizes, -1, 0.0, dim, dim, floats, floats
                plans.append(library.plan(*given))
            given = floats, ints, plans[0], q, k, v, pages_end, indices, last, out
            library.run(*given, None, 0, -1, False, None, *scales)
            return
        if not plans:
            ends = views["rows_end"], views["pages_end"], views["lengths"], batch * count, batch
            given = *work, *ends, *sizes, dim, dim, count > 1, -1, -1, False, 0
            plans.append(library.plan(*given, count if count > 1 else 0))
        given = floats, ints, plans[0], q, k, v, rows_end, pages_end, indices, last, out
        library.paged_run(*given, None, int(count > 1), 0, -1, False, *[None] * 8, *scales, 0)

    name = next(_names)
    jax_tvm_ffi.register_ffi_target(name, tvm_ffi.convert(call), ["args", "rets"], platform="gpu")
    shape = jax.ShapeDtypeStruct((batch * count, heads, dim), query.dtype)
    table = np.asarray(pages)
    arguments = {
        "query": query,
        "keys": keys,
        "values": values,
        "rows_end": jnp.asarray(host["rows_end"]),
        "pages_end": jnp.asarray(host["pages_end"]),
        "indices": jnp.asarray(np.concatenate([table[b, :n] for b, n in enumerate(used)])),
        "last": jnp.asarray(lengths - (used - 1) * page),
        **{name: jnp.zeros(size, jnp.uint8) for name, size in _WORK.items()},
    }

    def run(query: jax.Array, **rest: jax.Array) -> jax.Array:
        # [B, S, N, D] -> [B * S, N, D] and back; the order of operands is that of `arguments`.
        rest = {name: rest[name] for name in arguments if name != "query"}
        found = jax.ffi.ffi_call(name, shape)(query.reshape(shape.shape), *rest.values())
        return found.reshape(query.shape)

    return jax.jit(run).lower(**arguments).compile(), arguments
