"""Stage status: lists all finished, running and planned runs.

It reads only their files. Slurm is not asked.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Container, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pipeline.config.stages import StatusStage, TableStage
from pipeline.errors import PipelineError
from pipeline.launch.plan_file import LOGS, Task, read_plans
from pipeline.launch.slurm import FOLDER, log_of
from pipeline.launch.slurm_commands import last_log_line
from pipeline.runs import resume, state
from pipeline.runs.folders import finished_manifests
from pipeline.runs.lease import latest_work_folder, live_holder
from pipeline.runs.manifest import Manifest
from pipeline.text import align_columns


@dataclass
class RunStatus:
    """The status of a run.

    `state` is finished, running, waiting, blocked, failed, stopped or planned.
    """

    run: str
    stage: str
    state: str
    detail: str
    hash: str
    seconds: float | None = None
    attempt: int | None = None
    step: int | None = None
    steps: int | None = None
    seconds_left: float | None = None
    log: str | None = None


def show_status(config: StatusStage) -> str:
    """Return the status of all runs, or of a table's runs, as a text table or as JSON."""
    runs_dir = Path(config.runs_dir)
    if not runs_dir.is_dir():
        raise PipelineError(
            f"runs_dir={runs_dir} does not exist. It has no runs yet, or runs_dir is another"
            " folder."
        )
    statuses = all_statuses(runs_dir)
    of_table = ""
    if config.table:
        of_table = f" of table={config.table}"
        hashes = hashes_of(config)
        statuses = [status for status in statuses if status.hash in hashes]
    elif config.every:
        raise PipelineError(
            f"every.{next(iter(config.every))} applies to the runs of a table. Set table=T, or"
            " remove it."
        )
    if config.status.json:
        return json.dumps([asdict(status) for status in statuses], indent=1)
    if not statuses:
        return f"No run{of_table} was computed or submitted in runs_dir={runs_dir} yet."
    rows = [("run", "stage", "seconds", "attempt", "state")]
    for status in statuses:
        seconds, attempt, text = "", "", status.state
        if status.seconds is not None:
            seconds = str(round(status.seconds))
        if status.attempt is not None:
            attempt = str(status.attempt)
        if status.detail:
            text += f": {status.detail}"
        rows.append((status.run, status.stage, seconds, attempt, text))
    states = Counter(status.state for status in statuses)
    counts = [f"{count} {state}" for state, count in states.items()]
    return "\n".join([*align_columns(rows, right={2, 3}), ", ".join(counts)])


def hashes_of(config: TableStage) -> set[str]:
    """Return the hashes of a table's runs.

    Settings come from the command, or from the last stage=table.
    """
    from pipeline.report.report_state import Reported
    from pipeline.tables.planned_runs import Planning

    planning = Planning.of(Reported.of(config).asked_again(config))
    _, runs, _ = planning.graph()
    return {run.hash for run in runs}


def all_statuses(runs_dir: Path) -> list[RunStatus]:
    """Return finished runs, oldest first, then the others in the order of their plans."""
    finished = [
        (manifest.started, of_finished(manifest)) for manifest in finished_manifests(runs_dir)
    ]
    finished.sort(key=lambda pair: pair[0])
    statuses = {status.hash: status for _, status in finished}
    return [*statuses.values(), *unfinished_statuses(runs_dir, statuses)]


def unfinished_statuses(runs_dir: Path, finished: Container[str]) -> list[RunStatus]:
    """Return the status of each planned or begun run that is not among the finished hashes."""
    planned = {task.hash: (name, task) for name, task in read_plans(runs_dir)}
    begun = []
    for path in sorted((runs_dir / ".work").glob("*")):
        if path.is_dir() and not path.suffix:
            begun.append(path.name)
    failed: dict[str, str] = {}
    of_array = cache(submitted)  # each directory of logs is listed once
    statuses = []
    for run_hash in dict.fromkeys([*planned, *begun]):
        if run_hash not in finished:
            plan, task = planned.get(run_hash, ("", None))
            statuses.append(of_unfinished(run_hash, plan, task, runs_dir, failed, of_array))
    return statuses


