"""`rejection_sample` on a GPU: backends side by side, per call in a chain, and kernel time alone.

A call is one of many in one compiled loop, each with its own noise and fed by the one before;
inputs rotate over more bytes than the cache holds. Kernel time is what the profiler adds up.
"""

from __future__ import annotations

import argparse
import functools
import time
import traceback
from typing import Any, NamedTuple

import inputs as inputs_lib
import jax
import jax.numpy as jnp
import measure
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import profiler

import jax_specdec as sd
from jax_specdec._src import reference

K = inputs_lib.K
ROTATED_BYTES = 150e6
CALLS = 200


class Case(NamedTuple):
    """One row of the table. `noise`: how far the drafter's logits are from the target's."""

    name: str
    batch: int
    vocabulary: int = 128256
    temperature: float = 0.8
    distribution: str = "normalized"
    noise: float = 0.6
    dtype: str = "bfloat16"
    rates: tuple[float, ...] | None = None
    goal: float | None = None  # microseconds per call


MAIN = [
    Case("standard, 2.9 emitted", batch, goal=goal)
    for batch, goal in ((1, 8), (8, 10), (64, 28), (256, 80))
]
CASES = [
    *MAIN,
    Case("standard, 1.0 emitted", 256, noise=3.0, goal=45),
    *(
        Case("greedy", b, temperature=0, distribution="none", noise=0.5, goal=goal)
        for b, goal in ((1, 6), (256, 60))
    ),
    Case("synthetic", 256, rates=(0.8, 0.6, 0.4, 0.2), goal=45),
    *(
        Case("float32, 2.9 emitted", b, dtype="float32", goal=goal)
        for b, goal in ((1, 9), (64, 45), (256, 150))
    ),
    Case("one-hot drafts", 64, distribution="none"),
    Case("draft probabilities", 64, distribution="probs"),
    Case("draft logits, no normalizer", 64, distribution="logits"),
    *(Case(f"V = {v}", 64, vocabulary=v) for v in (32000, 151936, 256000, 262144)),
]


SWEPT = [
    Case("standard, 2.9 emitted", 64),
    Case("one-hot drafts", 64, distribution="none"),
    Case("draft logits, no normalizer", 64, distribution="logits"),
    Case("greedy", 64, temperature=0, distribution="none", noise=0.5),
]


@functools.partial(jax.jit, static_argnames=("case",))
def make(case: Case, seed: jax.Array) -> tuple[jax.Array, sd.Drafts]:
    """Logits and drafts, without the probabilities that only the plain formulation needs."""
    return inputs_lib.make(case, seed)[:2]


def config_of(case: Case) -> sd.SpecDecodeConfig:
    if case.rates is None:
        return sd.SpecDecodeConfig(num_speculative_tokens=K)
    return sd.SpecDecodeConfig(
        num_speculative_tokens=K,
        rejection_sample_method="synthetic",
        synthetic_acceptance_rates=case.rates,
    )


def bytes_read(case: Case, output: sd.RejectionSampleOutput) -> float:
    """The rows that the contract has to read, per call."""
    emitted, rejected = int(output.num_emitted.sum()), int((output.num_accepted < K).sum())
    size = jnp.dtype(case.dtype).itemsize * case.vocabulary
    stored = 4 * case.vocabulary if case.distribution == "probs" else size
    rows = case.batch if case.rates is not None else emitted
    drafts = rejected if case.distribution != "none" else 0
    if case.distribution == "logits":  # read for its normalizer
        drafts = emitted - case.batch + rejected
    return rows * size + drafts * stored


def inputs(case: Case) -> list[tuple[jax.Array, sd.Drafts]]:
    first = make(case, jnp.uint32(0))
    size = sum(x.nbytes for x in jax.tree.leaves(first))
    count = min(max(2, int(np.ceil(ROTATED_BYTES / size))), 64)
    return [first, *(make(case, jnp.uint32(i)) for i in range(1, count))]


