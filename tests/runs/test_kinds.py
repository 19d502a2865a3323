"""Runs of the first versions, whose tensors have sha256 digests: listed as before, and never compared with new ones."""

import hashlib
import os
from types import SimpleNamespace

import pytest
from small_models import stacked

from pipeline import files
from pipeline.config.merging import Merge
from pipeline.errors import PipelineError
from pipeline.files import fingerprints
from pipeline.merge.digests import known_digests
from pipeline.merge.merge import open_merge
from pipeline.merge.methods.layer_swap import LayerSwap
from pipeline.models.checkpoint import Checkpoint, digest_tensors, weights_root
from pipeline.runs.make import why_not_finished
from pipeline.runs.manifest import Ancestor, Manifest, read_manifest
from pipeline.runs.run import External
from pipeline.runs.unchanged import check_unchanged, content_digest


@pytest.fixture
def finished(tmp_path):
    """A finished training of three layers whose weights are known by a kind of digest."""

    def made(name, kind, seed=0, **manifest):
        folder = stacked(tmp_path / name, 3, seed)
        digests = digest_tensors(folder)
        root = weights_root(digests)
        if kind == "sha256":
            digests = {tensor: f"sha256:{hashlib.sha256(one.encode()).hexdigest()}" for tensor, one in digests.items()}
            root = f"sha256:{hashlib.sha256(root.encode()).hexdigest()}"
        weights = {"root": root, "digests": digests}
        known = fingerprints(folder, ["model.safetensors"])
        Manifest(name, name, {"stage": "sft"}, {"weights": weights}, files=known, **manifest).write(folder)
        return External(name, name, folder)

    return made


def test_a_run_of_an_earlier_version_and_its_children_stay_finished(finished):
    old = finished("old", "sha256")
    check_unchanged(old.folder)
    recorded = content_digest(old)
    assert recorded == read_manifest(old.folder).weights_root and recorded.startswith("sha256:")
    child = finished("child", "blake3", parents={"checkpoint": Ancestor("p", "p", recorded)})
    assert (
        why_not_finished(SimpleNamespace(folder=child.folder, hash="child", config=None, parents={"checkpoint": old}))
        is None
    )
    again = finished("again", "blake3")
    said = why_not_finished(
        SimpleNamespace(folder=child.folder, hash="child", config=None, parents={"checkpoint": again})
    )
    assert said == "its checkpoint again was recomputed with other contents"


def test_weights_of_an_earlier_version_are_not_taken_for_unchanged_once_they_were_touched(finished):
    old, new = finished("old", "sha256"), finished("new", "blake3")
    for one in (old, new):
        os.utime(one.folder / "model.safetensors", ns=(1, 1))  # as copying does
    check_unchanged(new.folder)
    with pytest.raises(PipelineError, match="old was changed after it was finished: model.safetensors differs"):
        check_unchanged(old.folder)


def test_a_merge_of_old_and_new_has_digests_of_one_kind(finished, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_digests_of", {})
    settings: Merge = LayerSwap(math="m", language="l", bottom_layers=1)
    experts = {"math": finished("math", "sha256"), "language": finished("language", "blake3", seed=1)}
    merge = open_merge(settings, {role: Checkpoint.open(one.folder) for role, one in experts.items()})
    (tmp_path / "out").mkdir()
    found = known_digests(merge, tmp_path)
    assert all(one.startswith("blake3:") for known in found.values() for one in known.values())
    digests = merge.write(tmp_path / "out", recorded=found)
    assert digests == digest_tensors(tmp_path / "out") and all(one.startswith("blake3:") for one in digests.values())