def of_finished(manifest: Manifest) -> RunStatus:
    minute = manifest.started[: len("2026-01-01T00:00")]
    return RunStatus(
        run=manifest.name,
        stage=manifest.stage,
        state="finished",
        detail=f"began {minute.replace('T', ' ')}",
        hash=manifest.hash,
        seconds=manifest.seconds,
        attempt=manifest.attempt,
    )


def of_unfinished(
    run_hash: str,
    plan: str,
    task: Task | None,
    runs_dir: Path,
    failed: dict[str, str],
    of_array: Callable[[str, Path], tuple[str | None, str, str]],
) -> RunStatus:
    """Return the status of an unfinished run.

    Args:
        run_hash: the hash of the run.
        plan: the name of its plan.
        task: the run as a line of the plan, or None.
        runs_dir: the folder of runs.
        failed: run hash -> name of the failed runs so far, updated here.
        of_array: cached `submitted`.
    """
    workplace = runs_dir / ".work" / run_hash
    record = state.read_state(workplace)
    needs: Sequence[str] = ()
    if task:
        name, stage, needs = task.name, task.stage, task.needs
    else:
        name, stage = record.get("name") or run_hash[:12], record.get("stage") or ""
    status = RunStatus(name, stage, state="planned", detail="", hash=run_hash)
    status.step, status.steps = record.get("step"), record.get("steps")
    log = runs_dir / LOGS / f"{name}.log"
    if log.is_file():
        status.log = str(log)
    blocked = next((failed[parent] for parent in needs if parent in failed), None)
    owner = live_holder(workplace)
    if owner:
        status.state, status.detail = "running", f"{owner}{step_progress(status, record)}"
    elif blocked:
        status.state, status.detail = "blocked", f"by {blocked}"
    elif record.get("state") == "failed":
        status.state, status.detail = "failed", str(record.get("last_line"))
        if status.log:
            status.detail += f"; {log}"
    else:
        job = None
        if task:
            job, status.state, status.detail = of_array(task.array, runs_dir / FOLDER / plan)
        if workplace.is_dir():
            status.state, status.detail = "stopped", unpublished_reason(workplace, record, job)
    if blocked and not owner or status.state == "failed":
        failed[run_hash] = blocked or name
    return status


def submitted(array: str, folder: Path) -> tuple[str | None, str, str]:
    """Return the job of an array, with state and detail of its runs that have not begun."""
    job, log = log_of(array, folder)
    if job is None:
        return None, "planned", ""
    last_line = last_log_line(log)
    if last_line:
        return job, "failed", f"job {job} ended before it began: {last_line}; {log}"
    again = "where squeue --me does not list it, rerun the same command to submit it again"
    return job, "waiting", f"for job {job}; {again}"


def step_progress(status: RunStatus, record: dict[str, Any]) -> str:
    """Return the step and the time left, from the seconds per step of this attempt."""
    if not status.step or not status.steps:
        return ""
    text = f", step {status.step} of {status.steps}"
    step_seconds = record.get("seconds_a_step")
    if not step_seconds:
        return text
    status.seconds_left = round(step_seconds * (status.steps - status.step), 1)
    return f"{text}, about {status.seconds_left:.0f} s left"


def unpublished_reason(workplace: Path, record: dict[str, Any], job: str | None) -> str:
    """Return why a run was not published, and how to resume it.

    `record` is the state of the run, and `job` the Slurm job that should have computed it.
    """
    reason = "its job or process ended"
    if record.get("state") == "stopped":
        reason = "it received a signal"
    resume_point = resume.read_resume_point(latest_work_folder(workplace))
    if resume_point:
        reason += f", resume point after step {resume_point['step']}"
    resumes = ""
    if job:
        resumes = f"job {job} resumes it where squeue --me lists it, else "
    return f"{reason}; {resumes}rerun the same command to resume; stage=clean deletes it"
