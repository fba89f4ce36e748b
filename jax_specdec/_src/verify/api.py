"""`rejection_sample`: a call is checked, and then runs where its implementation is."""

from __future__ import annotations

import dataclasses
import functools
from typing import cast

import jax
import jax.numpy as jnp
from jax import lax

from jax_specdec._src.base.arrays import check_choice, check_int, check_type
from jax_specdec._src.base.config import SpecDecodeConfig
from jax_specdec._src.base.platform import Platform, traced_for_platform
from jax_specdec._src.base.sampling import SamplingParams
from jax_specdec._src.base.types import (
    Array,
    DraftDistribution,
    Drafts,
    Integers,
    Noise,
    RaceNoise,
    RejectionSampleOutput,
)
from jax_specdec._src.mosaic import gpus
from jax_specdec._src.verify.backends.base import Backend
from jax_specdec._src.verify.backends.mosaic_gpu import MosaicGpu
from jax_specdec._src.verify.backends.xla import Xla
from jax_specdec._src.verify.call import CallSettings, Implementation, Static, checked
from jax_specdec._src.verify.mosaic_gpu import support
from jax_specdec._src.verify.mosaic_gpu.config import KernelConfig
from jax_specdec._src.verify.requests import CallArrays
from jax_specdec._src.verify.rules import rule_of
from jax_specdec._src.verify.sharding import VerifySharding, gathered_if_small, over_parts
from jax_specdec._src.verify.values import check_known

BACKENDS: dict[str, Backend] = {
    "mosaic_gpu": MosaicGpu(),
    "xla": Xla(),
}
"""Every implementation, by its name. A new one is a class in `verify.backends`, and a row here."""


