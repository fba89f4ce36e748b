"""What a step costs on one GPU with a Gemma 4 and its assistant, beside a plain one.

    python benchmarks/bench_gemma4_gpu.py

Targets of the shapes of Gemma 4 E4B in bfloat16 and 31B in int8, with assistants (E4B: 256 wide, an
ordered head that scores 4,096 of 262,144 ids; 31B: 1,024 wide, a dense head in int8), random
weights, temperature 0.8. Per batch size, wall times of a plain step, of a step with K drafts and of
drafting alone, beside the time in which a large copy moves the bytes of weights that drafting
reads. A step that emits more tokens than `step / plain` is faster than plain decoding.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import gemmas
import jax
import measure
from bench_steps_gpu import time_ways

import jax_specdec as sd
from jax_specdec import lm
from jax_specdec.lm.decoding.core import PLAIN, Decoder
from jax_specdec.lm.drafting.drafter import NoDrafter


class Case(NamedTuple):
    """A target, its assistant, and how their weights are held."""

    config: lm.models.DecoderConfig
    is_int8: bool
    assistant: tuple[int, int, int | None]
    """Width, that of its feed-forward layers, and groups of ids of an ordered head."""


CASES = {
    "E4B": Case(gemmas.GEMMA_4_E4B, False, (256, 2048, 2048)),
    "31B": Case(gemmas.GEMMA_4_31B, True, (1024, 8192, None)),
}


def nbytes(tree: Any) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(tree))


def draft_bytes(head: lm.models.GemmaAssistantHead, params: dict[str, Any], k: int) -> int:
    """Bytes of weights that K drafts of a request read: of groups, those that are scored."""
    read = {x: y for x, y in params.items() if x not in ("embed_tokens", "target_ids")}
    c = head.config
    if c.num_centroids is not None and c.num_active_centroids is not None:
        group = nbytes(read.pop("lm_head")) // c.num_centroids
        return k * (nbytes(read) + c.num_active_centroids * group)
    return k * nbytes(read)


def measure_case(name: str, size: int, options: Any) -> dict[str, Any]:
    case = CASES[name]
    config = gemmas.tiny(case.config) if options.tiny else case.config
    width, inner, groups = (8, 16, case.assistant[2] and 64) if options.tiny else case.assistant
    target = lm.models.Llama(config, "bfloat16")
    params = gemmas.random_params(target, 0, case.is_int8)
    head = gemmas.assistant_of(config, width, inner, groups)
    shared = {name: params[name] for name in ("embed_tokens", "norm")}
    draft_params = jax.jit(head.init_params)(jax.random.key(1), shared)
    if case.is_int8:
        draft_params = lm.models.quantize(draft_params)
    draft_params["embed_tokens"] = params["embed_tokens"]  # one array for both, as loaded
    k = options.k
    drafter = lm.GemmaAssistantDrafter(head)
    decoder = Decoder(target, drafter, sd.SpecDecodeConfig(num_speculative_tokens=k))
    samples = time_ways(
        {
            "plain": (Decoder(target, NoDrafter(), PLAIN), "step", params, None),
            "step": (decoder, "step", params, draft_params),
            "draft": (decoder, "draft", params, draft_params),
        },
        size,
        options.prompt,
        options,
    )
    return {
        "target": name,
        "batch": size,
        "k": k,
        "steps": options.steps,
        "prompt": options.prompt,
        "weights_bytes": nbytes(params),
        "draft_bytes": draft_bytes(head, draft_params, k),
        "ms": {kind: measure.median(x) / options.steps * 1e3 for kind, x in samples.items()},
        "samples": samples,
    }


def show(rows: list[dict[str, Any]], bandwidth: float | None) -> None:
    cells = []
    for row in rows:
        ms = row["ms"]
        least = row["draft_bytes"] / bandwidth * 1e3 if bandwidth else 0
        cells.append(
            {
                "target": row["target"],
                "B": row["batch"],
                "K": row["k"],
                "plain step": f"{ms['plain']:.3f}",
                "step": f"{ms['step']:.3f}",
                "pays above": f"{ms['step'] / ms['plain']:.2f}",
                "drafting": f"{ms['draft']:.3f}",
                "its weights": f"{least:.3f}" if least else "-",
            }
        )
    measure.show("ms; tokens per step above which drafts pay", cells)


def main(command_line: list[str] | None = None) -> int:
    parser = measure.gpu_parser(__doc__, repeats=3, seconds=110)
    parser.add_argument("--targets", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--batches", type=int, nargs="+", default=[1])
    parser.add_argument("-k", type=int, default=4)
    parser.add_argument("--steps", type=int, default=16, help="per run")
    parser.add_argument("--prompt", type=int, default=128, help="tokens before the first step")
    options = parser.parse_args(command_line)
    clock = measure.begin(options)
    if clock is None:
        return 0
    bandwidth = None if options.tiny else measure.copy_bandwidth()
    names = ("target", "batch")
    results = measure.Results("gemma4_gpu", names, options.output, copy_bytes_per_second=bandwidth)
    cells = {
        f"{name}, B = {size}": (name, size, options)
        for size in options.batches
        for name in options.targets
    }
    status = measure.measure_cells(results, clock, lambda *cell: [measure_case(*cell)], cells)
    show(results.rows, bandwidth)
    return status


if __name__ == "__main__":
    raise SystemExit(main())
