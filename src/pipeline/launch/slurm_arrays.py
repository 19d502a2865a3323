"""launcher=slurm: submits the unfinished runs of a plan as job arrays, one per level of the graph and resource class.

An array task computes the runs of one line of a file with the worker that launcher=local uses: short runs of a class
are batched, evaluations of one model are adjacent. An array depends on its parents' arrays by `afterany`, and each run
checks the manifests of its parents, so a failure costs what depends on it. Submitting again adds what is missing.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from pipeline.config.stages import Launcher, TrainStage
from pipeline.errors import Held, PipelineError
from pipeline.files import ADDED_CONF
from pipeline.launch import plan_files
from pipeline.launch.job_script import COMPLETED, job_script, quote_with_expansion, requeue_lines
from pipeline.launch.run_json import element_of
from pipeline.launch.slurm_commands import (
    JOB_LOST,
    check_installed,
    last_log_line,
    queued_jobs,
    run_slurm,
    sbatch,
    seconds_left,
)
from pipeline.launch.slurm_tasks import (
    EARLY,
    LARGEST_ARRAY,
    Array,
    Resources,
    arrays_of,
    check_limit,
    largest_array,
)
from pipeline.launch.worker import LOGS
from pipeline.runs import state
from pipeline.runs.disk import check_writable
from pipeline.runs.graph import order_runs, reasons_unfinished
from pipeline.runs.lease import hold_lease, live_holder
from pipeline.runs.run import Run, parent_runs
from pipeline.runs.stop import delay_signals
from pipeline.text import pluralize

FOLDER = ".slurm"
DRY_RUN, SUBMIT = ".slurm-dry-run", "submit.sh"
SUBMIT_LIMIT = re.compile(r"(Max|Grp)\w*Submit|job submit limit")  # how Slurm names a limit of submitted jobs
NO_GRES = re.compile(r"[Ii]nvalid generic resource|gres", re.ASCII)
AGAIN = requeue_lines("${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}")


def execute(
    launcher: Launcher,
    again: Sequence[str] | None,
    targets: list[Run],
    earlier_failures: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Submit the runs that are neither finished nor in the queue. Returns the failures if no job is in the queue.

    again: the arguments of the command that a last job runs when the others are done; None: no such job.

    Raises:
        Held: jobs are in the queue; rerun the same command when they are done.
        PipelineError: Slurm rejected the jobs; has its message.
    """
    runs = order_runs(targets)
    missing = reasons_unfinished(runs, targets)
    if not missing:
        return {}
    check_writable(runs[0].runs_dir)
    unfinished = [run for run in runs if run.hash in missing]
    plan = Submission(launcher, again, plan_files.plan_name(targets), runs)
    if launcher.dry_run:
        shutil.rmtree(plan.folder, ignore_errors=True)
        plan.folder.mkdir(parents=True)
        plan.submit(unfinished)
        show_dry_run(plan.folder)
    check_installed("squeue", "sbatch", "scontrol")
    with hold_lease(plan.folder / "submitting", "submitting"):
        plan.queued = queued = jobs_in_queue(runs[0].runs_dir)
        failed = {} if launcher.retry_failed else failed_runs(unfinished, queued)
        unsubmitted = [run for run in unfinished if run.hash not in queued and run.name not in failed]
        unsubmitted = [run for run in unsubmitted if not live_holder(run.workplace)]
        if not unsubmitted and not queued:
            return failed
        submitted = plan.submit(unsubmitted)
    waiting = f"{len(missing) - len(failed)} in the queue or in work"
    text = f"{submitted}, {waiting}"
    if not unsubmitted:
        text = f"{waiting}, as they were submitted (to change how, scancel them first)"
    error = Held(f"{text}; stage=status shows them; rerun the same command when they are done")
    error.failed = failed
    raise error


def show_dry_run(folder: Path) -> NoReturn:
    """Print what would submit the jobs, and end the command: there is no result to show."""
    text = (folder / SUBMIT).read_text(encoding="utf-8")
    print(f"{text}nothing was submitted (launcher.dry_run=true); these lines are {folder / SUBMIT}", file=sys.stderr)
    raise SystemExit(0)


def write_submission(folder: Path, script: Path, arguments: Sequence[str]) -> str:
    """Add the submission of a script to the folder's submit.sh. Returns the variable there that holds its job's id."""
    lines = (folder / SUBMIT).read_text(encoding="utf-8").splitlines() if (folder / SUBMIT).is_file() else []
    job = f"JOB{len(lines) + 1}"
    quoted = [word if word.startswith("afterany:$") else shlex.quote(word) for word in arguments]
    command = f"{job}=$(sbatch --parsable {' '.join(quoted)} {shlex.quote(str(script))})"
    (folder / SUBMIT).write_text("\n".join([*lines, command]) + "\n", encoding="utf-8")
    return f"${job}"


