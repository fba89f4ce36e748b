"""Rotary positions, and the frequencies of Llama 3.1 that reach further than training did.

References:
  Su et al., 2021, "RoFormer", https://arxiv.org/abs/2104.09864
  Grattafiori et al., 2024, "The Llama 3 Herd of Models", https://arxiv.org/abs/2407.21783
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jax_specdec._src.arrays import require
from jax_specdec.lm.models.fields import check_fields


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How Llama 3.1 and later slow the rotation down (`rope_type` "llama3").

    With wavelength w = 2 pi / f of a frequency f and C = original_max_position_embeddings:
    f stays where C / w > high_freq_factor, becomes f / factor where C / w < low_freq_factor, and is
    interpolated linearly in C / w in between. Fields are named as in a Hugging Face `config.json`.

    Attributes:
      factor: by which slow frequencies are divided.
      low_freq_factor: rotations in the original context up to which a frequency is slow.
      high_freq_factor: rotations in the original context from which a frequency is fast.
      original_max_position_embeddings: longest context before the model was extended.

    Raises:
      ValueError: a field is not a positive number that float32 holds, the context is not an
        integer, the factor is less than 1, or the two limits are not in order.

    Example:
      >>> scaling = RopeScaling(
      ...     factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
      ...     original_max_position_embeddings=8192)
      >>> scaling.factor
      8.0
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        check_fields(self)
        require(self.factor >= 1, "factor", "be at least 1", self.factor)
        low = self.low_freq_factor
        high = self.high_freq_factor
        require(low < high, "low_freq_factor", f"be less than high_freq_factor = {high}", low)


def rotation(
    positions: jax.Array, head_dim: int, theta: float, scaling: RopeScaling | None
) -> tuple[jax.Array, jax.Array]:
    """Returns the cos and sin of position * frequency: two ``[B, S, 1, D/2]`` float32."""
    frequencies = _frequencies(head_dim, theta, scaling)
    # [B, S] * [D/2] -> [B, S, 1, D/2]: the same for all heads
    angles = positions[:, :, None, None].astype(jnp.float32) * jnp.asarray(
        frequencies[None, None, None, :], jnp.float32
    )
    return jnp.cos(angles), jnp.sin(angles)


def _frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> np.ndarray:
    """Returns the radians per position of the pairs ``[D/2]``, scaled; float64."""
    plain = theta ** (-np.arange(0, head_dim, 2) / head_dim)  # theta^(-2i/D)
    if scaling is None:
        return plain
    # C / w: how often a pair turns in the original context.
    turns = scaling.original_max_position_embeddings * plain / (2 * np.pi)
    low = scaling.low_freq_factor
    high = scaling.high_freq_factor
    kept = np.clip((turns - low) / (high - low), 0, 1)  # 1: fast, 0: slow
    return plain * (kept + (1 - kept) / scaling.factor)


def rotate(x: jax.Array, rotation: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Returns ``[B, S, N, D]``, the pairs (x[i], x[i + D/2]) of each head turned, in float32."""
    cos, sin = rotation
    # [B, S, N, D] -> two [B, S, N, D/2]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)
