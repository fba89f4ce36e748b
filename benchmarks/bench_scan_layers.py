"""A Llama's layers one after another, and in a scan: seconds to compile and to run a pass.

python benchmarks/bench_scan_layers.py                # random weights: 135M on a CPU, 1.4B on a GPU
python benchmarks/bench_scan_layers.py --target DIR   # a Hugging Face directory
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import measure
from rich.console import Console
from rich.table import Table

import jax_specdec as sd

SMALL = sd.models.LlamaConfig(  # of the shape of SmolLM2-135M
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    tie_word_embeddings=True,
)
LARGE = dataclasses.replace(
    SMALL,
    vocab_size=32000,
    hidden_size=2048,
    intermediate_size=5632,
    num_attention_heads=32,
    num_key_value_heads=8,
)


def random_weights(model: sd.models.Llama) -> dict[str, Any]:
    """Stacked weights, made on the device one array at a time."""
    stacked = dataclasses.replace(model, scan_layers=True)
    leaves, tree = jax.tree.flatten(jax.eval_shape(stacked.init_params, jax.random.key(0)))
    keys = jax.random.split(jax.random.key(0), len(leaves))
    return jax.tree.unflatten(
        tree,
        [
            (0.02 * jax.random.normal(key, leaf.shape, model.dtype))
            for key, leaf in zip(keys, leaves, strict=True)
        ],
    )


def forms(model: sd.models.Llama, stacked: dict[str, Any]) -> dict[str, sd.models.LoadedModel]:
    """The same model both ways."""
    return {
        "unrolled": sd.models.LoadedModel(model, sd.models.unstack_layers(stacked)),
        "scanned": sd.models.LoadedModel(dataclasses.replace(model, scan_layers=True), stacked),
    }


def run(
    loaded: dict[str, sd.models.LoadedModel],
    length: int,
    max_length: int,
    compiles: int,
    repeats: int,
) -> list[dict[str, Any]]:
    """One pass of `length` tokens of one request, in both forms in turn."""
    tokens, start = jnp.ones((1, length), jnp.int32), jnp.zeros((1,), jnp.int32)
    rows = {name: {"form": name, "tokens": length} for name in loaded}
    samples: dict[str, dict[str, list[float]]] = {
        name: {key: [] for key in ("compile_s", "compile_cpu_s", "pass_s", "pass_cpu_s")}
        for name in loaded
    }
    programs, caches = {}, {}
    for name, (model, params) in loaded.items():
        caches[name] = model.init_cache(1, max_length)
        for _ in range(compiles):
            jax.clear_caches()
            clock = time.perf_counter(), time.process_time()
            apply = jax.jit(model.apply, donate_argnums=3)
            programs[name] = apply.lower(params, tokens, start, caches[name]).compile()
            _add(samples[name], "compile", clock)
    for repeat in range(2 + repeats):
        for name, (_, params) in loaded.items():
            clock = time.perf_counter(), time.process_time()
            logits, caches[name], _ = programs[name](params, tokens, start, caches[name])
            jax.block_until_ready((logits, caches[name]))
            if repeat >= 2:
                _add(samples[name], "pass", clock)
    return [rows[name] | {"samples": samples[name]} for name in loaded]


def _add(samples: dict[str, list[float]], what: str, since: tuple[float, float]) -> None:
    samples[f"{what}_s"].append(time.perf_counter() - since[0])
    samples[f"{what}_cpu_s"].append(time.process_time() - since[1])


def table(rows: list[dict[str, Any]]) -> Table:
    found = Table("tokens", "form", "compile, s", "CPU s", "pass, ms", "CPU ms")
    for row in rows:
        one = {key: measure.median(values) for key, values in row["samples"].items()}
        found.add_row(
            str(row["tokens"]),
            row["form"],
            f"{one['compile_s']:.2f}",
            f"{one['compile_cpu_s']:.2f}",
            f"{1e3 * one['pass_s']:.2f}",
            f"{1e3 * one['pass_cpu_s']:.2f}",
        )
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=pathlib.Path)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1, 5, 128])
    parser.add_argument("--max-length", type=int, default=512)
    parser.add_argument("--compiles", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=20)
    values = parser.parse_args(arguments)
    jax.config.update("jax_enable_compilation_cache", False)
    on_cpu = jax.default_backend() == "cpu"
    if values.target:
        model, stacked = sd.load_huggingface(values.target, scan_layers=True)
        model = dataclasses.replace(model, scan_layers=False)
    else:
        model = (
            sd.models.Llama(SMALL, jnp.float32) if on_cpu else sd.models.Llama(LARGE, jnp.bfloat16)
        )
        stacked = random_weights(model)
    loaded = forms(model, stacked)
    rows = [
        row
        for length in values.lengths
        for row in run(loaded, length, values.max_length, values.compiles, values.repeats)
    ]
    Console().print(table(rows))
    print(measure.save(f"scan_layers_{jax.default_backend()}", rows))


if __name__ == "__main__":
    main()
