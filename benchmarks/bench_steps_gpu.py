"""What a step of decoding costs on one GPU, by drafter, beside a plain one.

    python benchmarks/bench_steps_gpu.py

A target of the shape of Llama 3 8B, a draft model of that of Llama 3.2 1B and a head with 32000
ids, random weights in bfloat16, temperature 0.8, K = 4. Per batch size and length of the text, wall
times of loops of steps, plain or with drafts, and of drafting alone, beside the times in which a
large copy moves as many bytes as the drafter reads, and as a plain step reads.

Random models agree by chance alone, so a speed-up is given as what it takes: a step that emits more
tokens than `step / plain` is faster than plain decoding.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from typing import Any

import jax
import jax.numpy as jnp
import llamas
import measure
import numpy as np
from jax import lax

import jax_specdec as sd
from jax_specdec import lm
from jax_specdec.lm.decoding.core import PLAIN, Decoder
from jax_specdec.lm.decoding.generate import make_batch
from jax_specdec.lm.decoding.state import DecodeState
from jax_specdec.lm.drafting.drafter import NoDrafter

K = 4
ROUNDS = 2


def make_head(target: lm.models.DecoderConfig, num_ids: int) -> lm.models.Eagle3Head:
    layers = len(target.layers)
    config = lm.models.Eagle3Config.of_target(
        target,
        layers=target.layers[:1],
        draft_vocab_size=num_ids,
        aux_hidden_state_layers=tuple(
            sorted({min(2, layers - 1), layers // 2, max(layers - 3, 0)})
        ),
        own_lm_head=True,
    )
    return lm.models.Eagle3Head(config, "bfloat16")


def loop(decoder: Decoder, kind: str, params: Any, draft_params: Any, state: Any, n: Any) -> Any:
    """`n` whole steps, or `n` times drafting at one place; the state and what depends on all."""

    def step(_: Any, carry: Any) -> Any:
        state, total = carry
        if kind == "draft":
            new = decoder.draft(draft_params, state)
            total += new.proposal.token_ids[:, -1]
            return dataclasses.replace(new, features=state.features, proposal=None), total
        state, record = decoder.step(params, draft_params, state)
        return state, total + record.num_emitted

    return lax.fori_loop(0, n, step, (state, jnp.zeros_like(state.batch.lengths)))


def make_state(
    decoder: Decoder, params: Any, draft_params: Any, size: int, prompt: int, budget: int
) -> DecodeState:
    """As after prompts were read, except that caches and features hold zeros."""
    rng = np.random.default_rng(0)
    vocab_size = decoder.model.vocab_size
    prompts = rng.integers(0, vocab_size, (size, prompt)).tolist()
    options = [lm.RequestOptions(temperature=0.8, max_new_tokens=budget)] * size
    slack = decoder.num_drafts + 1
    batch = make_batch(prompts, options, vocab_size=vocab_size, key=None, slack=slack)[0]
    return decoder.empty_state(params, draft_params, batch)


Way = tuple[Decoder, str, Any, Any]
"""A decoder, what a run does, "step" or "draft", the target's weights and the drafter's."""


def time_ways(ways: dict[Any, Way], size: int, prompt: int, options: Any) -> dict[Any, list[float]]:
    """Wall seconds of each run of `options.steps` steps, in turn, for texts of `prompt` tokens."""
    # Programs of earlier calls stay in JAX's caches otherwise, with code, constants and CUDA graphs
    # in the memory of the device: after three batches, a fourth does not fit.
    jax.clear_caches()
    runs = 1 + -(-options.repeats // ROUNDS)  # the first is not counted

    def fresh_state(decoder: Decoder, params: Any, weights: Any) -> DecodeState:
        budget = runs * options.steps * (decoder.num_drafts + 1)
        return make_state(decoder, params, weights, size, prompt, budget)

    compiled = {}
    for name, (decoder, kind, params, weights) in ways.items():
        shapes = jax.eval_shape(functools.partial(fresh_state, decoder, params, weights))
        run = jax.jit(functools.partial(loop, decoder, kind), donate_argnums=2)
        compiled[name] = run.lower(params, weights, shapes, jnp.int32(1)).compile()
    samples: dict[Any, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, (decoder, _, params, weights) in ways.items():
            state = fresh_state(decoder, params, weights)  # one at a time: caches fill the memory
            for repeat in range(runs):
                jax.block_until_ready(state)
                begin = time.perf_counter()
                state, total = compiled[name](params, weights, state, jnp.int32(options.steps))
                jax.block_until_ready(total)
                if repeat:
                    samples[name].append(time.perf_counter() - begin)
            del state
    return samples


def bytes_of(params: Any) -> int:
    """What K drafts read of a drafter's weights: of a head, fc once and no embedding."""
    size = {name: sum(x.nbytes for x in jax.tree.leaves(p)) for name, p in params.items()}
    if "fc" in size:
        return size["fc"] + K * (size["layer"] + size["norm"] + size["lm_head"])
    return K * sum(size.values())


