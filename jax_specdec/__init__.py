"""Speculative decoding for JAX."""