def rejection_sample(
    target_logits: Array,
    drafts: Drafts,
    *,
    sampling: SamplingParams,
    keys: jax.Array | None,
    positions: Integers | None,
    config: SpecDecodeConfig,
    bonus_token_ids: Array | None = None,
    active: Array | None = None,
    vocab_size: int | None = None,
    token_bitmask: Array | None = None,
    padded_rows: bool = False,
    implementation: Implementation | None = None,
    kernel_config: KernelConfig | None = None,
    sharding: VerifySharding | None = None,
) -> RejectionSampleOutput:
    """Verifies drafts against the target: accepts a prefix of each, then emits one more token.

    Let ``p = softmax(float32(target_logits) / temperature)``, filtered by the min-p, top-k and
    top-p of `sampling`, and let ``q`` be the draft distribution. A draft ``x`` is accepted iff
    ``u * q(x) < p(x)``. At the first rejection one token is drawn from ``(p - q)+``; after the last
    draft, if all were accepted, one is drawn from ``p``. The tokens that a request emits are
    distributed as if the target had sampled them one by one. Temperature 0 is greedy: drafts are
    accepted as long as they equal the target's argmax.

    ``config`` may ask for the block rule, which judges all drafts of a request jointly: it accepts
    more of them and is just as exact. Or it may ask for the agreement rule, which accepts fewer: at
    each position the target's own token is drawn with the noise of that position, and a draft is
    accepted iff it equals it, so the tokens do not depend on what is drafted (XLA only). Or it may
    ask for synthetic acceptance. Requests are independent: none changes another's tokens.

    Works under `jit`, `lax.while_loop`, `lax.scan`, `jax.shard_map` and `jax.export`. ``config``,
    ``kernel_config`` and ``sharding`` are pytrees without arrays, which `jax.jit` takes as they
    are; ``vocab_size``, ``padded_rows`` and ``implementation`` are static. All derivatives are
    zero; those of `token_logprobs` are not, and make a policy gradient.

    Outside of `jax.jit`, where values are known, a bad one raises, as in `validate`. What models
    compute is not looked at, there a status answers: rows of logits, and probabilities that are not
    finite. Stored arrays of more than 2**18 numbers are not read. The others are, in one transfer,
    for which the host waits until they are computed; under `jax.jit` nothing is read, and every bad
    value is answered with a status.

    Args:
      target_logits: ``[N+B, V]`` float32, bfloat16 or float16, straight from the model. Request
        b owns ``count + 1`` rows from ``cu[b] + b`` on: one per draft, then the bonus row. If
        `bonus_token_ids` is given, ``[N, V]``: row j belongs to draft j.
      drafts: the proposed tokens and the distributions they were drawn from.
      sampling: per-request temperature, min-p, top-k and top-p.
      keys: ``[B]`` typed keys of two or four words (threefry2x32, rbg, unsafe_rbg), one per
        request, the same on every step. May be None if the temperatures are, but for synthetic
        acceptance.
      positions: ``[B]`` int32, absolute position of each request's first draft, not negative. It
        must grow with every step, as the length of the sequence does: a position used twice gets
        the same noise twice. None where keys may be.
      bonus_token_ids: ``[B]`` int32, the tokens to emit if all drafts are accepted, for a caller
        who samples them. A request that ends early, at an id out of range, samples from its own
        row instead.
      active: ``[B]`` bool. A slot where it is false emits nothing, and its rows are not read.
      vocab_size: ids from it on are padding of the vocabulary axis: weight 0, whatever the
        logits hold there.
      token_bitmask: ``[M, ceil(V/32)]`` int32 or uint32, M the rows of `target_logits`, or None.
        Token ``id`` is allowed in a row if bit ``id % 32`` of word ``id // 32`` is set. If not, it
        has ``p = 0``, whatever its logit.
      padded_rows: static; whether `target_logits` (and `token_bitmask`) may have another number of
        rows M. With more rows, the last are padding and never read. With fewer, those of inactive
        requests are left out; an active request whose rows lie past the end is BAD_INPUT, and no
        other. Over a mesh's batch axis, each device's M / n rows begin with its requests' rows.
      implementation: "mosaic_gpu" (the default on Hopper GPUs), "xla", or None for the first that
        supports the call; see `which_implementation`. A named one never falls back to another.
        "xla" reads as suits the platform that the program is for: all rows at once or, on CPUs, one
        request after another.
      kernel_config: settings of "mosaic_gpu" that change its speed only; None for the default.
      sharding: the mesh axes that the vocabulary and the requests are split over. None to go by
        where `target_logits` is, which is known outside of `jax.jit`, and for explicit axes.

    Returns:
      `RejectionSampleOutput`. A request that could not be verified emits nothing, its
      ``status`` says why, and its neighbours are untouched. If B is 0, the output is empty.

    Raises:
      TypeError: an argument of the wrong type or dtype, at trace time.
      ValueError: shapes that do not fit, at trace time; or, outside of `jax.jit`, a bad value.
      NotImplementedError: the named implementation cannot serve this call.

    Numerics:
      Sums and comparisons are float32. Uniforms have 24 bits, so acceptance probabilities are
      exact to 2**-24. On one backend and compilation, a request's tokens do not depend on its slot,
      on padding or on the other requests, to the last bit. Across backends they agree unless a
      compared quantity is within a relative 1e-5 of its threshold.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jax_specdec as sd
      >>> drafts = sd.Drafts.from_flat(jnp.array([2, 0, 1]), jnp.array([2, 1]))
      >>> logits = jnp.log(jnp.array(  # 3 drafts + 2 requests = 5 rows
      ...     [[0, 0, 1, 0], [0, 0, 0, 1], [1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0]], float))
      >>> output = sd.rejection_sample(
      ...     logits, drafts,
      ...     sampling=sd.SamplingParams(temperature=jnp.array([0.0, 1.0])),
      ...     keys=jax.random.split(jax.random.key(0), 2),
      ...     positions=jnp.array([5, 9]),
      ...     config=sd.SpecDecodeConfig(num_speculative_tokens=2))
      >>> sd.parse_output(output)
      [[2, 3], [1, 2]]

    References:
      Leviathan et al., arXiv 2211.17192. Chen et al., arXiv 2302.01318. Block: Sun et al.,
      arXiv 2403.10444.
    """
    # Arrays in one pytree, which declares them; static arguments in another.
    of_requests = (keys, positions), sampling, bonus_token_ids, active
    arrays, static = _checked(
        CallArrays.given(target_logits, drafts, *of_requests, token_bitmask),
        CallSettings(config, vocab_size, padded_rows, implementation, kernel_config, sharding),
    )
    check_known(arrays, static)
    return verify(arrays, static)


