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
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pipeline.config.stages import EvalStage, Launcher, TrainStage
from pipeline.errors import Held, PipelineError
from pipeline.files import ADDED_CONF
from pipeline.report.text import some
from pipeline.runs import state
from pipeline.runs.disk import check_writable
from pipeline.runs.folders import finished
from pipeline.runs.lease import holder, leased
from pipeline.runs.run import Run, runs_behind
from pipeline.runs.stop import finishing
from pipeline.study import plans
from pipeline.study.bill import moved, shape_for
from pipeline.study.element import element_of
from pipeline.study.graph import ordered, unfinished
from pipeline.study.history import History
from pipeline.study.pool import sources
from pipeline.study.queue import GONE, check_installed, in_queue, last_words, slurm
from pipeline.study.worker import LOGS
from pipeline.train.disk import written

FOLDER = ".slurm"
START = 120.0  # seconds from a job's start to its first step: libraries and an 8B model from a shared file system
EARLY = 60.0  # Slurm looks at time limits once a minute
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
    name = plans.name_of(targets)
    with leased(folder / "submitting", "submitting"):
        there = jobs_in_queue(runs[0].runs_dir)
        failed = {} if launcher.retry_failed else failures([run for run in runs if run.hash in missing], there)
        left = [run for run in runs if run.hash in missing and run.hash not in there and run.name not in failed]
        left = [run for run in left if not holder(run.workplace)]
        if not left and not there:
            return failed
        submitted = submit(launcher, folder, name, runs, left, there, again)
    waiting = f"{len(missing) - len(failed)} in the queue or in work"
    told = f"{some(len(left), 'run')} submitted as {some(submitted, 'array')}, {waiting}"
    if not left:
        told = f"{waiting}, as they were submitted (to change how, scancel them first)"
    held = Held(f"{told}; stage=status shows them, and the same command goes on when they are done")
    held.failed = failed
    raise held


def failures(runs: Sequence[Run], there: Mapping[str, str]) -> dict[str, str]:
    """Those whose job ended before they were made, and what depends on them: name -> reason."""
    found: dict[str, str] = {}
    for run in runs:
        blocked = next((parent.name for parent in runs_behind(run.parents) if parent.name in found), None)
        told = state.read(run.workplace)
        if blocked:
            found[run.name] = f"its parent {blocked} failed"
        elif told.get("state") not in (None, "blocked") and run.hash not in there and not holder(run.workplace):
            words = told.get("last_line") or last_words(run.runs_dir / LOGS / f"slurm-{told.get('job')}.log")
            found[run.name] = str(words or f"{GONE}: job {told.get('job')}")
    return found


def jobs_in_queue(runs_dir: Path) -> dict[str, str]:
    """Run hash -> job, of the runs of earlier plans whose jobs are in the queue."""
    jobs = {run_hash: run["job"] for plan in plans.plans(runs_dir) for run_hash, run in plan["runs"].items()}
    mine = in_queue()
    return {run_hash: job for run_hash, job in jobs.items() if job in mine}


# ---------------------------------------------------------------------------------------------------- arrays


