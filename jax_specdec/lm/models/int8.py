"""Weights in 8 bits, and the product that takes them: half the bytes of a step, and of a model.

A decoding step waits for the bytes of its weights. An int8 weight is an integer times the scale of
its column, w[i, j] ~ scale[j] v[j, i], so a product is one with the integers, scaled at the end:

  (x w)[j] = scale[j] sum over i of x[i] v[j, i]

Integers up to 127 are exact in 16 bits; sums are float32. Quantizing a drafter changes which drafts
are proposed and not the text: q is what it draws from.

Reference: Dettmers et al., 2022, "LLM.int8()", https://arxiv.org/abs/2208.07339 (section 2.1,
scales per column; activations stay in 16 bits here).
"""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import KeyPath

from jax_specdec._src.base.arrays import require
from jax_specdec.lm.models.int8_matmul import int8_matmul
from jax_specdec.lm.models.protocol import Params, is_loaded_model

NOT_PRODUCTS = ("embed_tokens", "embed_tokens_per_layer", "markov_w1", "confidence_proj")
"""Matrices that stay: rows of the first three are looked up, the last has one column."""
MOST = 127
"""The largest integer; -128 is not used, so that the scale is the same for both signs."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Int8Weight:
    """A matrix ``[in, out]`` as integers and a scale for each output.

    Attributes:
      values: ``[out, in]`` int8: the order in which a product with few rows reads memory in a row.
      scale: ``[out]`` float32.

    Example:
      >>> import jax.numpy as jnp
      >>> weight = quantize({"fc": jnp.array([[1.0, 10.0], [-0.5, 5.0]])})["fc"]
      >>> weight.shape, weight.values.tolist()
      ((2, 2), [[127, -64], [127, 64]])
      >>> weight.dequantized().round(2).tolist()
      [[1.0, 10.0], [-0.5, 5.04]]
    """

    values: jax.Array
    scale: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrix, ``[in, out]``, after the axis of devices if there is one."""
        *devices, num_out, num_in = self.values.shape
        return (*devices, num_in, num_out)

    def columns(self, x: jax.Array, ids: jax.Array) -> jax.Array:
        """Returns those entries ``[..., C]`` of `matmul` of x ``[..., in]`` that are asked for.

        Args:
          x: rows.
          ids: ``[..., C]`` int32, of outputs, with leading axes that broadcast with those of x.
        """
        # Rows of the outputs that are asked for: [out, in] -> [..., C, in], the only ones read.
        # [..., C, in] and [..., in] -> [..., C]
        values = self.values[ids].astype(x.dtype)
        sums = jnp.einsum("...ci,...i->...c", values, x, preferred_element_type=jnp.float32)
        return (sums * self.scale[ids]).astype(x.dtype)

    def dequantized(self) -> jax.Array:
        """Returns the matrix ``[in, out]`` that products are taken with, in float32."""
        return (self.values.astype(jnp.float32) * self.scale[..., None]).swapaxes(-2, -1)


def quantize(params: Params, bits: int = 8) -> Params:
    """Returns weights in which each matrix that products are taken with is an `Int8Weight`.

    The scale of column j is max over i of abs(w[i, j]) / 127, or 1 where all are 0; the integers
    are w / scale, rounded to the nearest. Where one of its weights is NaN or infinite, the scale is
    NaN, as are all products with the column: weights that diverged show as they do in floats.

    Norms, biases and embeddings stay as they are. The output matrix is quantized too; where the
    embedding is the output matrix, an ``lm_head`` of its own is added, as rows of the embedding are
    looked up in 16 bits. A weight that is quantized stays.

    Args:
      params: weights of a `Llama`, an `Eagle3Head` or a DFlash or DSpark head; not yet those of
        `TensorParallelLlama.shard_params`, which takes what this returns.
      bits: 8.

    Raises:
      TypeError: `params` are no dict of weights, such as a `LoadedModel`.
      ValueError: other bits are asked for, or an output matrix has as many inputs as outputs and
        is not the array that is the embedding.

    Example:
      >>> from jax_specdec import lm
      >>> _, (model, params) = lm.load_embedded_pair()
      >>> lean = lm.models.quantize(params)
      >>> lean["layers"][0]["down_proj"].values.dtype.name
      'int8'
    """
    hint = "pass its .params" if is_loaded_model(params) else None
    is_dict = isinstance(params, Mapping)
    require(is_dict, "params", "be a dict of weights", params, hint, TypeError)
    require(bits == 8, "bits", "be 8", bits)
    # A tied model gives its embedding a second name, under which it is quantized.
    if "embed_tokens" in params and "lm_head" not in params:
        params = {**params, "lm_head": params["embed_tokens"]}
    embedding = params.get("embed_tokens")

    def quantize_weight(path: KeyPath, weight: jax.Array | Int8Weight) -> jax.Array | Int8Weight:
        """Returns a weight, as an `Int8Weight` if it is a matrix that products are taken with."""
        where = "params" + jax.tree_util.keystr(path)
        is_array = isinstance(weight, Int8Weight) or hasattr(weight, "ndim")
        require(is_array, where, "be an array", weight, error=TypeError)
        name = str(getattr(path[-1], "key", ""))
        if isinstance(weight, Int8Weight) or weight.ndim != 2 or name in NOT_PRODUCTS:
            return weight
        # Only an `lm_head` comes here that is the embedding [V, H]: it is [out, in] as it stands.
        if weight is embedding:
            return quantized(weight)
        rows_and_columns = np.shape(embedding)
        is_square = name == "lm_head" and weight.shape == rows_and_columns == weight.shape[::-1]
        must = "be the array embed_tokens, or not square"
        require(not is_square, "lm_head", must, weight, "its outputs may be either axis")
        # [in, out] -> [out, in], the order of `Int8Weight.values`
        is_by_output = has_outputs_first(name, weight.shape, rows_and_columns)
        return quantized(weight if is_by_output else weight.T)

    return jax.tree.map_with_path(quantize_weight, params, is_leaf=is_int8)


