"""A table that frees the snapshots that its selections have ranked.

Finished scores do not need their weights.
"""

import json
import shutil
from pathlib import Path

import pytest
import yaml
from fixture_types import Call, Patch
from small_runs import a_run, writes
from tiny_words import FEW

from pipeline.commands import table as module
from pipeline.runs.graph import order_runs, reasons_unfinished
from pipeline.runs.make import make_once
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
    """Return a table with two selections among snapshots after 2 and 3 of 4 steps and the last.

    One snapshot is scored too.
    """
    few = {key: yaml.safe_load(value) for key, value in (word.split("=") for word in FEW)}
    every = few | {
        "model": "trained",
        "model.path": str(base),
        "data_root": str(world),
        "data.size": 24,
        "sft.steps": 4,
        "sft.snapshot_every": 6,
    }
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
    late = {
        "name": "late",
        "defaults": ["./freeing.yaml"],
        "runs": {"early": {"checkpoint": "math run@3"}},
    }
    (tmp_path / "late.yaml").write_text(
        yaml.safe_dump(  # another score than the selection's, which is kept
            late | {"score": {**said["score"], "eval.limit": 1}, "columns": {"early": "early"}},
            sort_keys=False,
        )
    )
    return [f"runs_dir={tmp_path}/runs", "tracking.mode=disabled"]


def test_what_is_ranked_is_freed_at_once(
    table: list[str], call: Call, tmp_path: Path, monkeypatch: Patch
) -> None:
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
    assert [path.name for path in tmp_path.glob("runs/*/snapshots/*")] == [
        "step-3"
    ]  # scored by itself: early
    assert (qac / "snapshots/step-3/model.safetensors").is_file() and (
        math / "model.safetensors"
    ).is_file()
    for training, freed in ((math, {"2": True, "3": True}), (qac, {"2": True, "3": None})):
        manifest = read_manifest(training)
        assert (
            manifest
            and {step: one.get("freed") for step, one in manifest.snapshots.items()} == freed
        )
        assert all(
            f"freed: {training.name}@{step}, which is ranked" in made.err
            for step in freed
            if freed[step]
        )

    assert "done in" not in call("stage=table", "table=./freeing.yaml", *table, status=0).err
    assert "Nothing is left to compute." in call("stage=plan", "table=./freeing.yaml", *table).out

    refused = call("stage=table", "table=./late.yaml", *table)
    assert refused.status == 1 and f"{math.name}@3 was deleted. Train it again" in refused.err
    assert "done in" not in refused.err
    planned = call("stage=plan", "table=./late.yaml", *table)
    assert (
        planned.status == 1
        and f"error: {math.name}@3 was deleted. Train it again with redo=true" in planned.err
    )


