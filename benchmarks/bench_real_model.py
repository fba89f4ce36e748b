"""What each drafter gains with a published model and heads that were trained for it, on real text.

    python tools/make_model.py smollm2-135m smollm2
    python benchmarks/bench_real_model.py --target smollm2 --heads training/heads

Names of heads there hold `eagle3`, `dflash` or `dspark`. The prompts are of five kinds
(`real_model_prompts.py`); texts end at a stop token or after a budget. Every way of decoding takes
its turn with each batch.

- *generate*: one request, a batch of each kind, 32 of all kinds. What texts that end after one
  token take in the meantime is subtracted, which is the time in which the prompts are read. Plain
  decoding runs twice, with one row a pass and with K + 1, and the faster is what others are
  compared with: on GPUs a pass over one row of a small model takes longer than one over five.
- *serve*: OpenAI's client and `jax-specdec serve`, as many clients as slots. Answers of the kind
  JSON follow a schema here, and there they need not.
- *budget*: an engine of 32 slots with K drafts in every step, and with as many as it chooses.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import itertools
import math
import pathlib
import re
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple
from unittest import mock

import jax
import measure
import real_model_prompts

import jax_specdec as sd
from jax_specdec import lm
from jax_specdec.lm.cli.run import Run
from jax_specdec.lm.decoding import generate
from jax_specdec.lm.loading import Models, TargetText, load_models, read_target_text

TEMPERATURES = (0.0, 0.8)
LONGEST_PROMPT = 288
K, BLOCK_K = 4, 7
"""Drafts of lookups and EAGLE-3 heads, and of block heads, where nothing else is said."""
NUM_NODES = 16
"""Of a tree: the newest token and the drafts."""
PLAIN = "plain"
WIDE_PLAIN = "plain, K + 1 rows"
TINY: dict[str, Any] = dict(
    ways=["ngram", "dspark"], batches=[1, 2], alone=1, temperatures=[0.8], new_tokens=24,
    slots=2, engine_slots=2, repeats=1,
)  # fmt: skip
IDENTITY = ("part", "way", "kind", "temperature", "batch", "k", "block_k")
EMBEDDED = pathlib.Path(sd.__file__).parent / "lm" / "weights"
ALL_KINDS = "all"


class Way(NamedTuple):
    """How texts are decoded: a drafter as `--draft` names it, drafts, and nodes of its trees."""

    draft: str
    k: int
    nodes: int | None = None


def make_ways(heads: pathlib.Path, options: argparse.Namespace) -> dict[str, Way]:
    """All ways of decoding but the plain one, by the names that the table has."""
    k = options.k
    ways = {name: Way(name, k) for name in ("ngram", "suffix")}
    found = {}
    for kind in ("eagle3", "dflash", "dspark"):
        for folder in sorted(heads.glob(f"*{kind}*")):
            is_eagle3 = kind == "eagle3"
            directory = next(folder.rglob("config.json")).parent
            draft = f"{'eagle3' if is_eagle3 else 'block'}:{directory}"
            name = folder.name[folder.name.index(kind) :]
            found[name] = Way(draft, k if is_eagle3 else options.block_k)
    ways |= found
    for name in (name for name in found if name in (options.trees or found)):
        ways[f"{name}, trees"] = found[name]._replace(nodes=NUM_NODES)
    for name in (name for name in found if name in (options.with_suffix or found)):
        ways[f"suffix+{name}"] = found[name]._replace(draft=f"suffix+{found[name].draft}")
    return {name: way for name, way in ways.items() if name in (options.ways or ways)}


@dataclasses.dataclass(frozen=True)
class Case:
    """What decodes, and what is decoded."""

    models: Models
    ways: dict[str, Way]
    prompts: dict[str, list[list[int]]]
    budget: int

    def drafting(self, way: Way) -> dict[str, Any]:
        """The arguments of `generate` that say how it drafts."""
        draft = self.models.drafters[way.draft]
        config = sd.SpecDecodeConfig(
            num_speculative_tokens=way.k,
            rejection_sample_method="standard" if way.nodes is None else "agreement",
        )
        drafter, config = draft.drafting(config, way.nodes)
        return {"drafter": drafter, "draft_params": draft.params, "config": config}

    def decode(
        self, name: str, prompts: list[list[int]], temperature: float, budget: int, seed: int = 0
    ) -> lm.GenerateOutput:
        """One batch, in one compiled loop."""
        common: dict[str, Any] = {
            "temperature": temperature,
            "max_new_tokens": budget,
            "stop_token_ids": self.models.text.stop_token_ids,
            "key": jax.random.key(seed),
        }
        target = self.models.target
        if name == PLAIN:
            return lm.generate_plain(*target, prompts, **common)
        if name == WIDE_PLAIN:
            config = sd.SpecDecodeConfig(
                num_speculative_tokens=K, rejection_sample_method="agreement"
            )
            return lm.generate_plain(*target, prompts, config=config, exact=True, **common)
        return lm.generate(*target, prompts, **self.drafting(self.ways[name]), **common)

    def batches(self, size: int, kind: str, alone: int) -> list[list[list[int]]]:
        """The batches of a kind; of one request each, so many."""
        if kind == ALL_KINDS:
            mixed = [one for some in zip(*self.prompts.values(), strict=True) for one in some]
            return [mixed[:size]]
        own = self.prompts[kind]
        return [[one] for one in own[:alone]] if size == 1 else [own[:size]]


@contextlib.contextmanager
def one_shape(budget: int) -> Iterator[None]:
    """Prompts of all lengths have one shape, and so do budgets: one program serves them all."""
    whole = LONGEST_PROMPT + 2 * budget

    def round_up(size: int) -> int:
        return LONGEST_PROMPT if size <= LONGEST_PROMPT else whole

    with mock.patch.object(generate, "round_up", round_up):
        yield


def by_generate(
    case: Case, results: measure.Results, options: argparse.Namespace, clock: measure.Clock
) -> Iterator[None]:
    """Rows of every batch size, temperature and kind; first yields when all is compiled."""
    watch = time.process_time if jax.default_backend() == "cpu" else time.perf_counter
    names = [PLAIN, WIDE_PLAIN, *case.ways]
    for size, name in itertools.product(options.batches, names):
        case.decode(name, case.batches(size, ALL_KINDS, 0)[0], 0.0, 1)
    clock.say(f"compiled {len(options.batches) * len(names)} programs")
    yield
    for size, temperature in itertools.product(options.batches, options.temperatures):
        for kind in (ALL_KINDS,) if size > len(case.prompts["chat"]) else options.kinds:
            if clock.is_late(f"B = {size}, T = {temperature}, {kind}"):
                continue
            runs = {name: Run(temperature, name) for name in names}
            batches = case.batches(size, kind, options.alone)
            readings = []
            for repeat, batch, name in itertools.product(range(options.repeats), batches, names):
                decode = functools.partial(
                    case.decode, name, batch, temperature, case.budget, repeat
                )
                seconds, output = timed(watch, decode)
                runs[name].seconds.append(seconds)
                runs[name].outputs.append(output)
                if repeat == 0 and batch is batches[0]:
                    one = functools.partial(case.decode, name, batch, temperature, 1)
                    readings.append(timed(watch, one)[0])
            # No way reads prompts much faster than another, and each alone varies.
            reading = statistics.median(readings)
            results.add(generate_rows(runs, kind, size, reading))
            clock.say(f"B = {size}, T = {temperature}, {kind}")


def timed(watch: Callable[[], float], call: Callable[[], Any]) -> tuple[float, Any]:
    begin = watch()
    output = call()
    return watch() - begin, output


def generate_rows(
    runs: dict[str, Run], kind: str, size: int, reading: float
) -> list[dict[str, Any]]:
    """Returns what each run took, without reading prompts, beside the faster plain one."""
    # The first token of each request belongs to the reading.
    speeds = {
        name: (run.num_tokens - size * len(run.outputs))
        / sum(seconds - reading for seconds in run.seconds)
        for name, run in runs.items()
    }
    fastest = max((PLAIN, WIDE_PLAIN), key=speeds.__getitem__)
    rows = []
    for name in (name for name in runs if name != WIDE_PLAIN):
        of = fastest if name == PLAIN else name
        row = generate_row(runs[of], runs[fastest], kind, size, speeds[of] / speeds[fastest])
        row |= {"way": name, "tokens_per_second": speeds[of], "reading": reading}
        if name == PLAIN:
            row["plain_tokens_per_second"] = {of: speeds[of] for of in (PLAIN, WIDE_PLAIN)}
        rows.append(row)
    return rows


def generate_row(run: Run, plain: Run, kind: str, size: int, speedup: float) -> dict[str, Any]:
    """Returns what a run accepted, and how many of its texts are those of a plain one."""
    texts = [output.completions for output in run.outputs]
    same = [
        a == b
        for x, y in zip(texts, plain.outputs, strict=True)
        for a, b in zip(x, y.completions, strict=True)
    ]
    return {
        "part": "generate",
        "kind": kind,
        "temperature": run.temperature,
        "batch": size,
        "tokens": run.num_tokens,
        "tokens_per_pass": run.stats.tokens_per_target_pass,
        "speedup": speedup,
        "same_texts": sum(same) / len(same) if run.temperature == 0 else None,
        "steps": run.num_target_passes,
        "samples": run.seconds,
    }


class Served:
    """`jax-specdec serve` in a process of its own, and OpenAI's client."""

    def __init__(self, name: str, way: Way | None, options: argparse.Namespace) -> None:
        self.name, self.options = name, options
        command = [sys.executable, "-m", "jax_specdec", "serve", "--port", "0"]
        if options.target:
            command += ["--target", str(options.target), "--max-length", "512"]
            command += ["--dtype", options.dtype] * (options.dtype is not None)
        command += ["--draft", "none"] if way is None else ["--draft", way.draft, "-k", str(way.k)]
        command += ["--num-slots", str(options.slots), "--max-logprobs", "0"]
        # Every text is asked for again and again: prompts are to be read each time.
        command += [
            "--prefix-caching",
            "off",
            "--chunk-size",
            "256",
            *options.serve_options.split(),
        ]
        self.log = pathlib.Path(options.logs, f"serve_{name}.log".replace("/", "_"))
        with self.log.open("w") as log:
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)

    def connect(self) -> None:
        """Waits until it is ready."""
        import openai

        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        found = re.search(r"Serving (\S+) at (\S+)", line)
        if found is None:
            raise RuntimeError(self.log.read_text()[-2000:])
        self.model = found[1]
        self._client = openai.OpenAI(base_url=found[2], api_key="none", timeout=120)

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()

    def ask(self, kind: str, number: int, temperature: float, seed: int) -> tuple[int, int]:
        """Tokens of an answer, and those of them that were drafts."""
        text = real_model_prompts.KINDS[kind][number]
        asked: dict[str, Any] = {
            "model": self.model,
            "temperature": temperature,
            "max_tokens": self.options.new_tokens,
            "seed": seed,
            "extra_body": {"include_acceptance": True},
        }
        if kind == "JSON":
            schema = {"name": "answer", "schema": real_model_prompts.SCHEMAS[number]}
            asked["response_format"] = {"type": "json_schema", "json_schema": schema}
        if self.options.target is None:  # the embedded target has no chat template
            asked["extra_body"]["response_format"] = asked.pop("response_format", None)
            answer = self._client.completions.create(prompt=text[-100:], **asked)
        else:
            messages = [{"role": "user", "content": text}]
            answer = self._client.chat.completions.create(messages=messages, **asked)
        usage = answer.usage
        return usage.completion_tokens, usage.completion_tokens_details.accepted_prediction_tokens

    def all_of(self, kind: str, temperature: float, seed: int) -> dict[str, Any]:
        """All prompts of a kind, as many at a time as there are slots."""
        numbers = range(len(real_model_prompts.KINDS[kind]))
        begin = time.perf_counter()
        with ThreadPoolExecutor(self.options.slots) as clients:
            found = [*clients.map(lambda i: self.ask(kind, i, temperature, seed + i), numbers)]
        seconds = time.perf_counter() - begin
        tokens, drafts = map(sum, zip(*found, strict=True))
        return {"seconds": seconds, "tokens": tokens, "passes": tokens - drafts}