def submit(
    launcher: Launcher, folder: Path, name: str, runs: list[Run], left: list[Run], there: Mapping[str, str],
    again: Sequence[str] | None,
) -> int:  # fmt: skip
    """Submit arrays in the order of their levels; the plan says after each which job makes which run."""
    jobs, new = dict(there), []
    arrays = arrays_of(left, launcher, largest_array() if left else 1)
    try:
        for array in arrays:
            with finishing():
                new.append(submit_array(launcher, folder, name, array, jobs))
                keep(name, runs, array, new[-1], jobs)
            print(f"job {new[-1]}: level {array.level}, {some(len(array.tasks), 'task')}, "
                  f"{some(sum(map(len, array.tasks)), 'run')}, {some(array.resources.gpus, 'GPU')} each",
                  file=sys.stderr)  # fmt: skip
        wait_for(new, runs, there, jobs)
        if again is not None and arrays:
            words = [*again, "launcher.retry_failed=false"]
            script = script_of(launcher, ["-m", "pipeline", *words], requeue=False)
            options = ["--job-name", f"{name}-goes-on", "--dependency", after(jobs.values())]
            job = sbatch(launcher, folder, script, Resources(0, 1, int(EARLY)), options, "goes-on")
            print(f"job {job}: the same command, when these are done", file=sys.stderr)
    except PipelineError as error:
        told = f"{len(new)} of {len(arrays)} arrays were submitted"
        then = "the same command submits the rest once that is changed or, where it is a limit, later"
        raise PipelineError(f"{error} ({told}; {then})") from error
    except (KeyboardInterrupt, SystemExit):
        print(f"jobs in the queue stay there: {', '.join(new) or 'none was submitted'}", file=sys.stderr)
        raise
    return len(arrays)


def keep(name: str, runs: Sequence[Run], array: Array, job: str, jobs: dict[str, str]) -> None:
    """Write down which task of a job makes which run; cancel it where that cannot be written."""
    jobs |= {run.hash: f"{job}_{index}" for index, task in enumerate(array.tasks) for run in task}
    try:
        plans.leave(name, runs, jobs)
        for run in (run for task in array.tasks for run in task):
            run.workplace.mkdir(parents=True, exist_ok=True)
            state.write(run.workplace, name=run.name, stage=run.config.stage, state="waiting", job=jobs[run.hash])
    except OSError:
        slurm("scancel", job)  # what no plan knows of would be submitted again
        raise


def wait_for(new: Sequence[str], runs: Sequence[Run], there: Mapping[str, str], jobs: Mapping[str, str]) -> None:
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
        if launcher.time and (limit := seconds_of(launcher.time)) < START + lead:
            raise PipelineError(
                f"launcher.time={launcher.time} is {limit:.0f} s: a job of {run.name} needs {START + lead:.0f} s to "
                "start and to write one resume point; give more"
            )
    elif isinstance(config, EvalStage):
        gpus = config.eval.shards
    cpus = config.threads * processes if config.threads else None
    return Resources(gpus if launcher.gpus is None else min(gpus, launcher.gpus), cpus, int(lead))


def bytes_of_resume_point(run: Run[TrainStage]) -> int:
    """By the shape of its base, which need not be on this disk yet."""
    shape = shape_for(run)
    return written(run.config.sft, shape.parameters, moved(run, shape), snapshots=0, points=1)["resume points"]


_speeds: dict[Path, float] = {}


def write_speed(folder: Path) -> float:
    """Bytes a second that a file system takes, by writing one file: half of it, as other jobs write too."""
    if folder not in _speeds:
        probe, begun = folder / f".probe-{os.getpid()}", time.perf_counter()
        try:
            with open(probe, "wb") as file:
                file.write(os.urandom(PROBE))
                file.flush()
                os.fsync(file.fileno())
        finally:
            probe.unlink(missing_ok=True)
        _speeds[folder] = PROBE / (time.perf_counter() - begun) / 2
    return _speeds[folder]


def seconds_of(limit: str) -> float:
    """Of a limit as sbatch takes it: minutes[:seconds], hours:minutes:seconds, days-hours[:minutes[:seconds]]."""
    days, dash, rest = limit.rpartition("-")
    parts = [float(part) for part in rest.split(":") if re.fullmatch(r"\d+", part)]
    if not 1 <= len(parts) <= 3 or len(parts) != len(rest.split(":")) or (dash and not days.isdigit()):
        forms = "hours:minutes:seconds or days-hours, 24:00:00 or 2-12"
        raise PipelineError(f"launcher.time={limit} is not a time limit: write {forms}")
    units = (3600, 60, 1) if dash or len(parts) == 3 else (60, 1)
    return 86400 * float(days or 0) + sum(part * unit for part, unit in zip(parts, units, strict=False))


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
    script = script_of(launcher, ["-m", "pipeline.study.worker", str(file.resolve())])
    try:
        return sbatch(launcher, folder, script, array.resources, options, "%A_%a")
    except PipelineError:
        file.unlink()
        raise


