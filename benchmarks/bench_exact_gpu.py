"""Texts with and without speculation, on a GPU: how many are equal, with `exact` and without.

    python benchmarks/bench_exact_gpu.py --out benchmarks/results/exact_gpu.json

The embedded target continues 128 pieces of the standard library by 200 tokens, greedily and under
the agreement rule at temperature 0.8, with a draft model, n-grams and an EAGLE-3 head. Each text is
compared with that of `generate_plain` in the same process: the ids, and the bits of their
log-probabilities. Then an exact engine of 8 slots serves the pieces in a random order, preempting
requests now and then; its texts are compared with those that it makes without drafts, in order.
Cells run side by side, each in a process of its own.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import inspect
import itertools
import json
import operator
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_specdec as sd
from jax_specdec import lm

RULES = {"greedy": ("standard", 0.0), "agreement": ("agreement", 0.8)}
CELLS = [
    *itertools.product(("bfloat16",), RULES, (4, 7)),
    *itertools.product(("float32",), RULES, (4,)),
]


def prompts_of(count: int) -> list[list[int]]:
    """Pieces of 80 bytes of modules of the standard library."""
    modules = argparse, dataclasses, inspect, json, subprocess
    text = "".join(inspect.getsource(module) for module in modules)
    return [lm.encode_bytes(text[i * 900 : i * 900 + 80]) for i in range(count)]


def cast(loaded: Any, dtype: jnp.dtype) -> tuple[Any, Any]:
    """A model or head, and its weights, in another dtype."""
    params = jax.tree.map(
        lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, loaded.params
    )
    return dataclasses.replace(loaded.model, dtype=dtype), params


def loaded(dtype: str) -> tuple[Any, Any, dict[str, tuple[lm.Drafter, Any]]]:
    """The target, its weights, and each drafter with its own."""
    target, draft = lm.load_embedded_pair()
    head = lm.load_embedded_head(target)
    (model, params), (small, small_params), (eagle, eagle_params) = (
        cast(one, jnp.dtype(dtype)) for one in (target, draft, head)
    )
    drafters: dict[str, tuple[lm.Drafter, Any]] = {
        "draft model": (lm.ModelDrafter(small), small_params),
        "n-grams": (lm.NGramDrafter(), None),
        "EAGLE-3": (lm.Eagle3Drafter(eagle), eagle_params),
    }
    return model, params, drafters


def measure(dtype: str, rule: str, k: int, count: int, new: int) -> dict[str, Any]:
    """One cell: equal texts of each drafter, with `exact` and without, and seconds of each run."""
    model, params, drafters = loaded(dtype)
    method, temperature = RULES[rule]
    given: dict[str, Any] = dict(
        config=sd.SpecDecodeConfig(num_speculative_tokens=k, rejection_sample_method=method),
        max_new_tokens=new,
        temperature=temperature,
        logprobs=sd.LogprobsConfig(),
    )
    row: dict[str, Any] = dict(dtype=dtype, rule=rule, k=k, texts=count, tokens=new)
    for exact in (False, True):
        plain = lm.generate_plain(model, params, prompts_of(count), exact=exact, **given)
        for name, (drafter, weights) in drafters.items():
            run = functools.partial(
                lm.generate, model, params, prompts_of(count), drafter=drafter, exact=exact, **given
            )
            run(draft_params=weights)  # compiles
            begin = time.perf_counter()
            output = run(draft_params=weights)
            seconds = time.perf_counter() - begin
            pairs = [*zip(texts_of(output), texts_of(plain), strict=True)]
            row[f"{name}, exact={exact}"] = dict(
                equal_texts=sum(ours[0] == theirs[0] for ours, theirs in pairs),
                equal_bits=sum(ours == theirs for ours, theirs in pairs),
                seconds=round(seconds, 3),
                tokens_per_step=round(count * new / float((output.steps.num_kept > 0).sum()), 3),
            )
    return row | {"engine": measure_engine(dtype, rule, k, count, new)}


def measure_engine(dtype: str, rule: str, k: int, count: int, new: int) -> dict[str, Any]:
    """Texts of exact engines, each beside its own without drafts and that of the first drafter."""
    model, params, drafters = loaded(dtype)
    method, temperature = RULES[rule]
    prompts = prompts_of(count)
    row: dict[str, Any] = {}
    plain: list[Any] = []  # of the engine with each drafter
    for name, (drafter, weights) in drafters.items():
        engine = lm.Engine(
            model,
            drafter,
            sd.SpecDecodeConfig(num_speculative_tokens=k, rejection_sample_method=method),
            sd.LogprobsConfig(),
            num_slots=8,
            max_length=512,
            exact=True,
        )
        for has_drafts in (False, True):
            rng = np.random.default_rng(0)
            driver = lm.EngineDriver(engine, params, weights)
            order = rng.permutation(count) if has_drafts else np.arange(count)
            asked = dict(max_new_tokens=new, temperature=temperature)
            asked |= {} if has_drafts else {"max_drafts": 0}
            ids = {driver.submit(prompts[i], seed=int(i), **asked): int(i) for i in order}
            texts: list[Any] = [([], b"") for _ in range(count)]
            num_read_again = 0
            while not driver.is_idle:
                if has_drafts and rng.random() < 0.02:
                    num_read_again += driver.preempt(int(rng.integers(count)))
                for update in driver.step():
                    if update.token_ids:
                        i = ids[update.request_id]
                        bits = update.logprobs.logprobs[: len(update.token_ids)].tobytes()
                        texts[i] = texts[i][0] + update.token_ids, texts[i][1] + bits
            if not has_drafts:
                plain.append(texts)
                continue
            row[name] = dict(
                read_again=num_read_again,
                tokens=sum(len(ids) for ids, _ in texts),
                equal_bits=sum(map(operator.eq, texts, plain[-1])),
                equal_bits_to_first=sum(map(operator.eq, texts, plain[0])),
                equal_texts_to_first=sum(
                    a[0] == b[0] for a, b in zip(texts, plain[0], strict=True)
                ),
            )
    return row


def texts_of(output: lm.GenerateOutput) -> list[tuple[list[int], bytes]]:
    """Of each request the ids, and the bits of their log-probabilities."""
    # [S, B, K+1]: those that were kept, in the order of steps
    kept = np.arange(output.steps.token_ids.shape[2]) < output.steps.num_kept[..., None]
    logprobs = output.steps.logprobs.logprobs
    return [(ids, logprobs[:, b][kept[:, b]].tobytes()) for b, ids in enumerate(output.completions)]


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cell", type=int, help="of CELLS, alone")
    parser.add_argument("--texts", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=200)
    options = parser.parse_args()
    if options.cell is not None:
        row = measure(*CELLS[options.cell], options.texts, options.tokens)
        options.out.write_text(json.dumps(row))
        return

    def run(cell: int) -> dict[str, Any]:
        out = options.out.with_suffix(f".{cell}")
        sizes = ["--texts", str(options.texts), "--tokens", str(options.tokens)]
        command = [sys.executable, __file__, "--out", str(out), "--cell", str(cell), *sizes]
        subprocess.run(command, check=True)
        row = json.loads(out.read_text())
        out.unlink()
        print(json.dumps(row), flush=True)
        return row

    with concurrent.futures.ThreadPoolExecutor(len(CELLS)) as pool:
        rows = list(pool.map(run, range(len(CELLS))))
    device = jax.devices()[0].device_kind
    date = time.strftime("%Y-%m-%d")
    result = dict(date=date, device=device, jax=jax.__version__, rows=rows)
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
