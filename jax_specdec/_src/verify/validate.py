"""`validate`: checks of values on the host, for those who want errors before jit."""

from __future__ import annotations

import jax
import numpy as np

from jax_specdec._src.base.arrays import (
    as_positions,
    check_outside_jit,
    check_positions,
)
from jax_specdec._src.base.config import SpecDecodeConfig
from jax_specdec._src.base.noise import check_keys
from jax_specdec._src.base.sampling import SamplingParams
from jax_specdec._src.base.types import Array, Drafts, Integers
from jax_specdec._src.verify.api import check_implementation
from jax_specdec._src.verify.call import CallSettings, Implementation, checked
from jax_specdec._src.verify.mosaic_gpu.config import KernelConfig
from jax_specdec._src.verify.requests import CallArrays
from jax_specdec._src.verify.sharding import VerifySharding
from jax_specdec._src.verify.values import check_values


def validate(
    target_logits: Array,
    drafts: Drafts,
    *,
    sampling: SamplingParams,
    keys: jax.Array | None = None,
    positions: Integers | None = None,
    config: SpecDecodeConfig,
    bonus_token_ids: Array | None = None,
    active: Array | None = None,
    vocab_size: int | None = None,
    token_bitmask: Array | None = None,
    padded_rows: bool = False,
    implementation: Implementation | None = None,
    kernel_config: KernelConfig | None = None,
    sharding: VerifySharding | None = None,
) -> None:
    """Raises for any input that `rejection_sample` would answer with a status, or would ignore.

    Reads every array on the host, also rows of logits, which a call outside of `jax.jit` does not
    check: use it in tests and while you bring up a new serving loop, not on the hot path. Rows of
    inactive slots are not checked, nor are drafts past the offsets.

    Arguments are all those of `rejection_sample`. ``keys`` and ``positions`` may be left out, as
    for a call with explicit noise.

    Raises:
      TypeError: an argument of the wrong type or dtype, or an array that is traced by `jax.jit`.
      NotImplementedError: the named implementation has no device here.
      ValueError: a shape that does not fit, or a value out of its range; the message names the
        argument, the request or row, the rule and the value.

    Example:
      >>> import jax.numpy as jnp
      >>> import jax_specdec as sd
      >>> sd.testing.validate(
      ...     jnp.zeros((3, 4)),
      ...     sd.Drafts.from_flat(jnp.array([1, 9]), jnp.array([2])),
      ...     sampling=sd.SamplingParams(jnp.ones(1)),
      ...     config=sd.SpecDecodeConfig(num_speculative_tokens=2))
      Traceback (most recent call last):
        ...
      ValueError: drafts.token_ids[1] must be in [0, 4), or -1 for no proposal, but it is 9
    """
    check_outside_jit(
        "validate",
        target_logits=target_logits,
        drafts=drafts,
        sampling=sampling,
        keys=keys,
        positions=positions,
        bonus_token_ids=bonus_token_ids,
        active=active,
        token_bitmask=token_bitmask,
    )
    # Shapes and dtypes, as every call checks them. What follows looks at values.
    check_implementation(implementation)
    arrays, static = checked(
        CallArrays.given(
            target_logits, drafts, None, sampling, bonus_token_ids, active, token_bitmask
        ),
        CallSettings(config, vocab_size, padded_rows, implementation, kernel_config, sharding),
    )
    batch = len(drafts.cu_num_draft_tokens) - 1
    # Noise, if it is given.
    if keys is not None:
        check_keys("keys", keys, {"B": batch})
    at = None if positions is None else np.asarray(as_positions(positions))
    if at is not None:
        check_positions(at, {"B": batch})
    check_values(arrays, at, static, everything=True)
