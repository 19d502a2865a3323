"""Runs of earlier versions, whose weights are known by sha256, beside those of this one: never compared as they are."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file, save_file
from small_models import stacked

from pipeline import files
from pipeline.config.merging import Merge
from pipeline.errors import PipelineError
from pipeline.evaluate.score_cache import model_key
from pipeline.files import fingerprints
from pipeline.merge.compatibility import refuse_unmoved
from pipeline.merge.digests import SourceDigests
from pipeline.merge.merge import open_merge
from pipeline.merge.methods.layer_swap import LayerSwap
from pipeline.models.checkpoint import Checkpoint, digest_tensors, kind_of, weights_root
from pipeline.runs.lineage import one_base, recorded_base
from pipeline.runs.make import why_not_finished
from pipeline.runs.manifest import Ancestor, Manifest, read_manifest
from pipeline.runs.run import External
from pipeline.runs.unchanged import check_unchanged, content_digest


@pytest.fixture
def finished(tmp_path):
    """A finished training of three layers whose weights are known by a kind of digest, and its base."""

    def made(name, kind, seed=0, **manifest):
        folder = stacked(tmp_path / name, 3, seed)
        digests = digest_tensors(folder, kind)
        weights = {"root": weights_root(digests, kind), "digests": digests}
        known = fingerprints(folder, ["model.safetensors"])
        Manifest(name, name, {"stage": "sft"}, {"weights": weights}, files=known, **manifest).write(folder)
        return External(name, name, folder)

    return made


def test_a_finished_run_of_an_earlier_version_is_still_told_from_a_changed_one(finished):
    old = finished("old", "sha256")
    os.utime(old.folder / "model.safetensors", ns=(1, 1))  # as copying does
    check_unchanged(old.folder)
    assert content_digest(old) == read_manifest(old.folder).weights_root and content_digest(old).startswith("sha256:")
    tensors = load_file(old.folder / "model.safetensors")
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, old.folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(PipelineError, match="old was changed after it was finished: model.safetensors differs"):
        check_unchanged(old.folder)


@pytest.mark.parametrize("kinds", [("sha256", "blake3"), ("blake3", "sha256"), ("sha256", "sha256")])
def test_contents_are_compared_in_one_kind(finished, kinds):
    was, now = kinds
    recorded = weights_root(digest_tensors(finished("was", was).folder, was), was)
    same, other = finished("same", now), finished("other", now, seed=1)
    assert content_digest(same, recorded) == recorded != content_digest(other, recorded)
    assert kind_of(content_digest(other, recorded)) == was

    for parent, expected in ((same, None), (other, "its checkpoint other was made again with other contents")):
        child = finished(f"child of {parent.name}", "blake3", parents={"checkpoint": Ancestor("p", "p", recorded)})
        run = SimpleNamespace(folder=child.folder, parents={"checkpoint": parent})
        assert why_not_finished(run) == expected


@pytest.mark.parametrize("kinds", [("sha256", "blake3"), ("blake3", "sha256")])
def test_an_expert_that_learned_nothing_is_told_across_kinds(finished, kinds):
    base = finished("base", kinds[0])
    trained = {"parents": {"model": Ancestor("base", "base", content_digest(base))}}
    refuse_unmoved({"math": finished("moved", kinds[1], 1, **trained)})
    with pytest.raises(PipelineError, match="merge.math: unmoved is equal to its base base"):
        refuse_unmoved({"math": finished("unmoved", kinds[1], **trained)})


def test_freed_weights_of_the_other_kind_are_unknown(finished):
    freed = finished("freed", "blake3")
    manifest = read_manifest(freed.folder)
    manifest.weights["freed"] = True
    manifest.write(freed.folder)
    (freed.folder / "model.safetensors").unlink()
    assert content_digest(freed, "sha256:0") is None and content_digest(freed, "blake3:0") == manifest.weights_root


def test_folders_known_by_two_kinds_are_not_told_to_differ(finished):
    """Before kinds were recorded, a folder that no run made was a bare sha256; so are runs, and models on the Hub."""

    def trained(name, base_hash, content=None, path="./base"):
        parents = {"model": Ancestor("base", base_hash, content)}
        return name, recorded_base(finished(name, "blake3", parents=parents, config={"model": {"path": path}}))

    old, new = trained("old", "0" * 64), trained("new", "blake3:" + "1" * 64)
    other_old, other_new = trained("other_old", "2" * 64), trained("other_new", "blake3:" + "3" * 64)
    run = trained("run", "0" * 64, "blake3:root")
    hub = trained("hub", "0" * 64, path="hub:org/name")
    for fine in ([old, new], [old, old], [new, new], [hub, hub], [run, run]):
        assert one_base(fine, "the experts") is fine[0][1]
    for bad in ([old, other_old], [new, other_new], [old, new, other_new], [old, run], [new, hub], [old, hub]):
        with pytest.raises(PipelineError, match="the experts have different bases"):
            one_base(bad, "the experts")


def test_a_merge_of_old_and_new_has_digests_of_one_kind(finished, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_digests_of", {})
    settings: Merge = LayerSwap(math="m", language="l", bottom_layers=1)
    experts = {"math": finished("math", "sha256"), "language": finished("language", "blake3", seed=1)}
    merge = open_merge(settings, {role: Checkpoint.open(one.folder) for role, one in experts.items()})
    (tmp_path / "out").mkdir()
    sources = SourceDigests(merge, tmp_path)
    assert not sources.known["math"] and sources.known["language"]
    digests = merge.write(tmp_path / "out", recorded=sources.known)
    assert digests == digest_tensors(tmp_path / "out") and {kind_of(one) for one in digests.values()} == {"blake3"}


def test_scores_are_found_by_the_root_on_record(finished):
    """Scores of a run of an earlier version are found as before, and by no other model's key."""
    keys = {kind: model_key(finished(kind, kind)) for kind in ("sha256", "blake3")}
    assert {kind: kind_of(key["root"]) for kind, key in keys.items()} == {"sha256": "sha256", "blake3": "blake3"}
    (keys["sha256"].pop("root"), keys["blake3"].pop("root"))
    assert keys["sha256"] == keys["blake3"]
