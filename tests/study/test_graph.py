"""What a plan says of each run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from small_runs import a_run, writes

from pipeline.commands.table import show_runs
from pipeline.runs.make import make_once, why_not_finished
from pipeline.runs.run import External


def test_the_plan_says_why_a_run_is_not_taken_from_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert show_runs([]) == "run  stage  seconds  state\n0 of 0 runs to compute here: about 0 s"
    run, other_seed = a_run(tmp_path), a_run(tmp_path, seed=3)
    assert "never made" in show_runs([run])
    make_once(run, writes())
    assert "finished" in show_runs([run]) and "0 of 1 runs to compute" in show_runs([run])
    assert why_not_finished(other_seed) == "changed: seed default -> 3"
    assert why_not_finished(replace(run, version=99)) == f"changed: version {run.version} -> 99"
    parent = a_run(tmp_path, {"data_root": External("w", "abc", tmp_path)})
    assert why_not_finished(parent) == "changed: parents.data_root default -> abc"
    assert "redo=true" in show_runs([a_run(tmp_path, redo=True)])