def sbatch(
    launcher: Launcher, folder: Path, script: str, resources: Resources, options: Sequence[str], log: str
) -> str:
    logs = folder.parent / LOGS
    logs.mkdir(parents=True, exist_ok=True)
    asked: dict[str, Any] = {
        "partition": launcher.partition, "account": launcher.account, "qos": launcher.qos, "time": launcher.time,
        "mem": launcher.memory, "gres": f"gpu:{resources.gpus}" if resources.gpus else None,
        "cpus-per-task": resources.cpus, "signal": f"B:USR1@{resources.lead}", "open-mode": "append",
        "output": f"{logs.resolve()}/slurm-{log}.log", "nodes": 1, "ntasks": 1,
    }  # fmt: skip
    given = [f"--{key}={value}" for key, value in asked.items() if value is not None]
    file = folder / f"job-{time.time_ns()}.sh"
    file.write_text(script, encoding="utf-8")
    try:
        told = slurm("sbatch", "--parsable", *given, *options, *(launcher.options or []), str(file))
    except PipelineError as error:
        file.unlink()
        knobs = {f"launcher.{key}": getattr(launcher, key) for key in ("partition", "account", "qos", "time", "memory")}
        words = [f"{knob}={value}" for knob, value in knobs.items() if value is not None]
        words += [some(resources.gpus, "GPU"), *([some(resources.cpus, "core")] if resources.cpus else [])]
        raise PipelineError(f"{error}; asked for: {', '.join([*words, *(launcher.options or [])])}") from error
    return told.strip().partition(";")[0]


def script_of(launcher: Launcher, command: Sequence[str], requeue: bool = True) -> str:
    """What a job runs. Status 75 asks for the job again, unless Slurm itself ended it and knows what is next.

    A line of launcher.setup that fails ends the job: its run would be made in another environment than was asked for.
    """
    python = "python" if launcher.wrap else shlex.quote(sys.executable)
    started = " ".join(part for part in (launcher.wrap, python, shlex.join(command)) if part)
    lines = ["#!/bin/bash"]
    if launcher.setup:
        lines += ["trap 'echo \"launcher.setup ended the job at: $BASH_COMMAND\" >&2; exit 1' EXIT", "set -e"]
        lines += [*launcher.setup, "set +e", "trap - EXIT"]
    lines += [f"export {ADDED_CONF}={shlex.quote(os.environ[ADDED_CONF])}"] if ADDED_CONF in os.environ else []
    lines += [f"export HF_HOME={launcher.hf_home}"] if launcher.hf_home else []
    lines += [f'export TMPDIR={launcher.scratch}; mkdir -p "$TMPDIR"'] if launcher.scratch else []
    lines += [
        f"{started} & PID=$!",
        'trap "ASKED=1; kill -USR1 $PID 2>/dev/null" USR1',
        'trap "ENDED=1; kill -TERM $PID 2>/dev/null" TERM',
        "while wait $PID; STATUS=$?; kill -0 $PID 2>/dev/null; do :; done",
        "[ $STATUS -le 128 ] || { wait $PID; STATUS=$?; }  # it ended while a trap ran",
    ]
    if requeue:
        task = "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"
        lines += [f"if [ $STATUS = 75 ] && [ -z $ENDED ]; then scontrol requeue {task} && sleep 60; fi"]
    else:
        lines += ["if [ $STATUS = 75 ] && [ -z $ASKED$ENDED ]; then STATUS=0; fi  # what it submitted goes on"]
    return "\n".join([*lines, "exit $STATUS", ""])


def submitting(launcher: Launcher, again: Sequence[str] | None) -> Any:
    """`execute` of a plan."""
    return partial(execute, launcher, again)