def by_serving(
    case: Case, results: measure.Results, options: argparse.Namespace, clock: measure.Clock
) -> Iterator[None]:
    """Rows of every temperature and kind; all servers run, and each has its turn.

    First yields when they are ready.
    """
    names = [name for name in case.ways if name in (options.served or case.ways)]
    servers: list[Served] = []
    try:
        for name in (PLAIN, *names):  # the next one compiles when this one is ready
            servers.append(Served(name, case.ways.get(name), options))
            servers[-1].connect()
        clock.say(f"{len(servers)} servers are ready")
        yield
        for temperature, kind in itertools.product(options.temperatures, options.kinds):
            if clock.is_late(f"served, T = {temperature}, {kind}"):
                continue
            found: dict[str, list[dict[str, Any]]] = {server.name: [] for server in servers}
            for repeat, server in itertools.product(range(options.repeats + 1), servers):
                found[server.name].append(server.all_of(kind, temperature, 100 * repeat))
            # The first round makes connections, and compiles schemas.
            totals = {name: total(runs[1:]) for name, runs in found.items()}
            results.add([
                {
                    "part": "serve",
                    "way": name,
                    "kind": kind,
                    "temperature": temperature,
                    "batch": options.slots,
                    **figures(one, totals[PLAIN]),
                    "samples": [run["seconds"] for run in found[name][1:]],
                }
                for name, one in totals.items()
            ])  # fmt: skip
            clock.say(f"served, T = {temperature}, {kind}")
    finally:
        for server in servers:
            server.close()


