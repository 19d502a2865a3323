"""Merging folders that no run made.

Headers first, contents once, and nothing when asked for again.
"""

import json
import os
import shutil
import time

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_models import stacked

from pipeline import files
from pipeline.errors import PipelineError
from pipeline.merge import write as writing
from pipeline.models import identity
from pipeline.models.checkpoint import TensorInfo, digest_tensors, read_header
from pipeline.runs.find import find_run
from pipeline.runs.manifest import read_manifest


@pytest.fixture
def pair(tmp_path, monkeypatch):
    """Two folders in bfloat16, settled; no digest is known in this process."""
    folders = [stacked(tmp_path / name, 3, seed) for seed, name in enumerate(("math", "language"))]
    monkeypatch.setattr(files, "SETTLED_NS", 0)
    monkeypatch.setattr(files, "_digests_of", {})
    time.sleep(0.02)
    return folders


@pytest.fixture
def swap(pair, tmp_path, make_run):
    def made(*more):
        words = [
            "merge=layer_swap",
            "merge.embeddings=math",
            "merge.final_norm=math",
            "merge.head=math",
        ]
        words += [f"merge.math={pair[0]}", f"merge.language={pair[1]}", f"runs_dir={tmp_path}/runs"]
        return make_run("stage=merge", *words, "merge.bottom_layers=1", "merge.top_layers=0", *more)

    return made


def nothing_is_read(monkeypatch, what="read"):
    def refuse(*words):
        raise AssertionError(f"{what}: {words}")

    monkeypatch.setattr(files, "_digests_of", {})  # as another process
    monkeypatch.setattr(identity, "hash_tensor", refuse)
    monkeypatch.setattr(identity, "read_header", refuse)
    return refuse


def test_a_swap_of_folders_is_theirs_tensor_by_tensor(pair, swap):
    merged = swap()
    found, math, language = (load_file(folder / "model.safetensors") for folder in (merged, *pair))
    for name, tensor in found.items():
        assert torch.equal(tensor, (language if ".layers.0." in name else math)[name]), name
    assert read_manifest(merged).facts["weights"]["digests"] == digest_tensors(merged)


def test_what_does_not_fit_is_refused_before_contents_are_hashed(pair, swap, monkeypatch):
    for folder, value in zip(pair, (1e-6, 1e-5), strict=True):
        config = json.loads((folder / "config.json").read_text()) | {"rms_norm_eps": value}
        (folder / "config.json").write_text(json.dumps(config))
    nothing_is_read(monkeypatch)
    with pytest.raises(
        PipelineError, match="merge.language: .* has rms_norm_eps 1e-05, .* has rms_norm_eps 1e-06"
    ):
        swap()


def test_each_byte_is_hashed_once_for_all_merges_of_a_folder(pair, swap, monkeypatch):
    """The digests that name the folders are those of the copied tensors.

    The kernel copies them without the program reading them.
    """
    read, real = [], TensorInfo.pieces
    monkeypatch.setattr(
        TensorInfo, "pieces", lambda info: read.append((info.file, info.offset)) or real(info)
    )
    swap()
    every = [
        (info.file, info.offset)
        for one in pair
        for info in read_header(one / "model.safetensors").values()
    ]
    assert sorted(read) == sorted(every)
    monkeypatch.setattr(files, "_digests_of", {})  # as another process
    read.clear()
    merged = swap("merge.bottom_layers=2")
    swap("merge.bottom_layers=2", "redo=true")
    assert not read
    assert read_manifest(merged).facts["weights"]["digests"] == digest_tensors(merged)


def test_a_folder_with_values_that_are_not_finite_has_a_digest_and_no_merge(pair, swap):
    tensors = load_file(pair[1] / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][1, 1] = float("nan")
    save_file(tensors, pair[1] / "model.safetensors", {"format": "pt"})
    assert find_run(str(pair[1]), pair[1], "merge.language").hash.startswith("blake3:")
    with pytest.raises(
        PipelineError, match="model.layers.0.mlp.up_proj.weight holds NaN or infinite values"
    ):
        swap()


def test_a_folder_that_changes_while_it_is_merged_is_refused(pair, swap, monkeypatch, tmp_path):
    real, more = writing._put_tensor, ""

    def changing(*words):
        file = pair[1] / "config.json"
        file.write_text(file.read_text() + more)
        return real(*words)

    monkeypatch.setattr(writing, "_put_tensor", changing)
    shutil.rmtree(swap("threads=1"))  # touched alone: threads of the copy would write at once
    more = " "
    with pytest.raises(
        PipelineError,
        match="language was changed after layer_swap-2-0-math-language was planned, or while",
    ):
        swap("merge.bottom_layers=2", "threads=1")
    assert not list((tmp_path / "runs").glob("*/manifest.json"))


def test_weights_of_a_run_are_known_by_their_tensors(swap, tmp_path):
    """A copy of a run with other times is the same run, one with another value is not.

    Nothing is hashed twice.
    """
    merged = swap()
    listed = read_manifest(merged).files
    assert "sha256" not in listed["model.safetensors"] and "sha256" in listed["config.json"]
    os.utime(merged / "model.safetensors")
    assert swap() == merged
    tensors = load_file(merged / "model.safetensors")
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, merged / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        PipelineError, match="was changed after it was finished: model.safetensors differs"
    ):
        swap()
    (merged / "model.safetensors").write_bytes(b"short")
    with pytest.raises(
        PipelineError, match="was changed after it was finished: model.safetensors differs"
    ):
        swap()
