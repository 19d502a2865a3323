"""A few of the random inputs that fuzz_inputs.py tries in hundreds: none is read wrong."""

from __future__ import annotations

import random
from pathlib import Path

import fuzz_inputs as fuzz
import pytest


@pytest.mark.parametrize(("kind", "count"), [("csv", 6), ("json", 12), ("numbers", 300), ("adapters", 3)])
def test_none_is_read_wrong(kind: str, count: int, tmp_path: Path) -> None:
    found = []
    for number in range(count):
        folder = tmp_path / str(number)
        folder.mkdir()
        found.append(fuzz.KINDS[kind](random.Random(f"{kind} test {number}"), folder))
    assert fuzz.WRONG not in found and fuzz.CORRECT in found
