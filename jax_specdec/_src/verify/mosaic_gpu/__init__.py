"""Verification in one launch, written in Pallas Mosaic GPU, for Hopper GPUs and newer.

`call` holds the launch. It is imported only where a call uses it: it needs modules that JAX keeps
private, which must not cost, or break, anyone who runs elsewhere.
"""
