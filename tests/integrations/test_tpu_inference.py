"""The adapter for the flat layout: tables of cases, padding, meshes, and what is refused."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_specdec as sd
from jax_specdec.adapters import tpu_inference

from .tpu_inference_cases import OURS, THEIRS, Case, Row

K, V = 30, 128
CONFIG = sd.SpecDecodeConfig(num_speculative_tokens=K)
CASES = [*THEIRS, *OURS]
KEY = jax.random.key(3)


def row(entry: Row, floor: float, peak: float) -> np.ndarray:
    values = np.full(V, np.nan if entry is None else floor, np.float32)
    if isinstance(entry, int):
        values[entry] = peak
    elif isinstance(entry, dict):
        values[:] = -np.inf if floor else 0.0
        values[list(entry)] = list(entry.values())
    return values


def logits_of(entry: Row) -> np.ndarray:
    return row(entry, -100.0, 100.0)


def arguments(
    case: Case, sizes: tuple[int, int, int], with_bonus_rows: bool
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A case in arrays of L rows, N drafts and B requests, padded with rubbish."""
    num_rows, n, batch = sizes
    counts = [len(ids) for ids in case.drafts]
    rows: list[np.ndarray] = []
    for targets, bonus in zip(case.targets, case.bonus, strict=True):
        rows += [logits_of(entry) for entry in targets]
        rows += [logits_of(bonus)] if with_bonus_rows else []
    ids = [token for those in case.drafts for token in those]
    lengths = counts if case.lengths is None else case.lengths
    logits = np.full((num_rows if with_bonus_rows else n, V), np.nan, np.float32)
    logits[: len(rows)] = rows or logits[:0]
    probs = None
    if case.probs is not None:
        probs = np.full((n, V), np.nan, np.float32)
        entries = [entry for those in case.probs for entry in those]
        probs[: len(entries)] = [row(entry, 0.0, 1.0) for entry in entries]

    def per_request(values: Sequence[Any] | None, rest: Any, dtype: Any) -> np.ndarray:
        values = [rest] * len(counts) if values is None else list(values)
        return np.array([*values, *[rest] * (batch - len(values))], dtype)

    bonus = [entry if isinstance(entry, int) else 0 for entry in case.bonus]
    named = dict(
        temperature=per_request(case.temperature, -1.0, np.float32),
        top_k=per_request(case.top_k, 0, np.int32),
        top_p=per_request(case.top_p, 1.0, np.float32),
        draft_probs=probs,
        bonus_token_ids=None if with_bonus_rows else per_request(bonus, 0, np.int32),
        active=np.arange(batch) < len(counts),
        keys=KEY,
    )
    positional = (
        logits,
        np.array([*ids, *[-999] * (n - len(ids))], np.int32),
        (per_request(lengths, 0, np.int32)),
    )
    return positional, named


def read(flat: Any, lengths: Any, n: int) -> list[list[int]]:
    """The tokens of each request, as a reader of the flat output finds them."""
    ends = np.cumsum(np.maximum(lengths, 0))
    starts, found = ends - np.maximum(lengths, 0), []
    for b in range(len(lengths)):
        tokens = [*flat[starts[b] : ends[b]].tolist(), int(flat[n + b])]
        found.append([token for token in tokens if token != -1])
    return found


def ends(case: Case) -> list[list[int]]:
    """What their parser finds: a token of each request, 0 where it could not be verified."""
    return [tokens or [0] for tokens in case.expected]


@functools.cache
def verifier(sharding: sd.VerifySharding | None = None) -> Any:
    call = functools.partial(tpu_inference.verify_flat, config=CONFIG, sharding=sharding)
    return jax.jit(call)


def statuses(case: Case) -> list[bool]:
    return [b in case.bad for b in range(len(case.drafts))]


@pytest.mark.long
@pytest.mark.parametrize(
    "with_bonus_rows",
    [True, pytest.param(False, marks=pytest.mark.slow)],
    ids=["bonus rows", "bonus given"],
)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_case_gives_what_is_expected(case, with_bonus_rows):
    sizes = 40, 33, 4  # less rows than drafts and requests
    positional, named = arguments(case, sizes, with_bonus_rows)
    found = jax.device_get(verifier()(*positional, **named))
    number = len(case.drafts)
    assert read(found.token_ids, positional[2], sizes[1])[:number] == ends(case), case.defect
    assert sd.parse_output(found.output)[:number] == case.expected
    bad = found.output.status == sd.Status.BAD_INPUT
    assert bad[:number].tolist() == statuses(case)
    assert (found.output.status[number:] == sd.Status.INACTIVE).all()
    assert (found.token_ids[sizes[1] :][number:] == -1).all()


def test_the_table_has_all_of_theirs():
    assert len(THEIRS) == 28 and len(CASES) == 43
    assert len({case.name for case in CASES}) == len(CASES)
    assert all(case.defect is None for case in THEIRS)
    assert sum(case.defect is not None for case in OURS) == 5


