"""launcher=slurm: the unfinished part of a plan as arrays of jobs, by level of the graph and class of resources.

A task of an array makes the runs of one line of a file, by the worker that launcher=local uses: short runs of a class
are batched, scores of one model lie side by side. An array depends on those before it by `afterany`, and each run looks
at the manifests of its parents, so a failure costs what depends on it. Submitting again adds what is missing.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import sys
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from pipeline.config.stages import EvalStage, Launcher, TrainStage
from pipeline.errors import Held, PipelineError
from pipeline.estimate.durations import History
from pipeline.estimate.gpu_budget import moved, shape_for
from pipeline.files import ADDED_CONF
from pipeline.launch import plan_files
from pipeline.launch.job_script import COMPLETED, expanded, job_script, requeue
from pipeline.launch.local_pool import sources
from pipeline.launch.run_json import element_of
from pipeline.launch.slurm_commands import (
    GONE,
    check_installed,
    in_queue,
    last_words,
    sbatch,
    seconds_left,
    seconds_of,
    slurm,
)
from pipeline.launch.worker import LOGS
from pipeline.report.render.text import some
from pipeline.runs import state
from pipeline.runs.disk import check_writable
from pipeline.runs.folders import finished
from pipeline.runs.graph import ordered, unfinished
from pipeline.runs.lease import holder, leased
from pipeline.runs.run import Run, runs_behind
from pipeline.runs.stop import finishing
from pipeline.train.disk import written

FOLDER = ".slurm"
START = 120.0  # seconds from a job's start to its first step: libraries and an 8B model from a shared file system
EARLY = 60.0  # Slurm looks at time limits once a minute
SUBMIT_LIMIT = re.compile(r"(Max|Grp)\w*Submit|job submit limit")  # how Slurm names a limit of submitted jobs
NO_GRES = re.compile(r"[Ii]nvalid generic resource|gres", re.ASCII)
AGAIN = requeue("${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}")
PROBE = 2**26  # bytes that are written to measure a file system


@dataclass(frozen=True)
class Resources:
    """What a run needs of a node: what sbatch is asked for."""

    gpus: int
    cpus: int | None
    lead: int  # seconds before the time limit at which it is asked to stop


@dataclass
class Array:
    """Tasks that are submitted at once: each is some runs, made one after the other."""

    level: int
    resources: Resources
    tasks: list[list[Run]]


def execute(
    launcher: Launcher, again: Sequence[str] | None, targets: list[Run], before: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Submit what is neither finished nor in the queue. Gives the failures where nothing is left to wait for.

    again: the words of a command that goes on when all is done, as a last job.

    Raises:
        Held: jobs are in the queue; the same command goes on.
        PipelineError: Slurm refuses, in its own words.
    """
    runs = ordered(targets)
    missing = unfinished(runs)
    if not missing:
        return {}
    check_installed("squeue", "sbatch", "scontrol")
    check_writable(runs[0].runs_dir)
    folder = runs[0].runs_dir / FOLDER
    name = plan_files.name_of(targets)
    with leased(folder / "submitting", "submitting"):
        there = jobs_in_queue(runs[0].runs_dir)
        failed = {} if launcher.retry_failed else failures([run for run in runs if run.hash in missing], there)
        left = [run for run in runs if run.hash in missing and run.hash not in there and run.name not in failed]
        left = [run for run in left if not holder(run.workplace)]
        if not left and not there:
            return failed
        submitted = submit(launcher, folder, name, runs, left, there, again)
    waiting = f"{len(missing) - len(failed)} in the queue or in work"
    told = f"{submitted}, {waiting}"
    if not left:
        told = f"{waiting}, as they were submitted (to change how, scancel them first)"
    held = Held(f"{told}; stage=status shows them, and the same command goes on when they are done")
    held.failed = failed
    raise held


