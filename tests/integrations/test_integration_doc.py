"""The loops of docs/integration.md, attention.md and adapters.md run, and follow the target.

Loops with caches are compared with plain decoding. Over pages, where a target drafts for itself,
every draft must be accepted: that fails if a position or an entry of a cache is wrong.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from passes import run as run_pass

from jax_specdec import lm

DOCS = Path(__file__).parents[2] / "docs"
PAIR = "lm.load_embedded_pair()  # your two models\n"
TWO_TOKENS = "read(token_ids, lengths - 2, 2), lengths - 2,"
ONE_TOKEN = "read(token_ids, lengths - 1, 1), lengths - 1,"


def blocks(page: str) -> list[str]:
    text = (DOCS / page).read_text("utf-8")
    return re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


SMALL, LOOP, LOOKUP, SYNTHETIC, PADDED = blocks("integration.md")
*ADAPTERS, DFLASH = blocks("adapters.md")


def run(code: str) -> dict[str, object]:
    scope: dict[str, object] = {}
    exec(compile(code, "docs", "exec"), scope)
    return scope


def tokens_per_pass(scope: dict[str, object]) -> np.ndarray:
    emitted = np.stack([output.num_emitted for output in scope["steps"]])
    return emitted.sum(axis=0) / (emitted > 0).sum(axis=0)


def rows_of_target(scope: dict[str, object]) -> jax.Array:
    """``[B, L, V]``: of all texts of a loop, in one pass."""
    target, token_ids = scope["target"], scope["state"].token_ids
    cache = target.init_cache(*token_ids.shape)
    return run_pass(target, scope["params"], token_ids, scope["start"], cache).logits


# A small loop


@functools.cache
def names_of_the_small_loop() -> dict[str, object]:
    return run(SMALL)


def test_the_greedy_request_of_the_small_loop_follows_the_target() -> None:
    scope = names_of_the_small_loop()
    token_ids = np.asarray(scope["token_ids"])
    assert token_ids.shape == (8, 2, 5)
    for request in range(2):
        for step in token_ids[:, request]:
            emitted = (step >= 0).sum()
            assert emitted >= 1 and (step[emitted:] == -1).all()

    greedy = [t for step in token_ids[:, 0] for t in step.tolist() if t >= 0]
    target = np.asarray(scope["target"])
    token, expected = 0, []
    for _ in greedy:
        token = int(target[token].argmax())
        expected.append(token)
    assert greedy == expected
    assert len(greedy) > 8  # some drafts were accepted


def test_a_step_of_the_small_loop_is_about_fifteen_lines() -> None:
    body = SMALL.split("def serve_step")[1]
    assert len([line for line in body.splitlines() if line.strip()]) <= 15


def test_steps_that_are_padded_have_one_program() -> None:
    assert run(PADDED)["traces"] == [(20, 300)]


def test_the_small_loop_is_compiled_once() -> None:
    """A step returns a state of the very types that it takes, which `jax.jit` compiles for."""
    step = jax.jit(names_of_the_small_loop()["serve_step"])  # type: ignore[arg-type]
    state = (jnp.zeros(2, jnp.int32), jnp.ones(2, jnp.int32))
    types = [jax.typeof(x) for x in state]
    found, _ = jax.eval_shape(step, state, None)
    assert [(x.shape, x.dtype, x.weak_type) for x in found] == [
        (x.shape, x.dtype, x.weak_type) for x in types
    ]


@pytest.mark.long
def test_synthetic_acceptance_of_ragged_drafts_has_the_means_that_the_page_says() -> None:
    stats = run(LOOKUP + SYNTHETIC)["stats"]
    assert stats.num_verifications == 256 * 20 and stats.num_drafts == 192 * 20
    # Of the 128 requests whose second draft decides, half of the steps emit a token more.
    error = np.sqrt(0.25 * 128 * 20)
    assert abs(stats.num_tokens - 2 * 256 * 20) < 5 * error
    assert abs(stats.mean_acceptance_length - 7 / 3) < 5 * error / stats.num_drafts


# A complete loop


@pytest.mark.slow
@pytest.mark.newest
def test_the_loop_emits_what_plain_decoding_emits():
    scope = run(LOOP)
    prompts, texts = scope["prompts"], scope["texts"]
    for prompt, text in zip(prompts, texts, strict=True):
        assert text[: len(prompt)] == prompt
        assert len(text) == len(prompt) + 80 or text[-1] == lm.DOCUMENT_SEPARATOR
    logits = np.asarray(rows_of_target(scope)[0], np.float64)  # of the greedy request
    for i in range(len(prompts[0]), len(texts[0])):
        counts = np.bincount(texts[0][len(prompts[0]) : i], minlength=scope["V"])
        assert texts[0][i] == np.argmax(logits[i - 1] - 0.1 * counts)
    np.testing.assert_allclose(tokens_per_pass(scope)[:2], [3.3, 3.8], atol=0.05)  # as it says


@pytest.mark.slow
@pytest.mark.newest
def test_a_draft_model_that_skips_a_token_has_fewer_accepted():
    assert LOOP.count(TWO_TOKENS) == 1
    scope = run(LOOP.replace(TWO_TOKENS, ONE_TOKEN))
    np.testing.assert_allclose(tokens_per_pass(scope)[:2], [2.4, 2.6], atol=0.05)  # as it says


# Attention, and a loop over pages


ONE_LAYOUT, PAGES_OF_A_POOL, *PAGED_LOOP = blocks("attention.md")
PAGED = "".join(PAGED_LOOP)
FOR_ITSELF = "[lm.load_embedded_pair()[1]] * 2\n"  # the smaller model, with its own drafts
NOISY = f"""{FOR_ITSELF}
rng = np.random.default_rng(0)
draft_params = jax.tree.map(
    lambda x: np.float32(x * rng.normal(1, 0.15, x.shape)), jax.device_get(params))