def test_nothing_is_freed_unless_asked_for(
    table: list[str], call: Call, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = call("stage=table", "table=./freeing.yaml", "table.free_snapshots=false", *table)
    assert made.status == 0 and "freed" not in made.err
    assert len([*tmp_path.glob("runs/*/snapshots/*")]) == 4


@pytest.fixture(scope="module")
def scored(base: Path, world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a finished table: two experts, their scores, and the scores of their soup."""
    from pipeline.__main__ import main

    home = tmp_path_factory.mktemp("freed")
    few = {
        key: json.loads(value) if value[0].isdigit() else value
        for key, value in (word.split("=") for word in FEW)
    }
    experts = {
        name: {"stage": "sft", "expert": expert}
        for name, expert in (("math", "math"), ("qac", "qac"))
    }
    every = {
        "data_root": str(world),
        "model": "trained",
        "model.path": str(base),
        "eval.max_gen_toks": 2,
        **few,
    }
    soup = {"merge": "soup", "merge.experts": ["math", "qac"]}
    written = {"stage": "merge", **soup, "merge.weights": [0.3, 0.7]}
    table = {
        "name": "mine",
        "title": "t",
        "columns": {"English": {"in": "en"}},
        "score": {"eval": "mgsm_0shot"},
        "every": every,
        "runs": {**experts, "soup": soup, "written": written},
        "rows": {name: name for name in ("math", "qac", "soup", "written")},
    }
    (home / "mine.yaml").write_text(json.dumps(table))
    assert main(["stage=table", *words(home)]) == 0
    return home


def words(home: Path) -> list[str]:
    return [
        f"table={home}/mine.yaml",
        f"runs_dir={home}/runs",
        "tracking.mode=disabled",
        "launcher.workers=1",
    ]


@pytest.fixture
def home(scored: Path, tmp_path: Path) -> Path:
    shutil.copytree(scored, tmp_path / "home", symlinks=True)
    return tmp_path / "home"


@pytest.mark.parametrize("whole", [False, True])
def test_finished_scores_do_not_need_weights(whole: bool, home: Path, call: Call) -> None:
    before = call("stage=report", *words(home))
    page = Path(before.out.strip())
    cells, text = (page.parent / "cells.csv").read_bytes(), page.read_text(encoding="utf-8")
    (expert,) = (home / "runs").glob("math-full-s0-*")
    if whole:
        shutil.rmtree(expert)
    else:
        (expert / "model.safetensors").unlink()
    assert "9 runs, 9 done." in call("stage=plan", *words(home), status=0).out
    assert "[1/" not in call("stage=table", *words(home), status=0).err
    told = call("stage=report", *words(home))
    assert (
        told.status == 0
        and "missing" not in told.err
        and not (expert / "model.safetensors").exists()
    )
    assert (page.parent / "cells.csv").read_bytes() == cells
    assert page.read_text(encoding="utf-8").count("stale") == text.count("stale")


def test_a_new_score_needs_them(home: Path, call: Call) -> None:
    """Of a folder that is gone it is planned with its expert.

    Of weights that are gone it is refused at once.
    """
    (math,), (qac,) = ((home / "runs").glob(f"{name}-full-s0-*") for name in ("math", "qac"))
    shutil.rmtree(qac)
    assert "9 runs, 4 done." in call("stage=plan", *words(home), "every.eval.limit=1", status=0).out
    (math / "model.safetensors").unlink()
    told = call("stage=table", *words(home), "every.eval.limit=1")
    assert (
        told.status == 1 and f"{math.name} was deleted. Train it again with redo=true" in told.err
    )


def test_only_the_deleted_are_not_needed(tmp_path: Path) -> None:
    """A parent that is computed again is computed before its scores.

    One that is a target of its own is computed.
    """
    expert = a_run(tmp_path, label="expert", seed=1)
    make_once(expert, writes(weights="one"))
    score = a_run(tmp_path, {"checkpoint": expert}, label="score")
    score.config.stage = "eval"
    make_once(score, writes())
    again = a_run(
        tmp_path, {"checkpoint": a_run(tmp_path, label="expert", seed=1, redo=True)}, label="score"
    )
    again.config.stage = "eval"
    assert len(reasons_unfinished(order_runs([again]))) == 2
    shutil.rmtree(expert.folder)
    runs = order_runs([score])
    assert reasons_unfinished(runs) == {} and list(reasons_unfinished(runs, [score, expert])) == [
        expert.hash
    ]
    another = a_run(tmp_path, {"checkpoint": expert, "tokenizer": expert}, label="another")
    another.config.stage = "eval"
    assert reasons_unfinished(order_runs([score, another])).keys() == {expert.hash, another.hash}


def test_a_snapshot_of_a_training_that_stores_none_is_refused_by_the_plan(
    table: list[str], call: Call, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = Path("freeing.yaml").read_text()
    Path("freeing.yaml").write_text(text.replace("sft.snapshot_every: 6", "sft.epochs: 1"))
    planned = call("stage=plan", "table=./late.yaml", *table)
    assert planned.status == 1
    assert "math run@3: math run stores no snapshots. Set sft.snapshot_every=N" in planned.err
