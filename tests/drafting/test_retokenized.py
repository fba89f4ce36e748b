"""Drafts of a model with another tokenizer: what it reads, and what it draws from."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from formats.checkpoints import CHECKPOINTS
from models.weights import random_weights, sizes
from passes import run as run_pass

import jax_specdec as sd
from jax_specdec import lm

# The target has 11 ids. The draft model has 7 of its own: ids 2, 3, 5, 7 of the target are one of
# them each, the others two or three.
PIECES = np.full((11, 3), -1, np.int32)
for _id, _of_one in enumerate(
    [[0, 1], [4, 4, 2], [6], [1], [3, 0], [5], [2, 1, 6], [0], [5, 5], [1, 2], [4, 0, 3]]
):
    PIECES[_id, : len(_of_one)] = _of_one
IDS = [2, 3, 5, 7]
OWN = [6, 1, 5, 0]
K, B, L = 3, 4, 40
MODEL = lm.models.Llama(sizes(7, 16, 24, 1, (2, 1, 8)))
WEIGHTS = random_weights(MODEL, 0)
PARAMS = lm.RetokenizedParams(WEIGHTS, jnp.asarray(PIECES))
DRAFTER = lm.RetokenizingDrafter(MODEL, ids=IDS)
CONFIG = sd.SpecDecodeConfig(num_speculative_tokens=K)


@jax.jit
def propose(token_ids: Any, lengths: Any, cache: Any, keys: Any, active: Any) -> Any:
    sampling = sd.SamplingParams(jnp.asarray([1.0, 0.5, 2.0, 1.0], jnp.float32))
    context = lm.DraftContext(token_ids, lengths, sampling, keys, CONFIG, active=active)
    store = DRAFTER.init_store(PARAMS, B, CONFIG)
    return DRAFTER.propose(PARAMS, context, cache, store)


@functools.partial(jax.jit, donate_argnums=2)
def prefill(token_ids: Any, start: Any, cache: Any) -> Any:
    return DRAFTER.prefill(PARAMS, lm.models.Rows(token_ids, start), cache)


@jax.jit
def score(own_ids: Any) -> Any:
    """Logits of whole texts of the draft model's own ids, by a fresh cache."""
    empty = MODEL.init_cache(B, 2 * L + 8)
    return run_pass(MODEL, WEIGHTS, own_ids, jnp.zeros(B, jnp.int32), empty).logits


def spelled(text: list[int]) -> list[int]:
    return [piece for token_id in text for piece in PIECES[token_id].tolist() if piece >= 0]


def buffer(texts: list[list[int]]) -> np.ndarray:
    rows = np.random.default_rng(0).integers(0, 11, (B, L)).astype(np.int32)
    for row, text in zip(rows, texts, strict=True):
        row[: len(text)] = text
    return rows


def check_rows(texts: list[list[int]], proposal: Any) -> np.ndarray:
    """Checks that drafts are listed, and were drawn from the model's logits after the pieces."""
    drafts = np.asarray(proposal.token_ids)
    assert set(drafts.ravel().tolist()) <= set(IDS)
    own = np.zeros((B, 2 * L + 8), np.int32)
    for row, text, some in zip(own, texts, drafts.tolist(), strict=True):
        whole = spelled(text + some)
        row[: len(whole)] = whole
    fresh = np.asarray(score(own))
    first = [len(spelled(text)) - 1 for text in texts]
    expected = np.array([fresh[b, n : n + K][:, OWN] for b, n in enumerate(first)])
    stored = np.moveaxis(np.asarray(proposal.store.logits).reshape(K, B, -1), 0, 1)
    np.testing.assert_allclose(stored, expected, rtol=1e-4, atol=1e-5)
    return drafts


def test_drafts_are_drawn_after_the_pieces_of_the_text() -> None:
    rng = np.random.default_rng(1)
    texts = [rng.integers(0, 11, n).tolist() for n in (1, 5, 17, 26)]
    cache = DRAFTER.init_cache(B, L)
    # Prompts are read in two chunks that overlap; the second begins inside each but the first.
    rows = buffer(texts)
    cache = prefill(rows[:, :16], np.zeros(B, np.int32), cache)
    cache = prefill(rows[:, 12:28], np.full(B, 12, np.int32), cache)
    keys = jax.random.split(jax.random.key(0), B)
    active = np.ones(B, bool)
    # Any number of drafts is accepted, from none to all; then another token follows. At last they
    # are drafts of others, which the model has not seen, and of more pieces than a pass reads.
    for accepted in ([0, 1, 2, 3], [3, 3, 0, 1], [3, 0, 3, 0]):
        lengths = np.array([len(text) for text in texts], np.int32)
        proposal, cache = propose(buffer(texts), lengths, cache, keys, active)
        drafts = check_rows(texts, proposal)
        if accepted == [3, 0, 3, 0]:
            drafts = np.array([[1, 6, 10], [3, 5, 7], [10, 1, 1], [2, 2, 2]])
        for text, some, count in zip(texts, drafts.tolist(), accepted, strict=True):
            text += [*some[:count], int(rng.integers(0, 11))]
    # What a request that does not run has read so far stays, though its newest token is another.
    paused = [*texts[0][:-1], (texts[0][-1] + 1) % 11]
    lengths = np.array([len(text) for text in texts], np.int32)
    _, cache = propose(buffer([paused, *texts[1:]]), lengths, cache, keys, np.arange(B) > 0)
    proposal, cache = propose(buffer(texts), lengths, cache, keys, active)
    check_rows(texts, proposal)