def failed_runs(runs: Sequence[Run], queued: Mapping[str, str]) -> dict[str, str]:
    """The runs that failed in their jobs and those that depend on them: name -> reason.

    A run whose job was cancelled or lost counts as failed only the second time: the continuation resubmits it once.
    """
    reasons: dict[str, str] = {}
    for run in runs:
        blocked = next((parent.name for parent in parent_runs(run.parents) if parent.name in reasons), None)
        record = state.read_state(run.workplace)
        if blocked:
            reasons[run.name] = f"its parent {blocked} failed"
        elif record.get("state") not in (None, "blocked") and run.hash not in queued and not live_holder(run.workplace):
            words = record.get("last_line") if record["state"] == "failed" else None
            words = words or last_log_line(run.runs_dir / LOGS / f"slurm-{record.get('job')}.log")
            if words or record.get("resubmitted"):
                reasons[run.name] = str(words or f"{JOB_LOST}, twice: job {record.get('job')}")
    return reasons


def jobs_in_queue(runs_dir: Path) -> dict[str, str]:
    """Run hash -> job id, for the runs of this runs_dir whose jobs are in the queue: by the plans, and by the job
    scripts where a command was interrupted before it wrote its plan."""
    planned = {
        run_hash: run["job"] for plan in plan_files.read_plans(runs_dir) for run_hash, run in plan["runs"].items()
    }
    queue, array_ids = queued_jobs(), {array_of(job) for job in planned.values() if job}
    jobs = {run_hash: job for run_hash, job in planned.items() if job in queue}
    for job, script in queue.items():
        tasks = Path(script).with_suffix(".jsonl")
        array, _, index = job.partition("_")
        if index and array not in array_ids and tasks.parent == (runs_dir / FOLDER).resolve() and tasks.is_file():
            line = tasks.read_text(encoding="utf-8").splitlines()[int(index)]
            jobs |= {element["hash"]: job for element in json.loads(line)["elements"]}
    return jobs


# ---------------------------------------------------------------------------------------------------- arrays


