"""Whole engines beside each other on one GPU: ours, vLLM and transformers.

    python benchmarks/bench_engines_gpu.py --vllm DIR

A target of the shape of Llama 3 8B, random weights in bfloat16, temperature 0.8, no stop tokens;
plain, or with K = 4 drafts by an EAGLE-3 head of 32000 ids, a draft model of the shape of Llama 3.2
1B, or a lookup of n-grams, accepted at a synthetic length of 3.0. The same prompts and budgets for
each engine, each of which runs in a process of its own, one after another:

- *steady*: as many requests as can run come at once; tokens a second from when all have their
  first token until the first of them ends.
- *with ends*: the same until the last of them ends; budgets are between half and one and a half
  of their mean, so the batch shrinks.
- *arrivals*: requests come at random times, at half the rate that keeps this engine saturated.

Of transformers, plain decoding has a static cache and a compiled forward pass; its assisted
decoding serves one request, and has no synthetic length: its rate is what its steps would give.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import gc
import importlib.metadata
import itertools
import math
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from typing import Any

import engine_load
import jax
import llamas
import measure
import plots
import vllm_engine
from bench_steps_gpu import K, make_head

import jax_specdec as sd
from jax_specdec import lm
from jax_specdec.lm.decoding.core import PLAIN
from jax_specdec.lm.drafting.drafter import NoDrafter

IDENTITY = ("kind", "engine", "way", "batch", "slots")
WAYS = ("eagle3", "plain", "draft", "ngram")
ENGINES = {"ours": WAYS, "vLLM": WAYS, "transformers": ("plain", "draft", "ngram")}
"""What each engine can do; transformers has no EAGLE-3."""
LENGTH = 3.0
SYNTHETIC = {
    "num_speculative_tokens": K,
    "rejection_sample_method": "synthetic",
    "synthetic_acceptance_length": LENGTH,
}
TEMPERATURE = 0.8
NGRAM = 1, 3
LOAD = 0.5
"""Requests that come, of those that an engine can serve."""
WAITING = 2
"""Batches of requests that wait when it is measured what an engine can serve."""
SHARPNESS = 50.0
"""How much larger the logits of `engine_load.ALPHABET` are than those of random weights."""


@dataclasses.dataclass(frozen=True)
class Shapes:
    """Models, and the requests that they serve."""

    target: lm.models.DecoderConfig = llamas.LLAMA_3_8B
    draft: lm.models.DecoderConfig = llamas.LLAMA_3_1B
    head_ids: int = 32000
    sizes: engine_load.Sizes = engine_load.Sizes()


TINY = Shapes(llamas.TINY, llamas.TINY, 32, engine_load.Sizes(8, 4, 12, 64))


Rows = Iterator[dict[str, Any]]


class Ours(engine_load.Engine):
    """`EngineDriver`, two steps ahead, of an engine of so many slots."""

    def __init__(self, way: str, shapes: Shapes, slots: int) -> None:
        self._model = lm.models.Llama(shapes.target, "bfloat16")
        self._params = llamas.random_params(self._model, 0)
        lm_head = self._params["lm_head"]  # [H, V]
        self._params["lm_head"] = lm_head.at[:, : engine_load.ALPHABET].multiply(SHARPNESS)
        self._draft_params: Any = None
        drafter = self._make_drafter(way, shapes)
        engine = lm.Engine(
            self._model,
            drafter,
            PLAIN if way == "plain" else sd.SpecDecodeConfig(**SYNTHETIC),
            num_slots=slots,
            max_length=shapes.sizes.max_length,
            prefill_sizes=(shapes.sizes.prompt,),
        )
        weights = self._params, self._draft_params
        # Prompts are read as they come, as vLLM does, and not one before each step.
        self._driver = lm.EngineDriver(engine, *weights, max_steps_ahead=2, max_prefills=None)
        self._numbers: dict[int, int] = {}

    def _make_drafter(self, way: str, shapes: Shapes) -> lm.Drafter:
        """Returns a drafter, whose weights it makes."""
        if way == "plain":
            return NoDrafter()
        if way == "ngram":
            return lm.NGramDrafter(*NGRAM)
        if way == "draft":
            model = lm.models.Llama(shapes.draft, "bfloat16")
            self._draft_params = llamas.random_params(model, 1)
            return lm.ModelDrafter(model)
        head = make_head(shapes.target, shapes.head_ids)
        self._draft_params = jax.jit(head.init_params)(jax.random.key(2), self._params)
        self._draft_params["embed_tokens"] = self._params["embed_tokens"]  # one array, as loaded
        return lm.Eagle3Drafter(head)

    def submit(self, number: int, request: engine_load.Request) -> None:
        request_id = self._driver.submit(
            request.prompt, max_new_tokens=request.budget, temperature=TEMPERATURE, seed=number
        )
        self._numbers[request_id] = number

    def step(self) -> list[engine_load.Event]:
        updates = self._driver.step()
        failed = [one for one in updates if one.finish_reason == "failed"]
        if failed:
            raise RuntimeError(f"requests failed: {failed}")
        return [
            (self._numbers[one.request_id], len(one.token_ids), one.finish_reason is not None)
            for one in updates
        ]

    @property
    def is_idle(self) -> bool:
        return self._driver.is_idle


def published(config: lm.models.DecoderConfig, **more: Any) -> dict[str, Any]:
    """Returns the shape of a Llama as the `config.json` of a published model has it."""
    layer = config.layers[0]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": layer.intermediate_size,
        "num_hidden_layers": len(config.layers),
        "num_attention_heads": layer.num_attention_heads,
        "num_key_value_heads": layer.num_key_value_heads,
        "head_dim": layer.head_dim,
        "rope_theta": layer.rotation.rope_theta,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "max_position_embeddings": 8192,
        "tie_word_embeddings": config.tie_word_embeddings,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "attention_bias": False,
        "mlp_bias": False,
    } | more


def make_vllm(way: str, shapes: Shapes, options: argparse.Namespace) -> engine_load.Engine:
    """Returns vLLM with random weights."""
    vllm_engine.import_vllm(options.vllm)
    folder = pathlib.Path(tempfile.mkdtemp())
    layer = llamas.cut(shapes.target, 1)
    head = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": shapes.head_ids}
    drafter = {
        "plain": {},
        "ngram": dict(zip(("prompt_lookup_min", "prompt_lookup_max"), NGRAM, strict=True)),
        "draft": {"model": vllm_engine.model_folder(folder / "draft", published(shapes.draft))},
        "eagle3": {"model": vllm_engine.model_folder(folder / "head", published(layer, **head))},
    }[way]
    # Of its two lookups, the one that runs on the GPU and between steps ahead.
    method = {"draft": "draft_model", "ngram": "ngram_gpu"}.get(way, way)
    engine = vllm_engine.VllmEngine(
        vllm_engine.model_folder(folder / "target", published(shapes.target)),
        batch=options.slots,
        max_length=shapes.sizes.max_length,
        temperature=TEMPERATURE,
        speculative=None if way == "plain" else {**SYNTHETIC, "method": method, **drafter},
        load_format="dummy",
    )
    engine.llm.apply_model(sharpen)
    return engine


def sharpen(model: Any) -> None:
    """Makes a model of PyTorch sample ids of the alphabet alone, whatever its random weights."""
    import torch

    with torch.inference_mode():
        rows = model.lm_head.weight[: engine_load.ALPHABET]  # [A, H]
        rows.normal_().mul_(1e4)  # vLLM's random norms are below .001


def make_transformers(way: str, shapes: Shapes, options: argparse.Namespace) -> engine_load.Engine:
    """Returns transformers with random weights."""
    import transformers_engine

    device = "cpu" if options.tiny else "cuda"
    engine = transformers_engine.TransformersEngine(
        published(shapes.target),
        device,
        temperature=TEMPERATURE,
        assistant=published(shapes.draft) if way == "draft" else None,
        max_ngram=NGRAM[1] if way == "ngram" else 0,
        num_drafts=K,
    )
    sharpen(engine.model)
    return engine


def make_engine(name: str, way: str, options: argparse.Namespace) -> engine_load.Engine:
    """Returns an engine, compiled for nothing yet."""
    shapes = TINY if options.tiny else Shapes()
    if name == "ours":
        return Ours(way, shapes, options.slots)
    return {"vLLM": make_vllm, "transformers": make_transformers}[name](way, shapes, options)


def batch_rows(
    engine: engine_load.Engine, requests: list[engine_load.Request], repeats: int
) -> Rows:
    """Yields a row of requests that come at once."""
    begin = time.perf_counter()
    engine.prepare()
    engine.serve(requests)  # compiles, and is not counted
    ready = time.perf_counter() - begin
    logs = [engine.serve(requests) for _ in range(repeats)]
    runs = [engine_load.batch_figures(log) for log in logs]
    median = jax.tree.map(lambda *samples: measure.median(samples), *runs)
    samples = [
        {**run, "steps_ms": engine_load.step_ms(log)} for run, log in zip(runs, logs, strict=True)
    ]
    yield {"kind": "batch", "ready_s": ready, **median, "samples": samples}


def arrival_rows(
    engine: engine_load.Engine, requests: list[engine_load.Request], batch: int, mean: float
) -> Rows:
    """Yields a row of requests that come at random times, after it was found how many can."""
    saturated = engine_load.saturated_tokens(engine.serve(requests), batch)
    rate = LOAD * saturated / mean
    due = engine_load.poisson(len(requests), rate, seed=batch + 2)
    found = engine_load.arrival_figures(engine.serve(requests, due), due, requests)
    yield {"kind": "arrivals", "saturated": saturated, "requests_per_second": rate, **found}


def measure_part(
    send: multiprocessing.connection.Connection, name: str, way: str, options: argparse.Namespace
) -> None:
    """Measures an engine in this process, and sends each of its rows; exits with 1 if one fails."""
    os.environ.pop("XLA_PYTHON_CLIENT_PREALLOCATE", None)
    clock = measure.Clock(options.deadline - time.perf_counter())
    sizes = (TINY if options.tiny else Shapes()).sizes
    engine = make_engine(name, way, options)
    clock.say(f"{name}, {way}: made")
    gc.collect()
    gc.freeze()  # as vLLM does
    status = 0
    for batch in options.batches:
        cell = f"{name}, {way}, B = {batch}"
        if batch > engine.most_requests or clock.is_late(cell):
            continue
        requests = sizes.requests(batch, seed=batch)
        parts = [batch_rows(engine, requests, options.repeats)]
        if batch == options.slots and engine.has_arrivals and not options.no_arrivals:
            requests = sizes.requests((WAITING + 1) * batch, seed=batch + 1)
            parts.append(arrival_rows(engine, requests, batch, sizes.mean))
        try:
            for row in itertools.chain.from_iterable(parts):
                about = {"engine": name, "way": way, "batch": batch, "slots": options.slots}
                send.send({**about, **row})
                clock.say(f"{cell}: {in_words(row)}")
        except Exception:  # one must not cost the others
            clock.say(f"{cell}: FAILED\n{traceback.format_exc(limit=-4)}")
            status = 1
    engine.close()
    send.close()
    sys.exit(status)


def in_words(row: dict[str, Any]) -> str:
    if row["kind"] == "arrivals":
        return f"{row['saturated']:.0f} tokens/s while saturated, arrivals measured"
    steady, with_ends = row["steady"], row["with_ends"]
    return (
        f"steady {steady['tokens_per_second']:.0f} tokens/s, a step {steady['step_ms']:.2f} ms of "
        f"{steady['emitted']:.2f} tokens, with ends {with_ends['tokens_per_second']:.0f}"
    )


def run_part(
    name: str, way: str, options: argparse.Namespace, results: measure.Results
) -> int | None:
    """Measures an engine in a process of its own; returns its exit code."""
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=measure_part, args=(send, name, way, options))
    path = list(sys.path)
    if name == "vLLM":
        sys.path.insert(0, str(options.vllm))  # all that the process imports, it imports from there
    process.start()
    sys.path[:] = path
    send.close()
    while True:
        try:
            results.add([receive.recv()])
        except EOFError:
            break
    process.join(timeout=20)
    if process.exitcode is None:  # all rows are there; what PyTorch waits for is no concern
        process.kill()
        process.join()
        return 0
    return process.exitcode


def by_cell(rows: list[dict[str, Any]], kind: str) -> dict[tuple[str, int], dict[str, Any]]:
    """Returns the rows of a kind, by way and batch, then by engine; of the most slots."""
    found: dict[tuple[str, int], dict[str, Any]] = collections.defaultdict(dict)
    order = sorted(
        (row for row in rows if row["kind"] == kind),
        key=lambda row: (list(plots.WHOLE).index(row["way"]), row["batch"], row["slots"]),
    )
    for row in order:
        found[row["way"], row["batch"]][row["engine"]] = row
    return found


def rate(row: dict[str, Any] | None, part: str, length: float = LENGTH) -> float:
    """Returns tokens a second; where a length is not synthetic, those that it would give.

    Args:
      row: of the kind "batch"; None for NaN.
      part: "steady" or "with_ends".
      length: tokens that a step with drafts is to give a request.
    """
    if row is None:
        return math.nan
    if row["engine"] == "transformers" and row["way"] != "plain":
        return row["batch"] * length / row[part]["step_ms"] * 1e3
    return row[part]["tokens_per_second"]


def cells(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the table of batches: tokens a second, and ours divided by vLLM's."""
    table = []
    for (way, batch), engines in by_cell(rows, "batch").items():
        line: dict[str, Any] = {"drafts by": plots.WHOLE[way], "B": batch}
        for part in ("steady", "with_ends"):
            rates = {name: rate(engines.get(name), part) for name in ENGINES}
            title = part.replace("_", " ")
            line |= {f"{title}, {name}": number(each) for name, each in rates.items()}
            line[f"{title}, ours / vLLM"] = number(rates["ours"] / rates["vLLM"], 2)
        table.append(line)
    return table


