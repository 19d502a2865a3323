"""Where a run was made: no credential of it is kept."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from small_runs import a_run

from pipeline.hub.addresses import without_credentials
from pipeline.runs import provenance
from pipeline.runs.make import make_once


def test_credentials_are_taken_out_of_every_address() -> None:
    nested = {"a": ["https://me:p@ss@host/x@y", "git+ssh://token@host"], "b": {"c": "me@host?", "d": 1}}
    assert without_credentials(nested) == {
        "a": ["https://host/x@y", "git+ssh://host"],
        "b": {"c": "me@host?", "d": 1},
    }
    told = "x.url=https://me:pw@host/a.gz?token=1&X-Amz-Signature=2#access_token=3 and hf://datasets/a/b@c/d: why?"
    assert without_credentials(told) == "x.url=https://host/a.gz and hf://datasets/a/b@c/d: why?"


def test_no_credential_reaches_a_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "sesame")
    monkeypatch.setenv("HF_TOKEN", "sesame")
    run = a_run(tmp_path)
    run.config.expert.sources["x"].hub = "https://me:sesame@host/set"  # type: ignore[attr-defined]
    folder = make_once(run, lambda run, work, tracker: {"from": "https://me:sesame@host"})
    text = (folder / "manifest.json").read_text()
    assert "sesame" not in text and "https://host/set" in text
    assert set(json.loads(text)["environment"]) <= set(provenance.ENVIRONMENT)


def test_results_do_not_make_a_commit_dirty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*words: str) -> str:
        who = ["-c", "user.name=x", "-c", "user.email=x@x"]
        return subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    source = tmp_path / "src/pipeline/provenance.py"
    for file in (source, tmp_path / "results/table.csv"):
        file.parent.mkdir(parents=True)
        file.write_text("1\n")
    monkeypatch.setattr(provenance, "__file__", str(source))
    assert provenance.git_state() == {"commit": None, "dirty": None}  # no checkout
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "one")
    commit = git("rev-parse", "HEAD").strip()
    (tmp_path / "results/table.csv").write_text("2\n")
    assert provenance.git_state() == {"commit": commit, "dirty": False}
    source.write_text("2\n")
    assert provenance.git_state() == {"commit": commit, "dirty": True}
