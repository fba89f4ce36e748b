"""Many calls of verification in one compiled loop, each fed by the one before.

The traps this avoids: a slice of stacked inputs is a copy, so rotating inputs are arguments of
their own; equal calls are computed once, and what does not change is computed before the loop, so
keys change with every trip and calls depend on each other; an operation between two calls is a
launch of its own, so `positions` of a call is `num_emitted` of the last, as it left the kernel, and
what is counted is counted once per trip.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import plain
from jax import lax
from verify_cases import Case, Variant

import jax_specdec as sd

SWEPT_WORDS = 2**25
"""float32 words that are read and written to sweep the cache: 128 MiB, over twice an H200's."""

_GOLDEN = 0.618034


class Totals(NamedTuple):
    """Sums over all calls, per request: ``[B]`` int32. `first` is there to be computed."""

    emitted: jax.Array
    rejected: jax.Array
    first: jax.Array


def arguments(case: Case, variant: Variant, sets: list[Any]) -> dict[str, Any]:
    """What `chain` takes: inputs, and randomness for each of them."""
    rng = np.random.default_rng(0)
    noise = None
    if variant.noise_given:
        noise = [
            sd.testing.Noise(
                jnp.asarray(rng.random((case.batch, case.k), np.float32)),
                jnp.asarray(rng.random((case.batch, 2), np.float32)),
            )
            for _ in sets
        ]
    return {
        "sets": sets,
        "temperature": jnp.asarray(np.full((case.batch,), case.temperature, np.float32)),
        "key_data": jnp.asarray(rng.integers(2**32, size=(case.batch, 2), dtype=np.uint32)),
        "noise": noise,
        "swept": jnp.zeros((SWEPT_WORDS,), jnp.float32) if variant.cold else None,
    }


@functools.partial(jax.jit, static_argnames=("case", "variant", "trips", "laps", "kernel_config"))
def chain(
    arguments: dict[str, Any],
    *,
    case: Case,
    variant: Variant,
    trips: int,
    laps: int = 1,
    kernel_config: Any,
) -> tuple[Totals, Any]:
    """``trips * laps * len(sets)`` calls, one after another; with no sets, the sweeps alone.

    Args:
      arguments: from `arguments`.
      case: what is called.
      variant: how.
      trips: of the loop; what it does besides calls, it does once per trip.
      laps: times a trip uses each input.
      kernel_config: of the Mosaic GPU kernel, or None for its default.

    Returns:
      Sums over the calls, and what the sweeps left.
    """
    key_data, sets = arguments["key_data"], arguments["sets"]

    def trip(index: jax.Array, state: Any) -> Any:
        last, totals, swept = state
        keys = jax.random.wrap_key_data(key_data ^ jnp.full_like(key_data, index))
        outputs = []
        for lap, i in itertools.product(range(laps), range(len(sets))):
            inputs, randomness = sets[i], keys
            if arguments["noise"] is not None:
                randomness = _fresh(arguments["noise"][i], index * laps + lap, last)
            output = _call(
                case, variant, inputs, arguments["temperature"], randomness, last, kernel_config
            )
            last = output.num_emitted
            outputs.append(output)
        totals = Totals(
            sum((o.num_emitted for o in outputs), totals.emitted),
            sum(((o.num_accepted < case.k).astype(jnp.int32) for o in outputs), totals.rejected),
            sum((o.token_ids[:, 0] for o in outputs), totals.first),
        )
        if swept is not None:
            swept = swept * 0.5 + lax.convert_element_type(last[:1], jnp.float32)
        return last, totals, swept

    zero = jnp.zeros((case.batch,), jnp.int32)
    state = (zero, Totals(zero, zero, zero), arguments["swept"])
    _, totals, swept = lax.fori_loop(0, trips, trip, state)
    return totals, None if swept is None else swept[0]


def _fresh(noise: sd.testing.Noise, index: jax.Array, last: jax.Array) -> sd.testing.Noise:
    """Other noise on every trip, after the last call: one small launch, which counts."""
    moved = noise.accept + jnp.full_like(noise.accept, index * _GOLDEN)
    moved = jnp.where((last >= 0)[:, None], moved - jnp.floor(moved), 0.0)
    return sd.testing.Noise(moved, noise.recover)


def _call(
    case: Case,
    variant: Variant,
    inputs: Any,
    temperature: jax.Array,
    randomness: Any,
    last: jax.Array,
    kernel_config: Any,
) -> sd.RejectionSampleOutput:
    if variant.implementation != "mosaic_gpu":  # reading logits depends on nothing: XLA would hoist
        inputs, _ = lax.optimization_barrier((inputs, last))
    logits, drafts, probs = inputs
    if variant.implementation == "plain":
        return _plain(case, logits, drafts, probs, temperature, randomness, last)
    options: dict[str, Any] = {
        "sampling": sd.SamplingParams(temperature),
        "config": case.config,
        "implementation": variant.implementation,
    }
    if variant.implementation == "mosaic_gpu" and kernel_config is not None:
        options["kernel_config"] = kernel_config
    if variant.noise_given:
        return sd.testing.rejection_sample_with_noise(logits, drafts, randomness, **options)
    return sd.rejection_sample(logits, drafts, keys=randomness, positions=last, **options)


def _plain(
    case: Case,
    logits: jax.Array,
    drafts: sd.Drafts,
    probs: jax.Array | None,
    temperature: jax.Array,
    keys: jax.Array,
    last: jax.Array,
) -> sd.RejectionSampleOutput:
    if case.temperature == 0:
        token_ids, emitted = plain.greedy_sample(logits, drafts.token_ids, k=case.k)
    else:
        key = jax.random.fold_in(keys[0], last[0])
        token_ids, emitted = plain.rejection_sample(
            logits, drafts.token_ids, probs, temperature, key, k=case.k
        )
    return sd.RejectionSampleOutput(token_ids, emitted - 1, emitted, jnp.zeros_like(emitted))
