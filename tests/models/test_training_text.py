"""The text the embedded models learn from holds nothing of what they are tested on."""

import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.newest

SCRIPT = Path(__file__).parents[2] / "training" / "stdlib_text.py"


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


def write(directory: Path, *names: str) -> None:
    for name in names:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {name}\n")


def names(files: list[tuple[str, bytes]]) -> list[str]:
    return [name for name, _ in files]


def test_files_go_where_they_belong(script: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path, "zlib.py", "abc.py", "xml/dom/x.py", "heapq.py", "json/encoder.py", "glob.py")
    write(tmp_path, "test/test_abc.py", "test/test_heapq.py", "test/test_glob/case.py")
    write(tmp_path, "test/badsyntax_1.py", "encodings/cp437.py", "site-packages/heapq.py")
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n")
    (tmp_path / "nul.py").write_bytes(b"# \0\n")
    (tmp_path / "empty.py").touch()
    text = script["read_text"](tmp_path)
    assert names(text.library) == ["abc.py", "xml/dom/x.py", "zlib.py"]
    assert names(text.tests) == ["test/test_abc.py"]
    assert names(text.validation) == ["glob.py"]
    assert names(text.held_out) == ["heapq.py", "json/encoder.py"]
    assert script["join"](text.held_out).tobytes() == b"\0# heapq.py\n\0# json/encoder.py\n\0"


def test_a_directory_that_is_no_standard_library_is_refused(
    script: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match="is not Python's standard library"):
        script["read_text"](tmp_path)


def test_held_out_and_validation_files_are_disjoint(script: dict[str, Any]) -> None:
    assert 15 <= len(set(script["HELD_OUT"])) <= 20
    assert not set(script["HELD_OUT"]) & set(script["VALIDATION"])


def test_docstrings_go_and_code_stays(script: dict[str, Any]) -> None:
    source = b'''\
class A:
    """Gone."""

    def f(self):
        r"""Gone,
        all of it.
        """
        text = """kept"""
        return text

    def only_a_docstring(self):
        """Kept: the body would be empty."""
'''
    assert (
        script["without_docstrings"](source)
        == b'''\
class A:
    def f(self):
        text = """kept"""
        return text

    def only_a_docstring(self):
        """Kept: the body would be empty."""
'''
    )


def test_blocks_begin_at_functions_and_classes(script: dict[str, Any]) -> None:
    source = b"import a\nclass A:\n    async def f():\n        define = 1\n"
    assert script["block_starts"](np.frombuffer(source, np.uint8)).tolist() == [9, 18]