class Submission:
    """Submits runs of a plan as arrays. `new`: run hash -> its job, submitted here; `queued`: in the queue before.

    A dry run writes the same files into another folder, without a Slurm; submit.sh there would submit them.
    """

    def __init__(self, launcher: Launcher, again: Sequence[str] | None, name: str, runs: list[Run]) -> None:
        self.launcher, self.again, self.name, self.runs = launcher, again, name, runs
        self.folder = runs[0].runs_dir / (DRY_RUN if launcher.dry_run else FOLDER)
        self.queued: dict[str, str] = {}
        self.new: dict[str, str] = {}

    @property
    def jobs(self) -> dict[str, str]:
        return {**self.queued, **self.new}

    def tell(self, text: str) -> None:
        if not self.launcher.dry_run:
            print(text, file=sys.stderr)

    def submit(self, unsubmitted: list[Run]) -> str:
        """Submit arrays in the order of their levels, updating the plan after each. Returns a summary as text."""
        done: list[Array] = []
        largest = LARGEST_ARRAY if self.launcher.dry_run or not unsubmitted else largest_array()
        arrays = arrays_of(unsubmitted, self.launcher, largest)
        try:
            for array in arrays:
                try:
                    with delay_signals():
                        job, part = self.submit_part(array)
                        done.append(part)
                        self.record(part, job)
                except PipelineError as error:
                    if not done or not SUBMIT_LIMIT.search(str(error)):
                        raise
                    break
                self.tell(
                    f"job {job}: level {part.level}, {pluralize(len(part.tasks), 'task')}, "
                    f"{pluralize(sum(map(len, part.tasks)), 'run')}, {pluralize(part.resources.gpus, 'GPU')} each"
                )
                if part is not array:
                    break
            self.wait_for_new()
            if self.again is not None and arrays:
                self.submit_continuation(self.again, done[-1])
        except Held:
            raise
        except PipelineError as error:
            progress = f"{len(done)} of {len(arrays)} arrays were submitted"
            then = "rerun the same command to submit the rest once that is changed or, if it is a limit, later"
            raise PipelineError(f"{error} ({progress}; {then})") from error
        except (KeyboardInterrupt, SystemExit):
            ids = sorted(set(map(array_of, self.new.values())), key=int)
            self.tell(f"jobs in the queue stay there: {', '.join(ids) or 'none was submitted'}")
            raise
        count = len(self.new)
        remaining = len(unsubmitted) - count
        who = "the last job" if self.again is not None else "the same command"
        then = f", {remaining} more by {who} when these are done" if remaining else ""
        return f"{pluralize(count, 'run')} submitted as {pluralize(len(done), 'array')}{then}"

    def submit_part(self, array: Array) -> tuple[str, Array]:
        """Submit an array, halved until it is within the site's submit limit. Returns the job id and the submitted
        part."""
        while True:
            try:
                return self.submit_array(array), array
            except PipelineError as error:
                if not SUBMIT_LIMIT.search(str(error)) or len(array.tasks) == 1:
                    raise
            array = replace(array, tasks=array.tasks[: len(array.tasks) // 2])

    def submit_array(self, array: Array) -> str:
        """Write an array's files and submit it. Returns the job id."""
        launcher, jobs = self.launcher, self.jobs
        lines = [
            json.dumps({"requeues": launcher.requeues, "elements": [element_of(run) for run in task]})
            for task in array.tasks
        ]
        file = self.folder / f"{self.name}-{time.time_ns()}.jsonl"
        write_job_file(launcher, file, "\n".join(lines) + "\n")
        parents = {jobs[parent.hash] for task in array.tasks for run in task for parent in parent_runs(run.parents)
                   if parent.hash in jobs}  # fmt: skip
        options = ["--array", f"0-{len(lines) - 1}", "--job-name", f"{self.name}-{array.level}", "--requeue"]
        if parents:
            options += ["--dependency", dependency_on(parents)]
        script = script_of(launcher, ["-m", "pipeline.launch.worker", str(file.resolve())])
        try:
            job = submit_script(launcher, file.with_suffix(".sh"), script, array.resources, options, "%A_%a")
        except Held:  # it may have been submitted
            raise
        except PipelineError:
            file.unlink()
            raise
        if not launcher.dry_run:
            check_job_limit(job, array)
        return job

    def record(self, array: Array, job: str) -> None:
        """Record in the plan and the states which task of a job computes which run; cancel the job if that fails."""
        self.new |= {run.hash: f"{job}_{index}" for index, task in enumerate(array.tasks) for run in task}
        if self.launcher.dry_run:
            return
        try:
            plan_files.write_plan(self.name, self.runs, self.jobs)
            for run in (run for task in array.tasks for run in task):
                run.workplace.mkdir(parents=True, exist_ok=True)
                facts = {"name": run.name, "stage": run.config.stage, "state": "waiting", "job": self.new[run.hash]}
                before = state.read_state(run.workplace).get("state")
                resubmitted = not self.launcher.retry_failed and before not in (None, "blocked")
                state.update_state(run.workplace, **facts, last_line=None, resubmitted=resubmitted)
        except OSError:
            run_slurm("scancel", job)  # runs without a recorded job would be submitted again
            raise

    def wait_for_new(self) -> None:
        """Make arrays that were already in the queue depend on parents that were resubmitted; running ones check
        themselves whether their parents are finished."""
        jobs, new, parents = self.jobs, set(map(array_of, self.new.values())), defaultdict[str, set[str]](set)
        for run in self.runs:
            if run.hash in self.queued:
                parent_jobs = (jobs[parent.hash] for parent in parent_runs(run.parents) if parent.hash in jobs)
                parents[array_of(self.queued[run.hash])] |= set(map(array_of, parent_jobs))
        for array, ids in parents.items():
            if ids & new:
                with suppress(PipelineError):
                    run_slurm("scontrol", "update", f"JobId={array}", f"Dependency={dependency_on(ids)}")

    def submit_continuation(self, again: Sequence[str], last: Array) -> None:
        """Submit the same command as a job that runs after all others. At the site's submit limit it replaces the last
        task."""
        own = ("launcher.retry_failed=", "launcher.dry_run=")
        words = [word for word in again if not word.startswith(own)] + ["launcher.retry_failed=false"]
        script = script_of(self.launcher, ["-m", "pipeline", *words], COMPLETED)
        options = ["--job-name", f"{self.name}-goes-on", "--dependency", dependency_on(self.jobs.values())]
        file = self.folder / f"{self.name}-{time.time_ns()}.sh"
        arguments = self.launcher, file, script, Resources(0, 1, int(EARLY)), options, "goes-on"
        try:
            job = submit_script(*arguments)
        except PipelineError as error:
            if not SUBMIT_LIMIT.search(str(error)) or len(last.tasks) == 1:
                raise
            task = last.tasks.pop()
            run_slurm("scancel", self.new[task[0].hash])
            for run in task:
                del self.new[run.hash]
                state.remove_state(run.workplace)
            job = submit_script(*arguments)
        self.tell(f"job {job}: the same command, when these are done")


def array_of(job: str) -> str:
    return job.partition("_")[0]


def dependency_on(jobs: Iterable[str]) -> str:
    """sbatch dependency on the end, successful or not, of the arrays of these jobs."""
    return "afterany:" + ":".join(sorted(set(map(array_of, jobs))))


def check_job_limit(job: str, array: Array) -> None:
    """Cancel a job of trainings whose time limit (e.g. the partition's) ends before their first resume point.

    Raises:
        PipelineError: the job was cancelled.
    """
    run = array.tasks[0][0]
    if not isinstance(run.config, TrainStage) or (limit := seconds_left(job)) is None:
        return
    try:
        check_limit(run, array.resources.lead, limit, f"the time limit of job {job}")
    except PipelineError:
        run_slurm("scancel", job)
        raise


def write_job_file(launcher: Launcher, file: Path, text: str) -> None:
    """Write a file of a job; readable by its owner alone if it has lines of the user's, which may hold secrets."""
    with file.open("w", encoding="utf-8") as stream:
        if launcher.setup or launcher.wrap or launcher.options:
            os.fchmod(stream.fileno(), 0o600)
        stream.write(text)


def submit_script(
    launcher: Launcher, file: Path, script: str, resources: Resources, options: Sequence[str], log: str
) -> str:
    """Write a job's script and submit it. Returns the job id."""
    logs = file.parents[1].resolve() / LOGS
    logs.mkdir(parents=True, exist_ok=True)
    requested: dict[str, Any] = {
        "partition": launcher.partition, "account": launcher.account, "qos": launcher.qos, "time": launcher.time,
        "mem": launcher.memory,
        "mem-per-gpu": launcher.memory_per_gpu if resources.gpus and not launcher.memory else None,
        "gres": f"gpu:{resources.gpus}" if resources.gpus else None,
        "cpus-per-task": resources.cpus, "signal": f"B:USR1@{resources.lead}", "open-mode": "append",
        "output": f"{str(logs).replace('%', '%%')}/slurm-{log}.log", "nodes": 1, "ntasks": 1,
    }  # fmt: skip
    arguments = [f"--{key}={value}" for key, value in requested.items() if value is not None]
    write_job_file(launcher, file, script)
    if launcher.dry_run:
        return write_submission(file.parent, file.resolve(), [*arguments, *options, *(launcher.options or [])])
    try:
        return sbatch(file.resolve(), *arguments, *options, *(launcher.options or []))
    except Held:
        raise
    except PipelineError as error:
        file.unlink()
        knobs = {f"launcher.{key}": getattr(launcher, key) for key in ("partition", "account", "qos", "time", "memory")}
        words = [f"{knob}={value}" for knob, value in knobs.items() if value is not None]
        words += [pluralize(resources.gpus, "GPU"), *([pluralize(resources.cpus, "core")] if resources.cpus else [])]
        text = f"{error}; requested: {', '.join([*words, *(launcher.options or [])])}"
        if NO_GRES.search(str(error)):
            text += (
                "; where GPUs are not gres named gpu, give launcher.gpus=0 and your site's own option, "
                """'launcher.options=["--gpus-per-node=1"]'"""
            )
        raise PipelineError(text) from error


def script_of(launcher: Launcher, command: Sequence[str], then: str = AGAIN) -> str:
    """The script of a job. A failing line of launcher.setup ends it, so that no run is computed in an environment other
    than the requested one."""
    python = "python" if launcher.wrap else shlex.quote(sys.executable)
    setup = []
    if launcher.setup:
        setup += ["trap 'echo \"launcher.setup ended the job at: $BASH_COMMAND\" >&2; exit 1' EXIT", "set -e"]
        setup += [*launcher.setup, "set +e", "trap - EXIT"]
    setup += [f"export {ADDED_CONF}={shlex.quote(os.environ[ADDED_CONF])}"] if ADDED_CONF in os.environ else []
    setup += [f"export HF_HOME={quote_with_expansion(launcher.hf_home)}"] if launcher.hf_home else []
    setup += [f'export TMPDIR={quote_with_expansion(launcher.scratch)}; mkdir -p "$TMPDIR"'] if launcher.scratch else []
    start = " ".join(part for part in (launcher.wrap, python, shlex.join(command)) if part)
    return job_script(start, setup=setup, then=then)
