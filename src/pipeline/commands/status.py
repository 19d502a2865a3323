"""Stage status: every run that is finished, in work, or in a plan that a launcher left, by the files that they leave.

Slurm's queue is asked where it answers; its accounting never is.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from pipeline.benchmarks import primary_metric
from pipeline.config.stages import StatusStage, TableStage
from pipeline.errors import PipelineError
from pipeline.launch import plan_files
from pipeline.launch.slurm_commands import GONE, in_queue, last_words
from pipeline.launch.worker import LOGS
from pipeline.report.load.scores import percent
from pipeline.report.render.text import aligned
from pipeline.runs import resume, state
from pipeline.runs.folders import DIGITS, finished, folder_name, label_in
from pipeline.runs.lease import holder, left
from pipeline.runs.manifest import Manifest
from pipeline.stages.rows import RUN_STAGES


@dataclass
class RunStatus:
    """state: finished, running, waiting, blocked, failed, stopped, or planned. detail: what is to be known of it."""

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
    score: str | None = None  # of an evaluation: the main one, in percent or on its own scale 0-100


def show_status(config: StatusStage) -> str:
    """All of them, or those of a table, as a table in text, or as JSON."""
    runs_dir = Path(config.runs_dir)
    if not runs_dir.is_dir():
        raise PipelineError(f"runs_dir={runs_dir} is not there: no run was made in it yet, or give another")
    found = statuses(runs_dir)
    of_table = f" of table={config.table}" if config.table is not None else ""
    if config.table is not None:
        wanted = hashes_of(config.table, config.runs_dir)
        found = [one for one in found if one.hash in wanted]
    if config.status.json:
        return json.dumps([asdict(one) for one in found], indent=1)
    rows = [("run", "stage", "seconds", "attempt", "score", "state")]
    for one in found:
        seconds, attempt = (str(round(value)) if value is not None else "" for value in (one.seconds, one.attempt))
        standing = f"{one.state}{': ' if one.detail else ''}{one.detail}"
        rows.append((one.run, one.stage, seconds, attempt, one.score or "", standing))
    counts = [f"{sum(one.state == kind for one in found)} {kind}" for kind in dict.fromkeys(one.state for one in found)]
    if not found:
        return f"no run{of_table} was made or submitted in runs_dir={runs_dir} yet"
    return "\n".join([*aligned(rows, right={2, 3}), ", ".join(counts)])


def hashes_of(table: str, runs_dir: str) -> set[str]:
    """The runs of a table, as stage=table was last asked for it."""
    from pipeline.results.report_state import Reported
    from pipeline.runs.graph import ordered
    from pipeline.tables.planned_runs import Planning

    asked = TableStage(stage="table", runs_dir=runs_dir, table=table)
    return {run.hash for run in ordered(Planning.of(Reported.of(asked).asked_again(asked)).targets())}


def statuses(runs_dir: Path) -> list[RunStatus]:
    """Finished runs, oldest first, then the others in the order of their plans."""
    done = {one.hash: one for one in sorted(finished(runs_dir), key=lambda one: one.started)}
    found = [of_finished(one) for one in done.values()]
    planned = {run_hash: run for plan in plan_files.plans(runs_dir) for run_hash, run in plan["runs"].items()}
    work = {path.name: path for path in sorted((runs_dir / ".work").glob("*")) if path.is_dir() and not path.suffix}
    queue = answered()
    failed: dict[str, str] = {}
    later = {(label_in(one.name), one.stage): one.started for one in done.values()}
    for run_hash in [*planned, *(one for one in work if one not in planned)]:
        if run_hash not in done:
            one = of_unfinished(run_hash, planned.get(run_hash, {}), runs_dir, queue, failed)
            if one.state != "failed" or not repaired(runs_dir / ".work" / run_hash, later.get(key_of(one))):
                found.append(one)
    names = Counter(one.run for one in found)
    for one in found:
        if names[one.run] > 1 and one.state != "finished":  # whose hashes share eight digits
            one.run = folder_name(label_in(one.run), one.hash, DIGITS[1])
    return found


def key_of(one: RunStatus) -> tuple[str, str]:
    return label_in(one.run), one.stage


def repaired(workplace: Path, later: str | None) -> bool:
    """Whether what failed here was changed and finished since under the same label; later: when that began."""
    since = state.read(workplace).get("since")
    return bool(since and later) and datetime.fromisoformat(str(since)) <= datetime.fromisoformat(str(later))


def of_finished(manifest: Manifest) -> RunStatus:
    version = manifest.decided_by.get("version")
    row = RUN_STAGES.get(manifest.stage)
    stale = row is not None and version != row.version
    begun = manifest.started[: len("2026-01-01T00:00")].replace("T", " ")
    detail = f"by version {version} of the stage, now {row.version}" if row and stale else f"began {begun}"
    made = manifest.seconds, manifest.attempt
    score = main_score(manifest.facts.get("scores") or {})
    if score and (split := manifest.config.get("eval", {}).get("split", "test")) != "test":
        score += f" ({split})"
    return RunStatus(manifest.name, manifest.stage, "finished", detail, manifest.hash, *made, score=score)


def main_score(scores: Mapping[str, float]) -> str | None:
    """`mgsm sw 16.0`: the primary metric of an evaluation's first task; of several languages their mean."""
    for task in dict.fromkeys(name.partition("/")[0] for name in scores):
        metric = primary_metric(task)[0]
        places = [name.split("/")[1] for name in scores if re.fullmatch(rf"{task}/[^/]+/{re.escape(metric)}", name)]
        if places:
            place = "mean" if "mean" in places else places[0]
            return f"{task} {place} {percent(metric) * scores[f'{task}/{place}/{metric}']:.1f}"
    return None