def rejection_sample_with_noise(
    target_logits: Array,
    drafts: Drafts,
    noise: Noise | RaceNoise,
    *,
    sampling: SamplingParams,
    config: SpecDecodeConfig,
    bonus_token_ids: Array | None = None,
    active: Array | None = None,
    vocab_size: int | None = None,
    token_bitmask: Array | None = None,
    padded_rows: bool = False,
    implementation: Implementation | None = None,
    kernel_config: KernelConfig | None = None,
    sharding: VerifySharding | None = None,
) -> RejectionSampleOutput:
    """Verifies as `rejection_sample`, with explicit noise in place of keys and positions.

    For tests, for comparing with other systems, and for callers with their own generators.
    `rejection_sample` equals this with ``draw_noise(keys, positions, K)``; under the agreement
    rule, with a `RaceNoise` of `token_exponentials` at the K + 1 positions of each request.

    Under the other rules, ``noise`` is a `Noise`, or a `RaceNoise` to draw the last token by an
    exponential race (XLA only, and not over a split vocabulary). The other arguments, the output
    and the errors are those of `rejection_sample`.

    Example:
      >>> import jax.numpy as jnp
      >>> import jax_specdec as sd
      >>> output = sd.testing.rejection_sample_with_noise(
      ...     jnp.log(jnp.array([[0.5, 0.5], [0.1, 0.9]])),
      ...     sd.Drafts.from_flat(jnp.array([0]), jnp.array([1])),
      ...     sd.testing.Noise(accept=jnp.array([[0.7]]), recover=jnp.zeros((1, 2))),
      ...     sampling=sd.SamplingParams(temperature=jnp.ones(1)),
      ...     config=sd.SpecDecodeConfig(num_speculative_tokens=1))
      >>> sd.parse_output(output)  # 0.7 * 1 >= 0.5: token 0 is rejected, only 1 is left
      [[1]]
    """
    check_type("noise", noise, Noise, RaceNoise)
    of_requests = noise, sampling, bonus_token_ids, active
    arrays, static = _checked(
        CallArrays.given(target_logits, drafts, *of_requests, token_bitmask),
        CallSettings(config, vocab_size, padded_rows, implementation, kernel_config, sharding),
    )
    return verify(arrays, static)


def which_implementation(
    target_logits: Array | jax.ShapeDtypeStruct,
    drafts: Drafts,
    *,
    config: SpecDecodeConfig,
    vocab_size: int | None = None,
    kernel_config: KernelConfig | None = None,
) -> Implementation:
    """Returns which implementation `rejection_sample` uses if none is named.

    The answer is for programs compiled for JAX's default device. For any other device it is "xla".

    Arguments are those of `rejection_sample`. A `jax.ShapeDtypeStruct` will do for each array, also
    inside ``drafts``.

    Returns:
      "mosaic_gpu" or "xla". If you wonder why it is "xla", call `rejection_sample` with
      ``implementation="mosaic_gpu"``: the error says why. On GPUs that the kernel has not run on
      (B200, B300, RTX of compute capability 12.0) there is no error: it runs if it is named.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jax_specdec as sd
      >>> drafts = sd.Drafts.from_dense(jnp.array([[7, 3], [4, 0]]))
      >>> logits = jax.ShapeDtypeStruct((6, 128256), jnp.bfloat16)
      >>> config = sd.SpecDecodeConfig(num_speculative_tokens=2)
      >>> sd.testing.which_implementation(logits, drafts, config=config) in ("xla", "mosaic_gpu")
      True
    """
    check_type("drafts", drafts, Drafts)
    check_type("config", config, SpecDecodeConfig)
    check_type("kernel_config", kernel_config, KernelConfig, None)
    if vocab_size is not None:
        check_int("vocab_size", vocab_size)
    # The device and the rule, then the call.
    if gpus.not_by_default() or support.rule_unsupported(rule_of(config)):
        return "xla"
    why_not = support.unsupported(
        cast(jax.Array, target_logits),
        _unless_empty(drafts.distribution),
        is_race=False,
        num_requests=drafts.cu_num_draft_tokens.shape[0] - 1,
        k=config.num_speculative_tokens,
        size=target_logits.shape[1] if vocab_size is None else vocab_size,
        config=kernel_config,
    )
    return "xla" if why_not else "mosaic_gpu"


