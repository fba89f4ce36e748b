"""How many drafts of the embedded pair are accepted, by what they are drawn from.

Under the target's sampling parameters, or at its temperature alone; from all ids, or a few likely.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import measure
import numpy as np
from rich.console import Console
from rich.table import Table

import jax_specdec as sd

PROMPTS = (
    "def quicksort(items):",
    "class Stack:\n    def __init__(self):\n",
    "import os\n\ndef list_files(path):\n",
)
CASES: tuple[dict[str, float], ...] = (
    {"temperature": 1.0},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 1.0, "top_k": 20},
    {"temperature": 1.0, "top_p": 0.95},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
)

CANDIDATES = (1, 2, 4, 8, 16, 32, 64)


def probabilities(logits: jax.Array, case: dict[str, float]) -> jax.Array:
    """What `sample_draft_tokens` draws from, for rows ``[n, V]``."""
    n = logits.shape[0]
    dtypes = {"temperature": jnp.float32, "min_p": jnp.float32, "top_k": jnp.int32}
    values = {k: jnp.full((n,), v, dtypes.get(k, jnp.float32)) for k, v in case.items()}
    drawn = sd.sample_draft_tokens(
        logits,
        sampling=sd.SamplingParams(**values),
        keys=jax.random.split(jax.random.key(0), n),
        positions=jnp.zeros((n,), jnp.int32),
        offset=0,
    )
    rows = logits.astype(jnp.float32)
    if drawn.threshold is not None:
        rows = jnp.where(rows < drawn.threshold[:, None], -jnp.inf, rows)
    relative = (rows - drawn.row_max[:, None]) / case["temperature"]
    return jnp.exp(relative - drawn.log_normalizer[:, None])


def run(case: dict[str, float], logits: dict[str, jax.Array]) -> dict[str, Any]:
    """The chance ``sum(min(p, q))`` that a draft is accepted, averaged over the rows."""
    p = probabilities(logits["target"], case)
    alone = {"temperature": case["temperature"]}
    chances = {
        name: np.minimum(p, probabilities(logits["draft"], drafting)).sum(axis=1).mean().item()
        for name, drafting in (("temperature", alone), ("same", case))
    }
    return {**case, "accepted": chances, "rows": len(p)}


def run_candidates(temperature: float, logits: dict[str, jax.Array]) -> dict[str, Any]:
    """The same of drafts drawn from the C likeliest ids of the drafter's row, by C."""
    case = {"temperature": temperature}
    p = probabilities(logits["target"], case)
    q = np.asarray(probabilities(logits["draft"], case))
    chances = {"all": np.minimum(p, q).sum(axis=1).mean().item()}
    order = np.argsort(-q, axis=1)
    for count in CANDIDATES:
        listed = order[:, :count]
        own = np.take_along_axis(q, listed, axis=1)
        own /= own.sum(axis=1, keepdims=True)
        of_target = np.take_along_axis(np.asarray(p), listed, axis=1)
        chances[str(count)] = np.minimum(of_target, own).sum(axis=1).mean().item()
    return {**case, "accepted_by_candidates": chances, "rows": len(p)}


def read(new_tokens: int) -> dict[str, jax.Array]:
    """Logits ``[n, V]`` of both models along texts that the target wrote at temperature 1."""
    (target, params), (draft, draft_params) = sd.load_embedded_pair()
    prompts = [sd.encode_bytes(prompt) for prompt in PROMPTS]
    output = sd.generate_plain(
        target, params, prompts, temperature=1.0, max_new_tokens=new_tokens, key=jax.random.key(1)
    )
    found: dict[str, list[jax.Array]] = {"target": [], "draft": []}
    for prompt, continuation in zip(prompts, output.completions, strict=True):
        text = jnp.asarray([[*prompt, *continuation]], jnp.int32)
        start = jnp.zeros((1,), jnp.int32)
        for name, model, weights in (
            ("target", target, params),
            ("draft", draft, draft_params),
        ):
            cache = model.init_cache(1, text.shape[1])
            logits, *_ = jax.jit(model.apply)(weights, text, start, cache)
            found[name].append(logits[0, len(prompt) - 1 :])
    return {name: jnp.concatenate(rows) for name, rows in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--new-tokens", type=int, default=128)
    options = parser.parse_args()
    logits = read(options.new_tokens)
    rows = [run(case, logits) for case in CASES]
    table = Table(title=f"drafts accepted, of {rows[0]['rows']} places in the target's own text")
    for heading in ("sampling", "drafted at the temperature", "drafted under the same"):
        table.add_column(heading)
    for case, row in zip(CASES, rows, strict=True):
        accepted = row["accepted"]
        name = ", ".join(f"{k} {v:g}" for k, v in case.items())
        table.add_row(name, f"{accepted['temperature']:.3f}", f"{accepted['same']:.3f}")
    listed = [run_candidates(temperature, logits) for temperature in (1.0, 0.7)]
    few = Table(title=f"drafted from the likeliest ids, of {logits['draft'].shape[1]}")
    for heading in ("temperature", *listed[0]["accepted_by_candidates"]):
        few.add_column(heading)
    for row in listed:
        shares = row["accepted_by_candidates"].values()
        few.add_row(f"{row['temperature']:g}", *(f"{share:.3f}" for share in shares))
    Console(width=110).print(table, few)
    rows += listed
    print(f"saved: {measure.save('acceptance_cpu', rows).name}")


if __name__ == "__main__":
    main()