def run(
    case: Case, implementation: str, sets: Any, repeats: int, explicit: bool = False
) -> dict[str, Any]:
    config, count = config_of(case), len(sets)
    inner = max(12 // count, 1) * count
    trips = max(CALLS // inner, 4)
    temperature = jnp.full((case.batch,), case.temperature, jnp.float32)
    keys = jax.random.split(jax.random.key(2), case.batch)

    def once(logits: Any, drafts: Any, temperature: Any, keys: Any, positions: Any) -> Any:
        return sd.rejection_sample(
            logits,
            drafts,
            sampling=sd.SamplingParams(temperature),
            keys=keys,
            positions=positions,
            config=config,
            implementation=implementation,
        )

    def with_noise(logits: Any, drafts: Any, temperature: Any, noise: Any, positions: Any) -> Any:
        # The one before must end first, though nothing depends on it.
        accept = jnp.where((positions >= 0)[:, None], noise.accept, 0.0)
        return sd.rejection_sample_with_noise(
            logits,
            drafts,
            sd.Noise(accept, noise.recover),
            sampling=sd.SamplingParams(temperature),
            config=config,
            implementation=implementation,
        )

    @jax.jit
    def chain(sets: Any, temperature: Any, randomness: Any) -> Any:
        def trip(_: Any, state: Any) -> Any:
            positions, total = state
            for i in range(inner):
                if explicit:
                    output = with_noise(*sets[i % count], temperature, randomness[i], positions)
                else:
                    output = once(*sets[i % count], temperature, randomness, positions)
                positions = positions + output.num_emitted
                total = total + output.token_ids[:, 0]
            return positions, total

        zero = jnp.zeros((case.batch,), jnp.int32)
        return lax.fori_loop(0, trips, trip, (zero, zero))

    randomness: Any = keys
    if explicit:
        randomness = [sd.draw_noise(keys, jnp.full((case.batch,), i), K) for i in range(inner)]
    positions, _ = jax.block_until_ready(chain(sets, temperature, randomness))
    calls = inner * trips
    samples = measure.alternate(
        {"chain": lambda: chain(sets, temperature, randomness)}, repeats, warm_up=1
    )["chain"]

    kernels: list[list[tuple[str, float]]] = []
    if not explicit:
        start = jnp.zeros((case.batch,), jnp.int32)
        one = jax.jit(once)
        for logits, drafts in sets[:6]:
            _, times = profiler.measure(one, aggregate=False)(
                logits, drafts, temperature, keys, start
            )
            kernels.append([(name, ms * 1e3) for name, ms in times])
    output = jax.jit(once)(*sets[0], temperature, keys, jnp.zeros((case.batch,), jnp.int32))
    return {
        **case._asdict(),
        "implementation": implementation,
        "noise_given": explicit,
        "emitted_per_request": float(positions.mean()) / calls,
        "bytes_read": bytes_read(case, output),
        "call_us": measure.median(samples) / calls * 1e6,
        "kernel_us": float(np.median([sum(t for _, t in k) for k in kernels])) if kernels else None,
        "largest_kernel_us": float(np.median([max(t for _, t in k) for k in kernels]))
        if kernels
        else None,
        "launches": len(kernels[0]) if kernels else None,
        "kernels": kernels[0] if kernels else None,
        "samples": [s / calls for s in samples],
    }


def disagreements(case: Case, draws: int = 100) -> dict[str, Any]:
    """How often the backends differ with the same noise, and by how much it was decided."""
    config, temperature = config_of(case), jnp.full((case.batch,), case.temperature, jnp.float32)
    sampling = sd.SamplingParams(temperature)
    sets = inputs(case)[:2]
    backends = [
        jax.jit(
            functools.partial(
                sd.rejection_sample_with_noise, sampling=sampling, config=config, implementation=i
            )
        )
        for i in ("xla", "mosaic_gpu")
    ]
    decisions, differ = 0, []
    for draw in range(draws):
        keys = jax.random.split(jax.random.key(draw), case.batch)
        noise = sd.draw_noise(keys, jnp.zeros((case.batch,), jnp.int32), K)
        arguments = (*sets[draw % 2], noise)
        xla, kernel = (jax.device_get(f(*arguments)) for f in backends)
        decisions += int(xla.num_emitted.sum()) + case.batch  # positions, then tile and token
        rows = np.flatnonzero(
            (xla.token_ids != kernel.token_ids).any(axis=1) | (xla.status != kernel.status)
        )
        if rows.size:
            oracle = reference.rejection_sample(
                *jax.device_get(arguments),
                temperature=np.asarray(temperature),
                method=config.rejection_sample_method,
                num_speculative_tokens=K,
                conditional_rates=config.conditional_rates,
            )
            differ += [float(oracle.margin[row]) for row in rows]
    return {"case": case.name, "decisions": decisions, "margins of disagreements": differ}


def copy_bandwidth() -> float:
    """Bytes read and written per second by a large copy."""
    x = jnp.ones((2**30,), jnp.float32)
    copy = jax.jit(lambda x: x + 1.0)
    _, times = profiler.measure(copy, aggregate=True, iterations=5)(x)
    return 2 * x.nbytes / (float(np.median(times)) * 1e-3)


def line(row: dict[str, Any], bandwidth: float) -> str:
    def us(x: float | None) -> str:
        return "       -" if x is None else f"{x:8.1f}"

    rate = row["bytes_read"] / ((row["kernel_us"] or row["call_us"]) * 1e-6)
    return (
        f"{row['name']:28} B={row['batch']:<4} {row['implementation']:10} "
        f"{'given' if row['noise_given'] else 'keys':5} emitted {row['emitted_per_request']:4.2f} "
        f"call {us(row['call_us'])} goal {us(row['goal'])} kernels {us(row['kernel_us'])} "
        f"largest {us(row['largest_kernel_us'])} launches {row['launches']} "
        f"{row['bytes_read'] / 1e6:7.1f} MB {rate / 1e12:5.2f} TB/s {rate / bandwidth:5.1%} of copy"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--main", action="store_true", help="the four main cases only")
    parser.add_argument("--brief", action="store_true", help="no explicit noise, no sweep")
    parser.add_argument("--implementations", default="mosaic_gpu,xla")
    parser.add_argument("--seconds", type=float, default=3600, help="start no case after these")
    arguments = parser.parse_args()
    if jax.default_backend() != "gpu":
        print(f"bench_verify_gpu: nothing to measure, JAX runs on {jax.default_backend()}")
        return
    begin = time.perf_counter()
    bandwidth = copy_bandwidth()
    print(f"{measure.environment()['device']}: copies {bandwidth / 1e12:.2f} TB/s", flush=True)
    rows: list[dict[str, Any]] = [{"copy_bandwidth": bandwidth}]
    for case in MAIN if arguments.main else CASES:
        if time.perf_counter() - begin > arguments.seconds:
            print("left out:", case)
            continue
        sets = inputs(case)
        for implementation in arguments.implementations.split(","):
            for explicit in (False, True) if case in MAIN and not arguments.brief else (False,):
                try:
                    row = run(case, implementation, sets, arguments.repeats, explicit)
                except Exception:  # one case must not cost the others
                    print(case, implementation, traceback.format_exc(limit=-2), flush=True)
                    continue
                rows.append(row)
                print(line(row, bandwidth), flush=True)
    rows[0]["disagreements"] = [disagreements(case) for case in SWEPT if not arguments.brief]
    for row in rows[0]["disagreements"]:
        print(row)
    path = measure.save("verify_gpu", rows)
    print(f"raw samples: {path.name}")


if __name__ == "__main__":
    main()
