"""The faults that `tools/plant_faults.py` plants can still be planted."""

from __future__ import annotations

import inspect
from pathlib import Path

import plant_faults
import pytest

pytestmark = pytest.mark.newest

TESTS = Path(__file__).parent


def test_every_fault_has_a_function_to_replace_and_tests() -> None:
    for name, fault in plant_faults.FAULTS.items():
        *_, found = plant_faults.found_for(name)
        found = found.fget if isinstance(found, property) else inspect.unwrap(found)
        assert inspect.isfunction(found), name
        files = fault.tests.split()
        assert files and all((TESTS / file).is_file() for file in files), name
