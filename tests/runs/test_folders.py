"""The folders of runs_dir: whose they are, when two share their digits too."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from small_runs import a_run, never, of_digits, writes

from pipeline.errors import PipelineError
from pipeline.runs.find import find_run
from pipeline.runs.folders import (
    finished_names,
    folder_of,
    scan_folders,
)
from pipeline.runs.make import make_once, why_not_finished


def test_two_runs_may_share_the_digits_of_their_hashes(tmp_path: Path) -> None:
    one, two = (of_digits(a_run(tmp_path, label=f"data-{seed}", seed=seed)) for seed in (1, 2))
    first = make_once(one, writes("one\n", weights="one"))
    assert why_not_finished(two) == "never made" and first.name == "data-1-0123456789ab"
    second = make_once(two, writes("two\n", weights="two"))
    for run, folder, text in ((one, first, "one\n"), (two, second, "two\n")):
        assert make_once(run, never) == folder == run.folder and (folder / "train.jsonl").read_text() == text
        assert find_run(folder.name, tmp_path, "checkpoint").hash == run.hash
    shutil.rmtree(first)
    assert two.folder == second and one.folder == first and why_not_finished(one) is not None
    other = of_digits(a_run(tmp_path, label="data-2", seed=3))  # of the same label, too
    with pytest.raises(PipelineError, match=f"{second.name} has no manifest.json of this run, so another made it"):
        make_once(other, never)
    assert (second / "train.jsonl").read_text() == "two\n"


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
