"""The programs of reports to other projects, in benchmarks/NOTES.md."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

NOTES = Path(__file__).parents[2] / "benchmarks" / "NOTES.md"


def chi_square_of(project: str) -> float:
    """What the program of a report prints."""
    reports = re.split(r"^## ", NOTES.read_text("utf-8"), flags=re.MULTILINE)
    (report,) = [text for text in reports if text.startswith(f"{project}: ")]
    program = re.search(r"^```py\n(.*?)^```", report, re.DOTALL | re.MULTILINE)
    assert program is not None
    done = subprocess.run([sys.executable, "-c", program[1]], capture_output=True, text=True)
    found = re.search(r"^chi-square (\d+), of", done.stdout, re.MULTILINE)
    assert found is not None, done.stderr
    return float(found[1])
