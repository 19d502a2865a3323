"""Making a run: once, in its work folder, its manifest last; and what a plan says of each run."""

import json
import multiprocessing
import os
import shutil
import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from limits import files_up_to, filled, small_disk
from small_runs import a_run, never, writes

from pipeline.commands.plan import show_runs
from pipeline.config.compose import compose
from pipeline.errors import PipelineError
from pipeline.launch.in_process import error_sentence
from pipeline.launch.local import execute_here
from pipeline.runs.find import find_run
from pipeline.runs.graph import order_runs, reasons_unfinished
from pipeline.runs.make import make_once, why_not_finished
from pipeline.runs.manifest import read_manifest
from pipeline.runs.provenance import ENVIRONMENT
from pipeline.runs.run import External, Run
from pipeline.runs.unchanged import check_unchanged


def test_a_finished_run_is_not_made_again(tmp_path: Path) -> None:
    folder = make_once(a_run(tmp_path), writes())
    manifest = read_manifest(folder)
    assert manifest is not None
    assert make_once(a_run(tmp_path), never) == folder
    assert (manifest.name, manifest.attempt, list(manifest.files)) == (
        folder.name,
        1,
        ["train.jsonl"],
    )
    assert manifest.hash.startswith(folder.name[-12:])
    keys = {
        "decided_by",
        "config",
        "parents",
        "facts",
        "git",
        "versions",
        "machine",
        "environment",
        "started",
        "cost",
    }
    written = json.loads((folder / "manifest.json").read_text())
    assert keys <= written.keys() and set(written["environment"]) <= set(
        ENVIRONMENT
    )  # others may hold secrets
    assert list((tmp_path / ".work").iterdir()) == []


def test_a_worker_that_finds_a_run_finished_does_not_begin_it(tmp_path: Path) -> None:
    """Each of the idle workers may look at it before its worker has told the session."""
    begun: list[int] = []
    for number in range(4):
        make_once(a_run(tmp_path), writes(), begin=partial(begun.append, number))
    assert begun == [0]


def test_what_one_left_that_was_killed_after_publishing_goes_with_the_next_command(
    tmp_path: Path,
) -> None:
    run = a_run(tmp_path)
    make_once(run, writes())
    for left in (
        ["lease-1"],
        ["lease-1", "state.json", "0badcafe.replaced/rows"],
        ["lease-1", "0badcafe/resume.json"],
    ):
        for name in left:
            (run.workplace / name).parent.mkdir(parents=True, exist_ok=True)
            (run.workplace / name).write_text("released")
        assert execute_here([run]) == {}
        resumes = (
            run.workplace / "0badcafe/resume.json"
        ).is_file()  # of another attempt, by redo=true
        assert resumes == ("0badcafe/resume.json" in left) and run.workplace.exists() == resumes


def test_the_manifest_is_written_last_and_the_folder_appears_at_once(tmp_path: Path) -> None:
    run = a_run(tmp_path)

    def stage(run: Run, work: Path, tracker: Any) -> dict[str, Any]:
        assert (
            work.parent == tmp_path / ".work" / run.hash
            and work == run.work
            and run.lease == work.name
        )
        assert not list(work.iterdir()) and not list(tmp_path.glob("*/manifest.json"))
        (work / "sub").mkdir()
        (work / "sub/rows").write_text("x")
        return {}

    folder = make_once(run, stage)
    times = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    assert max(times, key=lambda path: times[path]).name == "manifest.json"


