"""The manifest: what is none is refused by name where it is read.

Commands that list runs name it and go on. Those of the first versions, whose tensors have sha256
digests, are listed as before, and never compared with new ones.
"""

import hashlib
import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from fixture_types import Call
from small_models import stacked
from small_runs import a_run, writes

from pipeline import files
from pipeline.config.merging import Merge
from pipeline.errors import PipelineError
from pipeline.files import fingerprints
from pipeline.merge.digests import known_digests
from pipeline.merge.methods.layer_swap import LayerSwap
from pipeline.merge.open_merge import open_merge
from pipeline.models.checkpoint import Checkpoint, digest_tensors, weights_root
from pipeline.runs.make import make_once, why_not_finished
from pipeline.runs.manifest import Ancestor, Manifest, read_manifest
from pipeline.runs.run import External
from pipeline.runs.unchanged import check_unchanged, content_digest

MALFORMED = {
    "no JSON": "{",
    "a list": "[]",
    "another program's": '{"of": "another program"}',
    "facts missing": json.dumps(
        {
            "name": "x",
            "hash": "x",
            "decided_by": {"stage": "data"},
            "cost": {"seconds": 1.0},
            "started": "",
        }
    ),
    "no cost": json.dumps({"name": "x", "hash": "x", "decided_by": {"stage": "data"}, "facts": {}}),
}


@pytest.fixture(params=MALFORMED.values(), ids=MALFORMED)
def malformed(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Write a folder beside a finished run with the same name except for its digits."""
    folder = tmp_path / "data-x-00000000"
    folder.mkdir()
    (folder / "manifest.json").write_text(request.param)
    return folder


def test_a_manifest_that_is_none_is_refused(malformed: Path) -> None:
    where = f"^{malformed}/manifest.json is (not readable JSON|not a manifest of this program)"
    with pytest.raises(PipelineError, match=where):
        read_manifest(malformed)


@pytest.mark.parametrize("stage", ["status", "clean"])
def test_commands_that_list_runs_name_it_and_go_on(
    stage: str, malformed: Path, tmp_path: Path, call: Call
) -> None:
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
    assert read_manifest(tmp_path).attempt == 2 and read_manifest(tmp_path) is read_manifest(
        tmp_path
    )  # type: ignore[union-attr]
    with open(file, "r+", encoding="utf-8") as inside:
        inside.write(file.read_text().replace('"attempt": 2', '"attempt": 3'))
    assert read_manifest(tmp_path).attempt == 3  # type: ignore[union-attr]


@pytest.fixture
def finished(tmp_path):
    """Write a finished training of three layers, with a given kind of digest."""

    def made(name, kind, seed=0, **manifest):
        folder = stacked(tmp_path / name, 3, seed)
        digests = digest_tensors(folder)
        root = weights_root(digests)
        if kind == "sha256":
            digests = {
                tensor: f"sha256:{hashlib.sha256(one.encode()).hexdigest()}"
                for tensor, one in digests.items()
            }
            root = f"sha256:{hashlib.sha256(root.encode()).hexdigest()}"
        weights = {"root": root, "digests": digests}
        known = fingerprints(folder, ["model.safetensors"])
        Manifest(name, name, {"stage": "sft"}, {"weights": weights}, files=known, **manifest).write(
            folder
        )
        return External(name, name, folder)

    return made


def test_a_run_of_an_earlier_version_and_its_children_stay_finished(finished):
    old = finished("old", "sha256")
    check_unchanged(old.folder)
    recorded = content_digest(old)
    assert recorded == read_manifest(old.folder).weights_root and recorded.startswith("sha256:")
    child = finished("child", "blake3", parents={"checkpoint": Ancestor("p", "p", recorded)})
    run = SimpleNamespace(
        folder=child.folder, hash="child", config=None, parents={"checkpoint": old}
    )
    assert why_not_finished(run) is None
    run.parents = {"checkpoint": finished("again", "blake3")}
    assert why_not_finished(run) == "its checkpoint again was recomputed with other contents"


def test_weights_of_an_earlier_version_are_not_taken_for_unchanged_once_they_were_touched(finished):
    old, new = finished("old", "sha256"), finished("new", "blake3")
    for one in (old, new):
        os.utime(one.folder / "model.safetensors", ns=(1, 1))  # as copying does
    check_unchanged(new.folder)
    with pytest.raises(
        PipelineError, match="old was changed after it was finished: model.safetensors differs"
    ):
        check_unchanged(old.folder)


def test_a_merge_of_old_and_new_has_digests_of_one_kind(finished, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_digests_of", {})
    settings: Merge = LayerSwap(math="m", language="l", bottom_layers=1)
    experts = {
        "math": finished("math", "sha256"),
        "language": finished("language", "blake3", seed=1),
    }
    merge = open_merge(
        settings, {role: Checkpoint.open(one.folder) for role, one in experts.items()}
    )
    (tmp_path / "out").mkdir()
    found = known_digests(merge, tmp_path)
    assert all(one.startswith("blake3:") for known in found.values() for one in known.values())
    digests = merge.write(tmp_path / "out", recorded=found)
    assert digests == digest_tensors(tmp_path / "out") and all(
        one.startswith("blake3:") for one in digests.values()
    )
