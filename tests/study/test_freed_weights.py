"""Scores that are finished do not need the weights that they are of."""

import json
import shutil
from pathlib import Path

import pytest
from fixture_types import Call
from small_runs import a_run, writes
from tiny_words import FEW

from pipeline.runs.graph import order_runs, reasons_unfinished
from pipeline.runs.make import make_once


@pytest.fixture(scope="module")
def scored(base: Path, world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished table: two experts, their scores and those of their soup."""
    from pipeline.__main__ import main

    home = tmp_path_factory.mktemp("freed")
    few = {key: json.loads(value) if value[0].isdigit() else value for key, value in (word.split("=") for word in FEW)}
    experts = {name: {"stage": "sft", "expert": expert} for name, expert in (("math", "math"), ("qac", "qac"))}
    every = {"data_root": str(world), "model": "trained", "model.path": str(base), "eval.max_gen_toks": 2, **few}
    soup = {"merge": "soup", "merge.experts": ["math", "qac"]}
    written = {"stage": "merge", **soup, "merge.weights": [0.3, 0.7]}
    table = {
        "name": "mine", "title": "t", "columns": {"English": {"in": "en"}}, "score": {"eval": "mgsm_0shot"},
        "every": every, "runs": {**experts, "soup": soup, "written": written},
        "rows": {name: name for name in ("math", "qac", "soup", "written")},
    }  # fmt: skip
    (home / "mine.yaml").write_text(json.dumps(table))
    assert main(["stage=table", *words(home)]) == 0
    return home


def words(home: Path) -> list[str]:
    return [f"table={home}/mine.yaml", f"runs_dir={home}/runs", "tracking.mode=disabled", "launcher.workers=1"]


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
    told = call("stage=plan", *words(home))
    assert told.status == 0 and "9 of 9 runs are done" in told.out, told.out + told.err
    told = call("stage=table", *words(home))
    assert told.status == 0 and "[1/" not in told.err, told.err
    told = call("stage=report", *words(home))
    assert told.status == 0 and "missing" not in told.err and not (expert / "model.safetensors").exists()
    assert (page.parent / "cells.csv").read_bytes() == cells
    assert page.read_text(encoding="utf-8").count("stale") == text.count("stale")


def test_a_new_score_needs_them(home: Path, call: Call) -> None:
    """Of a folder that is gone it is planned with its expert; of weights that are gone it is refused at once."""
    (math,), (qac,) = ((home / "runs").glob(f"{name}-full-s0-*") for name in ("math", "qac"))
    shutil.rmtree(qac)
    told = call("stage=plan", *words(home), "every.eval.limit=1")
    assert told.status == 0 and "4 of 9 runs are done" in told.out, told.out
    (math / "model.safetensors").unlink()
    told = call("stage=table", *words(home), "every.eval.limit=1")
    assert told.status == 1 and f"{math.name} was deleted: train it again with redo=true" in told.err


def test_only_the_deleted_are_not_needed(tmp_path: Path) -> None:
    """A parent that is computed again is computed before its scores; one that is a target of its own is computed."""
    expert = a_run(tmp_path, label="expert", seed=1)
    make_once(expert, writes(weights="one"))
    score = a_run(tmp_path, {"checkpoint": expert}, label="score")
    score.config.stage = "eval"
    make_once(score, writes())
    again = a_run(tmp_path, {"checkpoint": a_run(tmp_path, label="expert", seed=1, redo=True)}, label="score")
    again.config.stage = "eval"
    assert len(reasons_unfinished(order_runs([again]))) == 2
    shutil.rmtree(expert.folder)
    runs = order_runs([score])
    assert reasons_unfinished(runs) == {} and list(reasons_unfinished(runs, [score, expert])) == [expert.hash]
    another = a_run(tmp_path, {"checkpoint": expert, "tokenizer": expert}, label="another")
    another.config.stage = "eval"
    assert reasons_unfinished(order_runs([score, another])).keys() == {expert.hash, another.hash}
