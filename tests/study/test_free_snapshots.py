"""A table that frees the snapshots that its selections have ranked, on tiny models."""

from pathlib import Path

import pytest
import yaml
from fixture_types import Call, Patch
from tiny_words import FEW

from pipeline.commands import table as module
from pipeline.runs.manifest import read_manifest

SELECT = {
    "stage": "select",
    "select": "layer_swapping_math",
    "select.eval.tasks": [{"task": "belebele", "num_fewshot": 0}],
    "select.primary": [{"task": "belebele", "language": "en"}],
    "select.eval.limit": 2,
    "languages": ["en"],
}


@pytest.fixture
def table(base: Path, world: Path, tmp_path: Path) -> list[str]:
    """Two selections, each among snapshots after 2 and 3 of 4 steps and the last weights; one snapshot scored too."""
    few = {key: yaml.safe_load(value) for key, value in (word.split("=") for word in FEW)}
    every = few | {
        "model": "trained", "model.path": str(base), "data_root": str(world), "data.size": 24,
        "sft.steps": 4, "sft.snapshot_every": 6,
    }  # fmt: skip
    runs = {
        "math run": {"stage": "sft", "expert": "math"},
        "math": {**SELECT, "checkpoints": ["math run"]},
        "qac run": {"stage": "sft", "expert": "qac"},
        "qac": {**SELECT, "checkpoints": ["qac run"]},
        "early": {"checkpoint": "qac run@3"},
    }
    said = {"name": "freeing", "free_snapshots": True, "every": every, "runs": runs}
    said |= {"score": {"eval": "belebele_0shot", "eval.limit": 2, "in": "en"}}
    said |= {"columns": {"math": "math", "qac": "qac", "early": "early"}}
    (tmp_path / "freeing.yaml").write_text(yaml.safe_dump(said, sort_keys=False))
    late = {"name": "late", "defaults": ["./freeing.yaml"], "runs": {"early": {"checkpoint": "math run@3"}}}
    (tmp_path / "late.yaml").write_text(
        yaml.safe_dump(  # another score than the selection's, which is kept
            late | {"score": {**said["score"], "eval.limit": 1}, "columns": {"early": "early"}}, sort_keys=False
        )
    )
    return [f"runs_dir={tmp_path}/runs", "tracking.mode=disabled"]


def test_what_is_ranked_is_freed_at_once(table: list[str], call: Call, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    there: list[int] = []  # snapshots on the disk whenever a selection was made
    real = module.free_ranked
    monkeypatch.setattr(
        module,
        "free_ranked",
        lambda *given: (there.append(len([*tmp_path.glob("runs/*/snapshots/*")])), real(*given))[1],
    )
    made = call("stage=table", "table=./freeing.yaml", *table, status=0)
    assert there == [2, 2]  # of one training at a time
    (math,), (qac,) = tmp_path.glob("runs/math-full-*"), tmp_path.glob("runs/qac-full-*")
    assert [path.name for path in tmp_path.glob("runs/*/snapshots/*")] == ["step-3"]  # scored by itself: early
    assert (qac / "snapshots/step-3/model.safetensors").is_file() and (math / "model.safetensors").is_file()
    for training, freed in ((math, {"2": True, "3": True}), (qac, {"2": True, "3": None})):
        manifest = read_manifest(training)
        assert manifest and {step: one.get("freed") for step, one in manifest.snapshots.items()} == freed
        assert all(f"freed: {training.name}@{step}, which is ranked" in made.err for step in freed if freed[step])

    again = call("stage=table", "table=./freeing.yaml", *table)
    assert again.status == 0 and "done in" not in again.err
    assert "Nothing is left to compute." in call("stage=plan", "table=./freeing.yaml", *table).out

    refused = call("stage=table", "table=./late.yaml", *table)
    assert refused.status == 1 and f"{math.name}@3 was deleted: train it again" in refused.err
    assert "done in" not in refused.err
    planned = call("stage=plan", "table=./late.yaml", *table)
    assert planned.status == 1 and f"error: {math.name}@3 was deleted: train it again with redo=true" in planned.err


def test_nothing_is_freed_unless_asked_for(table: list[str], call: Call, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    made = call("stage=table", "table=./freeing.yaml", "table.free_snapshots=false", *table)
    assert made.status == 0 and "freed" not in made.err
    assert len([*tmp_path.glob("runs/*/snapshots/*")]) == 4
