"""What an acceptance length is worth: speculative against plain decoding on one GPU.

A target of the shape of Llama 3 8B and a drafter of that of Llama 3.2 1B, random weights in
bfloat16, synthetic acceptance. Per batch size three programs are compiled (`serving_programs.py`):
decoding with drafts, drafting alone, and plain decoding; times are wall times of loops of steps.

With t the time of a plain step, and d that of drafting one token, the simple model of the speedup
is length / (1 + K d/t). It takes a pass over K+1 tokens to cost what a pass over one does; the
measured ratio of the two is reported beside it. The share of verification is what a step takes
longer with it than without, by the wall, and by the sum of kernel times.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import pathlib
import time
import traceback
from typing import Any

import jax
import jax.numpy as jnp
import measure
import plots
import serving_programs
from rich.console import Console
from rich.table import Table
from serving_programs import Study

import jax_specdec as sd

IDENTITY = ("kind", "batch", "way")
K = 4
LENGTHS = (1, 2, 3, 4, 5)


def make_study(tiny: bool) -> Study:
    target, draft = serving_programs.LLAMA_3_8B, serving_programs.LLAMA_3_1B
    if tiny:
        target = draft = serving_programs.TINY
    synthetic = (
        sd.SpecDecodeConfig(
            num_speculative_tokens=K,
            rejection_sample_method="synthetic",
            synthetic_acceptance_length=length,
        )
        for length in LENGTHS
    )
    return Study(
        sd.models.Llama(target, "bfloat16"),
        sd.ModelDrafter(sd.models.Llama(draft, "bfloat16")),
        (*synthetic, sd.SpecDecodeConfig(num_speculative_tokens=K)),
    )


WAYS = (*(f"length {length}" for length in LENGTHS), "standard", "no verification")
"""The branches of `Study.speculative`."""


class Programs:
    """The three programs at one batch size, compiled, with their caches."""

    def __init__(self, study: Study, params: Any, draft_params: Any, batch: int, options: Any):
        self.params, self.draft_params, self.steps = params, draft_params, options.steps
        self.size = batch
        self.state = study.init(draft_params, options.prompt, batch, options.steps)
        weights = {"params": params, "draft_params": draft_params}
        common = {"state": self.state, "steps": jnp.int32(1)}
        lowered = {  # traced one after another, compiled at once
            "speculative": study.speculative.lower(study, **weights, **common, way=jnp.int32(0)),
            "draft": study.draft.lower(study, params=draft_params, **common),
            "plain": study.plain.lower(study, params=params, **common),
        }
        self.compile_seconds: dict[str, float] = {}

        def compiled(name: str) -> Any:
            begin = time.perf_counter()
            program = lowered[name].compile()
            self.compile_seconds[name] = time.perf_counter() - begin
            return program

        with concurrent.futures.ThreadPoolExecutor(options.threads) as pool:
            self.programs = dict(zip(lowered, pool.map(compiled, lowered), strict=True))

    def call(self, name: str, steps: int) -> tuple[Any, dict[str, Any]]:
        """The program of a way of `WAYS`, "draft" or "plain", and what it takes."""
        given = {"state": self.state, "steps": jnp.int32(steps)}
        if name == "draft":
            return self.programs["draft"], {"params": self.draft_params, **given}
        given["params"] = self.params
        if name == "plain":
            return self.programs["plain"], given
        given |= {"draft_params": self.draft_params, "way": jnp.int32(WAYS.index(name))}
        return self.programs["speculative"], given

    def run(self, name: str, steps: int) -> jax.Array:
        program, given = self.call(name, steps)
        return program(**given)

    def kernel_ms(self, name: str) -> float | None:
        """Sum of the kernel times of a step: of three steps, less that of one."""
        try:
            one, three = (
                sum(us for _, us in measure.kernel_times(*self.call(name, steps)).values())
                for steps in (1, 3)
            )
        except Exception:
            print(f"no kernel times of {name}:", traceback.format_exc(limit=-1), flush=True)
            return None
        return (three - one) / 2 / 1e3


def measure_batch(programs: Programs, repeats: int, profile: bool) -> list[dict[str, Any]]:
    """Rows of one batch size: one of the parts of a step, one per way to verify."""
    steps, size = programs.steps, programs.size
    names = [*WAYS, "draft", "plain"]
    emitted = {name: int(programs.run(name, steps).sum()) for name in names}
    runs = {name: lambda name=name: programs.run(name, steps) for name in names}
    samples = measure.alternate(runs, repeats, warm_up=0)
    ms = {name: measure.median(s) / steps * 1e3 for name, s in samples.items()}
    kernels = {name: programs.kernel_ms(name) if profile else None for name in names}
    bare, draft_cost = "no verification", ms["draft"] / K / ms["plain"]
    plain_rate = emitted["plain"] / steps / ms["plain"] * 1e3
    parts = {
        "kind": "parts",
        "batch": size,
        "way": None,
        "steps": steps,
        "step_ms": ms,
        "kernel_ms": kernels,
        "draft_cost": draft_cost,
        "pass_cost": (ms[bare] - ms["draft"]) / ms["plain"],
        "compile_seconds": programs.compile_seconds,
        "samples": samples,
    }
    rows = [parts]
    for way in WAYS[:-1]:
        length = emitted[way] / steps / size
        shares = {"verification_share": 1 - ms[bare] / ms[way]}
        with_it, without = kernels[way], kernels[bare]
        shares["verification_share_kernels"] = (
            None if with_it is None or without is None else 1 - without / with_it
        )
        rate = emitted[way] / steps / ms[way] * 1e3
        rows.append(
            {
                "kind": "standard" if way == "standard" else "speculative",
                "batch": size,
                "way": way,
                "length": length,
                "tokens_per_second": rate,
                "plain_tokens_per_second": plain_rate,
                "speedup": rate / plain_rate,
                "model_speedup": length / (1 + K * draft_cost),
                "model_speedup_with_pass": length / (parts["pass_cost"] + K * draft_cost),
                **shares,
            }
        )
    return rows


def summary(parts: dict[str, Any]) -> str:
    ms = parts["step_ms"]
    return (
        f"B = {parts['batch']}: a plain step {ms['plain']:.2f} ms, K drafts {ms['draft']:.2f} ms, "
        f"draft cost {parts['draft_cost']:.3f}; a pass over K+1 tokens costs "
        f"{parts['pass_cost']:.2f} of a plain step; compiled in "
        f"{', '.join(f'{s:.0f} s ({name})' for name, s in parts['compile_seconds'].items())}"
    )


def table(document: dict[str, Any]) -> Table:
    result = Table(title="Of a step: share of verification by wall time, and by kernel time")
    for column in ("B", "way", "length", "tokens/s", "plain", "speedup", "model", "share", ""):
        result.add_column(column, justify="left" if column == "way" else "right")
    for row in document["rows"]:
        if row["kind"] == "parts":
            continue
        kernels = row["verification_share_kernels"]
        result.add_row(
            str(row["batch"]),
            row["way"],
            f"{row['length']:.2f}",
            f"{row['tokens_per_second']:.0f}",
            f"{row['plain_tokens_per_second']:.0f}",
            f"{row['speedup']:.2f}",
            f"{row['model_speedup']:.2f}",
            f"{row['verification_share']:.2%}",
            "-" if kernels is None else f"{kernels:.2%}",
        )
    return result


def parse(command_line: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--batches", default="1,8,32", help="batch sizes")
    add("--steps", type=int, default=32, help="per run; each adds up to K+1 tokens")
    add("--prompt", type=int, default=128, help="tokens before the first step")
    add("--repeats", type=int, default=3)
    add("--seconds", type=float, default=3600, help="begin no batch size after these")
    add("--threads", type=int, default=3, help="that compile")
    add("--output", type=pathlib.Path, default=measure.RESULTS, help="folder of results and plots")
    add("--tiny", action="store_true", help="a tiny model on any device: does it work?")
    return parser.parse_args(command_line)


def main(command_line: list[str] | None = None) -> int:
    options = parse(command_line)
    on_gpu = jax.default_backend() == "gpu"
    if not on_gpu and not options.tiny:
        print(f"bench_throughput_gpu: nothing to measure, JAX runs on {jax.default_backend()}")
        return 0
    begin = time.perf_counter()
    study = make_study(options.tiny)
    run = {**measure.environment(), "target": dataclasses.asdict(study.target.config)}
    run |= {"drafter": dataclasses.asdict(study.drafter.model.config), "k": K}
    params = serving_programs.random_params(study.target, 0)
    draft_params = serving_programs.random_params(study.drafter.model, 1)
    jax.block_until_ready((params, draft_params))
    for name, weights in (("target", params), ("drafter", draft_params)):
        run[f"{name}_bytes"] = sum(x.nbytes for x in jax.tree.leaves(weights))
        print(f"{time.perf_counter() - begin:4.0f} s  {name}: {run[f'{name}_bytes'] / 1e9:.2f} GB")
    path = options.output / "throughput_gpu.json"
    before, rows = measure.load(path), []
    for size in map(int, options.batches.split(",")):
        if time.perf_counter() - begin > options.seconds:
            print(f"left out: B = {size}", flush=True)
            continue
        try:
            programs = Programs(study, params, draft_params, size, options)
            print(f"{time.perf_counter() - begin:4.0f} s  B = {size}: compiled", flush=True)
            rows += measure_batch(programs, options.repeats, profile=on_gpu)
        except Exception:  # one must not cost the others
            print(f"B = {size}:", traceback.format_exc(limit=-3), flush=True)
            continue
        measure.write(path, measure.merge(before, run, rows, IDENTITY))
        parts = next(r for r in rows if (r["kind"], r["batch"]) == ("parts", size))
        print(f"{time.perf_counter() - begin:4.0f} s  {summary(parts)}", flush=True)
    document = measure.load(path)
    if document is None:
        print("nothing was measured")
        return 1
    for row in document["rows"]:
        if row["kind"] == "parts":
            print(summary(row))
    Console(width=110).print(table(document))
    print("wrote", path.name, *(p.name for p in plots.draw(path)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
