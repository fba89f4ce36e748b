"""The loops of docs/integration.md run as they stand, and greedy requests follow the target."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import numpy as np
import pytest

PAGE = Path(__file__).parents[2] / "docs" / "integration.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE)


@pytest.mark.newest
@pytest.mark.parametrize(("block", "greedy"), [(0, [0]), (1, [0])], ids=["flat", "chains"])
def test_a_loop_on_the_page_decodes_every_request(block, greedy):
    scope: dict[str, object] = {}
    exec(compile(BLOCKS[block], str(PAGE), "exec"), scope)
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


@pytest.mark.parametrize("code", BLOCKS, ids=["flat", "chains"])
def test_a_loop_is_about_sixty_lines(code):
    assert 40 <= len([line for line in code.splitlines() if line.strip()]) <= 60
