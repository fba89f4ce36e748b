"""What an EAGLE-3 head costs per step on one GPU, and that others do not pay for its features.

    python benchmarks/bench_eagle3_gpu.py

A target of the shape of Llama 3 8B and a head for it with 32000 ids, random weights in bfloat16,
temperature 0.8, K = 4. Per batch size, wall times of loops of steps:

- drafting alone, beside the time in which a large copy moves as many bytes as it reads: the layer
  and the output matrix K times, and fc once;
- a whole step with the head, and plain decoding;
- a step with n-gram drafts, of the target and of the same target behind a class that knows no
  features. What is given to the compiler must be the same text.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import measure
import numpy as np
import serving_programs
from jax import lax
from rich.console import Console
from rich.table import Table

import jax_specdec as sd
from jax_specdec._src.serving.core import PLAIN, Decoder, DecodeState
from jax_specdec._src.serving.generate import make_batch

K = 4


@dataclasses.dataclass(frozen=True)
class WithoutFeatures:
    """The target as a model that returns a plain pair."""

    model: sd.models.Llama

    @property
    def vocab_size(self) -> int:
        return self.model.vocab_size

    def init_cache(self, batch_size: int, max_length: int) -> Any:
        return self.model.init_cache(batch_size, max_length)

    def apply(self, params: Any, token_ids: Any, start: Any, cache: Any) -> tuple[Any, Any]:
        return self.model.apply(params, token_ids, start, cache)[:2]


def make_head(target: sd.models.LlamaConfig, num_ids: int) -> sd.models.Eagle3Head:
    layers = target.num_hidden_layers
    config = sd.models.Eagle3Config(
        layer=dataclasses.replace(target, num_hidden_layers=1),
        draft_vocab_size=num_ids,
        feature_layers=tuple(sorted({min(2, layers - 1), layers // 2, max(layers - 3, 0)})),
        target_hidden_size=target.hidden_size,
        own_lm_head=True,
    )
    return sd.models.Eagle3Head(config, "bfloat16")


def loop(decoder: Decoder, kind: str, params: Any, draft_params: Any, state: Any, n: Any) -> Any:
    """`n` whole steps, or `n` times drafting at one place; something that depends on all of it."""

    def step(_: Any, carry: Any) -> Any:
        state, total = carry
        if kind == "draft":
            new = decoder.draft(draft_params, state)
            given = dict(features=state.features, num_features=state.num_features)
            return dataclasses.replace(new, **given), total + new.draft_token_ids[:, -1]
        state, record = decoder.step(params, draft_params, state)
        return state, total + record.num_emitted

    return lax.fori_loop(0, n, step, (state, jnp.zeros_like(state.batch.lengths)))[1]


def make_state(
    decoder: Decoder, params: Any, draft_params: Any, size: int, prompt: int, budget: int
) -> DecodeState:
    """As after prompts were read, except that caches and features hold zeros."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, decoder.model.vocab_size, (size, prompt)).tolist()
    options = [sd.RequestOptions(temperature=0.8, max_new_tokens=budget)] * size
    vocab_size = decoder.model.vocab_size
    batch = make_batch(prompts, options, vocab_size=vocab_size, key=None, slack=K + 1)[0]
    state = decoder.empty_state(params, draft_params, batch)
    if state.num_features is None:
        return state
    return dataclasses.replace(state, num_features=jnp.ones_like(state.num_features))


def bytes_of(params: Any) -> int:
    """What K drafts read of a head's weights."""
    size = {name: sum(x.nbytes for x in jax.tree.leaves(p)) for name, p in params.items()}
    return size["fc"] + K * (size["layer"] + size["norm"] + size["lm_head"])


