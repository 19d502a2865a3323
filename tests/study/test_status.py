"""stage=status: the state of each run by its manifest, lease and state.json, and by the plans of submissions."""

import json
from pathlib import Path
from typing import Any

import pytest
from fixture_types import Call
from small_runs import a_run, writes

from pipeline.launch.plan_file import Task, write_plan
from pipeline.runs import state
from pipeline.runs.make import make_once
from pipeline.runs.run import Run


def test_status_tells_of_each_run(tmp_path: Path, call: Call) -> None:
    runs_dir = tmp_path / "runs"
    done, failing, waits = (a_run(runs_dir, label=label, seed=1) for label in ("done", "failing", "waits"))
    failing, waits = a_run(runs_dir, label="failing", seed=2), a_run(runs_dir, label="waits", seed=3)
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
    assert states["waits"][0] == "waiting" and states["waits"][1].startswith("for job 5; where squeue --me does not")
    assert states["blocked"] == ("blocked", f"by {failing.name}")
    assert states["running"][0] == "running" and ", step 30 of 90, about 150 s left" in states["running"][1]
    one = found[running.name]
    assert (one["step"], one["steps"]) == (30, 90) and one["seconds_left"] == 150
    (tmp_path / "empty").mkdir()
    none = call("stage=status", f"runs_dir={tmp_path}/empty")
    assert none.out == f"no run was computed or submitted in runs_dir={tmp_path}/empty yet\n"
    shown = call("stage=status", f"runs_dir={runs_dir}").out
    assert "2 finished, 1 failed, 1 waiting, 1 blocked" in shown
    with pytest.raises(SystemExit):
        make_once(waits, lambda *_: (_ for _ in ()).throw(SystemExit(75)))
    shown = call("stage=status", f"runs_dir={runs_dir}").out
    assert (
        "stopped: it received a signal; job 5 resumes it where squeue --me lists it, else rerun the same command to "
        "resume; stage=clean clean.hours=0 clean.dry_run=false deletes it and other unfinished work" in shown
    )


@pytest.mark.parametrize("text", ["", '{"name": "x"', '{"name": "x"}'])
def test_a_plan_that_cannot_be_read_is_an_error(text: str, tmp_path: Path, call: Call) -> None:
    (tmp_path / "runs/.plans").mkdir(parents=True)
    (tmp_path / "runs/.plans/mine.jsonl").write_text(f"{text}\n")
    told = call("stage=status", f"runs_dir={tmp_path}/runs").err
    assert "mine.jsonl is not readable (" in told and "remove it and rerun that command" in told