def arrival_cells(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the table of arrivals."""
    return [
        {
            "drafts by": plots.WHOLE[way],
            "B": batch,
            "engine": name,
            "saturated, tokens/s": number(row["saturated"]),
            "then requests/s": number(row["requests_per_second"], 1),
            "tokens/s": number(row["tokens_per_second"]),
            "TTFT, ms: median": number(row["first_ms"]["p50"], 1),
            "TTFT, 99%": number(row["first_ms"]["p99"], 1),
            "TPOT, ms: median": number(row["token_ms"]["p50"], 1),
            "TPOT, 99%": number(row["token_ms"]["p99"], 1),
        }
        for (way, batch), engines in by_cell(rows, "arrivals").items()
        for name, row in engines.items()
    ]


def number(x: float, digits: int = 0) -> str:
    return "-" if math.isnan(x) else f"{x:,.{digits}f}"


def section(document: dict[str, Any]) -> Iterator[str]:
    """Yields what the page docs/engines.md says of a file of results, in Markdown."""
    runs = document["runs"]
    devices = {run["device"].split(": ")[-1] for run in runs}
    date = max(run["date"] for run in runs)[:10]
    ran = {row["engine"] for row in document["rows"]}
    names = "jax", "torch", *sorted(ran - {"ours"})
    programs = {f"{name} {run[name]}" for run in runs for name in names if run.get(name)}
    picture = "../benchmarks/results/engines_gpu_tokens_per_second.png"
    yield f"![Tokens per second of each engine over requests, by drafter]({picture})\n"
    yield f"[{', '.join(sorted(devices))}, {date}](../benchmarks/results/engines_gpu.json);"
    yield f"{', '.join(sorted(programs))}. Tokens a second:"
    for table in (cells(document["rows"]), arrival_cells(document["rows"])):
        # What no row has, such as an engine that did not run, is no column.
        titles = [title for title in table[0] if {line[title] for line in table} != {"-"}]
        yield f"\n| {' | '.join(titles)} |"
        yield f"| --- |{' ---: |' * (len(titles) - 1)}"
        for line in table:
            yield f"| {' | '.join(str(line[title]) for title in titles)} |"


def versions(options: argparse.Namespace) -> dict[str, str | None]:
    """Returns the versions of what the other engines need; None of what is not there."""
    found: dict[str, str | None] = {"vLLM": options.vllm and vllm_engine.version(options.vllm)}
    name = "VLLM_ENABLE_V1_MULTIPROCESSING"
    found[name] = os.environ.get(name, "1")  # its default
    for name in ("torch", "transformers", "triton"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def main(command_line: list[str] | None = None) -> int:
    parser = measure.gpu_parser(__doc__, repeats=3, seconds=560)
    add = parser.add_argument
    add("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    add("--ways", nargs="+", choices=WAYS, default=WAYS)
    add("--batches", type=int, nargs="+", default=[32, 8, 1, 64])
    add("--slots", type=int, help="the most requests of an engine; the largest batch by default")
    add("--no-arrivals", action="store_true", help="which come for as many requests as slots")
    add("--vllm", type=pathlib.Path, metavar="DIR", help="has vLLM; see docs/engines.md")
    add("--show", action="store_true", help="print what the file of results has, in Markdown")
    options = parser.parse_args(command_line)
    if options.show:
        folder = options.output or measure.RESULTS
        print(*section(measure.load(folder / "engines_gpu.json")), sep="\n")
        return 0
    # The engines need the memory, and this process has none of them.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    clock = measure.begin(options)
    if clock is None:
        return 0
    options.slots = options.slots or max(options.batches)
    options.deadline = time.perf_counter() + options.seconds
    # What XLA has found out about a product in one process, others need not.
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", tempfile.mkdtemp())
    about = versions(options)
    absent = [name for name in options.engines if name != "ours" and about[name] is None]
    if absent:
        clock.say("not there, and left out:", *absent)
    sizes = dataclasses.asdict((TINY if options.tiny else Shapes()).sizes)
    results = measure.Results(
        "engines_gpu", IDENTITY, options.output, **about, sizes=sizes, k=K, length=LENGTH
    )
    command = results.run["command"].replace(str(options.vllm), "DIR")
    results.run["command"] = command
    failed = []
    for way, name in itertools.product(options.ways, options.engines):
        if name in absent or way not in ENGINES[name] or clock.is_late(f"{name}, {way}"):
            continue
        if run_part(name, way, options, results):
            failed.append(f"{name}, {way}")
    rows = results.document["rows"]
    print("wrote", results.path.name, *(drawn.name for drawn in plots.draw(results.path)))
    measure.show("Tokens a second of whole engines", cells(rows), width=170)
    measure.show("Requests at random times", arrival_cells(rows), width=150)
    for part in failed:
        print(f"FAILED: {part}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