def measure_batch(
    target: sd.models.Llama,
    head: sd.models.Eagle3Head,
    params: Any,
    head_params: Any,
    size: int,
    options: Any,
) -> dict[str, Any]:
    config = sd.SpecDecodeConfig(num_speculative_tokens=K)
    with_head = Decoder(target, sd.Eagle3Drafter(head), config)
    lookup = Decoder(target, sd.NGramDrafter(), config)
    ways: dict[str, tuple[Decoder, str, Any]] = {
        "draft": (with_head, "draft", head_params),
        "head": (with_head, "step", head_params),
        "plain": (Decoder(target, None, PLAIN), "step", None),
        "lookup": (lookup, "step", None),
        "no features": (
            dataclasses.replace(lookup, model=WithoutFeatures(target)),
            "step",
            None,
        ),
    }
    budget = options.steps * (K + 1)
    arguments, lowered = {}, {}
    for name, (decoder, kind, weights) in ways.items():  # traced one after another
        state = make_state(decoder, params, weights, size, options.prompt, budget)
        arguments[name] = params, weights, state
        run = jax.jit(functools.partial(loop, decoder, kind))
        lowered[name] = run.lower(*arguments[name], jnp.int32(1))
    with concurrent.futures.ThreadPoolExecutor(options.threads) as pool:
        compiled = dict(zip(ways, pool.map(lambda x: x.compile(), lowered.values()), strict=True))
    steps = jnp.int32(options.steps)
    runs = {n: functools.partial(compiled[n], *arguments[n], steps) for n in ways}
    samples = measure.alternate(runs, options.repeats, warm_up=1)
    return {
        "batch": size,
        "k": K,
        "steps": options.steps,
        "step_ms": {n: measure.median(s) / options.steps * 1e3 for n, s in samples.items()},
        "emitted_per_step": {
            n: int(runs[n]().sum()) / options.steps / size for n in ("head", "plain", "lookup")
        },
        "same_program": lowered["lookup"].as_text() == lowered["no features"].as_text(),
        "draft_bytes": bytes_of(head_params),
        "samples": samples,
    }


def table(rows: list[dict[str, Any]]) -> Table:
    result = Table(title=f"ms per step, K = {K}")
    for column in (
        *("B", "drafting", "its bytes at copy bandwidth", "ratio", "step with it", "plain step"),
        *("n-gram step", "without features", "same program"),
    ):
        result.add_column(column, justify="right")
    for row in rows:
        ms, least = row["step_ms"], row["bytes_ms"]
        result.add_row(
            str(row["batch"]),
            f"{ms['draft']:.3f}",
            "-" if least is None else f"{least:.3f}",
            "-" if least is None else f"{ms['draft'] / least:.2f}",
            *(f"{ms[name]:.3f}" for name in ("head", "plain", "lookup", "no features")),
            str(row["same_program"]),
        )
    return result


def parse(command_line: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--batches", default="1,32", help="batch sizes")
    add("--steps", type=int, default=32, help="per run")
    add("--prompt", type=int, default=128, help="tokens before the first step")
    add("--repeats", type=int, default=5)
    add("--seconds", type=float, default=150, help="begin no batch size after these")
    add("--threads", type=int, default=5, help="that compile")
    add("--tiny", action="store_true", help="tiny models on any device: does it work?")
    return parser.parse_args(command_line)


def main(command_line: list[str] | None = None) -> int:
    options = parse(command_line)
    on_gpu = jax.default_backend() == "gpu"
    if not on_gpu and not options.tiny:
        print(f"bench_eagle3_gpu: nothing to measure, JAX runs on {jax.default_backend()}")
        return 0
    begin = time.perf_counter()
    target = sd.models.Llama(
        serving_programs.TINY if options.tiny else serving_programs.LLAMA_3_8B, "bfloat16"
    )
    num_ids = 32 if options.tiny else 32000
    head = make_head(target.config, num_ids)
    params = serving_programs.random_params(target, 0)
    head_params = jax.jit(head.init_params)(jax.random.key(1), params)
    head_params["embed_tokens"] = params["embed_tokens"]  # one array for both, as loaded
    bandwidth = measure.copy_bandwidth() if on_gpu else None
    if bandwidth is not None:
        print(f"{jax.devices()[0].device_kind}: copies {bandwidth / 1e12:.2f} TB/s", flush=True)
    rows: list[dict[str, Any]] = []
    for size in map(int, options.batches.split(",")):
        if time.perf_counter() - begin > options.seconds:
            print(f"left out: B = {size}", flush=True)
            continue
        row = measure_batch(target, head, params, head_params, size, options)
        row["bytes_ms"] = None if bandwidth is None else row["draft_bytes"] / bandwidth * 1e3
        rows.append({**row, "copy_bytes_per_second": bandwidth})
        print(f"{time.perf_counter() - begin:4.0f} s  B = {size}: measured", flush=True)
        if not options.tiny:
            measure.save("eagle3_gpu", rows)
    Console(width=120).print(table(rows))
    return 0 if all(row["same_program"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
