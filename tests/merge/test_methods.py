"""The files of merge/methods: found by listing, and their labels."""

from pathlib import Path

import pytest

from pipeline.config.training import Partition
from pipeline.errors import PipelineError
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
    assert METHODS[method](**knobs).label(partition, None) == label


def test_a_swap_is_named_by_its_layers_in_the_model() -> None:
    """5 and 2 of 32 layers are 4 and 1 of SmolLM2's 30, and 1 and 1 of 8."""
    swap = METHODS["layer_swap"](scale_to_depth=True)
    assert [swap.label(None, layers) for layers in (None, 32, 30, 8)] == [
        "layer_swap-5-2", "layer_swap-5-2", "layer_swap-4-1", "layer_swap-1-1",
    ]  # fmt: skip


def test_scaling_is_advised_where_it_fits() -> None:
    for layers, advised in ((6, True), (1, False)):
        with pytest.raises(PipelineError, match=f"the model has {layers}: lower them") as caught:
            METHODS["layer_swap"]().refuse(None, layers)
        assert ("or set merge.scale_to_depth=true" in str(caught.value)) == advised
