"""Texts with and without speculation, on a GPU: how many are equal, with `exact` and without.

    python benchmarks/bench_exact_gpu.py --out benchmarks/results/exact_gpu.json
    python benchmarks/bench_exact_gpu.py --large 1000000 --out exact_large_gpu.json

The embedded target continues 128 pieces of the standard library by 200 tokens, greedily and under
the agreement rule at temperature 0.8, with a draft model, n-grams and an EAGLE-3 head. Each text is
compared with that of `generate_plain` in the same process: the ids, and the bits of their
log-probabilities. Then an exact engine of 8 slots serves the pieces in a random order, preempting
requests now and then; its texts are compared with those that it makes without drafts, in order.
Cells run one after another, each in a process of its own.

With `--large`, so many greedy tokens and so many sampled ones under the agreement rule of a model
of the shape of Llama 3 8B with 16 layers and random weights, bfloat16, from one exact engine of 128
slots: without drafts, and with drafts of which a part is wrong, in another order, preempted.
"""

from __future__ import annotations

import argparse
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
from llamas import LLAMA_3_8B, cut, random_params

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
                if has_drafts and rng.random() < 0.05:
                    # One of those that have begun
                    begun = [number for number, i in ids.items() if 0 < len(texts[i][0]) < new]
                    num_read_again += bool(begun) and driver.preempt(int(rng.choice(begun)))
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


@dataclasses.dataclass(frozen=True)
class Recalled(lm.Drafter):
    """Proposes texts that are known, with one token in six replaced.

    Its params are the texts, ``[N, L]`` int32. A prompt begins with the number of its text.
    """

    def propose(
        self, params: Any, context: lm.DraftContext, cache: Any, store: Any
    ) -> tuple[lm.Proposal, Any]:
        k = context.config.num_speculative_tokens
        number = context.token_ids[:, 0] * PROMPT_BASE + context.token_ids[:, 1]  # [B]
        place = context.lengths[:, None] + jnp.arange(k, dtype=jnp.int32)[None, :]  # [B, K]
        ids = params[number[:, None], jnp.minimum(place, params.shape[1] - 1)]
        noise = (place * 7919 + number[:, None] * 104729) % 6
        return lm.Proposal(jnp.where(noise == 0, (ids + 1) % 1000, ids)), cache


PROMPT_BASE = 1000


def measure_large(num_tokens: int, layers: int, num_slots: int, seconds: float) -> dict[str, Any]:
    """Greedy and sampled tokens, so many of each, without drafts and with: what differs.

    After `seconds` no further request is begun.
    """
    config = cut(LLAMA_3_8B, layers)
    model = lm.models.Llama(config, jnp.dtype("bfloat16"))
    params = random_params(model, 0)
    rng = np.random.default_rng(0)
    count = 2 * num_tokens // 512
    budgets = rng.integers(256, 768, count)
    prompts = [
        [i // PROMPT_BASE, i % PROMPT_BASE, *rng.integers(config.vocab_size, size=n).tolist()]
        for i, n in enumerate(rng.integers(1, 120, count))
    ]
    engine = lm.Engine(
        model,
        Recalled(),
        sd.SpecDecodeConfig(num_speculative_tokens=4, rejection_sample_method="agreement"),
        sd.LogprobsConfig(),
        num_slots=num_slots,
        max_length=960,
        exact=True,
    )
    known = jnp.zeros((count, 960), jnp.int32)
    texts: dict[bool, list[tuple[list[int], list[bytes]]]] = {}
    row: dict[str, Any] = dict(layers=layers, slots=num_slots, k=4, read_again=0)
    for has_drafts in (False, True):
        driver = lm.EngineDriver(engine, params, known)
        driver.warm_up()
        begin = time.perf_counter()
        # The second time only what the first made
        order = [i for i in range(count) if not has_drafts or texts[False][i][0]]
        waiting = [int(i) for i in (rng.permutation(order) if has_drafts else order)]
        ids: dict[int, int] = {}
        found: list[tuple[list[int], list[bytes]]] = [([], []) for _ in range(count)]
        steps = 0
        while waiting or not driver.is_idle:
            is_late = not has_drafts and time.perf_counter() - begin > seconds
            waiting = [] if is_late else waiting
            # They come in bursts.
            for i in waiting[: int(rng.integers(30)) if driver.num_queued < 20 else 0]:
                asked = dict(max_new_tokens=int(budgets[i]), temperature=0.8 * (i % 2), seed=i)
                asked |= {} if has_drafts else {"max_drafts": 0}
                ids[driver.submit(prompts[i], **asked)] = i
                waiting = waiting[1:]
            if has_drafts and steps % 40 == 39:
                begun = [number for number, i in ids.items() if found[i][0]]
                row["read_again"] += bool(begun) and driver.preempt(int(rng.choice(begun[-300:])))
            for update in driver.step():
                i = ids[update.request_id]
                found[i][0].extend(update.token_ids)
                logprobs = np.asarray(update.logprobs.logprobs)[: len(update.token_ids)]
                found[i][1].extend(x.tobytes() for x in logprobs)
            steps += 1
        texts[has_drafts] = found
        name = "with drafts" if has_drafts else "without"
        row[name] = dict(steps=steps, seconds=round(time.perf_counter() - begin, 1))
        print(name, row[name], flush=True)
        rows = [(prompts[i] + ids + [0] * 960)[:960] for i, (ids, _) in enumerate(found)]
        known = jnp.array(rows, jnp.int32)
        del driver
    for kind, first in (("greedy", 0), ("agreement", 1)):
        pairs = [*zip(texts[False][first::2], texts[True][first::2], strict=True)]
        row[kind] = dict(
            texts=sum(bool(a[0]) for a, _ in pairs),
            tokens=sum(len(a[0]) for a, _ in pairs),
            different_tokens=sum(sum(map(operator.ne, a[0], b[0])) for a, b in pairs),
            different_bits=sum(sum(map(operator.ne, a[1], b[1])) for a, b in pairs),
            different_lengths=sum(len(a[0]) != len(b[0]) for a, b in pairs),
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
    parser.add_argument("--large", type=int, help="tokens of each kind of the large model")
    parser.add_argument("--layers", type=int, default=16, help="of the large model")
    parser.add_argument("--slots", type=int, default=128, help="of the large model's engine")
    parser.add_argument("--seconds", type=float, default=300, help="after which none is begun")
    parser.add_argument("--texts", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=200)
    options = parser.parse_args()
    if options.cell is not None:
        row = measure(*CELLS[options.cell], options.texts, options.tokens)
        options.out.write_text(json.dumps(row))
        return
    if options.large is not None:
        row = measure_large(options.large, options.layers, options.slots, options.seconds)
        write(options.out, [row])
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

    write(options.out, [run(cell) for cell in range(len(CELLS))])


def write(out: Path, rows: list[dict[str, Any]]) -> None:
    device = jax.devices()[0].device_kind
    date = time.strftime("%Y-%m-%d")
    command = "python benchmarks/bench_exact_gpu.py " + " ".join(sys.argv[1:])
    result = dict(date=date, command=command, device=device, jax=jax.__version__, rows=rows)
    out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