def test_a_text_of_more_pieces_than_there_is_room_for_gets_no_drafts() -> None:
    texts = [[1] * 30, [2] * 30, [1, 2] * 4, [6] * 24]  # 90, 30, 16 and 72 pieces of 68
    rows = buffer(texts)
    cache = prefill(rows[:, :29], np.zeros(B, np.int32), DRAFTER.init_cache(B, L))
    keys = jax.random.split(jax.random.key(0), B)
    lengths = np.array([len(text) for text in texts], np.int32)
    proposal, _ = propose(rows, lengths, cache, keys, np.ones(B, bool))
    drafts = np.asarray(proposal.token_ids)
    assert (drafts[[0, 3]] == sd.PLACEHOLDER_TOKEN_ID).all()
    assert set(drafts[[1, 2]].ravel().tolist()) <= set(IDS)


def words(path: Path, *names: str) -> lm.Tokenizer:
    """A tokenizer of these words."""
    ids = {name: token_id for token_id, name in enumerate(names)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids))
    tokenizer.decoder = tokenizers.decoders.Fuse()
    path.mkdir()
    tokenizer.save(str(path / "tokenizer.json"))
    return lm.load_tokenizer(path)


def test_of_a_long_token_the_last_pieces_are_read(tmp_path: Path) -> None:
    letters = words(tmp_path / "draft", *"abcdefghijkl")
    long = words(tmp_path / "target", "a", "abcdefghij", "lkj")
    model = lm.models.PlainModel(12, lambda *arrays: arrays)
    _, params = lm.retokenize(long, 3, letters, model, None)
    none = [-1] * 5
    expected = [[0, -1, -1, *none], [*range(2, 10)], [11, 10, 9, *none]]
    np.testing.assert_array_equal(params.pieces, expected)


def with_row(row: list[int]) -> lm.RetokenizedParams:
    """The params with other pieces of id 4."""
    pieces = PIECES.copy()
    pieces[4] = row
    return PARAMS._replace(pieces=jax.device_put(pieces))


REFUSED = [
    (DRAFTER, WEIGHTS, TypeError, "draft_params must be a RetokenizedParams"),
    (DRAFTER, PARAMS._replace(pieces=PARAMS.pieces[:7]), ValueError, "V above all of drafter.ids"),
    (DRAFTER, PARAMS._replace(pieces=jnp.zeros((11, 9), jnp.int32)), ValueError, "M at most 8"),
    (DRAFTER, PARAMS._replace(pieces=PARAMS.pieces.astype(float)), TypeError, "int32"),
    *(
        (DRAFTER, with_row(row), ValueError, rf"pieces\[4\] must .* = 7, then -1, but it is \{row}")
        for row in ([-1, -1, -1], [-1, 2, 3], [2, -1, 3], [2, 7, -1])
    ),
]


@pytest.mark.parametrize(("drafter", "params", "error", "message"), REFUSED)
def test_what_cannot_be_read_is_named(drafter: Any, params: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        drafter.check_params("draft_params", params)


def test_pieces_spell_every_token_of_a_real_vocabulary() -> None:
    """Of a tokenizer whose merges were learned from other text; ids are those of equal text."""
    ours, theirs = (lm.load_tokenizer(CHECKPOINTS / name) for name in ("qwen2", "llama"))
    model = lm.models.PlainModel(288, lambda *arrays: arrays)
    drafter, params = lm.retokenize(ours, 288, theirs, model, None)
    pieces = np.asarray(params.pieces)
    special = ours.special_tokens
    listed = set(drafter.ids.values.tolist())
    for token_id, row in enumerate(pieces.tolist()):
        own = [piece for piece in row if piece >= 0]
        assert own and row == [*own, *[-1] * (len(row) - len(own))]
        text = b"".join(map(theirs.token_bytes, own))
        if token_id in special:
            text = text or special[token_id].encode()
        is_unknown = not (ours.token_bytes(token_id) or token_id in special)
        expected = special.get(token_id, "").encode() or ours.token_bytes(token_id)
        assert text == expected or is_unknown
        if token_id in listed:
            assert len(own) == 1
    both = {ours.token_bytes(i) for i in range(288)} & {theirs.token_bytes(i) for i in range(288)}
    assert {ours.token_bytes(i) for i in listed} - {b""} == both - {b""}
