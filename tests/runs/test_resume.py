"""The resume point of a run: whole or not used, of this very run, and all that is kept of its work folder."""

from pathlib import Path

import pytest
from small_runs import a_run, writes

from pipeline.runs import resume
from pipeline.runs.make import make_once
from pipeline.runs.run import Run


def at_step(run: Run, step: int, snapshots: tuple[int, ...] = ()) -> Path:
    """Its resume point of a step, two files in folders, as a training writes it."""
    run.work.mkdir(parents=True, exist_ok=True)
    for one in snapshots:
        (run.work / f"snapshots/step-{one}").mkdir(parents=True, exist_ok=True)
    beside = run.work / "trainer" / f"checkpoint-{step}"
    (beside / "inner").mkdir(parents=True)
    (beside / "state").write_text(f"state {step}")
    (beside / "inner/moments").write_text("moments")
    resume.write_resume_point(run, beside, step, {"snapshots": {str(one): {} for one in snapshots}, "seconds": 1.5})
    return run.work / f"resume/step-{step}"


def test_there_is_one_and_it_is_the_last(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    first, second = at_step(run, 1), at_step(run, 2)
    record = resume.usable_resume_point(run)
    assert record is not None and record["step"] == 2 and resume.resume_folder(run.work, record) == second
    assert record["files"] == {"inner/moments": 7, "state": 7} and not first.exists()


def test_beginning_again_keeps_what_it_needs_and_nothing_else(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    at_step(run, 4, snapshots=(2, 3))
    (run.work / "snapshots/step-4").mkdir()  # taken after the resume point
    (run.work / "model.safetensors").write_text("x")
    assert resume.prepare_work_folder(run) == 1.5
    there = {path.relative_to(run.work).as_posix() for path in run.work.rglob("*")}
    point = {"resume", "resume/step-4", "resume/step-4/inner", "resume/step-4/inner/moments", "resume/step-4/state"}
    assert there == {"resume.json", *point, "snapshots", "snapshots/step-2", "snapshots/step-3"}


@pytest.mark.parametrize("broken", ["cut", "gone", "no JSON", "no record"])
def test_one_that_is_not_whole_is_not_used(broken: str, tmp_path: Path) -> None:
    run = a_run(tmp_path)
    point = at_step(run, 3)
    if broken == "cut":
        (point / "state").write_text("sta")
    elif broken == "gone":
        (point / "inner/moments").unlink()
    elif broken == "no JSON":
        (run.work / "resume.json").write_text("{")
    else:
        (run.work / "resume.json").unlink()
    assert resume.read_resume_point(run.work) is None and resume.usable_resume_point(run) is None
    assert resume.prepare_work_folder(run) == 0.0 and list(run.work.iterdir()) == []


def test_one_of_another_attempt_or_other_parents_is_not_used(tmp_path: Path) -> None:
    parent = a_run(tmp_path, label="parent", seed=1)
    make_once(parent, writes("one\n", weights="one"))
    run = a_run(tmp_path, {"data_root": parent}, label="child")
    at_step(run, 3)
    assert resume.usable_resume_point(run) is not None
    again = a_run(tmp_path, label="parent", seed=1, redo=True)
    make_once(again, writes("two\n", weights="two"))
    assert resume.usable_resume_point(run) is None and resume.read_resume_point(run.work) is not None
    make_once(again, writes("one\n", weights="one"))
    assert resume.usable_resume_point(run) is not None
    make_once(a_run(tmp_path, {"data_root": parent}, label="child"), writes())  # which takes up the point, and ends
    at_step(run, 3)
    assert resume.usable_resume_point(run) is not None  # of attempt 2, as the run is finished