def answered() -> set[str] | None:
    """The jobs of this user in Slurm's queue; None where it does not answer."""
    try:
        return set(in_queue())
    except PipelineError:
        return None


def of_unfinished(
    run_hash: str, plan: dict[str, Any], runs_dir: Path, queue: set[str] | None, failed: dict[str, str]
) -> RunStatus:
    """`failed`: those met so far, run hash -> name, which are added to."""
    workplace = runs_dir / ".work" / run_hash
    told, owner = state.read(workplace), holder(workplace)
    name, stage = plan.get("name") or told.get("name") or run_hash[:12], plan.get("stage") or told.get("stage") or ""
    log = runs_dir / LOGS / f"{name}.log"
    one = RunStatus(name, stage, "planned", "", run_hash, step=told.get("step"), steps=told.get("steps"))
    one.log = str(log) if log.is_file() else None
    blocked = next((failed[parent] for parent in plan.get("parents", ()) if parent in failed), None)
    job = plan.get("job") or told.get("job")
    if owner:
        one.state, one.detail = "running", f"{owner}{progress(one, told)}"
    elif blocked:
        one.state, one.detail = "blocked", f"by {blocked}"
        failed[run_hash] = blocked
    elif told.get("state") == "blocked":
        one.state, one.detail = "blocked", str(told.get("last_line"))
    elif told.get("state") == "failed":
        one.state, one.detail = "failed", f"{told.get('last_line')}{f'; {log}' if one.log else ''}"
        failed[run_hash] = name
    elif queue and job in queue:
        one.state, one.detail = "waiting", f"job {job}"
    elif queue is None and told.get("state") == "waiting":
        one.state, one.detail = "waiting", f"job {job} by what was submitted; squeue does not answer here"
    elif told.get("state") == "waiting" and (words := last_words(own := runs_dir / LOGS / f"slurm-{job}.log")):
        one.state, one.detail = "failed", f"job {job} ended before it began: {words}; {own}"
        failed[run_hash] = name
    elif told.get("state") == "waiting":
        one.state, one.detail = "stopped", f"{GONE} (job {job}); the same command submits it again"
    elif workplace.is_dir():
        one.state, one.detail = "stopped", unpublished(workplace, told)
    if (row := RUN_STAGES.get(stage)) and plan.get("version") not in (None, row.version):
        one.detail = f"planned for version {plan['version']} of the stage, now {row.version}; {one.detail}"
    return one


def progress(one: RunStatus, told: dict[str, Any]) -> str:
    """Step and time left, by the time that the steps of this attempt took."""
    if not one.step or not one.steps:
        return ""
    standing = f", step {one.step} of {one.steps}"
    if not (took := told.get("seconds_a_step")):
        return standing
    one.seconds_left = round(took * (one.steps - one.step), 1)
    return f"{standing}, about {one.seconds_left:.0f} s left"


def unpublished(workplace: Path, told: dict[str, Any]) -> str:
    """Why work was not published, and what to do."""
    record = resume.read(left(workplace))
    ended = {"running": "its job or process ended", "stopped": "it was asked to stop"}
    why = ended.get(told.get("state", ""), "it was left behind")
    where = f", resume point after step {record['step']}" if record else ""
    return f"{why}{where}; the same command goes on, stage=clean frees {workplace}"