def check_implementation(name: str | None) -> None:
    """Checks that a named implementation is one, and has a device.

    Raises:
      ValueError: it is not in `BACKENDS`.
      NotImplementedError: it cannot run on JAX's default device.
    """
    check_choice("implementation", name, (*BACKENDS, None))
    why_not = None if name is None else BACKENDS[name].no_device()
    if why_not:
        raise NotImplementedError(why_not)


def _checked(arrays: CallArrays, settings: CallSettings) -> tuple[CallArrays, Static]:
    """Returns `call.checked`, if the named implementation is one that has a device."""
    check_implementation(settings.implementation)
    return checked(arrays, settings)


def verify(arrays: CallArrays, static: Static) -> RejectionSampleOutput:
    """Returns what `rejection_sample` does, of arrays that need no checks.

    Args:
      arrays: their randomness is keys and positions, or explicit noise.
      static: from `Static.of`.
    """
    # Without requests there is nothing to compile.
    if arrays.num_requests == 0:
        k = static.config.num_speculative_tokens
        counts = jnp.zeros((0,), jnp.int32)
        return RejectionSampleOutput(jnp.zeros((0, k + 1), jnp.int32), counts, counts, counts)
    noise = arrays.randomness
    if isinstance(noise, tuple) and not arrays.needs_noise(static.config):
        arrays = dataclasses.replace(arrays, randomness=(None, noise[1]))
    return _rejection_sample(arrays, static=static)


@functools.partial(jax.jit, static_argnames="static")
def _rejection_sample(arrays: CallArrays, *, static: Static) -> RejectionSampleOutput:
    """Runs `_verify_part` on the arrays of a call, or on each device's part of them."""
    # One program for a call: the equation is traced again for the platform it is lowered for.
    # The output is integers. Loops and kernels would refuse a derivative that is zero anyway.
    arrays = jax.tree.map(lax.stop_gradient, arrays)
    # A kernel is for one platform, whatever JAX's default is: it is traced in place.
    only = BACKENDS[static.implementation or "xla"].only
    return over_parts(
        lambda own: traced_for_platform(_verify_part, own, static, only=only), static.layout, arrays
    )


def _verify_part(arrays: CallArrays, static: Static, platform: Platform) -> RejectionSampleOutput:
    """Chooses a backend, and verifies one device's part of the arrays, or all of them."""
    # What the rule reads, and a row at least: kernels and gathers need one.
    rule = rule_of(static.config)
    if arrays.target_logits.shape[0] == 0:  # no drafts anywhere, and the bonus given: no row
        logits = jnp.zeros((1, *arrays.target_logits.shape[1:]), arrays.target_logits.dtype)
        arrays = dataclasses.replace(arrays, target_logits=logits, token_bitmask=None)
    # An empty distribution, and one that the rule does not read, is none.
    distribution = None if rule.draws_every_row else _unless_empty(arrays.drafts.distribution)
    drafts = dataclasses.replace(arrays.drafts, distribution=distribution)
    arrays = dataclasses.replace(arrays, drafts=drafts)

    # The platform is asked for here, and nowhere below. On GPUs an exchange takes as long as it
    # takes to gather a few rows.
    if platform == "cuda":
        arrays, layout = gathered_if_small(arrays, static.layout)
        static = static._replace(layout=layout)
    name = static.implementation or _default(arrays, static, platform)
    # A named one does not fall back; the default has been chosen so that it serves the call.
    backend = BACKENDS[name].on(platform)
    why_not = backend.unserved(arrays, static)
    if why_not:
        raise NotImplementedError(why_not)
    return backend.verify(arrays, rule, static)


def _default(arrays: CallArrays, static: Static, platform: Platform) -> str:
    """Returns the implementation of a call that names none."""
    # The kernel, if JAX's default device has run it and the program is for such a device.
    may_be_kernel = platform == "cuda" and gpus.not_by_default() is None
    if may_be_kernel and not BACKENDS["mosaic_gpu"].unserved(arrays, static):
        return "mosaic_gpu"
    return "xla"


def _unless_empty(distribution: DraftDistribution | None) -> DraftDistribution | None:
    """Returns the distribution; None if it has no rows, for then there are no drafts either."""
    if distribution is None or jax.tree.leaves(distribution)[0].shape[0] == 0:
        return None
    return distribution
