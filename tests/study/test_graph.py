"""What a plan says of each run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_runs import a_run, writes

from pipeline.commands.plan import show_runs
from pipeline.estimate.durations import History
from pipeline.runs.graph import reasons_unfinished
from pipeline.runs.make import make_once, why_not_finished
from pipeline.runs.run import External


def test_the_plan_says_why_a_run_is_not_taken_from_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def shown(run: Any) -> str:
        return show_runs([run], History(), reasons_unfinished([run]), 10)

    run, other_seed = a_run(tmp_path), a_run(tmp_path, seed=3)
    assert "never made" in shown(run)
    make_once(run, writes())
    assert "finished" in shown(run) and not reasons_unfinished([run])
    assert why_not_finished(other_seed) == "changed: seed default -> 3"
    assert why_not_finished(replace(run, version=99)) == f"changed: version {run.version} -> 99"
    parent = a_run(tmp_path, {"data_root": External("w", "abc", tmp_path)})
    assert why_not_finished(parent) == "changed: parents.data_root default -> abc"
    assert "redo=true" in shown(a_run(tmp_path, redo=True))
