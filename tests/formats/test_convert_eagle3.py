"""The converter of `pytorch_model.bin`, with a stand-in for torch that says how it was called."""

import sys
import types
from pathlib import Path
from typing import Any

import convert_eagle3
import pytest

SOURCE = convert_eagle3.SOURCE


class Tensor:
    """What is called of a tensor, with the calls."""

    def __init__(self, *calls: str) -> None:
        self.calls = calls

    def __getattr__(self, name: str) -> Any:
        return lambda: Tensor(*self.calls, name)


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """Loads `held`; remembers how, and what was saved."""
    stub = types.SimpleNamespace(__version__="2.6.0+cpu", Tensor=Tensor, held={"fc": Tensor()})

    def load(path: Path, **options: Any) -> Any:
        stub.options = options
        return stub.held

    def save_file(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
        path.write_text(f"{sorted(tensors)} {metadata}")
        stub.saved = tensors

    stub.load = load
    monkeypatch.setitem(sys.modules, "torch", stub)
    monkeypatch.setitem(
        sys.modules, "safetensors.torch", types.SimpleNamespace(save_file=save_file)
    )
    return stub


def test_only_tensors_are_read_and_written(torch: types.SimpleNamespace, tmp_path: Path) -> None:
    (tmp_path / SOURCE).touch()
    torch.held = {"fc.weight": Tensor(), "d2t": Tensor()}
    assert convert_eagle3.convert(tmp_path) == ["d2t", "fc.weight"]
    assert torch.options == {"map_location": "cpu", "weights_only": True}
    assert torch.saved["d2t"].calls == ("detach", "clone", "contiguous")


@pytest.mark.parametrize(
    "version, held, says",
    [
        ("2.5.1", {"fc": Tensor()}, "torch must be 2.6 or newer, but is 2.5.1"),
        ("2.6.0", [Tensor()], "must hold tensors by name, but holds a list"),
        ("2.6.0", {}, "must hold tensors by name"),
        ("2.6.0", {"fc": 5}, "holds 'fc', which is not a tensor"),
        ("2.10.0", {5: Tensor()}, "holds 5, which is not a tensor"),
    ],
)
def test_anything_else_is_refused(
    torch: types.SimpleNamespace, tmp_path: Path, version: str, held: Any, says: str
) -> None:
    (tmp_path / SOURCE).touch()
    torch.__version__, torch.held = version, held
    with pytest.raises(SystemExit, match=says):
        convert_eagle3.convert(tmp_path)
    assert not (tmp_path / convert_eagle3.WEIGHTS).exists()


def test_files_that_are_missing_or_there_are_named(
    torch: types.SimpleNamespace, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match="pytorch_model.bin does not exist"):
        convert_eagle3.convert(tmp_path)
    (tmp_path / SOURCE).touch()
    (tmp_path / convert_eagle3.WEIGHTS).write_text("mine")
    with pytest.raises(SystemExit, match="model.safetensors exists already"):
        convert_eagle3.convert(tmp_path)
    assert (tmp_path / convert_eagle3.WEIGHTS).read_text() == "mine"


def test_without_torch_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(sys, "argv", ["convert_eagle3.py", str(tmp_path)])
    with pytest.raises(SystemExit, match="pip install safetensors torch"):
        convert_eagle3.main()