def is_int8(value: object) -> bool:
    """Returns whether a value is an `Int8Weight`: a leaf, for JAX's functions of trees."""
    return isinstance(value, Int8Weight)


def has_outputs_first(name: str, shape: tuple[int, ...], embedding: tuple[int, ...]) -> bool:
    """Returns whether a matrix is ``[out, in]``, as an embedding that gives logits is.

    Args:
      name: of the matrix among its params.
      shape: its shape.
      embedding: the shape of ``embed_tokens`` beside it.
    """
    return name == "markov_w2" or (name == "lm_head" and shape == embedding != shape[::-1])


@jax.jit
def quantized(weight: jax.Array) -> Int8Weight:
    """Returns a matrix ``[out, in]`` as an `Int8Weight`; see `quantize`."""
    numbers = weight.astype(jnp.float32)
    # max |w| of each output: [out, in] -> [out]
    largest = jnp.max(jnp.abs(numbers), axis=1)
    is_finite = jnp.isfinite(largest)
    # No integer is NaN: the scale is, by which every product with the column becomes NaN.
    scale = jnp.where(largest == 0, 1, jnp.where(is_finite, largest / MOST, jnp.nan))
    # round(w / scale), in -127..127, as no weight of the row is larger than its largest
    values = jnp.where(is_finite[:, None], jnp.round(numbers / scale[:, None]), 0)
    return Int8Weight(values.astype(jnp.int8), scale)


def matmul(
    x: jax.Array, weight: jax.Array | Int8Weight, *, outputs_first: bool = False
) -> jax.Array:
    """Returns the product of rows and a weight, ``[..., out]`` in the dtype of x.

    Args:
      x: ``[..., in]``.
      weight: ``[in, out]`` in the dtype of x, or an `Int8Weight` of that shape.
      outputs_first: whether an array is ``[out, in]``, as an embedding is.

    Example: see `Int8Weight`.
    """
    if x.size != x.shape[-1] or x.dtype.itemsize != 2:
        return _product(x, weight, outputs_first)
    # Of one row in 16 bits XLA makes no product, but a sum, for which it converts the weight on
    # CPUs: one row took a model of 135M parameters 157 ms, where two took it 18. So it comes twice.
    # [..., in] -> [2, in] -> [2, out] -> [..., out]
    twice = jnp.broadcast_to(x.reshape(1, -1), (2, x.shape[-1]))
    return _product(twice, weight, outputs_first)[0].reshape(*x.shape[:-1], -1)


def _product(x: jax.Array, weight: jax.Array | Int8Weight, outputs_first: bool) -> jax.Array:
    """Returns the product of any number of rows; see `matmul`."""
    if isinstance(weight, Int8Weight):
        # [..., in] -> [M, in] -> [M, out] -> [..., out]
        rows = x.reshape(-1, x.shape[-1])
        products = int8_matmul(rows, weight.values, weight.scale)
        return products.reshape(*x.shape[:-1], products.shape[1])
    if outputs_first:
        return jnp.einsum("oi,...i->...o", weight, x)  # faster than x @ weight.T
    return x @ weight
