"""What users read: names instead of numbers, the knob that is at fault, and lines before minutes of silence."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fixture_types import Call, Patch
from small_runs import a_run, writes

from pipeline.config.compose import compose
from pipeline.errors import PipelineError
from pipeline.launch.plan_file import Task, publish_plan
from pipeline.runs import state
from pipeline.runs.graph import order_runs
from pipeline.runs.make import make_once
from pipeline.tables.planned_runs import Planning

TABLE = """
name: mine
runs:
  world: {stage: data, expert: sandbox, data.size: 4}
  math: {stage: sft, expert: math, model: sandbox, recipe: sandbox_math, data_root: world}
columns: {math: {run: math, eval: mgsm_0shot, in: en, data_root: world}}
"""


def test_a_table_file_beside_the_command(call: Call, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "table=mine.yaml is not a file: give one, or one of" in call("stage=plan", "table=mine.yaml", status=1).err
    (tmp_path / "mine.yaml").write_text(TABLE)
    plain, dotted = (call("stage=plan", f"table={name}").out.splitlines() for name in ("mine.yaml", "./mine.yaml"))
    assert plain[:-1] == dotted[:-1] and plain[-1].endswith(" table=mine.yaml")
    assert "runs are done" in call("stage=plan", "table=mine.yaml").out


def failing(run: Any, work: Path, tracker: Any) -> dict[str, Any]:
    raise PipelineError("no row")


def test_status_of_a_table_and_without_failures_that_were_repaired(call: Call, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    first, second, other = a_run(runs), a_run(runs, seed=1), a_run(runs, label="data-y", seed=2)

    def listed() -> list[tuple[str, str]]:
        told = json.loads(call("stage=status", f"runs_dir={runs}", "status.json=true").out)
        return sorted((one["run"], one["state"]) for one in told)

    for run in (first, other):
        with pytest.raises(PipelineError):
            make_once(run, failing)
    failures = [(first.name, "failed"), (other.name, "failed")]
    assert listed() == failures
    make_once(second, writes())  # changed, and finished under the same label
    assert listed() == [(second.name, "finished"), failures[1]]
    shown = call("stage=show", f"run={first.name}", f"runs_dir={runs}").out
    assert shown.startswith(f"{first.name}\nstage=data, failed: no row\n")
    state.update_state(other.workplace, since="2000-01-01T00:00:00+00:00")
    assert listed() == [(second.name, "finished"), failures[1]]  # nothing was finished after it
    blocked = replace(Task.of(a_run(runs, label="data-z", seed=3)), needs=[first.hash])
    publish_plan(runs, "mine", [Task.of(first), blocked])
    assert set(listed()) == {(second.name, "finished"), *failures, (blocked.name, "blocked")}

    (tmp_path / "mine.yaml").write_text(TABLE)
    words = ["stage=status", f"table={tmp_path}/mine.yaml", f"runs_dir={runs}"]
    told = f"no run of table={tmp_path}/mine.yaml was computed or submitted in runs_dir={runs} yet\n"
    assert call(*words).out == told
    asked: Any = compose(["stage=table", f"table={tmp_path}/mine.yaml", f"runs_dir={runs}"])
    world = order_runs(Planning.of(asked).targets())[0]
    make_once(world, writes())
    assert [one["run"] for one in json.loads(call(*words, "status.json=true").out)] == [world.name]
