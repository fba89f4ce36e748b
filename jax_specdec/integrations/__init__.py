"""Adapters for JAX serving stacks: pure functions over arrays that import nothing of theirs.

`tpu_inference` takes and returns the flat layout of vllm-project/tpu-inference, `sglang_jax` the
rectangle of sgl-project/sglang-jax. `keys` turns one key per step into one key per request.
"""
