"""The base of an expert."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from small_runs import a_run, of_digits, writes

from pipeline.config.compose import compose
from pipeline.errors import PipelineError
from pipeline.runs.find import find_run
from pipeline.runs.lineage import base_folder, base_of
from pipeline.runs.make import make_once
from pipeline.runs.manifest import read_manifest
from pipeline.stages.resolver import label_of

SOUP = "stage=merge merge=soup merge.experts=[hub:a/b,hub:a/c] merge.weights=[0.5,0.5]"


def test_a_parent_is_known_by_all_digits_of_its_hash(tmp_path: Path) -> None:
    """The base of an expert: not the run that shares eight digits with it and is first by name."""
    other, base = (of_digits(a_run(tmp_path, label=label, seed=seed)) for label, seed in (("a", 1), ("b", 2)))
    make_once(other, writes(weights="other"))
    make_once(base, writes(weights="base"))
    expert = a_run(tmp_path, {"model": base}, label="expert", seed=3)
    make_once(expert, writes(weights="expert"))
    manifest = read_manifest(expert.folder)
    assert manifest is not None and manifest.parents["model"].content == "base"
    assert label_of(find_run(base.folder.name, tmp_path, "base")) == "b" and len(base.folder.name) == len("b-") + 12
    found = find_run(expert.name, tmp_path, "checkpoint")
    assert base_of(found, compose([f"runs_dir={tmp_path}", *SOUP.split()])).hash == base.hash  # type: ignore[arg-type]
    assert base_folder(expert.folder) == base.folder
    shutil.rmtree(base.folder)  # no longer here; what shares its digits does not stand in for it
    with pytest.raises(PipelineError, match=f"{expert.name}: its base {base.name} is not in runs_dir"):
        base_of(found, compose([f"runs_dir={tmp_path}", *SOUP.split()]))  # type: ignore[arg-type]
