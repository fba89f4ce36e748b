"""What a published draft model, a head and lookups gain for a published target of the family.

    python tools/make_model.py qwen2.5-coder-1.5b qwen-1.5b
    python tools/make_model.py qwen2.5-coder-0.5b qwen-0.5b
    python benchmarks/bench_pair.py --target qwen-1.5b --draft qwen-0.5b [--head DIR]

`--head` is an EAGLE-3 head of the target, as `training/train_eagle3.py` writes it. Requests are
prompts of five kinds (`real_model_prompts.py`), eight of each; answers end at a stop token or after
a budget. A batch is as many slots, which serve all prompts one after another: for 32 slots each of
them four times. Every number of tokens and of passes begins after a request's first token, and so
do the seconds of a single slot; those of several have the reading of prompts in them.

`--engine vllm` (with a folder for `vllm_engine.py`) and `--engine transformers` do the same with
other engines, with `JAX_PLATFORMS=cpu`, so that JAX leaves the GPU to them. vLLM is one way of
decoding per process.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import pathlib
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import measure
import real_model_prompts
from bench_real_model import LONGEST_PROMPT, encode

import jax_specdec as sd
from jax_specdec import lm
from jax_specdec.lm.decoding.core import PLAIN
from jax_specdec.lm.decoding.step_costs import StepCosts
from jax_specdec.lm.drafting.drafter import NoDrafter
from jax_specdec.lm.loading import Models, TargetText, load_models, read_target_text

IDENTITY = ("engine", "way", "batch", "k", "temperature")
PLAIN_WAY, WIDE_PLAIN, DRAFT, EAGLE3, NGRAM, SUFFIX, BOTH = WAYS = (
    "plain", "plain, K + 1 rows", "draft", "eagle3", "ngram", "suffix", "suffix+draft"
)  # fmt: skip
DRAFTING_WAYS = EAGLE3, DRAFT, NGRAM, SUFFIX, BOTH
KINDS, ALL = real_model_prompts.KINDS, "all"
K = 4
PAGE = pathlib.Path(__file__).parents[1] / "docs" / "real_pair.md"
BEGIN, END = "<!-- tables: benchmarks/bench_pair.py -->\n", "<!-- end of tables -->\n"
FILES = {
    "pair_gpu": "The head and the draft model, beside other engines",
    "pair_gpu_h100": "Lookups and the draft model, by the number of drafts",
}
"""What the page shows: a file of results, and the title above its tables."""


class Plan(NamedTuple):
    """What is measured at a batch size; `steps` are the numbers of drafts that are compiled."""

    ways: tuple[str, ...]
    steps: tuple[int, ...] = (K,)
    drafts: tuple[int, ...] = (K,)
    times: int = 1


PLANS = {
    1: Plan((PLAIN_WAY, EAGLE3, DRAFT, NGRAM, WIDE_PLAIN, BOTH, SUFFIX)),
    8: Plan((PLAIN_WAY, EAGLE3, DRAFT, BOTH, SUFFIX, NGRAM), (K, 8), (2, 3, K, 6, 8)),
    32: Plan((PLAIN_WAY, EAGLE3, DRAFT, SUFFIX), times=4),
}
TINY = {
    1: Plan((PLAIN_WAY, NGRAM, WIDE_PLAIN)),
    2: Plan((DRAFT, BOTH), (1, 2), (1, 2)),
}


class Request(NamedTuple):
    """A prompt, and how it is answered."""

    prompt: list[int]
    temperature: float
    seed: int
    max_drafts: int | None


Event = tuple[int, list[int], bool]
"""What a step gave a request: its number, tokens, and whether it has ended."""


class Server(Protocol):
    """An engine with some slots."""

    def submit(self, number: int, request: Request) -> None: ...
    def step(self) -> list[Event]: ...
    @property
    def is_idle(self) -> bool: ...


class Answer(NamedTuple):
    """A text, and what it took after its first step; of transformers, from the beginning."""

    token_ids: list[int]
    tokens: int
    passes: int
    seconds: float


def serve(server: Server, requests: Sequence[Request]) -> tuple[float, list[Answer]]:
    """Returns the seconds of all, and the answers in the order of the requests."""
    texts: dict[int, list[int]] = {}
    firsts: dict[int, tuple[float, int]] = {}  # when a first step was over, and its tokens
    passes = dict.fromkeys(range(len(requests)), -1)  # without the first
    seconds: dict[int, float] = {}
    begin = time.perf_counter()
    for number, request in enumerate(requests):
        server.submit(number, request)
    while not server.is_idle:
        events = server.step()
        now = time.perf_counter() - begin
        for number, token_ids, _ in (event for event in events if event[1]):
            texts.setdefault(number, []).extend(token_ids)
            firsts.setdefault(number, (now, len(token_ids)))
            passes[number] += 1
            seconds[number] = now - firsts[number][0]
    answers = [
        Answer(texts[i], len(texts[i]) - firsts[i][1], passes[i], seconds[i])
        for i in range(len(requests))
    ]
    return time.perf_counter() - begin, answers


class Ours:
    """`EngineDriver`, two steps ahead."""

    def __init__(
        self, models: Models, way: str, draft: str, slots: int, plan: Plan, budget: int
    ) -> None:
        drafter: lm.Drafter = NoDrafter()
        config, params, steps = PLAIN, None, (0,)
        if way != PLAIN_WAY:
            drafter, params = models.drafters[draft]
            config = sd.SpecDecodeConfig(num_speculative_tokens=max(plan.steps))
            steps = plan.steps
        engine = lm.Engine(
            models.target.model,
            drafter,
            config,
            num_slots=slots,
            max_length=LONGEST_PROMPT + budget,
            prefill_sizes=(LONGEST_PROMPT,),
            max_prefill_requests=1,
            draft_budget=steps if way != PLAIN_WAY else None,
        )
        costs = StepCosts(slots, steps, (1.0,) * len(steps))  # unused: the number is fixed
        self._driver = lm.EngineDriver(
            engine,
            models.target.params,
            params,
            max_steps_ahead=2,
            max_prefills=None,
            step_costs=costs if way != PLAIN_WAY else None,
        )
        if self._driver.draft_choice is not None:
            self._driver.draft_choice.is_fixed = True
        self._common = dict(max_new_tokens=budget, stop_token_ids=models.text.stop_token_ids)
        self._numbers: dict[int, int] = {}
        self._driver.warm_up()

    def submit(self, number: int, request: Request) -> None:
        request_id = self._driver.submit(
            request.prompt,
            temperature=request.temperature,
            seed=request.seed,
            max_drafts=request.max_drafts,
            **self._common,
        )
        self._numbers[request_id] = number

    def step(self) -> list[Event]:
        return [
            (self._numbers[one.request_id], one.token_ids, one.finish_reason is not None)
            for one in self._driver.step()
        ]

    @property
    def is_idle(self) -> bool:
        return self._driver.is_idle


def ours(models: Models, options: argparse.Namespace, clock: measure.Clock) -> Iterator[Any]:
    """Yields a server, its batch, its way of decoding and its numbers of drafts."""
    drafts = drafters(options)
    for batch, plan in options.plans.items():
        by_name: dict[str, Ours] = {}
        for way in plan.ways:
            if clock.is_late(way, f"B = {batch}"):
                continue
            # The lookup's steps have K + 1 rows, also those without drafts.
            name = drafts[way]
            if name not in by_name:
                jax.clear_caches()
                by_name = {}  # there may be no room for two states
                by_name[name] = Ours(models, way, name, batch, plan, options.new_tokens)
                clock.say(f"{way}, B = {batch}: compiled")
            yield by_name[name], batch, way, numbers_of_drafts(way, plan)


def drafters(options: argparse.Namespace) -> dict[str, str]:
    """Returns what `--draft` of the command line calls each way."""
    return {
        PLAIN_WAY: "none",
        WIDE_PLAIN: NGRAM,
        DRAFT: options.draft,
        EAGLE3: f"eagle3:{options.head}",
        NGRAM: NGRAM,
        SUFFIX: SUFFIX,
        BOTH: f"suffix+{options.draft}",
    }


def numbers_of_drafts(way: str, plan: Plan) -> tuple[int | None, ...]:
    return {PLAIN_WAY: (None,), WIDE_PLAIN: (0,)}.get(way, plan.drafts)


def vllm(models: Models, options: argparse.Namespace, clock: measure.Clock) -> Iterator[Any]:
    """As `ours`, of all of vLLM, with one way of decoding."""
    import vllm_engine

    vllm_engine.import_vllm(options.vllm)
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    class Published(vllm_engine.VllmEngine):
        def submit(self, number: int, request: Request) -> None:
            sampling = SamplingParams(
                temperature=request.temperature,
                max_tokens=options.new_tokens,
                stop_token_ids=[*models.text.stop_token_ids],
                ignore_eos=True,  # they are among the stop tokens
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
            self.add(number, request.prompt, sampling)

        def step(self) -> list[Event]:
            return [
                (int(one.request_id), [*one.outputs[0].token_ids], one.finished)
                for one in self.outputs()
            ]

    (way,) = options.ways
    speculative = {
        PLAIN_WAY: None,
        DRAFT: {"method": "draft_model", "model": options.draft},
        EAGLE3: {"method": "eagle3", "model": str(options.head)},
        NGRAM: {"method": "ngram_gpu", "prompt_lookup_min": 3, "prompt_lookup_max": 8},
    }[way]
    if speculative is not None:
        speculative |= {"num_speculative_tokens": K}
    most = max(options.plans)
    engine = Published(
        str(options.target),
        batch=most,
        max_length=LONGEST_PROMPT + options.new_tokens + K + 1,
        temperature=0.0,
        speculative=speculative,
    )
    clock.say(f"vllm, {way}: ready")
    for batch in options.plans:
        engine.resize(batch)
        yield engine, batch, way, (None if way == PLAIN_WAY else K,)


class Transformers:
    """`generate` of transformers, eager, one request at a time."""

    def __init__(
        self, way: str, stop_token_ids: Sequence[int], options: argparse.Namespace
    ) -> None:
        import torch
        import transformers

        self._torch, self._waiting = torch, []
        device = "cuda" if torch.cuda.is_available() else "cpu"
        load = transformers.AutoModelForCausalLM.from_pretrained

        def read(folder: Any) -> Any:
            return load(folder, dtype=torch.bfloat16).to(device).eval()

        self._model = read(options.target)
        self._more: dict[str, Any] = {}
        if way == DRAFT:
            assistant = read(options.draft)
            assistant.generation_config.num_assistant_tokens = K
            assistant.generation_config.num_assistant_tokens_schedule = "constant"
            assistant.generation_config.assistant_confidence_threshold = 0.0
            self._more["assistant_model"] = assistant
        elif way == NGRAM:
            self._more |= dict(prompt_lookup_num_tokens=K, max_matching_ngram_size=3)
        self._common = dict(eos_token_id=[*stop_token_ids], pad_token_id=stop_token_ids[0])
        self._budget, self._passes = options.new_tokens, 0
        self._model.register_forward_hook(self._count)

    def _count(self, *_: Any) -> None:
        self._passes += 1

    def answer(self, request: Request) -> Answer:
        """One text, its prompt included: the first pass reads that and checks drafts."""
        torch = self._torch
        ids = torch.tensor([request.prompt], device=self._model.device)
        sampling: dict[str, Any] = {"do_sample": False}
        if request.temperature:
            sampling = dict(do_sample=True, temperature=request.temperature, top_k=0, top_p=1.0)
        torch.manual_seed(request.seed)
        self._passes = 0
        begin = time.perf_counter()
        output = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=self._budget,
            **sampling,
            **self._common,
            **self._more,
        )
        text = output[0, ids.shape[1] :].tolist()
        return Answer(text, len(text), self._passes, time.perf_counter() - begin)


def transformers(
    models: Models, options: argparse.Namespace, clock: measure.Clock
) -> Iterator[Any]:
    """As `ours`, of transformers: batches of one."""
    for way in options.ways or (PLAIN_WAY, DRAFT, NGRAM):
        if not clock.is_late("transformers", way):
            server = Transformers(way, models.text.stop_token_ids, options)
            clock.say(f"transformers, {way}: ready")
            yield server, 1, way, (None if way == PLAIN_WAY else K,)


ENGINES = {"ours": ours, "vllm": vllm, "transformers": transformers}


def measured(server: Any, requests: Sequence[Request], warm_up: bool) -> tuple[float, list[Answer]]:
    """Returns the seconds of all answers and the answers."""
    if isinstance(server, Transformers):
        if warm_up:
            server.answer(requests[0])
        begin = time.perf_counter()
        answers = [server.answer(request) for request in requests]
        return time.perf_counter() - begin, answers
    if warm_up:
        serve(server, requests[:2])
    return serve(server, requests)


def rows_of_all(
    models: Models, options: argparse.Namespace, clock: measure.Clock
) -> Iterator[dict[str, Any]]:
    """Yields a row for each way, number of drafts, batch and temperature."""
    prompts = [encode(models.text, one) for some in KINDS.values() for one in some[: options.alone]]
    assert max(map(len, prompts)) <= LONGEST_PROMPT
    plain: dict[int, list[list[int]]] = {}  # greedy texts, by batch
    for server, batch, way, numbers in ENGINES[options.engine](models, options, clock):
        warm_up = True
        for temperature in options.temperatures:
            for k in numbers:
                if clock.is_late(f"{way}, B = {batch}, T = {temperature}, K = {k}"):
                    continue
                requests = [
                    Request(prompt, temperature, seed, k)
                    for seed, prompt in enumerate(prompts * options.plans[batch].times)
                ]
                seconds, answers = measured(server, requests, warm_up)
                warm_up = False
                row = {
                    "engine": options.engine,
                    "way": way,
                    "batch": batch,
                    "k": k,
                    "step_drafts": step_drafts(way, k, options.plans[batch]),
                    "temperature": temperature,
                    "alone": options.alone,
                    "seconds": seconds,
                    "tokens": [one.tokens for one in answers],
                    "passes": [one.passes for one in answers],
                    "decoding": [round(one.seconds, 5) for one in answers],
                }
                row["tokens_per_second"] = rates(row)
                texts = [one.token_ids for one in answers]
                if temperature == 0 and way == PLAIN_WAY:
                    plain[batch] = texts
                    save_texts(texts, models.text, options, batch)
                if temperature == 0 and batch in plain:
                    same = [a == b for a, b in zip(texts, plain[batch], strict=True)]
                    row["same_texts"] = sum(same) / len(same)
                clock.say(summary(row))
                yield row


def step_drafts(way: str, k: int | None, plan: Plan) -> int | None:
    """Returns how many drafts the step had room for in which a request could have K."""
    return None if k is None else min(n for n in (*plan.steps, math.inf) if n >= k)


def rates(row: dict[str, Any]) -> dict[str, float]:
    """Returns tokens a second: of one slot while texts are decoded, of several from end to end."""
    if row["batch"] > 1:
        return {ALL: (sum(row["tokens"]) + len(row["tokens"])) / row["seconds"]}
    return {
        kind: sum(of_kind(row, "tokens", kind)) / sum(of_kind(row, "decoding", kind))
        for kind in (*KINDS, ALL)
    }


def save_texts(
    texts: Sequence[list[int]], text: TargetText, options: argparse.Namespace, batch: int
) -> None:
    """Write greedy texts of plain decoding, to be compared with those of another device."""
    folder = options.output or measure.RESULTS
    path = folder / f"pair_texts_{options.engine}_{batch}_{jax.default_backend()}.json"
    words = [text.stream().decode(token_ids, final=True) for token_ids in texts]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(words, indent=1, ensure_ascii=False) + "\n", "utf-8")


# What the results say


def per_pass(row: dict[str, Any], kind: str = ALL) -> tuple[float, float]:
    """Returns tokens per pass over all texts of a kind, and its standard error.

    That of a ratio of sums, `R = sum(t) / sum(p)`: the spread of `t - R p` from text to text.
    """
    tokens, passes = (of_kind(row, name, kind) for name in ("tokens", "passes"))
    ratio, count = sum(tokens) / sum(passes), len(tokens)
    squares = sum((t - ratio * p) ** 2 for t, p in zip(tokens, passes, strict=True))
    return ratio, math.sqrt(squares * count / max(count - 1, 1)) / sum(passes)


def of_kind(row: dict[str, Any], name: str, kind: str) -> list[Any]:
    """Returns a list of a row for the texts of a kind, or for `ALL` of them.

    Prompts are in the order of kinds, `alone` of each, and then again.
    """
    names, alone = [*KINDS], row["alone"]
    values = enumerate(row[name])
    return [x for i, x in values if kind in (ALL, names[i // alone % len(names)])]


def summary(row: dict[str, Any]) -> str:
    ratio, error = per_pass(row)
    keys = f"B = {row['batch']}, K = {row['k']}, T = {row['temperature']:g}"
    return (
        f"{row['engine']}, {row['way']}, {keys}: {row['tokens_per_second'][ALL]:.0f} tokens/s, "
        f"{ratio:.2f} +- {error:.2f} a pass, same texts {row.get('same_texts', math.nan):.2f}"
    )


class Found:
    """The rows of a file of results, by what was measured."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._rows = {tuple(row[key] for key in IDENTITY): row for row in document["rows"]}

    def row(
        self, way: str, temperature: float, batch: int = 1, k: int = K, engine: str = "ours"
    ) -> dict[str, Any] | None:
        number = {PLAIN_WAY: None, WIDE_PLAIN: 0}.get(way, k)
        return self._rows.get((engine, way, batch, number, temperature))

    def plain_speed(self, temperature: float, batch: int, kind: str = ALL) -> float:
        """Returns that of the faster plain way: a pass of one row is not always the faster one.

        A pass of one token takes as long for each kind of text. So what a drafter gains for a kind
        is over the plain speed of all kinds, which has less noise than that of the kind alone.
        """
        rows = (self.row(way, temperature, batch) for way in (PLAIN_WAY, WIDE_PLAIN))
        return max((row["tokens_per_second"][kind] for row in rows if row), default=math.nan)

    def plain(self, temperature: float, batch: int, kind: str = ALL) -> str:
        speed = self.plain_speed(temperature, batch, kind)
        return "-" if math.isnan(speed) else f"{speed:.0f} tokens/s"

    def gain(self, row: dict[str, Any] | None, kind: str = ALL) -> str:
        """Returns "speed-up (tokens per pass)" of a row."""
        if row is None:
            return "-"
        plain = self.plain_speed(row["temperature"], row["batch"])
        speed_up = row["tokens_per_second"][kind] / plain
        return f"{speed_up:.2f} ({per_pass(row, kind)[0]:.2f})"

    def steps(self, row: dict[str, Any] | None) -> str:
        """Returns how many plain steps a step takes."""
        if row is None:
            return "-"
        gain = row["tokens_per_second"][ALL] / self.plain_speed(row["temperature"], row["batch"])
        return f"{per_pass(row)[0] / gain:.2f}"


