"""What an addition touches: the diffs that CONTRIBUTING names apply, and what they add works.

Where a line that a diff stands beside has changed, change the diff: that is one more addition.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.newest

ROOT = Path(__file__).parents[1]
DIFFS = ROOT / "tests" / "additions"
FILES = {"processor": 3, "rule": 3, "drafter": 2}


def applied(name: str, directory: Path, *options: str) -> None:
    command = ["git", "apply", *options, str(DIFFS / f"{name}.diff")]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("name", "count"), FILES.items())
def test_an_addition_touches_as_many_files_as_its_row_says(name: str, count: int) -> None:
    applied(name, ROOT, "--check")
    files = re.findall(r"^\+\+\+ b/(.+)$", (DIFFS / f"{name}.diff").read_text(), re.MULTILINE)
    row = re.search(
        rf"^\| .*\({DIFFS.relative_to(ROOT)}/{name}\.diff\) \|(.*)\|$",
        (ROOT / "CONTRIBUTING.md").read_text(),
        re.MULTILINE,
    )
    assert row, f"no row of CONTRIBUTING names {name}.diff"
    named = [f"jax_specdec/{path}" for path in re.findall(r"`([^`]+)`", row[1])]
    assert len(files) == len(named) == count
    assert all(file.startswith(tuple(named)) for file in files)


WORKS = """
import dataclasses
import jax
from verify import batch, cases
import jax_specdec as sd
from jax_specdec import lm
from jax_specdec.lm.drafters import Given, kind_of_drafter

# The drafter changes no text, and the processor lets no logit tell from another.
(model, params), _ = lm.load_embedded_pair()
drafter = kind_of_drafter("repeat").read(Given(None), "")(None).drafter
options = [lm.RequestOptions(), lm.RequestOptions(soft_cap=1e-6, temperature=1.0)]
given = dict(
    config=sd.SpecDecodeConfig(num_speculative_tokens=2),
    options=[dataclasses.replace(one, max_new_tokens=32) for one in options],
    key=jax.random.key(0),
)
prompts = [list(b"def f(x):")] * 2
greedy, flat = lm.generate(model, params, prompts, drafter=drafter, **given).completions
assert greedy == lm.generate_plain(model, params, prompts, **given).completions[0]
assert len({*flat}) > 24

# The rule's tokens are those of its oracle.
class Lenient(batch.Layout):
    method = "lenient"

layout = Lenient(vocab=97, num_speculative_tokens=4, num_requests=8, num_drafts=34, kind="probs")
batch.agree(cases.random_batches(layout, range(1, 7)), batch.XLA)
"""


@pytest.mark.long
def test_what_the_diffs_add_works(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "jax_specdec", tmp_path / "jax_specdec")
    for name in FILES:
        applied(name, tmp_path)
    paths = os.pathsep.join([str(tmp_path), str(ROOT / "tests")])
    done = subprocess.run(
        [sys.executable, "-c", WORKS],
        env=os.environ | {"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