def by_budget(
    case: Case, results: measure.Results, options: argparse.Namespace, clock: measure.Clock
) -> Iterator[None]:
    """Rows of engines that serve all prompts: without drafts, with K, with as many as they choose.

    Plain decoding is that of the first engine. First yields when all is compiled.
    """
    prompts = [one for some in zip(*case.prompts.values(), strict=True) for one in some] * 2
    prompts = prompts[: 5 * options.engine_slots // 2]
    drivers = {}
    for name in case.ways:
        if name not in (options.budgeted or case.ways):
            continue
        drafting = case.drafting(case.ways[name])
        draft_params = drafting.pop("draft_params")
        k = drafting["config"].num_speculative_tokens
        engine = lm.Engine(
            case.models.target.model,
            **drafting,
            num_slots=options.engine_slots,
            max_length=LONGEST_PROMPT + case.budget + 32,
            prefill_sizes=(LONGEST_PROMPT,),
            max_prefill_requests=1,
            draft_budget=tuple(sorted({0, 1, 2, k})),
        )
        drivers[name] = lm.EngineDriver(engine, case.models.target.params, draft_params)
    for driver in drivers.values():
        driver.warm_up()
    clock.say(f"{len(drivers)} engines are ready")
    yield
    for driver in drivers.values():  # again, while nobody compiles
        assert driver.draft_choice is not None
        driver.draft_choice.costs = lm.measure_steps(driver.engine, *driver.weights)

    def serve(name: str, mode: str, temperature: float) -> dict[str, Any]:
        driver = drivers[name]
        assert driver.draft_choice is not None
        driver.draft_choice.is_fixed = mode == "fixed"
        before, begin, tokens = driver.stats(), time.perf_counter(), 0
        for seed, prompt in enumerate(prompts):
            driver.submit(
                prompt,
                max_new_tokens=case.budget,
                temperature=temperature,
                seed=seed,
                stop_token_ids=case.models.text.stop_token_ids,
                max_drafts=0 if mode == PLAIN else None,
            )
        while not driver.is_idle:
            tokens += sum(len(update.token_ids) for update in driver.step())
        seconds = time.perf_counter() - begin
        passes = driver.stats().num_verifications - before.num_verifications
        best = driver.draft_choice.best
        return {"seconds": seconds, "tokens": tokens, "passes": passes, "best": best}

    kinds = [(next(iter(drivers)), PLAIN), *itertools.product(drivers, ("fixed", "chosen"))]
    for temperature in options.temperatures:
        if clock.is_late(f"budget, T = {temperature}"):
            continue
        found: dict[Any, list[dict[str, Any]]] = {kind: [] for kind in kinds}
        # The first round teaches the engines what is accepted.
        for _, kind in itertools.product(range(options.repeats + 1), kinds):
            found[kind].append(serve(*kind, temperature))
        totals = {kind: total(all_[1:]) for kind, all_ in found.items()}
        plain = totals[kinds[0]]
        results.add([
            {
                "part": "budget",
                "way": PLAIN if kind[1] == PLAIN else ", ".join(kind),
                "kind": ALL_KINDS,
                "temperature": temperature,
                "batch": options.engine_slots,
                **figures(one, plain),
                "best": found[kind][-1]["best"],
                "costs": dataclasses.asdict(drivers[kind[0]].draft_choice.costs),
                "samples": [run["seconds"] for run in found[kind][1:]],
            }
            for kind, one in totals.items()
        ])  # fmt: skip
        clock.say(f"budget, T = {temperature}")


def total(runs: list[dict[str, Any]]) -> dict[str, float]:
    return {key: sum(run[key] for run in runs) for key in ("seconds", "tokens", "passes")}


def figures(one: dict[str, float], plain: dict[str, float]) -> dict[str, float]:
    """What a row says of some runs beside those of plain decoding."""
    speed, plain_speed = (x["tokens"] / x["seconds"] for x in (one, plain))
    return {
        "tokens": one["tokens"],
        "tokens_per_pass": one["tokens"] / max(one["passes"], 1),
        "tokens_per_second": speed,
        "speedup": speed / plain_speed,
    }


PARTS = {"generate": by_generate, "serve": by_serving, "budget": by_budget}


def shown(document: dict[str, Any]) -> Iterator[str]:
    """What a file of results has, in Markdown: with the usual numbers of drafts, then by number."""
    rows = [document["runs"][row["run"]] | row for row in document["rows"]]
    yield from tables([row for row in rows if (row["k"], row["block_k"]) == (K, BLOCK_K)])
    yield from by_drafts(rows)


def by_drafts(rows: list[dict[str, Any]]) -> Iterator[str]:
    """The table by number of drafts, over all kinds at temperature 0, of ways with several."""
    keys = ("way", "batch", "k", "block_k")
    cases: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        if row["part"] == "generate" and row["temperature"] == 0:
            cases.setdefault(tuple(row[key] for key in keys), []).append(row)
    lines: dict[str, dict[int, str]] = {}
    for (way, size, k, block_k), own in cases.items():
        if way != PLAIN and len(own) == len(real_model_prompts.KINDS):
            drafts = block_k if way.startswith(("dflash", "dspark")) else k
            line = lines.setdefault(f"{way}, B = {size}", {})
            line[drafts] = cell(own, cases[PLAIN, size, k, block_k])
    lines = {name: line for name, line in lines.items() if len(line) > 1}
    columns = sorted({drafts for line in lines.values() for drafts in line})
    if lines:
        yield f"\nby K\n\n| | {' | '.join(f'K = {k}' for k in columns)} |"
        yield f"| --- |{' ---: |' * len(columns)}"
    for name, line in lines.items():
        yield f"| {name} | {' | '.join(line.get(k, '') for k in columns)} |"


def tables(rows: list[dict[str, Any]]) -> Iterator[str]:
    """The rows in Markdown: by batch and temperature, then by kind; "speed-up (tokens per pass)".

    Over several kinds it is that of a text with equally many tokens of each.
    """
    for part in dict.fromkeys(row["part"] for row in rows):
        own = [row for row in rows if row["part"] == part]
        yield from table(part, own, lambda row: f"B = {row['batch']}, T = {row['temperature']:g}")
        for size, temperature in dict.fromkeys((r["batch"], r["temperature"]) for r in own):
            some = [r for r in own if (r["batch"], r["temperature"]) == (size, temperature)]
            if len({row["kind"] for row in some}) > 1:
                title = f"{part}, B = {size}, T = {temperature:g}"
                yield from table(title, some, lambda row: str(row["kind"]))


def table(
    title: str, rows: list[dict[str, Any]], column_of: Callable[[dict[str, Any]], str]
) -> Iterator[str]:
    """One table; plain decoding of one kind has tokens per second."""
    columns = dict.fromkeys(map(column_of, rows))
    yield f"\n{title}\n\n| | {' | '.join(columns)} |\n| --- |{' ---: |' * len(columns)}"
    for way in dict.fromkeys(row["way"] for row in rows):
        cells = []
        for column in columns:
            own, plain = (
                [row for row in rows if (row["way"], column_of(row)) == (name, column)]
                for name in (way, PLAIN)
            )
            is_measured = way == PLAIN and len(own) == 1
            cells.append(
                f"{own[0]['tokens_per_second']:.0f} tokens/s" if is_measured else cell(own, plain)
            )
        yield f"| {way} | {' | '.join(cells)} |"


def cell(own: list[dict[str, Any]], plain: list[dict[str, Any]]) -> str:
    """The speed-up and tokens per pass of a way, over some kinds, beside plain decoding of them."""
    seconds, plain_seconds, passes = (
        statistics.fmean([1 / row[key] for row in some]) if some else math.nan
        for some, key in (
            (own, "tokens_per_second"),
            (plain, "tokens_per_second"),
            (own, "tokens_per_pass"),
        )
    )
    return f"{plain_seconds / seconds:.2f} ({1 / passes:.2f})"


def main(arguments: list[str] | None = None) -> int:
    parser = measure.gpu_parser(__doc__, repeats=2, seconds=330)
    add = parser.add_argument
    add("--target", type=pathlib.Path, help="a checkpoint (default: the embedded target)")
    add("--heads", type=pathlib.Path, default=EMBEDDED, help="folder of folders of heads")
    add("--dtype", help="of target and heads (default: as stored)")
    add("--parts", nargs="+", choices=PARTS, default=[*PARTS])
    add("--ways", nargs="+", help="some ways of decoding, by name (default: all)")
    add("--trees", nargs="+", help="heads that propose trees, too (default: all)")
    add("--with-suffix", nargs="+", help="heads that have a lookup beside them, too (default: all)")
    add("--served", nargs="+", help="ways of decoding that are served (default: all)")
    add("--budgeted", nargs="+", help="ways of decoding of the part budget (default: all)")
    add("-k", type=int, default=K, help="drafts of lookups and EAGLE-3")
    add("--block-k", type=int, default=BLOCK_K, help="the most drafts of block heads")
    add("--kinds", nargs="+", choices=real_model_prompts.KINDS, default=[*real_model_prompts.KINDS])
    add("--temperatures", nargs="+", type=float, default=TEMPERATURES)
    add("--batches", nargs="+", type=int, default=[1, 32, 8])
    add("--slots", type=int, default=8, help="of a server")
    add("--engine-slots", type=int, default=32, help="of the part budget")
    add("--serve-options", default="", help="more options of the server")
    add("--alone", type=int, default=2, help="prompts of a kind that are decoded one at a time")
    add("--new-tokens", type=int, default=128)
    add("--logs", type=pathlib.Path, default=pathlib.Path("build"), help="folder of servers' logs")
    add("--show", action="store_true", help="print what the file of results has, in Markdown")
    options = parser.parse_args(arguments)
    if options.tiny:
        vars(options).update(TINY)
    platform = "cpu" if jax.default_backend() == "cpu" else "gpu"
    results = measure.Results(
        f"real_model_{platform}", IDENTITY, options.output, longest_prompt=LONGEST_PROMPT,
        new_tokens=options.new_tokens, dtype=options.dtype, k=options.k, block_k=options.block_k,
        num_nodes=NUM_NODES,
    )  # fmt: skip
    if options.show:
        print(*shown(results.document), sep="\n")
        return 0
    clock = measure.Clock(options.seconds)
    text, ways = read_target_text(options.target), make_ways(options.heads, options)
    drafts = [way.draft for way in ways.values()]
    models = load_models(text, [*dict.fromkeys(drafts)], dtype=options.dtype)
    for name, way in ways.items():
        most = models.drafters[way.draft].max_drafts or way.k
        ways[name] = way._replace(k=min(way.k, most))
    clock.say(f"loaded the models; ways of decoding: {', '.join(ways)}")
    prompts = {
        kind: [encode(text, one) for one in all_] for kind, all_ in real_model_prompts.KINDS.items()
    }
    longest = max(len(one) for all_ in prompts.values() for one in all_)
    assert longest <= LONGEST_PROMPT, longest
    case = Case(models, ways, prompts, options.new_tokens)
    options.logs.mkdir(parents=True, exist_ok=True)
    with one_shape(options.new_tokens):
        parts = [PARTS[part](case, results, options, clock) for part in options.parts]
        ready = [part for part in parts if succeeds(part)]  # all is compiled before any is timed
        for part in ready:
            succeeds(part)
    print(*tables(results.rows), sep="\n")
    return 0


def succeeds(part: Iterator[None]) -> bool:
    """Goes on with a part; if it fails, the others need not."""
    try:
        next(part, None)
    except Exception:
        traceback.print_exc()
        return False
    return True


def encode(text: TargetText, message: str) -> list[int]:
    """The ids of a prompt; of one for the embedded target, which knows no chat, its last bytes."""
    if text.tokenizer is None:
        return text.encode(message[-100:])
    return text.tokenizer.encode_chat([{"role": "user", "content": message}])


if __name__ == "__main__":
    raise SystemExit(main())