def failures(runs: Sequence[Run], there: Mapping[str, str]) -> dict[str, str]:
    """The runs that failed in their jobs, and what depends on them: name -> reason.

    One whose job was cancelled or lost is none of them at first: the continuation submits it again, once.
    """
    found: dict[str, str] = {}
    for run in runs:
        blocked = next((parent.name for parent in runs_behind(run.parents) if parent.name in found), None)
        told = state.read(run.workplace)
        if blocked:
            found[run.name] = f"its parent {blocked} failed"
        elif told.get("state") not in (None, "blocked") and run.hash not in there and not holder(run.workplace):
            words = told.get("last_line") if told["state"] == "failed" else None
            words = words or last_words(run.runs_dir / LOGS / f"slurm-{told.get('job')}.log")
            if words or told.get("resubmitted"):
                found[run.name] = str(words or f"{GONE}, twice: job {told.get('job')}")
    return found


def jobs_in_queue(runs_dir: Path) -> dict[str, str]:
    """Run hash -> job, of the runs of this runs_dir whose jobs are in the queue: by the plans, and by their scripts of
    those that a command could not write down."""
    planned = {run_hash: run["job"] for plan in plan_files.plans(runs_dir) for run_hash, run in plan["runs"].items()}
    queue, known = in_queue(), {array_of(job) for job in planned.values() if job}
    found = {run_hash: job for run_hash, job in planned.items() if job in queue}
    for job, script in queue.items():
        tasks = Path(script).with_suffix(".jsonl")
        array, _, index = job.partition("_")
        if index and array not in known and tasks.parent == (runs_dir / FOLDER).resolve() and tasks.is_file():
            line = tasks.read_text(encoding="utf-8").splitlines()[int(index)]
            found |= {element["hash"]: job for element in json.loads(line)["elements"]}
    return found


# ---------------------------------------------------------------------------------------------------- arrays


def submit(
    launcher: Launcher, folder: Path, name: str, runs: list[Run], left: list[Run], there: Mapping[str, str],
    again: Sequence[str] | None,
) -> str:  # fmt: skip
    """Submit arrays in the order of their levels; the plan says after each which job makes which run. Gives what was
    submitted, in words."""
    jobs, new = dict(there), []
    arrays = arrays_of(left, launcher, largest_array() if left else 1)
    try:
        for array in arrays:
            try:
                with finishing():
                    job, part = submit_part(launcher, folder, name, array, jobs)
                    new.append(part)
                    keep(launcher, name, runs, part, job, jobs)
            except PipelineError as error:
                if not new or not SUBMIT_LIMIT.search(str(error)):
                    raise
                break
            print(f"job {job}: level {part.level}, {some(len(part.tasks), 'task')}, "
                  f"{some(sum(map(len, part.tasks)), 'run')}, {some(part.resources.gpus, 'GPU')} each",
                  file=sys.stderr)  # fmt: skip
            if part is not array:
                break
        ids = {array_of(jobs[run.hash]) for part in new for task in part.tasks for run in task}
        wait_for(ids, runs, there, jobs)
        if again is not None and arrays:
            submit_continuation(launcher, folder, name, again, new[-1], jobs)
    except Held:
        raise
    except PipelineError as error:
        told = f"{len(new)} of {len(arrays)} arrays were submitted"
        then = "the same command submits the rest once that is changed or, where it is a limit, later"
        raise PipelineError(f"{error} ({told}; {then})") from error
    except (KeyboardInterrupt, SystemExit):
        ids_there = sorted({array_of(job) for run_hash, job in jobs.items() if run_hash not in there}, key=int)
        print(f"jobs in the queue stay there: {', '.join(ids_there) or 'none was submitted'}", file=sys.stderr)
        raise
    count = sum(len(task) for part in new for task in part.tasks)
    rest = len(left) - count
    then = f", {rest} more {'by the last job' if again is not None else 'by the same command'} when these are done"
    return f"{some(count, 'run')} submitted as {some(len(new), 'array')}{then if rest else ''}"


