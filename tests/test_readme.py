"""The README's examples run, and the serving example does what the README says."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models.checkpoints import CHECKPOINTS

README = Path(__file__).parent.parent / "README.md"


def serving_example() -> str:
    (code,) = re.findall(r"```python serving\n(.*?)```", README.read_text("utf-8"), re.DOTALL)
    return str(code)


def test_the_serving_example_runs_and_its_greedy_request_follows_the_target() -> None:
    scope: dict[str, object] = {}
    exec(compile(serving_example(), str(README), "exec"), scope)
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


def test_the_body_of_the_serving_example_is_about_fifteen_lines() -> None:
    body = serving_example().split("def serve_step")[1]
    assert len([line for line in body.splitlines() if line.strip()]) <= 15


def test_the_serving_example_is_compiled_once() -> None:
    scope: dict[str, object] = {}
    exec(compile(serving_example(), str(README), "exec"), scope)
    step = jax.jit(scope["serve_step"])  # type: ignore[arg-type]
    state = (jnp.zeros(2, jnp.int32), jnp.ones(2, jnp.int32))
    for _ in range(3):
        state, _ = step(state, None)
    assert step._cache_size() == 1


def blocks() -> list[str]:
    """All Python of the page but the serving example, in order."""
    return re.findall(r"```python\n(.*?)```", README.read_text("utf-8"), re.DOTALL)


@pytest.mark.newest
def test_the_other_examples_run_one_after_another(capsys: pytest.CaptureFixture[str]) -> None:
    """On the checkpoints of the tests in place of those of the text, and with fewer tokens."""
    loop, real, watching = blocks()
    scope: dict[str, object] = {}
    loop = loop.replace("max_new_tokens=100", "max_new_tokens=24")
    exec(compile(loop, str(README), "exec"), scope)
    printed = capsys.readouterr().out
    text, tokens_per_target_pass = printed.rsplit("\n", 2)[:2]
    assert "Return" in text and 1 < float(tokens_per_target_pass) <= 5

    real = real.replace("Qwen2.5-7B", str(CHECKPOINTS / "qwen2"))
    real = real.replace("Qwen2.5-0.5B", str(CHECKPOINTS / "qwen2_draft"))
    real = real.replace("stop_token_ids=", "max_new_tokens=8, stop_token_ids=")
    exec(compile(real, str(README), "exec"), scope)
    assert capsys.readouterr().out.strip()

    exec(compile(watching, str(README), "exec"), {})  # by itself, as a reader pastes it
    assert "3.00" in capsys.readouterr().out  # 1 + (3 + 1) / 2
