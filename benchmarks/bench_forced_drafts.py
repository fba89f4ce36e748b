"""What forced tokens save a server whose answers follow a JSON schema.

python benchmarks/bench_forced_drafts.py    # the embedded models, whose tokens are bytes
python benchmarks/bench_forced_drafts.py --target smollm2 --draft ngram --requests 4

Clients ask `jax-specdec serve`, over HTTP in this process, for texts of three schemas: with the
drafts that their grammars force, and with those of the drafter alone. Passes of the target are
counted per request. They depend on no clock; requests per second do.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import json
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import measure

from jax_specdec import lm
from jax_specdec.lm.cli.models import load_served
from jax_specdec.lm.cli.parsing import parse
from jax_specdec.lm.cli.serve import make_driver
from jax_specdec.lm.decoding import matchers
from jax_specdec.lm.loading import TargetText
from jax_specdec.lm.server.app import Server

K, SLOTS, BUDGET = 6, 4, 160


def text(length: int) -> dict[str, Any]:
    return {"type": "string", "pattern": f"^[a-z ]{{1,{length}}}$"}


def record(**properties: Any) -> dict[str, Any]:
    closed: dict[str, Any] = {"required": [*properties], "additionalProperties": False}
    return {"type": "object", "properties": properties, **closed}


SCHEMAS = {
    "record": record(
        identifier={"type": "integer", "minimum": 0, "maximum": 999},
        name=text(12),
        department={"enum": ["engineering", "marketing", "support"]},
        active={"type": "boolean"},
    ),
    "tool call": record(
        name={"const": "get_weather"},
        arguments=record(location=text(16), unit={"enum": ["celsius", "fahrenheit"]}),
    ),
    "free text": record(title=text(24), summary=text(80)),
}
PROMPT = "A JSON object, as an example: "


@contextlib.contextmanager
def forcing(is_on: bool) -> Iterator[None]:
    """With forced tokens, or without."""
    function = matchers.forced_drafts

    def without(*args: Any, **given: Any) -> Any:
        return function(*args, **(given | {"max_drafts": 0}))

    with mock.patch.object(matchers, "forced_drafts", function if is_on else without):
        yield


class Serving:
    """A server in a thread of its own."""

    def __init__(self, driver: lm.EngineDriver, text: TargetText) -> None:
        self.driver, self.server = driver, Server(text, driver, model_name="bench")
        listener, ready = socket.socket(), threading.Event()
        listener.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1/completions"
        run = self.server.run(listener, ready.set)
        self._thread = threading.Thread(target=asyncio.run, args=(run,))
        self._thread.start()
        ready.wait()

    def close(self) -> None:
        self.server.stop()
        self._thread.join()

    def ask(self, schema: dict[str, Any], temperature: float, seed: int) -> str:
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        asked = dict(prompt=PROMPT, max_tokens=BUDGET, temperature=temperature, seed=seed)
        body = json.dumps(asked | {"model": "bench", "response_format": form}).encode()
        request = urllib.request.Request(self.url, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as answer:
            return str(json.load(answer)["choices"][0]["text"])

    def texts(self, schema: dict[str, Any], temperature: float, requests: int) -> dict[str, Any]:
        """All at once, and what they took."""
        before, begin = self.driver.stats(), time.perf_counter()
        with concurrent.futures.ThreadPoolExecutor(requests) as clients:
            ask = functools.partial(self.ask, schema, temperature)
            texts = [*clients.map(ask, range(requests))]
        seconds = time.perf_counter() - begin
        after = self.driver.stats()
        passes = after.num_verifications - before.num_verifications
        tokens = after.num_tokens - before.num_tokens
        return dict(texts=texts, seconds=seconds, passes=passes, tokens=tokens)


def main(arguments: list[str] | None = None) -> None:
    parser = measure.parser(__doc__, repeats=3)
    parser.add_argument("--target")
    parser.add_argument("--draft", nargs="+", default=["ngram", "model", "eagle3"])
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 0.8])
    options = parser.parse_args(arguments)
    name = f"_{Path(options.target).name}" if options.target else ""
    results = measure.Results(f"forced_drafts{name}", ("draft", "schema", "temperature"))
    for draft in options.draft:
        given = ["--target", options.target] if options.target else []
        given += ["--draft", draft, "-k", str(K), "--num-slots", str(SLOTS), "--max-logprobs", "0"]
        serve = parse(["serve", *given, "--max-length", "256"], "0")
        models = load_served(serve)
        driver = make_driver(serve, models)
        driver.warm_up(grammars=True)
        serving = Serving(driver, models.text)
        try:
            for schema in SCHEMAS:
                for temperature in options.temperatures:
                    row = compare(serving, SCHEMAS[schema], temperature, options)
                    results.add([{"draft": draft, "schema": schema, **row}])
        finally:
            serving.close()
    measure.show(f"K = {K}, {SLOTS} slots, {options.requests} requests at once", [
        {
            "drafter": row["draft"],
            "schema": row["schema"],
            "temperature": row["temperature"],
            "tokens per pass": f"{row['tokens_per_pass']['forced']:.2f}",
            "without": f"{row['tokens_per_pass']['without']:.2f}",
            "requests/s": f"{row['requests_per_second']['forced']:.1f}",
            "without ": f"{row['requests_per_second']['without']:.1f}",
        }
        for row in results.rows
    ])  # fmt: skip


def compare(
    serving: Serving, schema: dict[str, Any], temperature: float, options: Any
) -> dict[str, Any]:
    """Both ways, in turn; greedy texts must be the same."""
    runs: dict[str, list[dict[str, Any]]] = {"forced": [], "without": []}
    for _ in range(options.repeats + 1):  # the first compiles the schema
        for way, found in runs.items():
            with forcing(way == "forced"):
                found.append(serving.texts(schema, temperature, options.requests))
    if temperature == 0:
        texts = {text for found in runs.values() for one in found for text in one["texts"]}
        assert len(texts) == 1, texts
    last = {way: found[-1] for way, found in runs.items()}
    samples = {way: [one["seconds"] for one in found[1:]] for way, found in runs.items()}
    return {
        "temperature": temperature,
        "example": last["forced"]["texts"][0],
        "tokens": {way: one["tokens"] for way, one in last.items()},
        "passes": {way: one["passes"] for way, one in last.items()},
        "tokens_per_pass": {way: one["tokens"] / one["passes"] for way, one in last.items()},
        "requests_per_second": {
            way: options.requests / measure.median(one) for way, one in samples.items()
        },
        "samples": samples,
    }


if __name__ == "__main__":
    main()
