"""Engines that the tests share, each compiled once, and traffic for them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from models.weights import random_weights, sizes

import jax_specdec as sd
from jax_specdec import lm

from . import tiny

VOCAB, K, SLOTS, LONGEST, PIECE = 6, 2, 4, 40, 8
TARGET = tiny.random_table(VOCAB, seed=1)
DRAFT = (0.7 * TARGET + 0.5 * tiny.random_table(VOCAB, seed=2)).astype(np.float32)
CONFIG = sd.SpecDecodeConfig(num_speculative_tokens=K)
SHAPE = dict(num_slots=SLOTS, max_length=LONGEST, prefill_sizes=(8, LONGEST), max_stop_tokens=2)


def llama(hidden_size: int) -> lm.models.Llama:
    return lm.models.Llama(sizes(VOCAB, hidden_size, 24, 1, (2, 2, 8)))


TABLE = lm.Engine(tiny.Trigram(VOCAB), lm.ModelDrafter(tiny.Trigram(VOCAB)), CONFIG, **SHAPE)
BLOCK = dataclasses.replace(CONFIG, rejection_sample_method="block")
JOINTLY = lm.Engine(tiny.Trigram(VOCAB), lm.ModelDrafter(tiny.Trigram(VOCAB)), BLOCK, **SHAPE)
LOOKUP = lm.Engine(tiny.Trigram(VOCAB), lm.NGramDrafter(min_ngram=1), CONFIG, **SHAPE)
# Its longer prompts are read in pieces.
LLAMA = lm.Engine(
    llama(16), lm.ModelDrafter(llama(8)), CONFIG, **(SHAPE | dict(prefill_sizes=(PIECE,)))
)
EVERYTHING = dataclasses.replace(  # longer prompts are read in pieces
    TABLE,
    prefill_sizes=(PIECE,),
    request_options=True,
    logprobs=sd.LogprobsConfig(num_top=1, distribution="processed"),
)
# Its rates show which drafts are learned from; every step has K drafts.
EXACT = dataclasses.replace(TABLE, prefill_sizes=(8,), exact=True, draft_budget=(K,))
# Many slots, for statistics, and fewer drafts where the load asks for it.
BUDGETED = dataclasses.replace(TABLE, num_slots=64, draft_budget=(0, 1, 2))
TABLES = jax.device_put((TARGET, DRAFT))
NAMES = {TABLE: "table", JOINTLY: "block", LOOKUP: "lookup", LLAMA: "llama"}


@functools.cache
def weights_of(engine: lm.Engine) -> tuple[Any, Any]:
    """Of the target and of the drafter, made when a test first asks for them."""
    drafter = engine.drafter
    if isinstance(engine.model, tiny.Trigram):
        return TABLES[0], None if isinstance(drafter, lm.NGramDrafter) else TABLES[1]
    # Fourfold, or every token follows every other alike.
    return random_weights(engine.model, 16, 4.0), random_weights(drafter.model, 8, 4.0)


def driver_of(
    engine: lm.Engine,
    *weights: Any,
    max_steps_ahead: int = 0,
    max_prefills: int | None = None,
    step_widths: tuple[int, ...] = (),
    **settings: int,
) -> lm.EngineDriver:
    """A driver; all that happens in a step happens at once, unless asked for otherwise."""
    return lm.EngineDriver(
        engine,
        *(weights or weights_of(engine)),
        max_steps_ahead=max_steps_ahead,
        max_prefills=max_prefills,
        step_widths=step_widths,
        **settings,
    )


@dataclasses.dataclass
class Finished:
    """All updates of a request."""

    token_ids: list[int]
    finish_reason: str | None
    status: sd.Status
    updates: list[lm.RequestUpdate]


def collect(updates: Sequence[lm.RequestUpdate]) -> dict[int, Finished]:
    found: dict[int, Finished] = {}
    for update in updates:
        one = found.setdefault(update.request_id, Finished([], None, sd.Status.OK, []))
        assert one.finish_reason is None, "an update of a request that had ended"
        one.token_ids += update.token_ids
        one.finish_reason, one.status = update.finish_reason, update.status
        one.updates.append(update)
    return found


def step(driver: lm.EngineDriver) -> list[lm.RequestUpdate]:
    """What a step gives; the programs that it was the first to want are there for the next."""
    updates = driver.step()
    if driver.step_widths:
        driver._device.behind.wait()  # type: ignore[union-attr]
    return updates


def run(driver: lm.EngineDriver, updates: Sequence[lm.RequestUpdate] = ()) -> dict[int, Finished]:
    """Step until nothing is left to do, after the updates so far."""
    updates = list(updates)
    while not driver.is_idle:
        updates += step(driver)
    return collect(updates)


def alone(driver: lm.EngineDriver, request: dict[str, Any]) -> Finished:
    """A request by itself: first slot, all others empty."""
    assert driver.is_idle
    request_id = driver.submit(**request)
    return run(driver)[request_id]


def random_request(rng: np.random.Generator, temperatures: Sequence[float]) -> dict[str, Any]:
    length = int(rng.integers(1, 20))
    return dict(
        prompt=rng.integers(0, VOCAB, length).tolist(),
        max_new_tokens=int(rng.integers(1, 16)),
        temperature=float(rng.choice(temperatures)),
        seed=int(rng.integers(0, 2**32)),
        stop_token_ids=rng.integers(0, VOCAB, rng.integers(0, 3)).tolist() * (rng.random() < 0.3),
    )


def greedy_truth(request: dict[str, Any], table: np.ndarray = TARGET) -> list[int]:
    """What a greedy request of the tables emits, token by token in plain Python."""
    sequence, new = list(request["prompt"]), []
    for _ in range(request["max_new_tokens"]):
        new.append(int(np.argmax(tiny.next_logits(table, sequence))))
        sequence.append(new[-1])
        if new[-1] in request.get("stop_token_ids", ()):
            break
    return new


@contextlib.contextmanager
def compilations() -> Iterator[list[str]]:
    """What JAX compiles, anywhere, as its log tells."""
    names: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            message = record.getMessage()
            if message.startswith("Compiling "):
                names.append(message.split()[1])

    logger, handler = logging.getLogger("jax"), Handler()
    logger.addHandler(handler)
    try:
        with jax.log_compiles():
            yield names
    finally:
        logger.removeHandler(handler)
