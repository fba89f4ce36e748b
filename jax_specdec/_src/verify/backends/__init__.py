"""Backends: how rows are read, and tokens drawn from them, on each kind of device.

A backend is a class in a file, and a row of the table in `verify.api`. `base` has verification as a
whole, and `gather` fills what that leaves open: a new backend overrides what its device does
better, and leaves the rest to ``super()``. Here are

- `gather`: all rows at once, by operations on whole matrices. GPUs, and devices that nothing is
  known of.
- `in_order`: one request after another. CPUs.
- `tiles`: all rows tile by tile. TPUs, though none has run it. `largest` finds the largest entries
  of rows, for filters.
- `mosaic_gpu`: a kernel that verifies. Hopper GPUs.
"""
