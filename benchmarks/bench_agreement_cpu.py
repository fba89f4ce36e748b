"""How many drafts the agreement rule keeps, by how they are drawn, beside the other rules.

First the chance that one draft is kept, over rows of a large vocabulary and of the embedded pair;
then whole generations of the embedded target with its draft model and with its EAGLE-3 head; last
the time of a draw.
"""

from __future__ import annotations

import argparse
from typing import Any

import bench_acceptance_cpu as pair
import jax
import jax.numpy as jnp
import measure
import numpy as np
import scipy.special
from rich.console import Console
from rich.table import Table

import jax_specdec as sd

VOCAB, TILE = 128256, 2048
LARGE = (  # exponent of Zipf's law, noise of the drafter's logits, temperature
    (1.0, 0.3, 1.0),
    (1.6, 1.0, 1.0),
    (1.6, 0.7, 0.4),
)
TEMPERATURES = (1.0, 0.7, 0.4)
RULES = {
    "standard": ("standard", "probabilistic"),
    "block": ("block", "probabilistic"),
    "standard, argmax": ("standard", "greedy"),
    "agreement, shared": ("agreement", "probabilistic"),
    "agreement, argmax": ("agreement", "greedy"),
}


def in_tiles(x: np.ndarray) -> np.ndarray:
    """A row ``[V]`` as ``[T, TILE]``."""
    size = min(TILE, len(x))
    return np.pad(x, (0, -len(x) % size)).reshape(-1, size)


def race(p: np.ndarray, q: np.ndarray, rng: np.random.Generator) -> tuple[int, int]:
    """The winners of one exponential race, run with the weights p and with the weights q."""
    e = rng.exponential(size=len(p))
    return int(np.argmax(p / e)), int(np.argmax(q / e))


def agreements(p: np.ndarray, q: np.ndarray, rng: np.random.Generator, draws: int) -> dict:
    """Chances that a draft of q is kept, where the target has p; rows ``[V]``."""
    tiles = [in_tiles(x) for x in (p, q)]
    masses = [x.sum(axis=1) for x in tiles]
    inside = [x / np.maximum(m, 1e-300)[:, None] for x, m in zip(tiles, masses, strict=True)]
    full = two_level = 0
    for _ in range(draws):
        a, b = race(p, q, rng)
        full += a == b
        a, b = race(*masses, rng)
        if a == b:
            a, b = race(inside[0][a], inside[1][a], rng)
            two_level += a == b
    return {
        "standard": np.minimum(p, q).sum(),
        "shared race": two_level / draws,
        "race over all ids": full / draws,
        "argmax": p[q.argmax()],
        "independent": p @ q,
    }


def mean(found: list[dict[str, float]]) -> dict[str, float]:
    return {name: float(np.mean([one[name] for one in found])) for name in found[0]}


def of_large_rows(num_rows: int, draws: int) -> list[dict[str, Any]]:
    """The chances over random rows of a large vocabulary."""
    rows, rng = [], np.random.default_rng(0)
    for exponent, noise, temperature in LARGE:
        found = []
        for _ in range(num_rows):
            target = -exponent * np.log1p(rng.permutation(VOCAB))
            draft = target + noise * rng.standard_normal(VOCAB)
            p, q = (scipy.special.softmax(x / temperature) for x in (target, draft))
            found.append(agreements(p, q, rng, draws))
        case = {"zipf": exponent, "logit_noise": noise, "temperature": temperature}
        rows.append({"vocabulary": VOCAB, **case, "accepted": mean(found), "rows": num_rows})
    return rows


def of_pair(new_tokens: int, draws: int) -> list[dict[str, Any]]:
    """The chances along texts that the embedded target wrote."""
    rows, rng = [], np.random.default_rng(1)
    logits = {k: np.asarray(x, np.float64) for k, x in pair.read(new_tokens).items()}
    for temperature in TEMPERATURES:
        p, q = (
            scipy.special.softmax(logits[name] / temperature, axis=1)
            for name in ("target", "draft")
        )
        found = [agreements(*of_row, rng, draws) for of_row in zip(p, q, strict=True)]
        case = {"vocabulary": p.shape[1], "temperature": temperature}
        rows.append({**case, "accepted": mean(found), "rows": len(p)})
    return rows


