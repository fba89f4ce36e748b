"""The README's serving example runs as it stands, and does what the README says."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

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
