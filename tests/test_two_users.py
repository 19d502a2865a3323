"""Two users in one runs_dir, with and without group rights. Root is needed to be both of them."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fixture_types import Call

from pipeline.config import conf

NOBODY = 65534
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="two users: needs root")


@pytest.fixture
def shared() -> Iterator[Path]:
    """Return a folder that all users may enter, with a data set. tmp_path is root's."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    (folder / "data/orca_math").mkdir(parents=True)
    (folder / "data/orca_math/train.jsonl").write_text(
        '{"question": "1 + 1?", "answer": "2"}\n' * 3
    )
    yield folder
    shutil.rmtree(folder)


@contextmanager
def another_user(group: int = NOBODY) -> Iterator[None]:
    """Become a user without special rights in this process."""
    before = os.getgroups()
    os.setgroups([]), os.setegid(group), os.seteuid(NOBODY)
    try:
        if not os.access(conf.folder() / "config.yaml", os.R_OK, effective_ids=True):
            pytest.skip("two users: this checkout is its owner's alone")
        yield
    finally:
        os.seteuid(0), os.setegid(0), os.setgroups(before)


def everything(runs_dir: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in runs_dir.rglob("*") if path.is_file()}


def command(shared: Path, *more: str) -> list[str]:
    start = [
        "stage=data",
        "expert=math",
        f"data_root={shared}/data",
        "data.validation=0",
        "tracking.mode=disabled",
    ]
    return [*start, f"runs_dir={shared}/runs", *more]


def test_without_group_rights_the_second_is_refused_in_one_sentence_and_can_read(
    shared: Path, call: Call
) -> None:
    before = os.umask(0o022)
    try:
        assert call(*command(shared)).status == 0
    finally:
        os.umask(before)
    there = everything(shared / "runs")
    with another_user():
        assert call(*command(shared)).status == 0  # which is finished
        for more in (["seed=1"], ["redo=true"]):
            told = call(*command(shared, *more))
            assert told.status == 1 and told.out == "" and "Traceback" not in told.err
            (line,) = [line for line in told.err.splitlines() if line.startswith("error: ")]
            assert line.startswith(
                f"error: runs_dir={shared}/runs cannot be written (Permission denied). Give another"
            )
            assert line.endswith(
                "People who share it need group rights: chmod -R g+rwsX, umask 002."
            )
        assert "1 finished" in call("stage=status", f"runs_dir={shared}/runs").out
    assert everything(shared / "runs") == there


def test_with_group_rights_both_make_runs(shared: Path, call: Call) -> None:
    """As slurm/README.md says: the folder's group, setgid, umask 002."""
    runs_dir, before = shared / "runs", os.umask(0o002)
    runs_dir.mkdir()
    os.chown(runs_dir, 0, 12345)
    runs_dir.chmod(0o2775)
    try:
        assert call(*command(shared)).status == 0
        with another_user(group=12345):
            assert call(*command(shared)).status == 0  # which is finished
            assert call(*command(shared, "seed=1")).status == 0
        assert call(*command(shared, "seed=1", "redo=true")).status == 0
    finally:
        os.umask(before)
    assert "2 finished" in call("stage=status", f"runs_dir={runs_dir}").out
