"""The page on how the kernel works: its pictures, and which file it names for a change."""

import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "kernel.md"


def test_pictures_are_what_their_script_draws(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("draw_kernel", ROOT / "tools" / "draw_kernel.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    monkeypatch.setattr(script, "DOCS", tmp_path)
    script.main()
    drawn = {path.name: path.read_text() for path in tmp_path.iterdir()}
    shown = re.findall(r"\]\((kernel_\w+\.svg)\)", PAGE.read_text())
    assert sorted(shown) == sorted(drawn)
    assert {name: (PAGE.parent / name).read_text() for name in drawn} == drawn


def test_every_file_of_the_kernel_is_on_the_page():
    named = re.findall(r"^\| `(\w+\.py)` \|", PAGE.read_text(), re.MULTILINE)
    folder = ROOT / "jax_specdec" / "_src" / "verify" / "mosaic_gpu"
    files = {path.name for path in folder.glob("*.py")} - {"__init__.py"}
    assert sorted(named) == sorted(files)
