"""Adapters for JAX serving stacks and models, which import nothing of theirs.

`tpu_inference` takes and returns the flat layout of vllm-project/tpu-inference, `sglang_jax` the
rectangle of sgl-project/sglang-jax. `keys` turns one key per step into one key per request.
`models` makes a `CausalModel` of a model whose cache has one write index for the whole batch.
"""

from jax_specdec.integrations import keys, models, sglang_jax, tpu_inference

__all__ = ["keys", "models", "sglang_jax", "tpu_inference"]