def of_generations(k: int, new_tokens: int, copies: int) -> list[dict[str, Any]]:
    """Tokens per step of `generate`, by drafter and rule, and whether texts are plain ones."""
    (target, params), (draft, draft_params) = sd.load_embedded_pair()
    head = sd.load_embedded_head(sd.load_embedded_pair()[0])
    drafters: dict[str, tuple[Any, Any]] = {
        "draft model": (sd.ModelDrafter(draft), draft_params),
        "EAGLE-3 head": (sd.Eagle3Drafter(head.model), head.params),
    }
    prompts = [sd.encode_bytes(prompt) for prompt in pair.PROMPTS] * copies
    named: dict[str, Any] = dict(max_new_tokens=new_tokens, key=jax.random.key(1))
    agreeing = sd.SpecDecodeConfig(num_speculative_tokens=k, rejection_sample_method="agreement")

    def plainly(temperature: float) -> list[list[int]]:
        given = dict(config=agreeing, temperature=temperature, **named)
        return sd.generate_plain(target, params, prompts, **given).completions

    plain = {t: plainly(t) for t in TEMPERATURES}
    rows = []
    for drafter, (proposes, weights) in drafters.items():
        for rule, (method, drawn) in RULES.items():
            config = sd.SpecDecodeConfig.from_dict(
                {
                    "num_speculative_tokens": k,
                    "rejection_sample_method": method,
                    "draft_sample_method": drawn,
                }
            )
            given = dict(drafter=proposes, draft_params=weights, config=config)
            for t in TEMPERATURES:
                output = sd.generate(target, params, prompts, temperature=t, **given, **named)
                steps = output.steps
                emitted, verified = steps.num_emitted.sum(), (steps.num_emitted > 0).sum()
                same = sum(a == b for a, b in zip(output.completions, plain[t], strict=True))
                rows.append(
                    {
                        "drafter": drafter,
                        "rule": rule,
                        "k": k,
                        "temperature": t,
                        "tokens_per_step": float(emitted / verified),
                        "texts": len(prompts),
                        "texts_as_plain": same,
                    }
                )
    return rows


def of_time(batch: int, repeats: int) -> list[dict[str, Any]]:
    """Microseconds of one row of a large vocabulary, of which a token is sampled."""
    rng = np.random.default_rng(2)
    logits = jnp.asarray(-1.6 * np.log1p([rng.permutation(VOCAB) for _ in range(batch)]))
    logits = jnp.repeat(logits.astype(jnp.bfloat16), 2, axis=0)
    keys, nothing = jax.random.split(jax.random.key(0), batch), jnp.full((batch, 1), -1, jnp.int32)
    draw = jax.jit(sd.rejection_sample, static_argnames="config")

    def call(method: Any, temperature: float) -> Any:
        return draw(
            logits,
            sd.Drafts.from_dense(nothing),
            sampling=sd.SamplingParams(jnp.full((batch,), temperature)),
            keys=keys,
            positions=jnp.arange(batch),
            config=sd.SpecDecodeConfig(num_speculative_tokens=1, rejection_sample_method=method),
        )

    runs = {
        "standard": lambda: call("standard", 1.0),
        "agreement": lambda: call("agreement", 1.0),
        "greedy, standard": lambda: call("standard", 0.0),
        "greedy, agreement": lambda: call("agreement", 0.0),
    }
    found = measure.alternate(runs, repeats)
    return [
        {"draw": name, "vocabulary": VOCAB, "microseconds": min(samples) / batch * 1e6}
        for name, samples in found.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=12, help="of the large vocabulary")
    parser.add_argument("--draws", type=int, default=40, help="races of each row")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--copies", type=int, default=8, help="requests of each prompt")
    parser.add_argument("-k", type=int, default=4)
    options = parser.parse_args()
    rows = of_large_rows(options.rows, options.draws) + of_pair(options.new_tokens, options.draws)
    chances = Table(title="chance that one draft is accepted")
    for heading in ("V", "rows", "temperature", *rows[0]["accepted"]):
        chances.add_column(heading)
    for row in rows:
        kind = f"Zipf {row['zipf']:g}, noise {row['logit_noise']:g}" if "zipf" in row else "pair"
        shares = (f"{x:.3f}" for x in row["accepted"].values())
        chances.add_row(str(row["vocabulary"]), kind, f"{row['temperature']:g}", *shares)
    generated = of_generations(options.k, options.new_tokens, options.copies)
    steps = Table(title=f"tokens per step, K = {options.k}")
    for heading in ("drafter", "rule", "temperature", "tokens per step", "texts as plain"):
        steps.add_column(heading)
    for row in generated:
        same = f"{row['texts_as_plain']} of {row['texts']}"
        numbers = f"{row['temperature']:g}", f"{row['tokens_per_step']:.3f}", same
        steps.add_row(row["drafter"], row["rule"], *numbers)
    timed = of_time(batch=32, repeats=15)
    Console(width=120).print(chances, steps, *timed)
    print(f"saved: {measure.save('agreement_cpu', rows + generated + timed).name}")


if __name__ == "__main__":
    main()
