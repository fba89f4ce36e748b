"""The product with an int8 matrix, every form of it, against float64."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lower_floor import assume
from upper_floor import int8_kernel, int8_matmul
from verify.interpret_mode import interpret_gpu_params

# rows, inputs, outputs
FORMS = {
    "a row": (1, 128, 256),
    "a row of each slot": (8, 96, 40),
    "more, where the kernel does not serve": (24, 96, 40),
    "many": (97, 96, 40),
}
KERNEL = {
    # one block of rows, and one split
    "few": (36, 256, 256),
    # two splits, of four tiles each
    "splits": (33, 1024, 256),
    # pairs of blocks that share their rows, and rows of padding
    "pairs": (161, 256, 256),
    # two blocks of rows in each of two pairs
    "blocks of rows": (258, 128, 512),
}
LARGER = list(KERNEL)[1:]
LONG = pytest.mark.long
ROUNDED = {"float32": 2e-6, "float16": 1e-3, "bfloat16": 8e-3}
ON_GPU = KERNEL | {
    "8B, a step": (40, 4096, 14336),
    "8B, 32 requests": (160, 14336, 4096),
    "8B, a short prompt": (300, 4096, 6144),
    "8B, a prompt": (1000, 4096, 6144),
}


def check(run: Callable[..., jax.Array], sizes: tuple[int, int, int], dtype: Any) -> None:
    """Checks a product of extreme integers, and of scales of 1, of 0, tiny and not finite.

    NaN in a row or a scale shows there and nowhere else.
    """
    num_rows, num_in, num_out = sizes
    rng = np.random.default_rng(num_rows)
    numbers = rng.normal(size=(num_rows, num_in))
    numbers[1:2, 7] = np.nan  # of the second row, if there is one
    x = jnp.asarray(numbers, dtype)
    values = rng.integers(-127, 128, (num_out, num_in)).astype(np.int8)
    values[0] = 127
    values[1] = -127
    scale = rng.uniform(0.5, 1.5, num_out).astype(np.float32) / 127
    scale[:5] = 1, 1e-6, 0, np.nan, np.inf
    found = run(x, jnp.asarray(values), jnp.asarray(scale))
    assert found.dtype == dtype and found.shape == (num_rows, num_out)
    found = np.asarray(found, np.float64)
    is_bad_row = np.isnan(numbers).any(axis=1)
    is_bad_output = ~np.isfinite(scale)
    is_bad = is_bad_row[:, None] | is_bad_output[None, :]
    np.testing.assert_array_equal(np.isfinite(found), ~is_bad)
    rows = np.asarray(x, np.float64)[~is_bad_row]
    weights = values.T[:, ~is_bad_output] * scale[~is_bad_output].astype(np.float64)
    # The result is rounded to the dtype, and weights may be.
    error = np.abs(found[~is_bad].reshape(len(rows), -1) - rows @ weights)
    assert (error <= ROUNDED[str(jnp.dtype(dtype))] * (np.abs(rows) @ np.abs(weights))).all()


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=str)
@pytest.mark.parametrize("name", FORMS)
def test_xla_is_the_product(name: str, dtype: Any, platform: str) -> None:
    with assume(platform):
        check(jax.jit(int8_matmul.int8_matmul), FORMS[name], dtype)


@pytest.mark.newest
@pytest.mark.parametrize(
    "dtype", [jnp.bfloat16, pytest.param(jnp.float16, marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize(
    "name", ["few", *(pytest.param(x, marks=pytest.mark.long) for x in LARGER)]
)
def test_the_interpreted_kernel_is_the_product(
    name: str, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "few":  # as the logits of an output matrix
        monkeypatch.setattr(int8_kernel, "MANY_OUTPUTS", 255)
    run = functools.partial(int8_kernel.product, interpret=interpret_gpu_params())
    check(run, KERNEL[name], dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=str)
@pytest.mark.parametrize("name", ON_GPU)
def test_the_kernel_is_the_product_on_a_gpu(name: str, dtype: Any) -> None:
    run = jax.jit(int8_matmul.int8_matmul)
    check(run, ON_GPU[name], dtype)
    shapes = jnp.ones(ON_GPU[name][:2], dtype), jnp.ones(ON_GPU[name][:0:-1], jnp.int8)
    assert "int8_matmul" in run.lower(*shapes, jnp.ones(ON_GPU[name][2])).compile().as_text()
