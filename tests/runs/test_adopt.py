"""Adopting finished runs: only where all that the stage reads is the same, and never what was freed or changed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_runs import a_run, never, writes

from pipeline.config.stages import MergeStage
from pipeline.files import sha256
from pipeline.runs.graph import order_runs, reasons_unfinished
from pipeline.runs.make import make_once, why_not_finished
from pipeline.runs.manifest import Manifest, read_manifest
from pipeline.runs.run import Run


def a_data_run(runs_dir: Path, seed: int, rows: str = "rows\n", card: str = "", made: bool = True) -> Run:
    """A data run; the seed stands for what else it read, such as one more benchmark."""
    run = a_run(runs_dir, {"benchmarks": a_benchmark(runs_dir, seed)}, label="data-math")

    def stage(run: Run, work: Path, tracker: Any) -> dict[str, Any]:
        (work / "train.jsonl").write_text(rows)
        (work / "validation.jsonl").write_text("")
        (work / "data_card.md").write_text(f"{card} {seed}")
        return {}

    if made:
        make_once(run, stage)
    return run


def a_benchmark(runs_dir: Path, number: int) -> Any:
    from pipeline.runs.run import External

    return External("benchmarks", f"{number}" * 64, runs_dir)


def an_expert(data: Run, **changes: Any) -> Run:
    """A run of stage sft as far as its identity goes."""
    run = a_run(data.runs_dir, {"data": data}, label="math-full-s0", **changes)
    return replace(run, config=replace(run.config, stage="sft"))


def test_an_expert_of_the_same_rows_is_adopted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = make_once(an_expert(a_data_run(tmp_path, 1)), writes("weights", weights="blake3:1"))
    again = an_expert(a_data_run(tmp_path, 2))
    folder = make_once(again, never)
    before, after = read_manifest(first), read_manifest(folder)
    assert before and after and folder != first
    assert (folder / "train.jsonl").stat().st_ino == (first / "train.jsonl").stat().st_ino
    assert after.adopted_from == {"name": first.name, "hash": before.hash} and before.adopted_from is None
    assert (after.hash, after.name, after.cost, after.files) == (again.hash, folder.name, before.cost, before.files)
    assert after.parents["data"].hash == again.parents["data"].hash != before.parents["data"].hash
    assert f"{folder.name}: adopted from {first.name}" in capsys.readouterr().err
    assert why_not_finished(again) is None and make_once(again, never) == folder
    third = make_once(an_expert(a_data_run(tmp_path, 3)), never)
    assert read_manifest(third).adopted_from in (  # type: ignore[union-attr]
        {"name": first.name, "hash": before.hash},
    )


@pytest.mark.parametrize("what", ["rows", "knob", "version", "redo", "freed", "changed file", "parent gone", "stage"])
def test_what_differs_is_computed(tmp_path: Path, what: str) -> None:
    data = a_data_run(tmp_path, 1)
    first = make_once(an_expert(data), writes("weights", weights="blake3:1"))
    again = an_expert(a_data_run(tmp_path, 2, rows="other\n" if what == "rows" else "rows\n"))
    if what == "knob":
        again = an_expert(again.parents["data"], seed=7)  # type: ignore[arg-type]
    if what == "version":
        again = replace(again, version=again.version + 1)
    if what == "redo":
        again = replace(again, config=replace(again.config, redo=True))
    if what == "freed":
        manifest = read_manifest(first)
        assert manifest
        facts = {**manifest.facts, "snapshots": {"10": {"root": "blake3:0", "freed": True}}}
        replace(manifest, facts=facts).write(first)
    if what == "changed file":
        (first / "train.jsonl").write_text("longer than before")
    if what == "parent gone":
        (data.folder / "manifest.json").unlink()
    if what == "stage":
        again = replace(again, config=replace(again.config, stage="analyze"))
    folder = make_once(again, writes("computed", weights="blake3:2"))
    manifest = read_manifest(folder)
    assert manifest and manifest.adopted_from is None and (folder / "train.jsonl").read_text() == "computed"


def a_merge(runs_dir: Path, expert: Run) -> Run:
    config = MergeStage(stage="merge", runs_dir=str(runs_dir), tracking=a_run(runs_dir).config.tracking)
    return Run(config, "merge-soup", {"math": expert}, version=1)


@pytest.mark.parametrize("differs", ["", "weights", "tokenizer.json"])
def test_a_merge_is_adopted_by_the_weights_and_settings_of_its_experts(tmp_path: Path, differs: str) -> None:
    def trained(root: str, tokenizer: str) -> Any:
        def stage(run: Run, work: Path, tracker: Any) -> dict[str, Any]:
            (work / "tokenizer.json").write_text(tokenizer)
            (work / "README.md").write_text(run.name)  # a card may differ
            return {"weights": {"root": root}}

        return stage

    one = an_expert(a_data_run(tmp_path, 1))
    make_once(one, trained("blake3:1", "{}"))
    two = an_expert(a_data_run(tmp_path, 2, rows="other\n"))
    make_once(two, trained("blake3:2" if differs == "weights" else "blake3:1", "[]" if "json" in differs else "{}"))
    make_once(a_merge(tmp_path, one), writes("merged", weights="blake3:3"))
    folder = make_once(a_merge(tmp_path, two), writes("new", weights="blake3:4"))
    assert (folder / "train.jsonl").read_text() == ("new" if differs else "merged")


def test_a_plan_says_what_may_be_adopted(tmp_path: Path) -> None:
    old = an_expert(a_data_run(tmp_path, 1))
    make_once(old, writes(weights="blake3:1"))
    make_once(a_merge(tmp_path, old), writes(weights="blake3:3"))
    data = a_data_run(tmp_path, 2, made=False)
    expert = an_expert(data)
    merge = a_merge(tmp_path, expert)
    reasons = reasons_unfinished(order_runs([merge]))
    assert "adopted" not in reasons[data.hash]
    for run in (expert, merge):
        assert reasons[run.hash].endswith("; may be adopted, known after its data run")
    a_data_run(tmp_path, 2)
    reasons = reasons_unfinished(order_runs([merge]))
    assert reasons[expert.hash].endswith(f"; may be adopted from {old.name}")
    other = an_expert(a_run(tmp_path, {"benchmarks": a_benchmark(tmp_path, 2)}, label="data-math", seed=9))
    assert "adopted" not in reasons_unfinished(order_runs([other]))[other.hash]  # its rows are drawn by another seed


def test_a_manifest_of_before_adoption_is_read(tmp_path: Path) -> None:
    folder = make_once(a_run(tmp_path), writes())
    kept = json.loads((folder / "manifest.json").read_text())
    del kept["adopted_from"]
    (folder / "manifest.json").write_text(json.dumps(kept))
    manifest = read_manifest(folder)
    assert isinstance(manifest, Manifest) and manifest.adopted_from is None
    assert manifest.files["train.jsonl"]["sha256"] == sha256(folder / "train.jsonl")
