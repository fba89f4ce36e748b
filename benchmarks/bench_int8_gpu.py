"""What weights in 8 bits save on one GPU: steps by drafter, and prompts.

    python benchmarks/bench_int8_gpu.py

A target of the shape of Llama 3 8B; a DSpark head of five of its layers with a block of 7, an
EAGLE-3 head with 32000 ids and a draft model of the shape of Llama 3.2 1B; random weights,
temperature 0.8. Weights are bfloat16, or int8 in the drafter alone, or in both. Per batch size wall
times of steps, in turn, as multiples of the plain step in bfloat16, beside the least that the bytes
of the weights allow: what a step reads of them at 3.35 TB/s, the bandwidth of an H100 (SXM).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import llamas
import measure
from bench_block_gpu import block_way, nbytes
from bench_steps_gpu import make_head, time_ways

import jax_specdec as sd
from jax_specdec import lm
from jax_specdec.lm.decoding.core import PLAIN, Decoder
from jax_specdec.lm.drafting.drafter import NoDrafter

BYTES_PER_SECOND = 3.35e12
WEIGHTS = {"bfloat16": (False, False), "int8 drafter": (False, True), "int8": (True, True)}
"""Whether the target's weights are int8, and whether the drafter's are."""
GOALS = {
    ("DSpark", "int8 drafter"): 1.13,
    ("EAGLE-3", "int8 drafter"): 1.18,
    ("model", "int8 drafter"): 1.45,
    ("none", "int8"): 0.68,
}
"""What a step of one request is to take at most, in plain steps in bfloat16."""
PROMPT_GOAL = 1.3


class Drafts(NamedTuple):
    """A drafter, K, and its weights in bfloat16 and in int8."""

    drafter: Any
    k: int
    params: tuple[Any, Any]


def make_drafts(target: Any, params: Any, is_tiny: bool) -> dict[str, Drafts]:
    k = 3 if is_tiny else 7
    block = block_way(target, params, True, k, ())
    eagle = make_head(target.config, 32 if is_tiny else 32000)
    eagle_params = jax.jit(eagle.init_params)(jax.random.key(2), params)
    eagle_params["embed_tokens"] = params["embed_tokens"]  # one array for both
    small = lm.models.Llama(llamas.TINY if is_tiny else llamas.LLAMA_3_1B, "bfloat16")
    given = {
        "DSpark": (block.drafter, k, block.params),
        "EAGLE-3": (lm.Eagle3Drafter(eagle), k, eagle_params),
        "model": (lm.ModelDrafter(small), min(k, 4), llamas.random_params(small, 1)),
    }
    return {
        name: Drafts(drafter, k, (own, lm.models.quantize(own)))
        for name, (drafter, k, own) in given.items()
    }


def bytes_read(params: Any, k: int) -> int:
    """Bytes of weights that K drafts of a drafter read, or one pass of a model with k = 1."""
    size = {name: nbytes(x) for name, x in params.items()}
    if "markov_w2" in size:
        return size["fc"] + size["layers"] + size["lm_head"] + k * size["markov_w2"]
    if "fc" in size:
        return size["fc"] + k * (size["layer"] + size["lm_head"])
    # Of an embedding that is not the output matrix only some rows are read.
    return k * (size["layers"] + size["lm_head" if "lm_head" in size else "embed_tokens"])


def step_rows(
    target: Any, params: tuple[Any, Any], drafts: dict[str, Drafts], options: Any, size: int
) -> list[dict[str, Any]]:
    """A row for each drafter, and none, with each kind of weights."""
    ways: dict[tuple[str, str], Any] = {}
    least: dict[tuple[str, str], int] = {}
    for weights, (is_target_int8, is_draft_int8) in WEIGHTS.items():
        own = params[is_target_int8]
        once = bytes_read(own, 1)
        if is_target_int8 == is_draft_int8:
            ways["none", weights] = (Decoder(target, NoDrafter(), PLAIN), "step", own, None)
            least["none", weights] = once
        for name, of in drafts.items():
            config = sd.SpecDecodeConfig(num_speculative_tokens=of.k)
            theirs = of.params[is_draft_int8]
            ways[name, weights] = (Decoder(target, of.drafter, config), "step", own, theirs)
            least[name, weights] = once + bytes_read(theirs, of.k)
    samples = time_ways(ways, size, options.prompt, options)
    ms = {way: measure.median(x) / options.steps * 1e3 for way, x in samples.items()}
    plain = ms["none", "bfloat16"]
    return [
        {
            "kind": "step",
            "batch": size,
            "drafter": name,
            "weights": weights,
            "k": drafts[name].k if name in drafts else 0,
            "steps": options.steps,
            "ms": ms[name, weights],
            "plain_steps": ms[name, weights] / plain,
            "weight_bytes": least[name, weights],
            "weight_bytes_ms": least[name, weights] / BYTES_PER_SECOND * 1e3,
            "samples": samples[name, weights],
        }
        for name, weights in ways
    ]


def prompt_rows(
    target: Any, params: tuple[Any, Any], options: Any, length: int
) -> list[dict[str, Any]]:
    """A row for each kind of weights: a pass over one prompt that writes its cache."""

    @functools.partial(jax.jit, donate_argnums=1)
    def read(params: Any, cache: Any, ids: jax.Array) -> Any:
        # Nobody reads the logits, so that the compiler leaves them out, as of prompts.
        rows = lm.models.Rows(ids, jnp.zeros((1,), jnp.int32))
        return target.apply(params, [rows], cache)[1]

    ids = jax.random.randint(jax.random.key(4), (1, length), 0, target.vocab_size, jnp.int32)
    caches = [target.init_cache(1, length) for _ in params]

    def run(index: int) -> Any:
        caches[index] = read(params[index], caches[index], ids)
        return caches[index]

    runs = {"bfloat16": functools.partial(run, 0), "int8": functools.partial(run, 1)}
    samples = measure.alternate(runs, 2 * options.repeats)
    ms = {name: measure.median(x) * 1e3 for name, x in samples.items()}
    return [
        {
            "kind": "prompt",
            "tokens": length,
            "weights": name,
            "ms": ms[name],
            "of_bfloat16": ms[name] / ms["bfloat16"],
            "samples": samples[name],
        }
        for name in ms
    ]


def show(rows: list[dict[str, Any]]) -> None:
    steps = [row for row in rows if row["kind"] == "step"]
    plain = {
        row["batch"]: row
        for row in steps
        if (row["drafter"], row["weights"]) == ("none", "bfloat16")
    }
    cells = []
    for row in steps:
        least = row["weight_bytes"] / plain[row["batch"]]["weight_bytes"]
        goal = GOALS.get((row["drafter"], row["weights"])) if row["batch"] == 1 else None
        cells.append(
            {
                "B": row["batch"],
                "drafts by": row["drafter"],
                "K": row["k"],
                "weights": row["weights"],
                "ms": f"{row['ms']:.3f}",
                "its weights at 3.35 TB/s": f"{row['weight_bytes_ms']:.3f}",
                "plain steps": f"{row['plain_steps']:.3f}",
                "by bytes": f"{least:.3f}",
                "goal": "-" if goal is None else f"{goal:.2f}",
            }
        )
    measure.show("steps; plain steps are those of the same B in bfloat16", cells)
    measure.show(
        f"prompts; goal: at most {PROMPT_GOAL} times bfloat16",
        [
            {
                "tokens": row["tokens"],
                "weights": row["weights"],
                "ms": f"{row['ms']:.3f}",
                "of bfloat16": f"{row['of_bfloat16']:.3f}",
            }
            for row in rows
            if row["kind"] == "prompt"
        ],
    )


def main(command_line: list[str] | None = None) -> int:
    parser = measure.gpu_parser(__doc__, repeats=4, seconds=200)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--steps", type=int, default=24, help="per run")
    parser.add_argument("--prompt", type=int, default=128, help="tokens before the first step")
    parser.add_argument("--lengths", type=int, nargs="*", default=[512, 2048], help="of prompts")
    options = parser.parse_args(command_line)
    clock = measure.begin(options)
    if clock is None:
        return 0
    target = lm.models.Llama(llamas.TINY if options.tiny else llamas.LLAMA_3_8B, "bfloat16")
    own = llamas.random_params(target, 0)
    params = own, lm.models.quantize(own)
    drafts = make_drafts(target, own, options.tiny)
    clock.say("weights are there:", f"{nbytes(params, [x.params for x in drafts.values()]):,} B")
    identity = ("kind", "batch", "drafter", "weights", "tokens")
    results = measure.Results("int8_gpu", identity, options.output)
    measured = {
        "step": functools.partial(step_rows, target, params, drafts, options),
        "prompt": functools.partial(prompt_rows, target, params, options),
    }
    first, rest = options.batches[:1], options.batches[1:]
    order = [("step", first), ("prompt", options.lengths), ("step", rest)]
    cells = {f"{kind} {size}": (kind, size) for kind, sizes in order for size in sizes}
    status = measure.measure_cells(results, clock, lambda kind, size: measured[kind](size), cells)
    show(results.rows)
    return status


if __name__ == "__main__":
    raise SystemExit(main())
