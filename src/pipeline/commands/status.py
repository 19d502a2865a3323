"""Stage status: lists all runs that are finished, running, or in a plan that a launcher wrote, from
their files alone: Slurm is not asked.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.benchmarks import primary_metric
from pipeline.config.stages import StatusStage, TableStage
from pipeline.errors import PipelineError
from pipeline.evaluate.shown_scores import percent_factor
from pipeline.files import DIGESTS_FOLDER, write_atomically
from pipeline.launch.plan_file import LOGS, Task, read_plans
from pipeline.launch.slurm import FOLDER, log_of
from pipeline.launch.slurm_commands import last_log_line
from pipeline.runs import resume, state
from pipeline.runs.folders import label_in, scan_folders
from pipeline.runs.lease import latest_work_folder, live_holder
from pipeline.runs.manifest import MANIFEST, Malformed, Manifest, read_file
from pipeline.stages.rows import RUN_STAGES
from pipeline.text import align_columns

CACHE = "status.json"  # in runs_dir/.digests


@dataclass
class RunStatus:
    """Status of a run; state: finished, running, waiting, blocked, failed, stopped, or planned."""

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
    score: str | None = None  # main score of an evaluation, in percent or on its own scale 0-100


def show_status(config: StatusStage) -> str:
    """Status of all runs, or those of a table, as a text table or as JSON."""
    runs_dir = Path(config.runs_dir)
    if not runs_dir.is_dir():
        raise PipelineError(
            f"runs_dir={runs_dir} does not exist: it has no runs yet, or give another"
        )
    statuses = all_statuses(runs_dir, rerun=bool(config.table))
    of_table = ""
    if config.table:
        of_table = f" of table={config.table}"
    if not config.table and config.every:
        raise PipelineError(
            f"every.{next(iter(config.every))} is of the runs of a table: give table=T, or leave"
            " it out"
        )
    if config.table:
        hashes = hashes_of(config)
        statuses = [status for status in statuses if status.hash in hashes]
    if config.status.json:
        return json.dumps([asdict(status) for status in statuses], indent=1)
    rows = [("run", "stage", "seconds", "attempt", "score", "state")]
    for status in statuses:
        numbers = (status.seconds, status.attempt)
        seconds, attempt = (str(round(value)) if value is not None else "" for value in numbers)
        text = f"{status.state}{': ' if status.detail else ''}{status.detail}"
        rows.append((status.run, status.stage, seconds, attempt, status.score or "", text))
    if not statuses:
        return f"no run{of_table} was computed or submitted in runs_dir={runs_dir} yet"
    counts = [
        f"{count} {state}" for state, count in Counter(status.state for status in statuses).items()
    ]
    return "\n".join([*align_columns(rows, right={2, 3}), ", ".join(counts)])


def hashes_of(config: TableStage) -> set[str]:
    """Hashes of a table's runs, with the settings of the last stage=table unless the command has
    its own.
    """
    from pipeline.report.report_state import Reported
    from pipeline.tables.planned_runs import Planning

    return {run.hash for run in Planning.of(Reported.of(config).asked_again(config)).graph()[1]}


def all_statuses(runs_dir: Path, rerun: bool = True) -> list[RunStatus]:
    """Finished runs, oldest first, then the others in the order of their plans.

    rerun: with failed runs that block nothing, and of which a changed one finished since.
    """
    finished = {
        run.hash: run for run in sorted(finished_runs(runs_dir), key=lambda run: run.started)
    }
    planned: dict[str, tuple[str, Task | None]] = {
        task.hash: (name, task) for name, task in read_plans(runs_dir)
    }
    work = {}
    for path in sorted((runs_dir / ".work").glob("*")):
        if path.is_dir() and not path.suffix:
            work[path.name] = path
    failed: dict[str, str] = {}
    of_array = cache(submitted)  # a directory of logs is listed once for each
    later = {(label_in(run.name), run.stage): run.started for run in finished.values()}
    unfinished = []
    for run_hash in dict.fromkeys([*planned, *work]):
        if run_hash not in finished:
            unfinished.append(
                of_unfinished(
                    run_hash, *planned.get(run_hash, ("", None)), runs_dir, failed, of_array
                )
            )
    blocking = set()
    for status in unfinished:
        if status.state == "blocked":
            blocking.add(status.detail)
    return [*map(of_finished, finished.values())] + [
        status
        for status in unfinished
        if rerun
        or status.state != "failed"
        or f"by {status.run}" in blocking
        or not was_rerun(
            runs_dir / ".work" / status.hash, later.get((label_in(status.run), status.stage))
        )
    ]


def was_rerun(workplace: Path, later: str | None) -> bool:
    """Whether a changed run of the same label finished after this one failed; later: when that run
    started.
    """
    since = state.read_state(workplace).get("since")
    return bool(since and later) and datetime.fromisoformat(str(since)) <= datetime.fromisoformat(
        str(later)
    )


class Finished(NamedTuple):
    """What status shows of a finished run; `state` of its manifest: a change shows in it."""

    state: Sequence[int]
    name: str
    hash: str
    stage: str
    version: int | None
    started: str
    seconds: float
    attempt: int
    score: str | None


def finished_runs(runs_dir: Path) -> list[Finished]:
    """Read what status shows of all finished runs: of unchanged manifests from a cache, the others
    themselves.
    """
    file, cached = runs_dir / DIGESTS_FOLDER / CACHE, dict[str, Finished]()
    with suppress(OSError, ValueError, TypeError):
        cached = {name: Finished(*fields) for name, fields in json.loads(file.read_bytes()).items()}
    found: dict[str, Finished] = {}
    for name in scan_folders(runs_dir).names:
        path = f"{runs_dir}/{name}/{MANIFEST}"
        with suppress(FileNotFoundError, NotADirectoryError):
            stat = os.stat(path)
            state = [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]
            if name in cached and cached[name].state == state:
                found[name] = cached[name]
                continue
            try:
                found[name] = read_finished(state, read_file(Path(path)))
            except Malformed as error:
                print(f"skipped: {error}", file=sys.stderr)
    if found != cached:
        with suppress(OSError):  # a runs_dir of somebody else
            file.parent.mkdir(exist_ok=True)
            write_atomically(file, json.dumps(found), durable=False)
    return [*found.values()]


def read_finished(state: Sequence[int], manifest: Manifest) -> Finished:
    score = main_score(manifest.facts.get("scores") or {})
    settings = {}
    if score:
        settings = manifest.config.get("eval", {})
    limit = settings.get("limit")
    if limit:
        score = f"{score} ({limit} questions)"
    split = settings.get("split", "test")
    if split != "test":
        score = f"{score} ({split})"
    version, cost = manifest.decided_by.get("version"), (manifest.seconds, manifest.attempt)
    return Finished(
        state, manifest.name, manifest.hash, manifest.stage, version, manifest.started, *cost, score
    )


def of_finished(run: Finished) -> RunStatus:
    row = RUN_STAGES.get(run.stage)
    detail = f"began {run.started[: len('2026-01-01T00:00')].replace('T', ' ')}"
    if row is not None and run.version != row.version:
        detail = f"by version {run.version} of the stage, now {row.version}"
    return RunStatus(
        run.name, run.stage, "finished", detail, run.hash, run.seconds, run.attempt, score=run.score
    )


def main_score(scores: Mapping[str, float]) -> str | None:
    """`mgsm sw 16.0`: the primary metric of an evaluation's first task; for several languages their
    mean.
    """
    for task in dict.fromkeys(name.partition("/")[0] for name in scores):
        metric = primary_metric(task)[0]
        languages = []
        for name in scores:
            if re.fullmatch(rf"{task}/[^/]+/{re.escape(metric)}", name):
                languages.append(name.split("/")[1])
        if languages:
            if "mean" in languages:
                column = "mean"
            else:
                column = languages[0]
            return (
                f"{task} {column}"
                f" {percent_factor(metric) * scores[f'{task}/{column}/{metric}']:.1f}"
            )
    return None


def of_unfinished(
    run_hash: str,
    plan: str,
    task: Task | None,
    runs_dir: Path,
    failed: dict[str, str],
    of_array: Callable[[str, Path], tuple[str | None, str, str]],
) -> RunStatus:
    """Status of an unfinished run.

    plan: name of the plan that it is in as `task`; failed: run hash -> name of the failed runs so
    far, updated here; of_array: `submitted`.
    """
    workplace = runs_dir / ".work" / run_hash
    record = state.read_state(workplace)
    if task:
        name = task.name
    else:
        name = record.get("name") or run_hash[:12]
    stage, log = task.stage if task else record.get("stage") or "", runs_dir / LOGS / f"{name}.log"
    status = RunStatus(
        name, stage, "", "", run_hash, step=record.get("step"), steps=record.get("steps")
    )
    status.log = str(log) if log.is_file() else None
    blocked = next(
        (failed[parent] for parent in (task.needs if task else ()) if parent in failed), None
    )
    owner = live_holder(workplace)
    if owner:
        status.state, status.detail = "running", f"{owner}{step_progress(status, record)}"
    elif blocked:
        status.state, status.detail = "blocked", f"by {blocked}"
    elif record.get("state") == "failed":
        status.state, status.detail = (
            "failed",
            f"{record.get('last_line')}{f'; {log}' if status.log else ''}",
        )
    else:
        if task:
            job, *job_state = of_array(task.array, runs_dir / FOLDER / plan)
        else:
            job, *job_state = (None, "planned", "")
        status.state, status.detail = job_state
        if workplace.is_dir():
            status.state, status.detail = "stopped", unpublished_reason(workplace, record, job)
    if blocked and not owner or status.state == "failed":
        failed[run_hash] = blocked or name
    if task:
        row = RUN_STAGES.get(stage)
        if row and task.version != row.version:
            status.detail = (
                f"planned for version {task.version} of the stage, now {row.version};"
                f" {status.detail}"
            )
    return status


def submitted(array: str, folder: Path) -> tuple[str | None, str, str]:
    """(job of an array, state and detail of those of its runs that no process has begun).

    folder: of its submission.
    """
    job, log = log_of(array, folder)
    if job is None:
        return None, "planned", ""
    last_line = last_log_line(log)
    if last_line:
        return job, "failed", f"job {job} ended before it began: {last_line}; {log}"
    again = "where squeue --me does not list it, rerun the same command to submit it again"
    return job, "waiting", f"for job {job}; {again}"


def step_progress(status: RunStatus, record: dict[str, Any]) -> str:
    """Text with the step and the time left, from the seconds per step of this attempt."""
    if not status.step or not status.steps:
        return ""
    text = f", step {status.step} of {status.steps}"
    step_seconds = record.get("seconds_a_step")
    if not step_seconds:
        return text
    status.seconds_left = round(step_seconds * (status.steps - status.step), 1)
    return f"{text}, about {status.seconds_left:.0f} s left"


def unpublished_reason(workplace: Path, record: dict[str, Any], job: str | None) -> str:
    """Why a run was not published, and how to resume or delete it.

    job: of Slurm, which was to make it.
    """
    resume_point = resume.read_resume_point(latest_work_folder(workplace))
    ended = {"running": "its job or process ended", "stopped": "it received a signal"}
    reason = ended.get(record.get("state", ""), "it was abandoned")
    progress = ""
    if resume_point:
        progress = f", resume point after step {resume_point['step']}"
    knobs = "clean.hours=0" + " clean.resume_points=true" * bool(resume_point)
    deletes = f"stage=clean {knobs} clean.dry_run=false deletes it and other unfinished work"
    resumes = ""
    if job:
        resumes = f"job {job} resumes it where squeue --me lists it, else "
    return f"{reason}{progress}; {resumes}rerun the same command to resume; {deletes}"
