"""Verification in one launch, written in Pallas Mosaic GPU, for Hopper GPUs and newer.

``docs/kernel.md`` explains what the kernel does. Where to look:

- ``support``: which GPUs and calls it serves. A new GPU generation begins here.
- ``plan``: what is static about a launch: slices of rows, shared memory, ``KernelConfig``.
- ``launch``: operands, scratch memory, the launch.
- ``kernel``: one request's walk: read a row, judge its draft, go on; the block rule; filters. A new
  rule begins here, and in ``verify/rules.py``.
- ``sample``: how the last token is drawn.
- ``request``: what is known of a request and its drafted tokens; what is written of it.
- ``statistics``: largest entry, argmax and masses of a row, for every dtype.
- ``rows``: target rows in shared memory, draft rows in global memory.
- ``lists``: draft rows on a list of ids: a map for all of them, or candidates of each.
- ``cluster``: exchanges between blocks; the one owner of rounds, slots and parities.
- ``ptx``: what Pallas does not offer, such as loads of several entries of a dtype at once.
- ``interpret``: the same in jnp, for GPU interpret mode.
- ``shard_kernels``: statistics, masses and draw of one device's part of a split vocabulary.

``launch`` and what it imports are imported only where a call uses them: they need modules that JAX
calls experimental, which must not cost, or break, anyone who runs elsewhere.
"""
