"""stage=status: the state of each run by its manifest, lease, state.json, and plans."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fixture_types import Call, Patch
from small_runs import a_run, writes

from pipeline.config.compose import compose
from pipeline.errors import PipelineError
from pipeline.launch.plan_file import Task, publish_plan, write_plan
from pipeline.runs import state
from pipeline.runs.graph import order_runs
from pipeline.runs.make import make_once
from pipeline.runs.run import Run
from pipeline.tables.planned_runs import Planning


def test_status_tells_of_each_run(tmp_path: Path, call: Call) -> None:
    runs_dir = tmp_path / "runs"
    labels = ("done", "failing", "waits")
    done, failing, waits = (
        a_run(runs_dir, label=label, seed=seed) for seed, label in enumerate(labels, 1)
    )
    blocked = a_run(runs_dir, {"data_root": failing}, label="blocked")
    make_once(done, writes())
    with pytest.raises(RuntimeError):
        make_once(failing, lambda *_: (_ for _ in ()).throw(RuntimeError("no room")))
    tasks = [Task.of(run, kind="x", level=int(run is waits)) for run in (failing, waits, blocked)]
    write_plan(runs_dir / ".plans/mine.jsonl", tasks)
    (folder := runs_dir / ".slurm/mine").mkdir(parents=True)
    (folder / "1-x.job").write_text("5")

    def stage(run: Run, work: Path, tracker: Any) -> dict[str, Any]:
        state.update_state(run.workplace, step=30, steps=90, seconds_a_step=2.5)
        told = json.loads(call("stage=status", f"runs_dir={runs_dir}", "status.json=true").out)
        found.update({one["run"]: one for one in told})
        return {}

    found: dict[str, Any] = {}
    running = a_run(runs_dir, label="running", seed=4)
    make_once(running, stage)
    states = {name.rpartition("-")[0]: (one["state"], one["detail"]) for name, one in found.items()}
    assert states["done"][0] == "finished" and states["done"][1].startswith("began 20")
    assert states["failing"] == ("failed", "no room")
    assert states["waits"][0] == "waiting" and states["waits"][1].startswith(
        "for job 5; where squeue --me does not"
    )
    assert states["blocked"] == ("blocked", f"by {failing.name}")
    assert (
        states["running"][0] == "running"
        and ", step 30 of 90, about 150 s left" in states["running"][1]
    )
    one = found[running.name]
    assert (one["step"], one["steps"]) == (30, 90) and one["seconds_left"] == 150
    (empty := tmp_path / "empty").mkdir()
    none = f"No run was computed or submitted in runs_dir={empty} yet.\n"
    assert call("stage=status", f"runs_dir={empty}").out == none
    assert (
        "2 finished, 1 failed, 1 waiting, 1 blocked"
        in call("stage=status", f"runs_dir={runs_dir}").out
    )
    with pytest.raises(SystemExit):
        make_once(waits, lambda *_: (_ for _ in ()).throw(SystemExit(75)))
    shown = call("stage=status", f"runs_dir={runs_dir}").out
    assert (
        "stopped: it received a signal; job 5 resumes it where squeue --me lists it, else rerun the"
        " same command to resume; stage=clean deletes it" in shown
    )


@pytest.mark.parametrize("text", ["", '{"name": "x"', '{"name": "x"}'])
def test_a_plan_that_cannot_be_read_is_an_error(text: str, tmp_path: Path, call: Call) -> None:
    (tmp_path / "runs/.plans").mkdir(parents=True)
    (tmp_path / "runs/.plans/mine.jsonl").write_text(f"{text}\n")
    told = call("stage=status", f"runs_dir={tmp_path}/runs").err
    assert "mine.jsonl is not readable (" in told and "remove it and rerun that command" in told


TABLE = """
name: mine
runs:
  world: {stage: data, expert: sandbox, data.size: 4}
  math: {stage: sft, expert: math, model: sandbox, recipe: sandbox_math, data_root: world}
columns: {math: {run: math, eval: mgsm_0shot, in: en, data_root: world}}
"""


def test_a_table_file_beside_the_command(call: Call, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    assert (
        "table=mine.yaml is not a file. Name a file, or an option. Choose from"
        in call("stage=plan", "table=mine.yaml", status=1).err
    )
    (tmp_path / "mine.yaml").write_text(TABLE)
    plain, dotted = (
        call("stage=plan", f"table={name}").out.splitlines()
        for name in ("mine.yaml", "./mine.yaml")
    )
    assert plain[:-1] == dotted[:-1] and plain[-1].endswith(" table=mine.yaml")
    assert " runs, " in call("stage=plan", "table=mine.yaml").out


def test_status_of_a_table_and_failures(call: Call, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    first, second, other = a_run(runs), a_run(runs, seed=1), a_run(runs, label="data-y", seed=2)

    def listed() -> list[tuple[str, str]]:
        told = json.loads(call("stage=status", f"runs_dir={runs}", "status.json=true").out)
        return sorted((one["run"], one["state"]) for one in told)

    for run in (first, other):
        with pytest.raises(PipelineError):
            make_once(run, lambda *_: (_ for _ in ()).throw(PipelineError("no row")))
    failures = [(first.name, "failed"), (other.name, "failed")]
    assert listed() == failures
    make_once(second, writes())  # changed, and finished under the same label
    assert set(listed()) == {(second.name, "finished"), *failures}
    blocked = replace(Task.of(a_run(runs, label="data-z", seed=3)), needs=[first.hash])
    publish_plan(runs, "mine", [Task.of(first), blocked])
    assert set(listed()) == {(second.name, "finished"), *failures, (blocked.name, "blocked")}

    (tmp_path / "mine.yaml").write_text(TABLE)
    words = ["stage=status", f"table={tmp_path}/mine.yaml", f"runs_dir={runs}"]
    assert (
        f"No run of {words[1]} was computed or submitted in {words[2]} yet.\n" == call(*words).out
    )
    asked: Any = compose(["stage=table", f"table={tmp_path}/mine.yaml", f"runs_dir={runs}"])
    world = order_runs(Planning.of(asked).targets())[0]
    make_once(world, writes())
    assert [one["run"] for one in json.loads(call(*words, "status.json=true").out)] == [world.name]