def measure_cell(
    target: Any, drafters: dict[str, tuple[Any, Any]], options: Any, size: int, prompt: int
) -> list[dict[str, Any]]:
    """A row: milliseconds of a step and of drafting, by drafter, for texts of `prompt` tokens."""
    model, params = target
    config = sd.SpecDecodeConfig(num_speculative_tokens=K)
    ways: dict[str, Way] = {"plain": (Decoder(model, NoDrafter(), PLAIN), "step", params, None)}
    for name, (drafter, weights) in drafters.items():
        decoder = Decoder(model, drafter, config)
        ways |= {f"{name}, {kind}": (decoder, kind, params, weights) for kind in ("step", "draft")}
    samples = time_ways(ways, size, prompt, options)
    cache = jax.eval_shape(lambda: model.init_cache(size, 64))
    plain_bytes = sum(x.nbytes for x in jax.tree.leaves(params)) - params["embed_tokens"].nbytes
    plain_bytes += sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache)) // 64 * prompt
    row = {
        "batch": size,
        "prompt": prompt,
        "k": K,
        "steps": options.steps,
        "ms": {name: measure.median(s) / options.steps * 1e3 for name, s in samples.items()},
        "draft_bytes": {name: bytes_of(w) for name, (_, w) in drafters.items() if w is not None},
        "plain_bytes": plain_bytes,
        "samples": samples,
    }
    return [row]


def show(rows: list[dict[str, Any]], bandwidth: float | None) -> None:
    cells = []
    for row in rows:
        plain = row["ms"]["plain"]
        for name in [way.removesuffix(", step") for way in row["ms"] if way.endswith("step")]:
            step, draft = (row["ms"][f"{name}, {kind}"] for kind in ("step", "draft"))
            least = row["draft_bytes"].get(name, 0) / bandwidth * 1e3 if bandwidth else 0
            cells.append(
                {
                    "B": row["batch"],
                    "tokens": row["prompt"],
                    "drafts by": name,
                    "plain step": f"{plain:.3f}",
                    "step": f"{step:.3f}",
                    "pays above": f"{step / plain:.2f}",
                    "drafting": f"{draft:.3f}",
                    "its bytes at copy bandwidth": f"{least:.3f}" if least else "-",
                }
            )
    measure.show(f"ms, K = {K}; tokens per step above which drafts pay", cells)


def main(command_line: list[str] | None = None) -> int:
    parser = measure.gpu_parser(__doc__, repeats=5, seconds=400)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--steps", type=int, default=32, help="per run")
    lengths = "tokens of each text before the first step"
    parser.add_argument("--prompts", type=int, nargs="+", default=[512, 4096], help=lengths)
    options = parser.parse_args(command_line)
    clock = measure.begin(options)
    if clock is None:
        return 0
    shapes = (llamas.TINY,) * 2 if options.tiny else (llamas.LLAMA_3_8B, llamas.LLAMA_3_1B)
    target, draft = (lm.models.Llama(shape, "bfloat16") for shape in shapes)
    params, draft_params = (llamas.random_params(m, seed) for seed, m in enumerate((target, draft)))
    head = make_head(target.config, 32 if options.tiny else 32000)
    head_params = jax.jit(head.init_params)(jax.random.key(2), params)
    head_params["embed_tokens"] = params["embed_tokens"]  # one array for both, as loaded
    drafters: dict[str, tuple[Any, Any]] = {
        "model": (lm.ModelDrafter(draft), draft_params),
        "EAGLE-3 head": (lm.Eagle3Drafter(head), head_params),
        "n-gram": (lm.NGramDrafter(), None),
    }
    bandwidth = None if options.tiny else measure.copy_bandwidth()
    results = measure.Results(
        "steps_gpu", ("batch", "prompt"), options.output, copy_bytes_per_second=bandwidth
    )
    measured = functools.partial(measure_cell, (target, params), drafters, options)
    cells = {
        f"B = {size}, {prompt} tokens": (size, prompt)
        for prompt, size in itertools.product(options.prompts, options.batches)
    }
    status = measure.measure_cells(results, clock, measured, cells)
    show(results.rows, bandwidth)
    return status


if __name__ == "__main__":
    raise SystemExit(main())
