"""The files of merge/methods: found by listing, and their labels."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config.training import Partition
from pipeline.merge import methods
from pipeline.merge.methods import METHODS


def test_methods_are_the_files_of_the_folder() -> None:
    files = sorted(path.stem for path in Path(methods.__file__).parent.glob("*.py") if path.stem != "__init__")
    assert list(METHODS) == files and len(files) >= 5
    assert all(kind.method == name for name, kind in METHODS.items())


@pytest.mark.parametrize(
    ("method", "knobs", "partition", "label"),
    [
        ("layer_swap", {"math": "a", "language": "b", "bottom_layers": 4}, None, "layer_swap-4-2"),
        ("layer_swap", {"math": "a", "language": "b"}, Partition("B", 8, 4), "layer_swap-B"),
        ("reset", {"expert": "a", "side": "math"}, Partition("C", 3, 1), "reset-C-math"),
        ("reset", {"expert": "a", "layers": [0]}, None, "reset-layers"),
        ("reset", {"expert": "a", "threshold": 0.1}, None, "reset-rows"),
        ("ties", {"experts": ["a", "b"]}, None, "ties"),
    ],
)
def test_labels(method: str, knobs: dict[str, object], partition: Partition | None, label: str) -> None:
    assert METHODS[method](**knobs).label(partition) == label