def table(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yields the lines of a table, without lines and columns that have nothing in them."""
    lines = [line for line in lines if {*line[1:]} != {"-"}]
    kept = [i for i in range(len(columns)) if {line[i + 1] for line in lines} - {"-"}]
    if kept:
        yield f"| | {' | '.join(columns[i] for i in kept)} |"
        yield f"| --- |{' ---: |' * len(kept)}"
        yield from (f"| {' | '.join([line[0], *(line[i + 1] for i in kept)])} |" for line in lines)
        yield ""


def first_screen(document: dict[str, Any]) -> list[str]:
    """Returns the table of README.md: what a head and a draft model gain for one request."""
    found = Found(document)
    lines = []
    for way, name in ((EAGLE3, "EAGLE-3 head"), (DRAFT, "draft model")):
        for temperature in (0, 0.8):
            row = found.row(way, temperature)
            cells = [found.gain(row, kind) for kind in (*KINDS, ALL)]
            lines.append([f"{name}, temperature {temperature:g}", *cells])
    return [*table([*KINDS, ALL], lines)]


def shown(name: str, document: dict[str, Any]) -> Iterator[str]:
    """Yields the tables of docs/real_pair.md that a file of results makes."""
    found = Found(document)
    yield f"### {FILES[name]}"
    yield ""
    yield f"Measured on an {source(name, document)}."
    yield ""
    for temperature in (0, 0.8):
        yield f"One request at a time, T = {temperature:g}, K = {K}:"
        yield ""
        kinds = [*KINDS, ALL]
        lines = [["plain", *(found.plain(temperature, 1, kind) for kind in kinds), "1.00"]]
        for way in DRAFTING_WAYS:
            row = found.row(way, temperature)
            lines.append([way, *(found.gain(row, kind) for kind in kinds), found.steps(row)])
        yield from table([*KINDS, ALL, "a step, in plain steps"], lines)
    yield "Tokens per pass, with the standard error over texts, by the number of drafts:"
    yield ""
    # Acceptance does not depend on the batch: these are the texts of eight slots.
    numbers = sorted({k for plan in PLANS.values() for k in plan.drafts})
    lines = []
    for temperature, way in itertools.product((0, 0.8), DRAFTING_WAYS):
        kinds = [*KINDS, ALL] if way in (EAGLE3, DRAFT) else [ALL]
        for kind in kinds:
            name = f"{way}, {kind}, T = {temperature:g}"
            rows = [found.row(way, temperature, 8, k) for k in numbers]
            lines.append([name, *(spread(row, kind) for row in rows)])
    yield from table([f"K = {k}" for k in numbers], lines)
    yield "By the number of requests at a time, with the reading of their prompts:"
    yield ""
    cases = [*itertools.product((8, 32), (0, 0.8))]
    lines = [["plain", *(found.plain(t, b) for b, t in cases)]]
    for way, k in itertools.product(DRAFTING_WAYS, (K, 8)):
        cells = [found.gain(found.row(way, t, b, k)) for b, t in cases]
        lines.append([f"{way}, K = {k}", *cells])
    yield from table([f"B = {b}, T = {t:g}" for b, t in cases], lines)
    if {row["engine"] for row in document["rows"]} == {"ours"}:
        return
    yield f"Tokens a second and (tokens per pass) of whole engines, K = {K}:"
    yield ""
    cases = [*itertools.product((1, 8, 32), (0, 0.8))]
    lines = []
    for way, engine in itertools.product((PLAIN_WAY, EAGLE3, DRAFT, NGRAM), ENGINES):
        rows = [found.row(way, t, b, engine=engine) for b, t in cases]
        cells = [
            f"{row['tokens_per_second'][ALL]:.0f} ({per_pass(row)[0]:.2f})" if row else "-"
            for row in rows
        ]
        lines.append([f"{engine}, {way}", *cells])
    yield from table([f"B = {b}, T = {t:g}" for b, t in cases], lines)


def source(name: str, document: dict[str, Any]) -> str:
    """Returns the device and the date of the last run, with a link to the file."""
    last = max(document["runs"], key=lambda run: run["date"])
    device = next(run["device"] for run in document["runs"] if run["device"].startswith("gpu"))
    (gpu,) = re.findall(r"[A-Z]+\d+", device)[:1]
    return f"[{gpu}, {last['date'][:10]}](../benchmarks/results/{name}.json)"


def spread(row: dict[str, Any] | None, kind: str) -> str:
    return "-" if row is None else "{:.2f} \u00b1 {:.2f}".format(*per_pass(row, kind))


def drawn(page: str, documents: dict[str, dict[str, Any]]) -> str:
    """Returns a page with the tables of files of results in their place."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    lines = [line for name, document in documents.items() for line in shown(name, document)]
    return "".join([before, BEGIN, "\n", "\n".join(lines), END, after])


def read_results() -> dict[str, dict[str, Any]]:
    """Returns those of `FILES` that are there."""
    found = {name: measure.load(measure.RESULTS / f"{name}.json") for name in FILES}
    return {name: document for name, document in found.items() if document is not None}


def main(arguments: list[str] | None = None) -> int:
    parser = measure.gpu_parser(__doc__, repeats=1, seconds=900)
    add = parser.add_argument
    add("--target", type=pathlib.Path, help="a checkpoint (default: the embedded target)")
    add("--draft", default="model", help="a checkpoint (default: the embedded draft model)")
    add("--head", type=pathlib.Path, help="an EAGLE-3 head of the target (default: none)")
    add("--dtype", help="of both models (default: as stored)")
    add("--engine", choices=ENGINES, default="ours")
    add("--vllm", type=pathlib.Path, help="folder of vLLM")
    add("--ways", nargs="+", choices=WAYS, help="some ways of decoding (default: all)")
    add("--batches", nargs="+", type=int, help=f"some of {[*PLANS]} (default: all)")
    add("--temperatures", nargs="+", type=float, default=[0.0, 0.8])
    add("--alone", type=int, default=8, help="prompts of each kind")
    add("--new-tokens", type=int, default=96)
    add("--tables", action="store_true", help="write the tables of docs/real_pair.md")
    options = parser.parse_args(arguments)
    if options.tables:
        documents = read_results()
        PAGE.write_text(drawn(PAGE.read_text("utf-8"), documents), "utf-8")
        print(*first_screen(documents["pair_gpu"]), sep="\n")
        return 0
    plans = TINY if options.tiny else PLANS
    if options.tiny:
        options.alone, options.new_tokens = 1, min(options.new_tokens, 12)
    options.plans = {
        batch: plan._replace(
            ways=tuple(
                way
                for way in plan.ways
                if way in (options.ways or plan.ways) and (way != EAGLE3 or options.head)
            )
        )
        for batch, plan in plans.items()
        if batch in (options.batches or plans)
    }
    text = read_target_text(options.target)
    clock = measure.Clock(options.seconds)
    if options.engine == "ours":
        names = drafters(options)
        wanted = {names[way]: None for plan in options.plans.values() for way in plan.ways}
        models = load_models(text, [*wanted], dtype=options.dtype)
        clock.say("loaded the models")
    else:
        models = Models(None, text, {})  # the other engine reads its own
    platform = "cpu" if options.engine == "ours" and jax.default_backend() == "cpu" else "gpu"
    results = measure.Results(
        f"pair_{platform}", IDENTITY, options.output, new_tokens=options.new_tokens,
        longest_prompt=LONGEST_PROMPT, prompts={kind: options.alone for kind in KINDS},
        **about_engine(options),
    )  # fmt: skip
    for row in rows_of_all(models, options, clock):
        results.add([row])
    return 0


def about_engine(options: argparse.Namespace) -> dict[str, Any]:
    """Returns what a figure of another engine depends on, in place of JAX's device."""
    if options.engine == "ours":
        return {}
    if options.engine == "vllm":
        import vllm_engine

        return {"vllm": vllm_engine.version(options.vllm)}
    import importlib.metadata

    return {name: importlib.metadata.version(name) for name in ("torch", "transformers")}


if __name__ == "__main__":
    raise SystemExit(main())
