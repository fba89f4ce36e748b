"""Seconds to trace, lower and compile `rejection_sample`, beside the plain formulation.

Both take the same arguments, with draft probabilities, and take turns in one process:

- "cold": JAX's caches of traces and programs are empty (for B + 1 requests);
- "new shape": then the same call for B requests;
- "from disk": caches are empty but for the compilation cache, which has the program.
"""

from __future__ import annotations

import functools
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import inputs
import jax
import jax.numpy as jnp
import measure
import plain
from jax.experimental.compilation_cache import compilation_cache

import jax_specdec as sd

STEPS = ("trace", "lower", "compile")
WHEN = ("cold", "new shape", "from disk")


def ours(batch: int, vocabulary: int, dtype: Any, k: int) -> Any:
    """A call, not traced yet, and its arguments as shapes."""
    shape, config = jax.ShapeDtypeStruct, sd.SpecDecodeConfig(num_speculative_tokens=k)

    def call(logits: Any, ids: Any, probs: Any, temperature: Any, keys: Any, positions: Any) -> Any:
        return sd.rejection_sample(
            logits,
            sd.Drafts.from_dense(ids, None, sd.DraftProbs(probs)),
            sampling=sd.SamplingParams(temperature),
            keys=keys,
            positions=positions,
            config=config,
        )

    return jax.jit(call), (
        shape((batch * (k + 1), vocabulary), dtype),
        shape((batch, k), jnp.int32),
        shape((batch, k, vocabulary), jnp.float32),
        shape((batch,), jnp.float32),
        jax.eval_shape(lambda: jax.random.split(jax.random.key(0), batch)),
        shape((batch,), jnp.int32),
    )


def plainly(batch: int, vocabulary: int, dtype: Any, k: int) -> Any:
    """The same of the plain formulation."""
    shape = jax.ShapeDtypeStruct
    call = functools.partial(plain.rejection_sample.__wrapped__, k=k)
    return jax.jit(call), (
        shape((batch * (k + 1), vocabulary), dtype),
        shape((batch * k,), jnp.int32),
        shape((batch * k, vocabulary), jnp.float32),
        shape((batch,), jnp.float32),
        jax.eval_shape(lambda: jax.random.key(0)),
    )


WAYS: dict[str, Callable[..., Any]] = {"ours": ours, "plain": plainly}


def clocks(function: Any, arguments: Any) -> tuple[dict[str, float], int]:
    """Wall and CPU seconds of each step, and the lines of the lowered program."""
    seconds: dict[str, float] = {}

    def step(name: str, do: Callable[[], Any]) -> Any:
        wall, cpu = time.perf_counter(), time.process_time()
        result = do()
        seconds[f"{name}_s"] = time.perf_counter() - wall
        seconds[f"{name}_cpu_s"] = time.process_time() - cpu
        return result

    traced = step("trace", lambda: function.trace(*arguments))
    lowered = step("lower", traced.lower)
    step("compile", lowered.compile)
    return seconds, lowered.as_text().count("\n")


def use_disk(folder: str | None) -> None:
    """Compile through a compilation cache, or None for none."""
    jax.config.update("jax_compilation_cache_dir", folder)
    least = 1.0 if folder is None else 0.0  # seconds to compile; 1 is JAX's default
    jax.config.update("jax_persistent_cache_min_compile_time_secs", least)
    compilation_cache.reset_cache()


def run(batch: int, vocabulary: int, dtype: str, repeats: int) -> list[dict[str, Any]]:
    """Rows of all ways and situations, after one round that does not count."""
    rows: dict[tuple[str, str], dict[str, Any]] = {
        (way, when): {
            "way": way,
            "when": when,
            "batch": batch,
            "vocabulary": vocabulary,
            "dtype": dtype,
            "k": inputs.K,
            "samples": {},
        }
        for when in WHEN
        for way in WAYS
    }
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(1 + repeats):
            for way, make in WAYS.items():

                def compiled(size: int, make: Any = make) -> tuple[dict[str, float], int]:
                    return clocks(*make(size, vocabulary, jnp.dtype(dtype), inputs.K))

                use_disk(None)
                jax.clear_caches()
                found = {"cold": compiled(batch + 1), "new shape": compiled(batch)}
                use_disk(folder)
                if repeat == 0:
                    jax.clear_caches()
                    compiled(batch)  # leaves its program there
                jax.clear_caches()
                found["from disk"] = compiled(batch)
                for when, (seconds, lines) in found.items() if repeat else ():
                    rows[way, when]["lines"] = lines
                    for name, value in seconds.items():
                        rows[way, when]["samples"].setdefault(name, []).append(value)
    use_disk(None)  # the folder is gone
    return list(rows.values())


def total(row: dict[str, Any], clock: str = "s") -> float:
    """Median seconds of all steps together."""
    steps = (row["samples"][f"{step}_{clock}"] for step in STEPS)
    return measure.median([sum(times) for times in zip(*steps, strict=True)])


def cells(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    base = {(r["batch"], r["vocabulary"], r["when"]): r for r in rows if r["way"] == "plain"}
    found = []
    for row in rows:
        other = base[row["batch"], row["vocabulary"], row["when"]]
        steps = {step: measure.median(row["samples"][f"{step}_s"]) for step in STEPS}
        steps["all"] = total(row)
        found.append(
            {"B": row["batch"], "V": row["vocabulary"], "when": row["when"], "way": row["way"]}
            | {step: f"{1e3 * seconds:.0f}" for step, seconds in steps.items()}
            | {
                "ratio": f"{total(row) / total(other):.2f}",
                "CPU": f"{1e3 * total(row, 'cpu_s'):.0f}",
                "CPU ratio": f"{total(row, 'cpu_s') / total(other, 'cpu_s'):.2f}",
                "lines": row["lines"],
            }
        )
    return found


def main(command_line: Sequence[str] | None = None) -> None:
    parser = measure.parser(__doc__, repeats=7)
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[128256])
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args(command_line)
    results = measure.Results(f"compile_{jax.default_backend()}")
    for vocabulary in options.vocabularies:
        for batch in options.batches:
            results.add(run(batch, vocabulary, options.dtype, options.repeats))
    measure.show("milliseconds, medians; ratios to the plain formulation", cells(results.rows))


if __name__ == "__main__":
    main()
