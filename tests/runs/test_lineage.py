"""The base of an expert."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from small_runs import a_run, of_digits, writes

from pipeline.errors import PipelineError
from pipeline.runs.find import find_run
from pipeline.runs.lineage import base_folder, base_of
from pipeline.runs.make import make_once
from pipeline.runs.manifest import read_manifest
from pipeline.stages.resolver import label_of


def test_a_parent_is_known_by_all_digits_of_its_hash(tmp_path: Path) -> None:
    """The base of an expert: not the run that shares twelve digits with it and is first by name."""
    other, base = (of_digits(a_run(tmp_path, label=label, seed=seed)) for label, seed in (("a", 1), ("b", 2)))
    make_once(other, writes(weights="other"))
    make_once(base, writes(weights="base"))
    expert = a_run(tmp_path, {"model": base}, label="expert", seed=3)
    make_once(expert, writes(weights="expert"))
    manifest = read_manifest(expert.folder)
    assert manifest is not None and manifest.parents["model"].content == "base"
    assert label_of(find_run(base.folder.name, tmp_path, "base")) == "b" and len(base.folder.name) == len("b-") + 12
    found = find_run(expert.name, tmp_path, "checkpoint")
    assert base_of(found, tmp_path).hash == base.hash
    assert base_folder(expert.folder) == base.folder
    shutil.rmtree(base.folder)  # no longer here; what shares its digits does not stand in for it
    with pytest.raises(PipelineError, match=f"{expert.name}: its base {base.name} is not in runs_dir"):
        base_of(found, tmp_path)


def test_the_base_is_the_one_that_was_recorded(tmp_path: Path, models: dict[str, list[Path]]) -> None:
    """Not weights that were put in its folder later, nor what a base that was made again holds now: a task vector, or
    an adapter, on these is another model."""
    folder = shutil.copytree(models["llama"][0], tmp_path / "base")
    base = find_run(str(folder), tmp_path, "model.path")
    expert = a_run(tmp_path, {"model": base}, label="expert")
    make_once(expert, writes(weights="expert"))
    manifest = read_manifest(expert.folder)
    assert manifest is not None
    replace(manifest, config={"model": {"path": str(folder)}}).write(expert.folder)
    found = find_run(expert.name, tmp_path, "checkpoint")
    assert base_of(found, tmp_path).hash == base.hash and base_folder(expert.folder) == folder
    shutil.copy(models["llama"][1] / "model.safetensors", folder)
    for look_up in (lambda: base_of(found, tmp_path), lambda: base_folder(expert.folder)):
        with pytest.raises(PipelineError, match=f"{expert.name} was made from base, and {folder} has changed since"):
            look_up()
    shutil.copy(models["llama"][0] / "model.safetensors", folder)
    assert base_folder(expert.folder) == folder

    base = a_run(tmp_path, label="made", seed=1)
    make_once(base, writes(weights="first"))
    of_run = a_run(tmp_path, {"model": base}, label="expert", seed=2)
    make_once(of_run, writes(weights="expert"))
    assert base_folder(of_run.folder) == base.folder
    make_once(a_run(tmp_path, label="made", seed=1, redo=True), writes(weights="second"))
    found = find_run(of_run.name, tmp_path, "checkpoint")
    for look_up in (lambda: base_of(found, tmp_path), lambda: base_folder(of_run.folder)):
        with pytest.raises(PipelineError, match=f"{of_run.name} was made from {base.name}, and .* has changed since"):
            look_up()
