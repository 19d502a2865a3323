"""The folders of runs_dir: whose they are, when two share eight digits too."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from small_runs import a_run, never, of_digits, writes

from pipeline.commands.clean import idle_snapshots
from pipeline.errors import PipelineError
from pipeline.runs.find import find_run
from pipeline.runs.folders import (
    finished_names,
    folder_of,
    scan_folders,
)
from pipeline.runs.make import make_once, why_not_finished
from pipeline.runs.manifest import read_manifest


def test_two_runs_may_share_eight_digits_of_their_hashes(tmp_path: Path) -> None:
    one, two = (of_digits(a_run(tmp_path, seed=seed)) for seed in (1, 2))
    first = make_once(one, writes("one\n", weights="one"))
    assert why_not_finished(two) == "changed: seed 1 -> 2" and first.name == "data-x-0123abcd"
    second = make_once(two, writes("two\n", weights="two"))
    assert second.name == f"data-x-{two.hash[:12]}" and (first / "train.jsonl").read_text() == "one\n"
    for run, folder, text in ((one, first, "one\n"), (two, second, "two\n")):
        assert make_once(run, never) == folder == run.folder and (folder / "train.jsonl").read_text() == text
        manifest = read_manifest(folder)
        assert manifest is not None and (manifest.name, manifest.hash) == (folder.name, run.hash)
        found = find_run(folder.name, tmp_path, "checkpoint")
        assert (found.hash, found.folder) == (run.hash, folder)
    again = of_digits(a_run(tmp_path, seed=2, redo=True))
    assert (
        make_once(again, writes("again\n", weights="two")) == second and (first / "train.jsonl").read_text() == "one\n"
    )
    assert find_run(second.name[:-2], tmp_path, "checkpoint").hash == two.hash
    with pytest.raises(PipelineError, match=f"means more than one run: {first.name}, {second.name}"):
        find_run("data-x-0123", tmp_path, "checkpoint")
    shutil.rmtree(first)  # the other keeps its name
    assert two.folder == second and one.folder == first and why_not_finished(one) is not None
    third = of_digits(a_run(tmp_path, seed=3), two.hash[:12])
    assert make_once(third, writes("three\n")).name == "data-x-0123abcd"  # which is free again
    assert third.folder != two.folder == second


def test_snapshots_of_runs_that_share_eight_digits_are_freed_in_their_own_folders(tmp_path: Path) -> None:
    homes = []
    for seed in (1, 2):
        run = of_digits(a_run(tmp_path, seed=seed))
        homes.append(make_once(run, lambda run, work, _: with_a_snapshot(work)))
    items = idle_snapshots(tmp_path)
    assert sorted(item.folder for item in items) == sorted(home / "snapshots/step-3" for home in homes)


def with_a_snapshot(work: Path) -> dict[str, Any]:
    (work / "snapshots/step-3").mkdir(parents=True)
    (work / "snapshots/step-3/model.safetensors").write_text("x")
    return {"snapshots": {"3": {"root": "x"}}}


def test_work_is_apart_and_status_tells_both(tmp_path: Path, call: Callable[..., SimpleNamespace]) -> None:
    one, two = (of_digits(a_run(tmp_path, seed=seed)) for seed in (1, 2))
    for run in (one, two):
        with pytest.raises(RuntimeError):
            make_once(run, lambda *_: (_ for _ in ()).throw(RuntimeError))
    assert one.work != two.work and one.work.is_dir() and two.work.is_dir()
    shown = call("stage=status", f"runs_dir={tmp_path}").out
    assert all(f"data-x-{run.hash[:12]} " in shown for run in (one, two)) and "2 failed" in shown
    make_once(two, writes())
    make_once(one, writes())
    shown = call("stage=status", f"runs_dir={tmp_path}").out
    assert "data-x-0123abcd " in shown and f"data-x-{one.hash[:12]} " in shown


# ------------------------------------------------------------------------------------------------ the scan


def old(folder: Path, seconds: int = 3600) -> None:
    """Make a folder look untouched for long, so that its scan is kept."""
    then = time.time_ns() - seconds * 10**9
    os.utime(folder, ns=(then, then))


def test_a_scan_is_kept_while_the_folder_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_once(a_run(tmp_path), writes())
    old(tmp_path)
    first = scan_folders(tmp_path)
    monkeypatch.setattr(os, "listdir", lambda path: pytest.fail("read again"))
    assert scan_folders(tmp_path) is first


def test_a_run_published_within_the_same_second_is_seen(tmp_path: Path) -> None:
    """By this process or another, also where the clock of the file system has not ticked in between."""
    one, two = a_run(tmp_path, seed=1), a_run(tmp_path, seed=2)
    assert folder_of(one.hash, tmp_path) is None  # which reads runs_dir, young as it is
    make_once(one, writes())
    assert folder_of(one.hash, tmp_path) == one.folder and scan_folders(tmp_path).names
    tick = os.stat(tmp_path).st_mtime_ns
    text = (
        f"from small_runs import a_run, writes; from pipeline.runs.make import make_once; from pathlib import Path\n"
        f"make_once(a_run(Path({str(tmp_path)!r}), seed=2), writes())"
    )
    here = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", text], check=True, env=here, capture_output=True)
    os.utime(tmp_path, ns=(tick, tick))
    assert folder_of(two.hash, tmp_path) == two.folder != one.folder
    assert finished_names(tmp_path) == sorted([one.folder.name, two.folder.name])
