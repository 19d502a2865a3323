"""The files of merge/methods: found by listing, refused where they lack something, and light at the program's start."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import pytest

from pipeline.config.compose import compose
from pipeline.config.training import Partition
from pipeline.errors import PipelineError
from pipeline.merge import methods
from pipeline.merge.methods import METHODS, method_in, sweep_of

MODULE = """
from dataclasses import dataclass
from pipeline.config.merging import Merge

@dataclass
class Mine(Merge):
    method: str = "mine"
    def references(self): ...
    def decide(self, sources, base, partition, threads): ...
"""


def module(source: str) -> ModuleType:
    found = ModuleType("pipeline.merge.methods.mine")
    sys.modules[found.__name__] = found  # dataclasses look their module up there
    try:
        exec(source, found.__dict__)
    finally:
        del sys.modules[found.__name__]
    return found


def test_methods_are_the_files_of_the_folder() -> None:
    files = sorted(path.stem for path in Path(methods.__file__).parent.glob("*.py") if path.stem != "__init__")
    assert list(METHODS) == files and len(files) >= 5
    assert method_in(module(MODULE)).method == "mine"


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("@dataclass\n", "", "mine.py must hold one dataclass of Merge, it holds 0"),
        ("(Merge)", "", "it holds 0"),
        ('"mine"', '"yours"', 'Mine must have method: str = "mine"'),
        ("def references(self)", "def reference(self)", r"Mine lacks references\(\)"),
        ("def decide(", "def decided(", r"Mine lacks decide\(\)"),
    ],
)
def test_a_file_that_is_no_method_is_refused(before: str, after: str, words: str) -> None:
    assert before in MODULE
    with pytest.raises(PipelineError, match=words):
        method_in(module(MODULE.replace(before, after)))


def test_what_can_be_swept_are_the_knobs_that_are_no_run() -> None:
    assert [item.name for item in fields(sweep_of({name: METHODS[name] for name in ("soup", "reset")}))] == [
        *("axis", "control", "dtype", "layer_weights", "layers", "outside", "side", "threshold", "weights", "shard")
    ]


def test_the_command_line_starts_without_numpy() -> None:
    code = "import sys, pipeline.stages.rows; assert not {'numpy', 'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


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


def test_the_method_is_that_of_the_option() -> None:
    with pytest.raises(PipelineError, match="merge.method=ties: merge=soup .* leave it out"):
        compose("stage=merge merge=soup merge.experts=[a,b] merge.method=ties".split())


@pytest.mark.parametrize(
    ("words", "there", "absent"),
    [
        (
            "merge=layer_swap merge.math=MATH merge.language=LANGUAGE partition=B partition.scale_to_depth=true",
            # of 32 layers 8 and 4: of 14 layers 8 * 14 // 32 = 3 and 4 * 14 // 32 = 1
            ["partition | B", "partition.bottom_layers | 3", "partition.top_layers | 1", "merge.embeddings | average"],
            ["merge.bottom_layers", "merge.top_layers", "merge.bottom_transition", "merge.zones", "scale_to_depth"],
        ),
        (
            "merge=layer_swap merge.math=MATH merge.language=LANGUAGE merge.bottom_layers=3",
            ["merge.bottom_layers | 3", "merge.top_layers | 2", "merge.zones | average"],
            ["partition"],
        ),
        (
            "merge=reset merge.expert=MATH merge.side=language partition=C",
            ["partition | C", "partition.bottom_layers | 6", "partition.top_layers | 2", "merge.side | language"],
            ["partition.outside"],
        ),
    ],
    ids=["partition", "counts", "reset"],
)
def test_the_card_lists_what_was_used(
    words: str, there: list[str], absent: list[str], models: dict[str, list[Path]], make_run: Callable[..., Path]
) -> None:
    base, math, language = map(str, models["llama"])
    asked = words.replace("MATH", math).replace("LANGUAGE", language).split()
    told = (make_run("stage=merge", *asked, f"merge.base={base}") / "README.md").read_text(encoding="utf-8")
    settings = told.partition("| setting | value |")[2].partition("```text")[0]
    assert all(f"| {row} |" in settings for row in there), settings
    assert not [key for key in absent if key in settings], settings
