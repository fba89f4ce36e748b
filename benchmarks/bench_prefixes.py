"""What it saves to begin a prompt with what an earlier request left in a slot.

    python benchmarks/bench_prefixes.py --size 8b --out benchmarks/results/prefixes_gpu.json
    python benchmarks/bench_prefixes.py --size 135m --out benchmarks/results/prefixes_cpu.json

A target of the shape of Llama 3 8B in bfloat16, or of SmolLM2 135M in float32, and an EAGLE-3 head,
random weights, greedy, K = 4, one engine. What is to be read anew has a salt of its own, which no
other request has, so all runs use the same programs, in turn:

- *conversation*: the time to the first token of the fifth turn, of 4000 tokens: in the slot of the
  first four turns, beside them (the slot is copied), and read anew.
- *prefix*: the same for a prompt of 64 tokens after so many that were there before.
- *system prompt*: the time that requests take which share 2000 tokens, and all come at once.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import llamas
import measure
import numpy as np
from bench_steps_gpu import make_head

import jax_specdec as sd
from jax_specdec import lm


class Size(NamedTuple):
    """A target, and tokens: of a conversation, a system prompt, prefixes, and answers."""

    target: lm.models.DecoderConfig
    dtype: str
    num_ids: int  # of the head
    slots: int
    requests: int
    conversation: int
    system: int
    prefixes: tuple[int, ...]
    own: int
    answer: int
    prefill_sizes: tuple[int, ...]


_LAYER = dataclasses.replace(
    llamas.LLAMA_3_1B.layers[0],
    num_attention_heads=9,
    num_key_value_heads=3,
    intermediate_size=1536,
)
SMOLLM2_135M = dataclasses.replace(
    llamas.LLAMA_3_1B, vocab_size=49152, hidden_size=576, layers=(_LAYER,) * 30
)
PREFIXES = (32, 64, 128, 256, 512, 1024, 2048)
SIZES = {
    "8b": Size(
        llamas.LLAMA_3_8B, "bfloat16", 32000, 32, 32, 4000, 2000, PREFIXES, 64, 64, (64, 256, 1024)
    ),
    "135m": Size(
        SMOLLM2_135M, "float32", 8192, 8, 8, 4000, 2000, PREFIXES[:5], 64, 16, (64, 256)
    ),
    "tiny": Size(llamas.TINY, "float32", 32, 4, 6, 200, 64, (32, 64), 16, 4, (32, 64)),
}  # fmt: skip
TURNS = 5


def make_driver(size: Size) -> lm.EngineDriver:
    """A driver that has compiled all of its programs."""
    target = lm.models.Llama(size.target, size.dtype)
    params = llamas.random_params(target, 0)
    head = dataclasses.replace(make_head(size.target, size.num_ids), dtype=size.dtype)
    head_params = jax.jit(head.init_params)(jax.random.key(2), params)
    head_params["embed_tokens"] = params["embed_tokens"]
    engine = lm.Engine(
        target,
        lm.Eagle3Drafter(head),
        sd.SpecDecodeConfig(num_speculative_tokens=4),
        num_slots=size.slots,
        max_length=size.conversation + size.own + size.answer,
        prefill_sizes=size.prefill_sizes,
        prefix_caching=True,
    )
    driver = lm.EngineDriver(engine, params, head_params)
    driver.warm_up()
    return driver


class Asked(NamedTuple):
    """What became of requests that came at once."""

    seconds: float  # until all had ended
    first: list[float]  # seconds to the first token of each
    reused: list[int]  # tokens of each prompt that were not read
    texts: list[list[int]]  # prompts and answers


def ask(driver: lm.EngineDriver, prompts: list[list[int]], salts: list[str], new: int) -> Asked:
    """Serves requests, nobody else running."""
    begin = time.perf_counter()
    numbers = [
        driver.submit(prompt, max_new_tokens=new, cache_salt=salt)
        for prompt, salt in zip(prompts, salts, strict=True)
    ]
    first: dict[int, float] = {}
    reused: collections.Counter[int] = collections.Counter()
    texts = dict(zip(numbers, map(list, prompts), strict=True))
    while not driver.is_idle:
        for update in driver.step():
            first.setdefault(update.request_id, time.perf_counter() - begin)
            reused[update.request_id] += update.num_reused
            texts[update.request_id] += update.token_ids
    seconds = time.perf_counter() - begin
    return Asked(seconds, [*first.values()], [reused[i] for i in numbers], [*texts.values()])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.partition("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="8b")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=450, help="begin nothing after these")
    options = parser.parse_args(arguments)
    size = SIZES[options.size]
    clock = measure.Clock(options.seconds)
    rng = np.random.default_rng(0)
    driver = make_driver(size)
    clock.say("compiled; calls beside a step read at most", driver.chunk_size, "tokens")

    def tokens(count: int) -> list[int]:
        return rng.integers(0, size.target.vocab_size, count).tolist()

    rows: list[dict[str, Any]] = []

    def add(**row: Any) -> None:
        rows.append(row)
        clock.say(row)
        about = measure.environment() | dict(size=options.size, chunk_size=driver.chunk_size)
        measure.write(options.out, about | dict(rows=rows))

    def first_tokens(what: str, prefix: int, prepared: Any) -> None:
        """Times a first token after a text that `prepared` leaves in a slot."""
        samples: dict[str, list[float]] = {"in its slot": [], "copied": [], "anew": []}
        found: dict[str, int] = {}
        for repeat in range(options.repeats + 1):
            if clock.is_late(what, prefix, repeat):
                break
            driver.set_params(driver.weights[0])  # all slots are empty
            text = prepared("")
            for name in samples:
                # The second goes on otherwise than the first, which keeps its slot.
                prompt = text + tokens(size.own)
                result = ask(driver, [prompt], ["anew" * (name == "anew")], 1)
                found[name] = result.reused[0]
                if repeat:  # the first is for caches of the host
                    samples[name].append(result.first[0])
        add(
            kind=what,
            tokens=prefix + size.own,
            reused=found,
            ms={name: round(1e3 * measure.median(x), 2) for name, x in samples.items() if x},
            samples={name: [round(1e3 * one, 2) for one in x] for name, x in samples.items()},
        )

    def conversation(salt: str) -> list[int]:
        """The text after all turns but the last; each has a question and an answer."""
        text: list[int] = []
        for turn in range(TURNS - 1):
            goal = (size.conversation - size.own) * (turn + 1) // (TURNS - 1)
            text += tokens(goal - size.answer - len(text))
            (text,) = ask(driver, [text], [salt], size.answer).texts
        return text

    first_tokens("conversation", size.conversation - size.own, conversation)
    for prefix in size.prefixes:
        first_tokens(
            "prefix",
            prefix,
            lambda salt, n=prefix: ask(driver, [tokens(n + 2)], [salt], 1).texts[0][: n + 1],
        )

    samples: dict[str, list[Asked]] = {"shared": [], "anew": []}
    for repeat in range(options.repeats + 1):
        if clock.is_late("system prompt", repeat):
            break
        system = tokens(size.system)
        prompts = [system + tokens(size.own) for _ in range(size.requests)]
        for name, runs in samples.items():
            salts = [f"{name} {repeat}" + f" {i}" * (name == "anew") for i in range(size.requests)]
            result = ask(driver, prompts, salts, size.answer)
            if repeat:
                runs.append(result)
    for name, runs in samples.items():
        if runs:
            seconds = measure.median([one.seconds for one in runs])
            add(
                kind="system prompt",
                way=name,
                requests=size.requests,
                tokens=size.system + size.own,
                reused=sum(runs[-1].reused),
                tokens_per_second=round(size.requests * size.answer / seconds, 1),
                first_token_ms=round(
                    1e3 * measure.median([statistics.fmean(x.first) for x in runs]), 1
                ),
                samples=[round(one.seconds, 4) for one in runs],
            )
    clock.say("done")


if __name__ == "__main__":
    main()
