"""scripts/bench.py on tiny shapes: its merges are merges of finished runs, byte for byte.

A slower row is marked.
"""

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from as_torch import as_torch
from fixture_types import Patch
from script_modules import load_script

from pipeline.models.checkpoint import Checkpoint
from pipeline.runs.manifest import read_manifest


def test_a_swap_of_what_it_makes(tmp_path: Path) -> None:
    bench = load_script("bench")
    bench.make_checkpoints(tmp_path, 64, 128, 8, 4, 2, 200)
    read_manifest(tmp_path / "math")
    assert bench.known_digests(bench.opened("swap", tmp_path)).keys() == {"math", "language"}
    assert bench.one_merge("swap", tmp_path)["seconds"] > 0
    out, sides = (
        Checkpoint.open(tmp_path / "out"),
        {s: Checkpoint.open(tmp_path / s) for s in ("math", "language")},
    )
    for layer, side in ((0, "language"), (4, "math"), (7, "language")):
        name = f"model.layers.{layer}.mlp.up_proj.weight"
        assert as_torch(out, name).equal(as_torch(sides[side], name))


def test_a_slower_row_is_marked(
    tmp_path: Path, monkeypatch: Patch, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = load_script("bench")
    seconds = [1.0]

    def plan(asked: Namespace, folder: Path) -> Any:
        yield bench.row("a plan", seconds[0], "imports", 0.5)

    monkeypatch.setattr(bench, "ROOT", tmp_path)
    monkeypatch.setattr(bench, "plan", plan)
    (tmp_path / "results/bench").mkdir(parents=True)
    monkeypatch.setattr(sys, "argv", ["bench.py", "plan", "--record"])
    assert bench.main() == 0
    (kept,) = json.loads((tmp_path / "results/bench/plan.json").read_text())["rows"]
    assert kept["ratio"] == 2.0 and "machine" in json.loads(
        (tmp_path / "results/bench/plan.json").read_text()
    )
    monkeypatch.setattr(sys, "argv", ["bench.py", "plan"])
    seconds[0] = 1.09
    assert bench.main() == 0
    seconds[0] = 1.2
    capsys.readouterr()
    assert bench.main() == 1 and "slower_than=2.0" in capsys.readouterr().out
