"""Adapters for JAX serving stacks, which import nothing of theirs.

`tpu_inference` takes and returns the flat layout of vllm-project/tpu-inference (now vllm-jax),
`sglang_jax` the rectangle of sgl-project/sglang-jax. `keys` turns one key per step into one key per
request.
"""

from jax_specdec.adapters import keys, sglang_jax, tpu_inference

__all__ = ["keys", "sglang_jax", "tpu_inference"]
