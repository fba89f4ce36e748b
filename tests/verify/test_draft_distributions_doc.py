"""Lists of ids on docs/draft_distributions.md: the code runs, one block after another.

`tests/test_docs.py` runs the first block, a loop with a store.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

PAGE = Path(__file__).parents[2] / "docs" / "draft_distributions.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE)[1:]


@pytest.mark.slow
def test_the_code_on_the_page_runs():
    scope: dict = {}
    for block in BLOCKS[:2]:
        exec(compile(block, str(PAGE), "exec"), scope)
        output, drafts = scope["output"], scope["drafts"]
        assert not np.any(output.status) and (np.asarray(output.num_emitted) >= 1).all()
        assert np.isin(drafts.token_ids, scope["ids"]).all()
    exec(compile(BLOCKS[2], str(PAGE), "exec"), scope)
    steps = scope["output"].steps
    assert 0.5 < steps.num_accepted.sum() / steps.num_proposed.sum() <= 1
    assert len(scope["output"].completions[0]) == 40
