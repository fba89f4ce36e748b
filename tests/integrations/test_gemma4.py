"""Gemma 4 and its assistants against `transformers` itself: `make test-models`."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from formats import test_gemma4 as of_fixtures

from .reports import chi_square_of

TESTS = Path(__file__).parents[1]


def makes() -> ModuleType:
    """The script that makes the recorded fixtures."""
    path = TESTS / "formats" / "gemma4" / "make.py"
    spec = importlib.util.spec_from_file_location("make_gemma4", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("seed", "edge", "wide"),
    [(100, "ssfsf", "ssf"), (200, "fssfssf", "fsssf"), (300, "sfsf", "sf")],
)
def test_random_models_agree(seed, edge, wide, tmp_path, monkeypatch) -> None:
    token_ids = np.random.default_rng(seed).integers(0, 283, 24).tolist()
    makes().make_all(tmp_path, token_ids, seed, edge, wide)
    monkeypatch.setattr(of_fixtures, "HERE", tmp_path)
    cached = of_fixtures.load, of_fixtures.expected, of_fixtures.passed, of_fixtures.assistant
    for function in cached:
        function.cache_clear()
    for name in of_fixtures.NAMES:
        of_fixtures.test_logits_are_those_of_transformers(name)
        of_fixtures.test_drafts_are_those_of_transformers_at_both_positions(name)
    for function in cached:
        function.cache_clear()


def test_the_program_of_the_report_shows_the_fault() -> None:
    assert chi_square_of("transformers") > 100