def test_work_that_was_finished_and_not_renamed_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = a_run(tmp_path)
    with monkeypatch.context() as killed, pytest.raises(KeyboardInterrupt):
        killed.setattr(
            "pipeline.runs.make.publish_run", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        make_once(run, writes())
    assert not run.folder.exists()
    assert (make_once(run, never) / "train.jsonl").is_file()


def test_a_training_of_another_side_is_refused_as_its_manifest_says_the_first(
    tmp_path: Path,
) -> None:
    """The side is no input of a full training.

    One run, whose manifest is what a merge and a map read it from.
    """
    words = [
        "stage=sft",
        "expert=own",
        "expert.sources.own.file=a.jsonl",
        "expert.sources.own.prompt='{q}'",
    ]
    words += ["expert.sources.own.completion='{a}'", f"model={tmp_path}", f"data_root={tmp_path}"]

    def training(*more: str) -> Run:
        config: Any = compose(
            [*words, f"runs_dir={tmp_path}/runs", "tracking.mode=disabled", *more]
        )
        return Run(config, "own", {}, version=1)

    make_once(training("expert.side=math"), writes())
    assert why_not_finished(training("expert.side=math")) is None
    assert why_not_finished(training("expert.side=language", "redo=true")) is None
    with pytest.raises(
        PipelineError, match="was trained with expert.side=math, not language. Give that side"
    ):
        why_not_finished(training("expert.side=language"))


def test_redo_is_a_new_attempt_that_takes_the_place_of_the_old(tmp_path: Path) -> None:
    folder = make_once(a_run(tmp_path), writes("one\n"))
    assert make_once(a_run(tmp_path, redo=True), writes("two\n")) == folder
    assert (folder / "train.jsonl").read_text() == "two\n" and read_manifest(folder).attempt == 2  # type: ignore[union-attr]
    assert list((tmp_path / ".work").iterdir()) == []
    with pytest.raises(RuntimeError):
        make_once(a_run(tmp_path, redo=True), lambda *_: (_ for _ in ()).throw(RuntimeError))
    assert (folder / "train.jsonl").read_text() == "two\n"  # a failed attempt takes nothing away


def test_a_child_sees_that_its_parent_was_made_again(tmp_path: Path) -> None:
    parent = a_run(tmp_path, label="parent", seed=1)
    make_once(parent, writes(weights="one"))
    child = a_run(tmp_path, {"model": parent}, label="child")
    make_once(child, writes())
    again = a_run(tmp_path, label="parent", seed=1, redo=True)
    make_once(again, writes(weights="one"))
    assert why_not_finished(child) is None  # the same weights: nothing to do
    make_once(again, writes(weights="two"))
    assert why_not_finished(child) == f"its model {parent.name} was recomputed with other contents"
    grandchild = a_run(tmp_path, {"model": child}, label="grandchild", seed=2)
    make_once(grandchild, writes())
    reasons = reasons_unfinished(order_runs([grandchild]))
    assert reasons[grandchild.hash] == f"its parent {child.name} is made first"
    assert make_once(child, writes()) == child.folder and why_not_finished(child) is None
    assert read_manifest(child.folder).attempt == 2  # type: ignore[union-attr]
    assert reasons_unfinished(order_runs([grandchild])) == {}


def test_a_run_that_changed_on_disk_is_refused(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    file = make_once(run, writes()) / "train.jsonl"
    file.touch()  # another time, the same bytes
    check_unchanged(run.folder)
    file.write_text("rowz\n")
    for use in (
        lambda: make_once(run, never),
        lambda: make_once(a_run(tmp_path, {"data": run}, label="child"), never),
    ):
        with pytest.raises(
            PipelineError, match=r"changed after it was finished: train.jsonl differs; .*redo=true"
        ):
            use()
    file.unlink()
    with pytest.raises(PipelineError, match=r"train.jsonl is gone"):
        make_once(run, never)
    make_once(a_run(tmp_path, redo=True), writes())
    make_once(run, never)


def test_a_folder_without_a_manifest_is_not_taken_for_a_run_nor_overwritten(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    folder = make_once(run, writes())
    (folder / "manifest.json").unlink()
    with pytest.raises(
        PipelineError, match=r"has no manifest.json of this run, so another made it. Move it away"
    ):
        make_once(run, never)
    assert (folder / "train.jsonl").is_file()
    with pytest.raises(
        PipelineError,
        match=r"has no manifest.json, so it is not a finished run, and no config.json",
    ):
        find_run(folder.name, tmp_path, "checkpoint")


def test_a_full_disk_is_seen_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**20))
    with pytest.raises(
        PipelineError,
        match=r"^runs_dir=.* is too full for data-x: 0.0 GB free, about 0.1 GB needed \(",
    ):
        make_once(a_run(tmp_path), never)


def test_a_file_larger_than_the_limit_of_the_shell_names_the_folder(
    tmp_path: Path,
) -> None:
    def writes_2_mb(run: Run, work: Path, tracker: Any) -> dict[str, Any]:
        (work / "x").write_bytes(bytes(2**21))
        return {}

    with files_up_to(2**20), pytest.raises(OSError) as refused:
        make_once(a_run(tmp_path), writes_2_mb)
    told = error_sentence(refused.value)
    assert told and told.startswith("File too large: the disk of runs_dir or of TMPDIR is full")


def in_a_process(runs_dir: str) -> None:
    def slow(run: Run, work: Path, tracker: Any) -> dict[str, Any]:
        with open(run.runs_dir / "calls", "a") as calls:
            calls.write(f"{os.getpid()}\n")
        time.sleep(1)
        return {}

    make_once(a_run(Path(runs_dir)), slow)


def test_two_processes_that_ask_for_one_run_make_it_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    context = multiprocessing.get_context("spawn")
    both = [context.Process(target=in_a_process, args=(str(tmp_path),)) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(60)
    assert [process.exitcode for process in both] == [0, 0]
    assert len((tmp_path / "calls").read_text().splitlines()) == 1
    assert (
        f": held by process {both[0].pid} on " in (told := capfd.readouterr().err)
        or f" {both[1].pid} on " in told
    )
    assert told.count("; waiting") == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="a file system of its own: needs root")
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_full_disk_is_named_and_leaves_nothing_behind(wrapped: bool, tmp_path: Path) -> None:
    """A tmpfs of 80 MB that the stage fills.

    Then there is room, and the same command ends with an empty .work.
    """

    def fills(run: Run, work: Path, tracker: Any) -> dict[str, Any]:
        full.enter_context(filled(run.runs_dir.parent))
        try:
            (work / "x").write_bytes(bytes(2**20))
        except OSError as error:
            if wrapped:
                raise RuntimeError("Error while serializing: I/O error: (os error 28)") from error
            raise
        return {}

    with small_disk(tmp_path / "disk", 80) as disk:
        run = a_run(disk / "runs")
        with ExitStack() as full, pytest.raises((OSError, RuntimeError)) as refused:
            make_once(run, fills)
        told = error_sentence(refused.value)
        assert told and "the disk of runs_dir or of TMPDIR is full: free some" in told
        assert not list(run.workplace.glob("state.json.*"))
        (run.workplace / "state.json.7-0a.part").touch()  # of a writer that was killed
        make_once(run, writes())
        assert not list((disk / "runs/.work").iterdir())


def test_the_plan_says_why_a_run_is_not_taken_from_before(tmp_path: Path) -> None:
    def shown(run: Any) -> str:
        return "\n".join(show_runs([run], reasons_unfinished([run]), 10))

    run, other_seed = a_run(tmp_path), a_run(tmp_path, seed=3)
    assert "never made" in shown(run)
    make_once(run, writes())
    assert "finished" in shown(run) and not reasons_unfinished([run])
    assert why_not_finished(other_seed) == "changed: seed default -> 3"
    assert why_not_finished(replace(run, version=99)) == f"changed: version {run.version} -> 99"
    parent = a_run(tmp_path, {"data_root": External("w", "abc", tmp_path)})
    assert why_not_finished(parent) == "changed: parents.data_root default -> abc"
    assert "redo=true" in shown(a_run(tmp_path, redo=True))
