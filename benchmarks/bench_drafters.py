"""The drafters of the embedded target: how many drafts are accepted, and what a draft costs.

    python benchmarks/bench_drafters.py

The draft model, the two EAGLE-3 heads and the lookup complete functions of held-out files as one
batch, those of `training/evaluate_embedded.py` and the running Python. Per drafter, K and
temperature: the mean acceptance length. Per drafter and K: milliseconds per draft for one request,
beside those of a target pass over one token.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import measure
from bench_eagle3_gpu import loop
from rich.console import Console
from rich.table import Table

import jax_specdec as sd
from jax_specdec._src.serving.core import PLAIN, Decoder
from jax_specdec._src.serving.generate import make_batch

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "training"))

WEIGHTS = pathlib.Path(sd.__file__).parent / "weights"
HEADS = ("eagle3", "eagle3-64")


def drafters(target: Any, draft: Any, folders: list[pathlib.Path]) -> dict[str, Any]:
    """Each drafter and its weights."""
    found: dict[str, Any] = {"ngram": (sd.NGramDrafter(), None)}
    found["model"] = sd.ModelDrafter(draft.model), draft.params
    for folder in folders:
        head = sd.load_eagle3(folder, target)
        found[folder.name] = sd.Eagle3Drafter(head.model), head.params
    return found


def prompts(count: int) -> list[list[int]]:
    """Heads of held-out functions, with what stands before them."""
    import stdlib_text

    heads = stdlib_text.function_heads(stdlib_text.read_text().held_out, count)
    return [sd.encode_bytes(context + head) for context, head in heads]


def timed(
    target: Any, drafter: Any, draft_params: Any, k: int, texts: list[list[int]], options: Any
) -> Callable[[], jax.Array]:
    """Drafts K tokens for one request `--steps` times; without a drafter, takes plain steps."""
    config = PLAIN if drafter is None else sd.SpecDecodeConfig(num_speculative_tokens=k)
    decoder = Decoder(target.model, drafter, config)
    asked = [sd.RequestOptions(temperature=0.8, max_new_tokens=options.steps + 1)]
    batch, prompt_size, _ = make_batch(texts[:1], asked, vocab_size=256, key=None, slack=k + 1)
    prefill = jax.jit(decoder.prefilled_state, static_argnums=3)
    state = prefill(target.params, draft_params, batch, prompt_size)
    kind = "step" if drafter is None else "draft"
    run = jax.jit(functools.partial(loop, decoder, kind))
    steps = jnp.int32(options.steps)
    return functools.partial(run, target.params, draft_params, state, steps)


def measure_drafter(
    target: Any, name: str, drafter: Any, draft_params: Any, texts: Any, options: Any
) -> list[dict[str, Any]]:
    """Acceptance lengths."""
    rows = []
    for k in ks(options):
        lengths = {}
        for temperature in map(float, options.temperature.split(",")):
            output = sd.generate(
                target.model,
                target.params,
                texts,
                drafter=drafter,
                draft_params=draft_params,
                config=sd.SpecDecodeConfig(num_speculative_tokens=k),
                temperature=temperature,
                max_new_tokens=options.max_new_tokens,
                stop_token_ids=[sd.DOCUMENT_SEPARATOR],
            )
            stats = sd.AcceptanceStats.from_steps(output.steps)
            lengths[f"{temperature:g}"] = stats.mean_acceptance_length
        rows.append({"drafter": name, "k": k, "acceptance_length": lengths})
        print(rows[-1], flush=True)
    return rows


def ks(options: Any) -> list[int]:
    return [int(k) for k in options.num_speculative_tokens.split(",")]


def table(rows: list[dict[str, Any]], plain_ms: float) -> Table:
    temperatures = list(rows[0]["acceptance_length"])
    result = Table(title=f"a plain step of one request takes {plain_ms:.3f} ms")
    for column in (
        *("drafter", "K"),
        *(f"length, T = {t}" for t in temperatures),
        *("ms per draft", "of a plain step"),
    ):
        result.add_column(column, justify="left" if column == "drafter" else "right")
    for row in rows:
        lengths = (f"{row['acceptance_length'][t]:.2f}" for t in temperatures)
        cost = f"{row['draft_ms']:.3f}", f"{row['draft_ms'] / plain_ms:.3f}"
        result.add_row(row["drafter"], str(row["k"]), *lengths, *cost)
    return result


def parse(command_line: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--num-speculative-tokens", default="2,4,6")
    add("--temperature", default="0,0.8")
    add("--prompts", type=int, default=32)
    add("--max-new-tokens", type=int, default=256)
    add("--steps", type=int, default=64, help="per timed run")
    add("--repeats", type=int, default=5)
    add("--head", type=pathlib.Path, action="append", help="folders of heads (default: shipped)")
    add("--save", metavar="NAME", help="write results/NAME.json")
    return parser.parse_args(command_line)


def main(command_line: list[str] | None = None) -> int:
    options = parse(command_line)
    target, draft = sd.load_embedded_pair()
    texts = prompts(options.prompts)
    found = drafters(target, draft, options.head or [WEIGHTS / name for name in HEADS])
    runs = {("plain", 1): timed(target, None, None, 0, texts, options)}
    for (name, (drafter, params)), k in itertools.product(found.items(), ks(options)):
        runs[name, k] = timed(target, drafter, params, k, texts, options)
    samples = measure.alternate(runs, options.repeats, warm_up=1)
    ms = {way: measure.median(s) / options.steps * 1e3 for way, s in samples.items()}
    plain_ms = ms["plain", 1]
    rows: list[dict[str, Any]] = []
    for name, (drafter, params) in found.items():
        for row in measure_drafter(target, name, drafter, params, texts, options):
            way = name, row["k"]
            costs = {"draft_ms": ms[way] / row["k"], "plain_ms": plain_ms, "samples": samples[way]}
            rows.append({**row, **costs})
    if options.save:
        measure.save(options.save, rows)
    Console(width=110).print(table(rows, plain_ms))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
