"""The manifest: what is none is refused by name where it is read; commands that list runs name it and go on."""

import json
import os
import time
from pathlib import Path

import pytest
from fixture_types import Call
from small_runs import a_run, writes

from pipeline.errors import PipelineError
from pipeline.runs.make import make_once
from pipeline.runs.manifest import Manifest, read_manifest

MALFORMED = {
    "no JSON": "{",
    "a list": "[]",
    "another program's": '{"of": "another program"}',
    "facts missing": json.dumps({
        "name": "x", "hash": "x", "decided_by": {"stage": "data"}, "cost": {"seconds": 1.0}, "started": "",
    }),
    "no cost": json.dumps({"name": "x", "hash": "x", "decided_by": {"stage": "data"}, "facts": {}}),
}  # fmt: skip


@pytest.fixture(params=MALFORMED.values(), ids=MALFORMED)
def malformed(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder beside a finished run, named as that run is but for its digits."""
    folder = tmp_path / "data-x-00000000"
    folder.mkdir()
    (folder / "manifest.json").write_text(request.param)
    return folder


def test_a_manifest_that_is_none_is_refused(malformed: Path) -> None:
    where = f"^{malformed}/manifest.json is (not readable JSON|not a manifest of this program)"
    with pytest.raises(PipelineError, match=where):
        read_manifest(malformed)


@pytest.mark.parametrize("stage", ["status", "plan table=sandbox", "clean"])
def test_commands_that_list_runs_name_it_and_go_on(stage: str, malformed: Path, tmp_path: Path, call: Call) -> None:
    finished = make_once(a_run(tmp_path), writes())
    told = call(*f"stage={stage}".split(), f"runs_dir={tmp_path}")
    assert told.status == 0 and told.err.count(f"skipped: {malformed}/manifest.json is ") == 1
    if stage == "status":
        assert finished.name in told.out and "1 finished" in told.out


def test_a_manifest_that_is_written_again_is_read_again(tmp_path: Path) -> None:
    """Also in place, with the same size: where it is young at once, where it is old by its time."""

    def written(attempt: int) -> int:
        Manifest("x", "h", {"stage": "data"}, {}, attempt=attempt).write(tmp_path)
        manifest = read_manifest(tmp_path)
        assert manifest is not None
        return manifest.attempt

    assert [written(1), written(2)] == [1, 2]
    file = tmp_path / "manifest.json"
    hour_ago = time.time_ns() - 3600 * 10**9
    os.utime(file, ns=(hour_ago, hour_ago))
    assert read_manifest(tmp_path).attempt == 2 and read_manifest(tmp_path) is read_manifest(tmp_path)  # type: ignore[union-attr]
    with open(file, "r+", encoding="utf-8") as inside:
        inside.write(file.read_text().replace('"attempt": 2', '"attempt": 3'))
    assert read_manifest(tmp_path).attempt == 3  # type: ignore[union-attr]
