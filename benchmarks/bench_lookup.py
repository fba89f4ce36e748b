"""Lookup, heads and both on texts that repeat themselves in part, and on one that does not.

    python benchmarks/bench_lookup.py                  # the embedded target
    python benchmarks/bench_lookup.py --target DIR     # a published model, with lookups alone

One request at a time, all drafters in turn. Then requests that resemble each other, one after
another, with a history and without.
"""

from __future__ import annotations

import functools
import pathlib
import time
from typing import Any, NamedTuple

import jax
import measure

import jax_specdec as sd
from jax_specdec import lm

AGENT = """Thought: I need to see which files there are.
Action: run
Action Input: {{"command": "ls {0}"}}
Observation: {0}/main.py {0}/utils.py

Thought: I need to read the file {0}/main.py.
Action: run
Action Input: {{"command": "cat {0}/main.py"}}
Observation: from utils import read_{0}

Thought: I need to read the file {0}/utils.py.
"""

# (prompt, temperature)
TEXTS = {
    "edit": (
        "def total_price(items, tax):\n    total = 0\n    for item in items:\n"
        "        if item.price is None:\n            continue\n"
        "        total = total + item.price * item.quantity\n    return total * (1 + tax)\n\n\n"
        "# The same, with result in place of total:\n\n\ndef total_price(items, tax):\n"
        "    result = 0\n",
        0.0,
    ),
    "agent": (AGENT.format("reports"), 0.0),
    "JSON": (
        "".join(
            f'{{"name": "{name}", "age": {age}, "city": "{city}", "languages": ["{own}", '
            '"English"]}\n'
            for name, age, city, own in (
                ("Alice", 31, "Paris", "French"),
                ("Bruno", 27, "Berlin", "German"),
                ("Carla", 44, "Rome", "Italian"),
            )
        ),
        0.0,
    ),
    "code": ("class Box:\n    def __init__(self, width):\n        self.width = width\n\n", 0.0),
    "noise": ("qzj vkw", 4.0),
}


class Draft(NamedTuple):
    drafter: Any
    params: Any = None


def main(command_line: list[str] | None = None) -> None:
    parser = measure.parser(__doc__, repeats=5)
    parser.add_argument("--target", type=pathlib.Path, help="a checkpoint")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--texts", nargs="*", default=list(TEXTS), choices=TEXTS)
    parser.add_argument("--drafters", nargs="*", help="some of them (default: all)")
    parser.add_argument("-k", type=int, default=6, help="drafts")
    options = parser.parse_args(command_line)
    config = sd.SpecDecodeConfig(num_speculative_tokens=options.k)
    lookup = lm.SuffixDrafter()
    drafts = {"ngram": Draft(lm.NGramDrafter()), "suffix": Draft(lookup)}
    if options.target is None:
        target, _ = lm.load_embedded_pair()
        encode = lm.encode_bytes
        head, head_params = lm.load_embedded_head(target)
        eagle3 = lm.Eagle3Drafter(head)
        drafts["eagle3"] = Draft(eagle3, head_params)
        drafts["suffix+eagle3"] = Draft(lm.FirstOf(lookup, eagle3), (None, head_params))
        block = lm.load_embedded_head(target, "dspark")
        dspark = lm.BlockDrafter(block.model)
        drafts["dspark"] = Draft(dspark, block.params)
        drafts["suffix+dspark"] = Draft(lm.FirstOf(lookup, dspark), (None, block.params))
    else:
        target = lm.load_huggingface(options.target, "float32")
        encode = lm.load_tokenizer(options.target).encode
    name = "lookup_cpu" if options.target is None else f"lookup_cpu_{options.target.name}"
    drafts = {x: one for x, one in drafts.items() if x in (options.drafters or drafts)}
    about = dict(k=options.k, new_tokens=options.max_new_tokens)
    results = measure.Results(name, ("text", "drafter"), **about)
    for text in options.texts:
        prompt, temperature = encode(TEXTS[text][0]), TEXTS[text][1]
        common = dict(max_new_tokens=options.max_new_tokens, temperature=temperature)
        results.add(in_turn(target, prompt, drafts, config, options.repeats, text, common))
    if "agent" in options.texts and "suffix" in drafts:
        prompts = [encode(AGENT.format(x)) for x in ("orders", "users", "items", "events")]
        for history in (0, 8192):
            results.add([after_others(target, prompts, config, history, options.max_new_tokens)])
    columns = ("text", "drafter", "tokens per pass", "speed")
    measure.show(name, [{column: row[column] for column in columns} for row in results.rows])


def in_turn(
    target: Any,
    prompt: list[int],
    drafts: dict[str, Draft],
    config: sd.SpecDecodeConfig,
    repeats: int,
    text: str,
    common: dict[str, Any],
) -> list[dict[str, Any]]:
    """A row for each drafter: tokens per pass, and CPU time relative to plain decoding."""
    runs: dict[str, Any] = {
        name: functools.partial(
            lm.generate,
            *target,
            [prompt],
            config=config,
            drafter=draft.drafter,
            draft_params=draft.params,
            **common,
        )
        for name, draft in drafts.items()
    }
    runs["plain"] = functools.partial(lm.generate_plain, *target, [prompt], **common)
    samples: dict[str, list[float]] = {name: [] for name in runs}
    outputs: dict[str, lm.GenerateOutput] = {}

    def counted(name: str) -> None:
        begin = time.process_time()
        outputs[name] = runs[name]()
        samples[name].append(time.process_time() - begin)

    timed = {name: functools.partial(counted, name) for name in runs}
    measure.alternate(timed, repeats, warm_up=1)
    seconds = {name: measure.median(all_[1:]) for name, all_ in samples.items()}
    rows = []
    for name in ("plain", *drafts):
        stats = sd.AcceptanceStats.from_steps(outputs[name].steps)
        rows.append(
            {
                "text": text,
                "drafter": name,
                "tokens per pass": f"{stats.tokens_per_target_pass:.2f}",
                "speed": f"{seconds['plain'] / seconds[name]:.2f}",
                "cpu_seconds": seconds[name],
            }
        )
    return rows


def after_others(
    target: Any, prompts: list[list[int]], config: sd.SpecDecodeConfig, history: int, new: int
) -> dict[str, Any]:
    """A row for requests that resemble each other, one at a time."""
    drafter = lm.SuffixDrafter(history=history)
    longest = max(map(len, prompts)) + new
    engine = lm.Engine(target.model, drafter, config, num_slots=1, max_length=longest)
    driver = lm.EngineDriver(engine, target.params, drafter.init_params())
    driver.warm_up()
    begin, num_tokens = time.process_time(), 0
    for prompt in prompts:
        driver.submit(prompt, max_new_tokens=new)
        while not driver.is_idle:
            num_tokens += sum(len(update.token_ids) for update in driver.step())
    return {
        "text": f"{len(prompts)} agents",
        "drafter": f"suffix, history of {history}",
        "tokens per pass": f"{driver.stats().tokens_per_target_pass:.2f}",
        "speed": "",
        "cpu_seconds": (time.process_time() - begin) / num_tokens * new,
    }


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main()