"""
CHAINS = {"IS_TREE = True": "IS_TREE = False"}
MOVED = "        cache = [sd.move_rows(layer, lengths - 1, path, pages=pages) for layer in cache]\n"


@pytest.mark.long
@pytest.mark.newest
def test_attention_reads_what_each_row_sees_and_a_path_is_moved_together() -> None:
    scope = run(f"{ONE_LAYOUT}first, of = read, start\n{PAGES_OF_A_POOL}")
    query, keys, values = (np.asarray(scope[x], np.float64) for x in ("query", "keys", "values"))
    for b, s, n in ((0, 0, 0), (1, 4, 7)):  # heads 0 to 3 read the first head of keys
        row, seen = 2 * b + n // 4, int(scope["of"][b]) + s + 1
        mass = np.exp(query[b, s, n] @ keys[row, :, :seen] / 8)
        wanted = mass @ values[row, :seen] / mass.sum()
        np.testing.assert_allclose(
            np.asarray(scope["first"], np.float64)[b, s, n], wanted, atol=0.02
        )
    assert np.isfinite(np.asarray(scope["read"], np.float32)).all()
    # Nodes 2 and 4 of the first request are at its positions 20 and 21, in page 17, one of 16.
    np.testing.assert_array_equal(scope["pool"][0][17, 4:6], scope["new_keys"][0, [2, 4]])


def run_paged(changes: dict[str, str]) -> dict[str, object]:
    loop = PAGED
    for printed, instead in changes.items():
        assert loop.count(printed) == 1
        loop = loop.replace(printed, instead)
    scope = run(loop)
    stats, completions = scope["stats"], scope["completions"]
    assert sorted(scope["free"]) == list(range(scope["P"])) and scope["num_moves"] > 10
    assert stats.num_tokens == sum(map(len, completions.values())) and stats.num_fallbacks == 0
    return scope


def texts_that_differ(scope: dict[str, object]) -> list[int]:
    """The requests whose texts are not those of plain decoding under the same rule."""
    prompts, most, temperatures = zip(*scope["asked"], strict=True)
    plain = lm.generate_plain(
        scope["target"],
        scope["params"],
        prompts,
        config=scope["config"],
        max_new_tokens=max(most),
        stop_token_ids=[lm.DOCUMENT_SEPARATOR],
        options=[lm.RequestOptions(temperature=t, seed=i) for i, t in enumerate(temperatures)],
    )
    wanted = [text[:n] for text, n in zip(plain.completions, most, strict=True)]
    return [i for i, text in enumerate(wanted) if scope["completions"][i] != text]


@pytest.mark.long
@pytest.mark.newest
def test_trees_over_pages_emit_what_plain_decoding_emits() -> None:
    scope = run_paged({PAIR: NOISY})
    assert texts_that_differ(scope) == []
    paths = np.stack([output.path for output in scope["outputs"]])
    assert (paths[paths > 0] % 2 == 0).any(), "no leaf was kept"
    assert scope["stats"].tokens_per_target_pass > 1.5


@pytest.mark.slow
@pytest.mark.newest
def test_over_pages_a_target_that_drafts_for_itself_has_everything_accepted() -> None:
    scope = run_paged({PAIR: FOR_ITSELF} | CHAINS)
    stats = scope["stats"]
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 0
    assert not {0, 3} & set(texts_that_differ(scope))  # those of greedy requests


@pytest.mark.slow
@pytest.mark.newest
def test_the_loop_over_pages_does_what_it_says_of_itself() -> None:
    scope = run_paged({})
    assert texts_that_differ(scope) == []
    np.testing.assert_allclose(scope["stats"].tokens_per_target_pass, 3.0, atol=0.05)


@pytest.mark.slow
@pytest.mark.newest
def test_a_path_that_is_not_moved_together_changes_texts() -> None:
    assert texts_that_differ(run_paged({PAIR: NOISY, MOVED: "        pass\n"})) != []


# Adapters


@pytest.mark.long
@pytest.mark.newest
@pytest.mark.parametrize(("block", "greedy"), [(0, [0]), (1, [0])], ids=["flat", "chains"])
def test_a_loop_on_the_page_decodes_every_request(block, greedy):
    scope = run(ADAPTERS[block])
    texts, table = scope["texts"], np.asarray(scope["table"])
    assert texts[3] == []  # an empty slot
    for b in greedy:
        token, want = texts[b][0], []
        for _ in texts[b][1:]:
            token = int(table[token].argmax())
            want.append(token)
        assert texts[b][1:] == want
        assert len(want) > 30  # all drafts were accepted
    log_p = np.asarray(jax.nn.log_softmax(table, axis=1))
    for b, text in enumerate(texts[:3]):
        pairs = np.array(list(zip(text[:-1], text[1:], strict=True)))
        assert len(pairs) >= 12 and pairs.max() < 64
        np.testing.assert_allclose(scope["logprobs"][b], log_p[tuple(pairs.T)], atol=1e-5)


@pytest.mark.parametrize("code", ADAPTERS, ids=["flat", "chains"])
def test_a_loop_is_about_sixty_lines(code):
    assert 40 <= len([line for line in code.splitlines() if line.strip()]) <= 60