def submit_part(
    launcher: Launcher, folder: Path, name: str, array: Array, jobs: Mapping[str, str]
) -> tuple[str, Array]:
    """Submit an array, or as many of its first tasks as the site lets one user submit: half as many until it does."""
    while True:
        try:
            return submit_array(launcher, folder, name, array, jobs), array
        except PipelineError as error:
            if not SUBMIT_LIMIT.search(str(error)) or len(array.tasks) == 1:
                raise
        array = replace(array, tasks=array.tasks[: len(array.tasks) // 2])


def submit_continuation(
    launcher: Launcher, folder: Path, name: str, again: Sequence[str], last: Array, jobs: dict[str, str]
) -> None:
    """Submit the same command as a job that follows all others. Where the site's limit has no room for it, it takes the
    place of the last task."""
    words = [*again, "launcher.retry_failed=false"]
    script = script_of(launcher, ["-m", "pipeline", *words], COMPLETED)
    options = ["--job-name", f"{name}-goes-on", "--dependency", after(jobs.values())]
    asked = folder / f"{name}-{time.time_ns()}.sh", script, Resources(0, 1, int(EARLY)), options, "goes-on"
    try:
        job = submit_script(launcher, *asked)
    except PipelineError as error:
        if not SUBMIT_LIMIT.search(str(error)) or len(last.tasks) == 1:
            raise
        task = last.tasks.pop()
        slurm("scancel", jobs[task[0].hash])
        for run in task:
            del jobs[run.hash]
            state.forget(run.workplace)
        job = submit_script(launcher, *asked)
    print(f"job {job}: the same command, when these are done", file=sys.stderr)


def keep(launcher: Launcher, name: str, runs: Sequence[Run], array: Array, job: str, jobs: dict[str, str]) -> None:
    """Write down which task of a job makes which run; cancel it where that cannot be written."""
    jobs |= {run.hash: f"{job}_{index}" for index, task in enumerate(array.tasks) for run in task}
    try:
        plan_files.leave(name, runs, jobs)
        for run in (run for task in array.tasks for run in task):
            run.workplace.mkdir(parents=True, exist_ok=True)
            facts = {"name": run.name, "stage": run.config.stage, "state": "waiting", "job": jobs[run.hash]}
            lost = not launcher.retry_failed and state.read(run.workplace).get("state") not in (None, "blocked")
            state.write(run.workplace, **facts, last_line=None, resubmitted=lost)
    except OSError:
        slurm("scancel", job)  # what no plan knows of would be submitted again
        raise


def wait_for(new: Collection[str], runs: Sequence[Run], there: Mapping[str, str], jobs: Mapping[str, str]) -> None:
    """Let arrays that were in the queue before wait for parents that were submitted again; those that run look
    themselves whether their parents are finished."""
    parents: dict[str, set[str]] = defaultdict(set)
    for run in runs:
        if run.hash in there:
            behind = (jobs[one.hash] for one in runs_behind(run.parents) if one.hash in jobs)
            parents[array_of(there[run.hash])] |= set(map(array_of, behind))
    for array, ids in parents.items():
        if ids & set(new):
            with suppress(PipelineError):
                slurm("scontrol", "update", f"JobId={array}", f"Dependency={after(ids)}")


def array_of(job: str) -> str:
    return job.partition("_")[0]


def after(jobs: Iterable[str]) -> str:
    """The dependency on the arrays of these jobs: that they ended, well or not."""
    return "afterany:" + ":".join(sorted(set(map(array_of, jobs))))


def arrays_of(runs: Sequence[Run], launcher: Launcher, largest: int) -> list[Array]:
    """By level and class of resources; runs of a class share a task up to launcher.batch_minutes."""
    history = History(finished(runs[0].runs_dir) if runs else (), on_gpu=launcher.gpus != 0)
    levels: dict[str, int] = {}
    classes: dict[tuple[int, Resources], list[Run]] = defaultdict(list)
    for run in runs:
        levels[run.hash] = 1 + max((levels.get(parent.hash, -1) for parent in runs_behind(run.parents)), default=-1)
        classes[levels[run.hash], resources_of(run, launcher)].append(run)
    found = []
    for (level, resources), members in sorted(classes.items(), key=lambda one: (one[0][0], str(one[0][1]))):
        tasks: list[list[Run]] = []
        full = 0.0
        for run in sorted(members, key=sources):  # scores of one model side by side
            seconds = history.predict(run) or math.inf  # one that cannot be estimated is a task of its own
            if not tasks or full + seconds > 60 * launcher.batch_minutes or isinstance(run.config, TrainStage):
                tasks.append([])
                full = 0.0
            tasks[-1].append(run)
            full += seconds
        chunks = [tasks[start : start + largest] for start in range(0, len(tasks), largest)]
        found += [Array(level, resources, chunk) for chunk in chunks]
    return found


def resources_of(run: Run, launcher: Launcher) -> Resources:
    """GPUs as the run's processes or shards ask for them, cores as its threads do."""
    config, processes, lead = run.config, 1, EARLY
    gpus = 0
    if launcher.gpus == 0 and config.threads is None and isinstance(config, TrainStage | EvalStage):
        raise PipelineError(
            "launcher.gpus=0 needs threads=N: results of CPUs depend on the number of threads, and the cores of nodes "
            "differ (threads=8; of a table every.threads=8)"
        )
    if isinstance(config, TrainStage):
        gpus = processes = config.sft.processes
        point = bytes_of_resume_point(run)
        lead += point / write_speed(run.runs_dir) if point > PROBE else 0
        if launcher.time:
            check_limit(run, lead, seconds_of(launcher.time), f"launcher.time={launcher.time}")
    elif isinstance(config, EvalStage):
        gpus = config.eval.shards
    cpus = config.threads * processes if config.threads else None
    return Resources(gpus if launcher.gpus is None else min(gpus, launcher.gpus), cpus, int(lead))


def bytes_of_resume_point(run: Run[TrainStage]) -> int:
    """By the shape of its base, which need not be on this disk yet."""
    shape = shape_for(run)
    return written(run.config.sft, shape.parameters, moved(run, shape), snapshots=0, points=1)["resume points"]


@cache
def write_speed(folder: Path) -> float:
    """Bytes a second that a file system takes, by writing one file: half of it, as other jobs write too."""
    probe, begun = folder / f".probe-{os.getpid()}", time.perf_counter()
    try:
        with open(probe, "wb") as file:
            file.write(os.urandom(PROBE))
            file.flush()
            os.fsync(file.fileno())
    finally:
        probe.unlink(missing_ok=True)
    return PROBE / (time.perf_counter() - begun) / 2


def largest_array() -> int:
    """MaxArraySize of this cluster, one more than the highest index."""
    found = re.search(r"MaxArraySize\s*=\s*(\d+)", slurm("scontrol", "show", "config"))
    return max(1, int(found[1]) - 1) if found else 1000


def submit_array(launcher: Launcher, folder: Path, name: str, array: Array, jobs: Mapping[str, str]) -> str:
    """The id of its job."""
    lines = [
        json.dumps({"requeues": launcher.requeues, "elements": [element_of(run) for run in task]})
        for task in array.tasks
    ]
    file = folder / f"{name}-{time.time_ns()}.jsonl"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    parents = {jobs[one.hash] for task in array.tasks for run in task for one in runs_behind(run.parents)
               if one.hash in jobs}  # fmt: skip
    options = ["--array", f"0-{len(lines) - 1}", "--job-name", f"{name}-{array.level}", "--requeue"]
    if parents:
        options += ["--dependency", after(parents)]
    script = script_of(launcher, ["-m", "pipeline.launch.worker", str(file.resolve())])
    try:
        job = submit_script(launcher, file.with_suffix(".sh"), script, array.resources, options, "%A_%a")
    except Held:  # it may have been submitted
        raise
    except PipelineError:
        file.unlink()
        raise
    refuse_short(job, array)
    return job


def refuse_short(job: str, array: Array) -> None:
    """Cancel a job of trainings whose limit, that of the partition for one, ends before their first resume point."""
    run = array.tasks[0][0]
    if not isinstance(run.config, TrainStage) or (limit := seconds_left(job)) is None:
        return
    try:
        check_limit(run, array.resources.lead, limit, f"the time limit of job {job}")
    except PipelineError:
        slurm("scancel", job)
        raise


def check_limit(run: Run, lead: float, limit: float, what: str) -> None:
    """Refuse a time limit (seconds) that ends before a training has started and written one resume point."""
    if limit < START + lead:
        raise PipelineError(
            f"{what} is {limit:.0f} s: a job of {run.name} needs {START + lead:.0f} s to start and to write one resume "
            "point; give a longer launcher.time"
        )


def submit_script(
    launcher: Launcher, file: Path, script: str, resources: Resources, options: Sequence[str], log: str
) -> str:
    """Write a job's script and submit it. Gives the id of the job."""
    logs = file.parents[1].resolve() / LOGS
    logs.mkdir(parents=True, exist_ok=True)
    asked: dict[str, Any] = {
        "partition": launcher.partition, "account": launcher.account, "qos": launcher.qos, "time": launcher.time,
        "mem": launcher.memory, "gres": f"gpu:{resources.gpus}" if resources.gpus else None,
        "cpus-per-task": resources.cpus, "signal": f"B:USR1@{resources.lead}", "open-mode": "append",
        "output": f"{str(logs).replace('%', '%%')}/slurm-{log}.log", "nodes": 1, "ntasks": 1,
    }  # fmt: skip
    given = [f"--{key}={value}" for key, value in asked.items() if value is not None]
    file.write_text(script, encoding="utf-8")
    try:
        return sbatch(file.resolve(), *given, *options, *(launcher.options or []))
    except Held:
        raise
    except PipelineError as error:
        file.unlink()
        knobs = {f"launcher.{key}": getattr(launcher, key) for key in ("partition", "account", "qos", "time", "memory")}
        words = [f"{knob}={value}" for knob, value in knobs.items() if value is not None]
        words += [some(resources.gpus, "GPU"), *([some(resources.cpus, "core")] if resources.cpus else [])]
        told = f"{error}; asked for: {', '.join([*words, *(launcher.options or [])])}"
        if NO_GRES.search(str(error)):
            told += (
                "; where GPUs are not gres named gpu, give launcher.gpus=0 and your site's own option, "
                """'launcher.options=["--gpus-per-node=1"]'"""
            )
        raise PipelineError(told) from error


def script_of(launcher: Launcher, command: Sequence[str], then: str = AGAIN) -> str:
    """The script of a job. A line of launcher.setup that fails ends it: its run would be made in another environment
    than was asked for."""
    python = "python" if launcher.wrap else shlex.quote(sys.executable)
    setup = []
    if launcher.setup:
        setup += ["trap 'echo \"launcher.setup ended the job at: $BASH_COMMAND\" >&2; exit 1' EXIT", "set -e"]
        setup += [*launcher.setup, "set +e", "trap - EXIT"]
    setup += [f"export {ADDED_CONF}={shlex.quote(os.environ[ADDED_CONF])}"] if ADDED_CONF in os.environ else []
    setup += [f"export HF_HOME={expanded(launcher.hf_home)}"] if launcher.hf_home else []
    setup += [f'export TMPDIR={expanded(launcher.scratch)}; mkdir -p "$TMPDIR"'] if launcher.scratch else []
    start = " ".join(part for part in (launcher.wrap, python, shlex.join(command)) if part)
    return job_script(start, setup=setup, then=then)
