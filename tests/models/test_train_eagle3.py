"""Training of EAGLE-3 heads: it learns, and what it unrolls is what drafting computes."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import own_text
import pytest
import train_eagle3
from formats.checkpoints import CHECKPOINTS

from jax_specdec import lm

from .test_eagle3 import CONFIG, TARGET, random_params

pytestmark = pytest.mark.newest


def test_unrolling_computes_what_drafting_does() -> None:
    config = dataclasses.replace(CONFIG, norm_output=True, norm_before_residual=True)
    head = lm.models.Eagle3Head(config)
    params, rng = random_params(head), np.random.default_rng(0)
    tokens = rng.integers(0, TARGET.vocab_size, (2, 9), np.int32)
    features = rng.normal(size=(2, 9, head.num_features)).astype(np.float32)

    @jax.jit
    def logits(params: Any) -> list[jax.Array]:
        states = train_eagle3.unroll(head, params, features, tokens)
        return [train_eagle3.logits_of(head, params, x) for x in states]

    steps = np.asarray(logits(params))
    apply = jax.jit(head.apply)
    rows_of = lm.models.Rows
    states = np.asarray(head.project(params, features))
    for i in range(9 - train_eagle3.NUM_STEPS):
        # Drafting from i: features up to i, then the head's own states.
        cache, start = head.init_cache(2, 16), np.zeros(2, np.int32)
        for position in range(i + 1):
            rows = rows_of(tokens[:, position + 1, None], start)
            found, state, cache = apply(params, states[:, position, None], rows, cache)
            start = start + 1  # not in place: the call may still read it
        for step in range(train_eagle3.NUM_STEPS):
            np.testing.assert_allclose(steps[step][:, i], found[:, 0], rtol=1e-4, atol=1e-4)
            token = tokens[:, min(i + 2 + step, 8), None]  # the last one is of no concern
            found, state, cache = apply(params, state, rows_of(token, start), cache)
            start = start + 1


@pytest.mark.long
def test_a_head_learns_and_is_read_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"def f{i}(x):\n    return x + {i % 7}\n" for i in range(200)))
    arguments = f"--out {tmp_path} --target {CHECKPOINTS / 'llama'} --text {text} --layers 0 1 2"
    arguments += " --vocab-size 24 --length 16 --batch-size 4 --sampled 8 --steps 100"
    with jax.numpy_dtype_promotion("standard"):  # optax asks for it
        train_eagle3.main([*arguments.split(), "--learning-rate", "3e-3"])
    assert "acceptance by step" in capsys.readouterr().out
    record = json.loads((tmp_path / "vocab_24" / "training.json").read_text())
    losses = [entry["loss"] for entry in record["log"]]
    assert losses[-1] < losses[0]
    target = lm.load_huggingface(CHECKPOINTS / "llama", jnp.float32)
    head, params = lm.load_head(tmp_path / "vocab_24", target)
    assert head.aux_hidden_state_layers == (0, 1, 2) and head.vocab_size == 24
    assert (np.diff(params["target_ids"]) > 0).all()
    rows = target.params["lm_head"][:, params["target_ids"]]
    np.testing.assert_array_equal(params["lm_head"], rows.astype(jnp.bfloat16).astype(jnp.float32))


def test_the_most_frequent_ids_are_listed() -> None:
    texts = np.array([5, 5, 3, 3, 3, 9]), np.array([[9, 9], [1, 1]])
    assert train_eagle3.frequent_ids(12, 3, *texts).tolist() == [1, 3, 9]
    assert train_eagle3.frequent_ids(12, 2, np.array([4, 2, 8])).tolist() == [2, 4]


def test_the_next_prompt_follows_where_the_target_ends_its_answer() -> None:
    target = train_eagle3.Target(*lm.load_huggingface(CHECKPOINTS / "llama", jnp.float32))
    rng, length = np.random.default_rng(0), 24
    script = own_text.Script(
        rng.integers(3, target.model.vocab_size, (2, length), np.int32),
        np.tile(np.arange(length) % 3 == 2, (2, 1)),
    )
    heat, key = np.array([0.0, 1.0], np.float32), jax.random.key(0)

    def written(stop: int) -> tuple[np.ndarray, np.ndarray]:
        found = own_text.continue_windows(*target, script, 2, np.array([stop]), key, heat)
        return np.asarray(found[0]), np.asarray(found[1])

    ids, drawn = written(-1)  # nothing ends an answer
    assert drawn[:, 3:].all() and not drawn[:, :3].any()
    stop = ids[0, 6]
    ids, drawn = written(stop)
    greedy = np.asarray(jax.jit(target.run, static_argnums=1)(ids, (0,))[0]).argmax(axis=-1)
    np.testing.assert_array_equal(ids[0, 1:][drawn[0, 1:]], greedy[0, :-1][drawn[0, 1:]])
    assert (ids[1, 1:] != greedy[1, :-1])[drawn[1, 1:]].any()
    for b in range(2):
        given = np.flatnonzero(~drawn[b])
        np.testing.assert_array_equal(ids[b, given], script.ids[b, : len(given)])
        for i in range(1, length):
            place = np.sum(~drawn[b, :i]) - 1  # of the last token that was given
            ended = ids[b, i - 1] == stop if drawn[b, i - 1] else not script.ends[b, place]
            assert drawn[b, i] != ended
    assert (~drawn[0, 7:10]).all()
