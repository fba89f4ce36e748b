"""Verification in one launch, written in Pallas Mosaic GPU, for Hopper GPUs and newer.

``docs/kernel.md`` explains what the kernel does. Where to look:

- ``support``: which calls it serves; ``mosaic.gpus`` has the GPUs, and a new one begins there.
- ``config``: ``KernelConfig``, what a caller may set.
- ``plan``: what is static about a launch: slices of rows, shared memory.
- ``launch``: operands, scratch memory, the launch.
- ``kernel``: one request: which loads and copies begin when, and which rule's walk follows. A new
  rule begins here, in ``support`` and in ``verify/rules.py``.
- ``walk``: position by position: read a row, judge its draft, go on.
- ``block_rule``: the walk of the block rule.
- ``reader``: reading the rows of one position; filters.
- ``draw``: how the last token is drawn.
- ``request``: operands and outputs; a request, and writing its output.
- ``drafted``: a request's drafted tokens, and what gives their q.
- ``statistics``: maximum, argmax and masses of a row, for every dtype; from entries to p and q.
- ``rows``: target rows in shared memory, draft rows in global memory; what hides entries of them.
- ``lists``: draft rows on a list of ids: one map for all rows, or candidates of each row.
- ``cluster``: exchanges between CTAs. Only this file handles rounds, slots and parities.

What the threads of a warpgroup do, on a GPU and in interpret mode, is in ``mosaic``.

`verify.backends.mosaic_gpu` is what calls ``launch``.

``launch`` and the modules that it needs are imported only if a call uses the kernel. They need
modules that JAX calls experimental, which must not slow down, or break, programs for other devices.
"""
