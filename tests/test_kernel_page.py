"""The page on how the kernel works: its pictures, and which file it names for a change."""

import re
from pathlib import Path

import draw

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "kernel.md"


def test_the_page_shows_every_picture_of_the_kernel():
    drawn = [picture.__name__ for picture in draw.PICTURES if "kernel" in picture.__name__]
    shown = re.findall(r"\]\((kernel_\w+)\.svg\)", PAGE.read_text())
    assert sorted(shown) == sorted(drawn)


def test_every_file_of_the_kernel_is_on_the_page():
    named = re.findall(r"^\| `([\w/]+\.py)` \|", PAGE.read_text(), re.MULTILINE)
    src = ROOT / "jax_specdec" / "_src"
    files = {path.name for path in (src / "verify" / "mosaic_gpu").glob("[a-z]*.py")}
    files |= {f"mosaic/{path.name}" for path in (src / "mosaic").glob("[a-z]*.py")}
    assert sorted(named) == sorted(files)