def test_a_flat_output_holds_what_their_parser_expects():
    """The three arrays of their parser's tests that a verification may emit."""
    for counts, emitted, flat in (
        ([3, 2], [[10, 20, 30, 40], [50, 60, 70]], [10, 20, 30, 50, 60, 40, 70]),
        ([3, 2], [[10], [20, 30, 40]], [10, -1, -1, 20, 30, -1, 40]),
        ([0, 0], [[50], [60]], [50, 60]),
    ):
        ids = np.full((2, 4), -1, np.int32)
        for tokens, into in zip(emitted, ids, strict=True):
            into[: len(tokens)] = tokens
        num_emitted = jnp.array([len(tokens) for tokens in emitted])
        output = sd.RejectionSampleOutput(
            jnp.asarray(ids), num_emitted - 1, num_emitted, jnp.zeros((2,), jnp.int32)
        )
        drafts = sd.Drafts.from_flat(jnp.zeros((sum(counts),), jnp.int32), jnp.array(counts))
        assert tpu_inference.flat_token_ids(output, drafts).tolist() == flat


@pytest.mark.long
@pytest.mark.parametrize(
    ("num_rows", "counts", "bad"),
    [
        (40, (30, 3, 0, 1), [False, False, False, True]),  # 34 drafts, but N is 33
        (40, (30, 3, 2, 0), [False, False, True, True]),  # and the next begins at 35
        (36, (30, 2, 1, 0), [False, False, False, True]),  # 37 rows, but L is 36
    ],
    ids=["drafts", "drafts, and all after", "rows"],
)
def test_requests_past_the_end_are_bad_input_and_no_other(num_rows, counts, bad):
    drafts = [[b + 1] * count for b, count in enumerate(counts)]
    case = Case("past the end", drafts, drafts, [9] * 4, [])
    (logits, ids, lengths), named = arguments(case, (50, 40, 4), with_bonus_rows=True)
    named["draft_probs"] = None
    found = jax.device_get(verifier()(logits[:num_rows], ids[:33], lengths, **named))
    assert (found.output.status == sd.Status.BAD_INPUT).tolist() == bad
    want = [[] if wrong else [*draft, 9] for draft, wrong in zip(drafts, bad, strict=True)]
    assert sd.parse_output(found.output) == want
    fits = np.where(np.cumsum(counts) <= 33, counts, 0)
    assert read(found.token_ids, fits, 33) == [tokens or [0] for tokens in want]


# Over a mesh of their kind: requests over "data", the vocabulary over "tensor".

GROUPS = 2
PART = dict(num_rows=180, n=150, batch=40)


def spread(cases: list[Case], with_bonus_rows: bool) -> tuple[list[Case], tuple, dict]:
    """The requests of many cases as one call: a half of them on each part of the data axis."""
    parts = []
    for half in (cases[0::GROUPS], cases[1::GROUPS]):
        together = Case(
            "all",
            [ids for case in half for ids in case.drafts],
            [rows for case in half for rows in case.targets],
            [bonus for case in half for bonus in case.bonus],
            [ids for case in half for ids in case.expected],
            temperature=[
                t for case in half for t in (case.temperature or [-1.0] * len(case.drafts))
            ],
            top_k=[k for case in half for k in (case.top_k or [0] * len(case.drafts))],
            top_p=[p for case in half for p in (case.top_p or [1.0] * len(case.drafts))],
            lengths=[
                n for case in half for n in (case.lengths or [len(ids) for ids in case.drafts])
            ],
        )
        parts.append(together)
    sizes = PART["num_rows"], PART["n"], PART["batch"]
    made = [arguments(part, sizes, with_bonus_rows) for part in parts]
    keys = [named.pop("keys") for _, named in made]
    positional, named = jax.tree.map(lambda *x: np.concatenate(x), *made)
    return parts, positional, named | dict(keys=keys[0])


def check_parts(parts: list[Case], positional: tuple, found: Any) -> None:
    found = jax.device_get(found)
    n, batch = PART["n"], PART["batch"]
    for i, part in enumerate(parts):
        flat = found.token_ids[i * (n + batch) :][: n + batch]
        lengths = np.asarray(positional[2])[i * batch :][:batch]
        assert read(flat, lengths, n)[: len(part.drafts)] == ends(part)
        emitted = sd.parse_output(found.output)[i * batch :]
        assert emitted[: len(part.drafts)] == part.expected


WITHOUT_PROBS = [case for case in CASES if case.probs is None and case.lengths is None]


def mesh_of(axis_type: AxisType) -> jax.sharding.Mesh:
    return jax.make_mesh((2, 4), ("data", "tensor"), (axis_type,) * 2)


@pytest.mark.long
@pytest.mark.newest
@pytest.mark.parametrize(
    ("axis_type", "with_bonus_rows"),
    [pytest.param(AxisType.Auto, False, marks=pytest.mark.slow), (AxisType.Explicit, True)],
    ids=["automatic axes, bonus given", "explicit axes, bonus rows"],
)
def test_requests_over_data_and_vocabulary_over_tensor_fit(axis_type, with_bonus_rows):
    mesh = mesh_of(axis_type)
    parts, positional, named = spread(WITHOUT_PROBS, with_bonus_rows)
    logits, *rest = positional
    logits = jax.device_put(logits, NamedSharding(mesh, P("data", "tensor")))
    rest, named = jax.device_put((rest, named), NamedSharding(mesh, P()))
    call = verifier(sd.VerifySharding(mesh, "tensor", "data"))
    check_parts(parts, positional, call(logits, *rest, **named))
