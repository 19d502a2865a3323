"""scripts/bench_merge.py on a tiny shape: what it writes is read again as finished runs, and merged byte for byte."""

from __future__ import annotations

import json
from pathlib import Path

from as_torch import as_torch
from script_modules import load_script

from pipeline.models.checkpoint import Checkpoint
from pipeline.runs.manifest import read_manifest


def test_a_swap_of_what_it_makes(tmp_path: Path) -> None:
    bench = load_script("bench_merge")
    bench.make_checkpoints(tmp_path, [64, 128, 8, 4, 2, 200])
    read_manifest(tmp_path / "math")
    assert bench.known(bench.opened("swap", tmp_path)).keys() == {"math", "language"}
    (tmp_path / "out").mkdir()
    found = bench.one("swap", tmp_path, None)
    assert found["seconds"] > 0 and json.dumps(found)
    out, sides = Checkpoint.open(tmp_path / "out"), {s: Checkpoint.open(tmp_path / s) for s in ("math", "language")}
    for layer, side in ((0, "language"), (4, "math"), (7, "language")):
        name = f"model.layers.{layer}.mlp.up_proj.weight"
        assert as_torch(out, name).equal(as_torch(sides[side], name))
