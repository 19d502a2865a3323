"""Messages about a full disk, a folder that cannot be written, and a closed output."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import constants

from pipeline.errors import PipelineError
from pipeline.hub.lock import unusable_cache
from pipeline.launch.in_process import error_sentence
from pipeline.runs import disk
from pipeline.runs.disk import check_writable

TORCH_ERROR = (
    "[enforce fail at inline_container.cc:672] . PytorchStreamWriter failed writing file data/1:"
    " file write failed"
)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device: the disk of"),
        (RuntimeError(TORCH_ERROR), "the disk of"),
    ],
)
def test_a_full_disk_is_named_with_a_remedy(error: Exception, reason: str) -> None:
    told = error_sentence(error)
    assert told and told.startswith(f"{reason} runs_dir or of TMPDIR is full: free some (stage=")


def test_a_folder_on_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(disk, "TemporaryFile", full)
    with pytest.raises(PipelineError, match=r"^runs_dir=.* cannot be written \(No space left on"):
        check_writable(tmp_path / "runs")


def test_a_cache_that_cannot_be_written_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", "/dev/null/home/hub")
    assert (
        unusable_cache()
        == "The Hub's cache /dev/null/home cannot be written (Not a directory). Set HF_HOME to a"
        " folder that can be written."
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "new/hub"))
    assert unusable_cache() == ""


def test_a_cache_in_which_no_file_can_be_locked_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a network file system without a lock daemon: datasets locks what it reads."""

    def refused(file: object, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "home/hub"))
    assert unusable_cache() == ""
    monkeypatch.setattr("fcntl.flock", refused)
    assert unusable_cache().startswith(
        f"The Hub's cache {tmp_path}/home cannot be written (No locks available). Set HF_HOME"
    )


def test_a_closed_output_is_one_sentence() -> None:
    command = f"{sys.executable} -m pipeline stage=status >&-"
    ended = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (
        1,
        "error: standard output is closed. Redirect it to a file, or to /dev/null.\n",
    )
