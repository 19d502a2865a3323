"""launcher=slurm: submits the workers of a plan as job arrays.

Each level of the plan and each kind of resources has an array. A task of an array is a worker
(launch/work.py): it computes any free run of its level and kind, and ends when no such run is left.
Arrays wait for the arrays of the level before with `afterany`, so a failure stops only the runs
that depend on it. When all jobs are done, a last job runs the command again. It submits runs whose
job was lost, as long as that makes progress.

The session's folder is `runs_dir/.slurm/<name of the plan>`. It holds the job scripts and their
ids.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from pipeline.config.stages import Launcher
from pipeline.errors import Held, PipelineError
from pipeline.estimate.durations import ON_GPU, guess
from pipeline.estimate.flops import cards
from pipeline.files import ADDED_CONF, config_dir_flags
from pipeline.launch.job_script import COMPLETED, job_script, quote_with_expansion, requeue_lines
from pipeline.launch.plan_file import LOGS, Task, plan_name, publish_plan, read_plan, tasks_of
from pipeline.launch.resources import (
    Resources,
    number_of_workers,
    resources_of,
)
from pipeline.launch.slurm_commands import (
    JOB_LOST,
    last_log_line,
    queued_jobs,
    run_slurm,
    sbatch,
)
from pipeline.launch.work import PLAN, Session
from pipeline.runs.disk import check_writable
from pipeline.runs.graph import order_runs, reasons_unfinished
from pipeline.runs.lease import hold_lease
from pipeline.runs.run import Run
from pipeline.runs.stop import delay_signals
from pipeline.text import pluralize

FOLDER = ".slurm"
DRY_RUN, SUBMIT = ".slurm-dry-run", "submit.sh"
AGAIN_JOB = "goes-on"
# Environment variable of the last job. Earlier failures are not retried.
CONTINUES = "PIPELINE_CONTINUES"
# Slurm's names for a limit of submitted jobs, and of tasks in an array.
SUBMIT_LIMIT = re.compile(r"(Max|Grp)\w*Submit|job submit limit|[Ii]nvalid job array specification")
REQUEUE = requeue_lines("${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}")
# After a stop signal the last job is requeued. Otherwise 75 says that submitted jobs continue.
GOES_ON = requeue_lines("${SLURM_JOB_ID}", ' && [ -n "$ASKED" ]') + f"\n{COMPLETED}"


def execute(
    launcher: Launcher,
    again: Sequence[str] | None,
    targets: list[Run],
) -> dict[str, str]:
    """Submit the unfinished runs, unless jobs of the same plan are in the queue.

    Args:
        launcher: the configuration.
        again: the command that a last job runs when all other jobs are done, or None for no such
            job.
        targets: the runs to compute.

    Returns:
        The failures, if no run is left to compute.

    Raises:
        Held: jobs are in the queue. Rerun the same command when they are done.
        PipelineError: Slurm rejected the jobs, with Slurm's message.
    """
    runs = order_runs(targets)
    missing = reasons_unfinished(runs, targets)
    if not missing:
        return {}
    runs_dir, name = runs[0].runs_dir, plan_name(targets)
    check_writable(runs_dir)
    unfinished = [run for run in runs if run.hash in missing]
    kinds = {run.hash: resources_of(run, launcher) for run in unfinished}
    if launcher.gpus == 0:
        card = None
    else:
        card = cards()[launcher.gpu or ON_GPU]
    predict = partial(guess, gpu=lambda: card)
    tasks = tasks_of(unfinished, predict, {key: kind.name for key, kind in kinds.items()})
    tasks.sort(key=lambda task: task.level)
    folder, resources = runs_dir / FOLDER / name, {kind.name: kind for kind in kinds.values()}
    if launcher.dry_run:
        folder = runs_dir / DRY_RUN
        shutil.rmtree(folder, ignore_errors=True)
        submission = Submission(launcher, name, Session(folder, tasks), resources, [])
        submission.submit(again)
        submission.end_dry_run()
    with hold_lease(runs_dir / FOLDER / "submitting", "submitting"):
        queue = {
            job: Path(script)
            for job, script in queued_jobs().items()
            if job != os.environ.get("SLURM_JOB_ID")
        }
        if own_jobs := [job for job, script in queue.items() if script.parent == folder.resolve()]:
            raise Held(
                f"{pluralize(len(own_jobs), 'job')} of {name} in the queue, as submitted earlier"
                " (to change options, scancel them first). stage=status shows the runs. Rerun the"
                " same command when they are done."
            )
        if CONTINUES not in os.environ:
            shutil.rmtree(folder, ignore_errors=True)
        session = Session(folder, tasks)
        publish_plan(runs_dir, name, tasks)
        other_jobs = sorted(
            {job.partition("_")[0] for job, script in queue.items() if shares_runs(script, tasks)}
        )
        if session.left:
            if goes_further(session):
                submission = Submission(launcher, name, session, resources, other_jobs)
                submitted = submission.submit(again)
            else:
                reasons = {
                    array: why_lost(array, folder)
                    for array in {task.array for task in session.left}
                }
                session.failed |= {task.hash: reasons[task.array] for task in session.ready()}
                session.look()
    failed = session.failures(tasks)
    if not session.left:
        return failed
    error = Held(
        f"{submitted}. stage=status shows the runs. Rerun the same command when they are done."
    )
    error.failed = failed
    raise error


def goes_further(session: Session) -> bool:
    """Return True if more runs have ended than at the last submission.

    Without this check the last job could resubmit itself forever.
    """
    file, ended = session.folder / "ended", len(session.done) + len(session.failed)
    if file.is_file():
        before = int(file.read_text())
    else:
        before = -1
    file.write_text(str(ended))
    return ended > before


def why_lost(array: str, folder: Path) -> str:
    """Return why an array's runs were not computed: the last line of its log, or a lost job."""
    job, log = log_of(array, folder)
    return last_log_line(log) or f"{JOB_LOST}, twice: job {job}"


def log_of(array: str, folder: Path) -> tuple[str | None, Path | None]:
    """Return the job id of an array and the newest log of its tasks.

    If there is no array of that name, the last job is used, which submits the remaining runs. The
    job id is None if there is no last job either.
    """
    logs = folder.parents[1] / LOGS
    of_array, of_last_job = folder / f"{array}.job", folder / f"{AGAIN_JOB}.job"
    if of_array.is_file():
        job = of_array.read_text()
        tasks = logs.glob(f"slurm-{job}_*.log")
        return job, max(tasks, key=lambda log: log.stat().st_mtime_ns, default=None)
    if of_last_job.is_file():
        job = of_last_job.read_text()
        log = logs / f"slurm-{AGAIN_JOB}-{job}.log"
        return job, log if log.is_file() else None
    return None, None


def shares_runs(script: Path, tasks: Sequence[Task]) -> bool:
    """Return True if a queued job of another plan computes some of these runs.

    The runs then wait for that job.
    """
    folder = script.parent
    if folder.parent != (tasks[0].runs_dir / FOLDER).resolve() or not (folder / PLAN).is_file():
        return False
    planned = {task.hash for task in read_plan(folder / PLAN)}
    return any(task.hash in planned for task in tasks)


# --- arrays ---


@dataclass
class Submission:
    """The submission of a session's workers.

    A dry run writes the same files into another folder and needs no Slurm; submit.sh there would
    submit the jobs.

    Attributes:
        launcher: the configuration.
        name: the name of the plan.
        session: the tasks.
        resources: by kind.
        before: jobs that the first arrays wait for.
        jobs: submitted job id -> number of tasks.
        lines: of a dry run's submit.sh.
    """

    launcher: Launcher
    name: str
    session: Session
    resources: Mapping[str, Resources]
    before: list[str]
    jobs: dict[str, int] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)

    def submit(self, again: Sequence[str] | None) -> str:
        """Submit the arrays and the last job, and return a summary.

        After an error or a signal, all submitted jobs are cancelled.
        """
        try:
            submitted = self.submit_arrays()
            arrays = len(self.jobs)
            if again:
                self.submit_again(again)
        except BaseException as error:
            # After Held nothing is cancelled: the next call finds the submitted jobs in the queue.
            if self.jobs and not self.launcher.dry_run and not isinstance(error, Held):
                with suppress(PipelineError), delay_signals():
                    run_slurm("scancel", *self.jobs)
                jobs = ", ".join(self.jobs)
                self.tell(f"cancelled again: {pluralize(len(self.jobs), 'job')} {jobs}")
            raise
        remaining = len(self.session.left) - submitted
        then = f", {remaining} more when these are done" if remaining else ""
        return f"{pluralize(submitted, 'run')} submitted as {pluralize(arrays, 'array')}{then}"

    def submit_arrays(self) -> int:
        """Submit an array for each level and kind, and return the number of their runs.

        If the site limits the number of jobs, arrays get fewer workers, and later levels are not
        submitted.
        """
        submitted, level, within = 0, -1, list[str]()
        arrays: dict[str, list[Task]] = {}
        for task in self.session.left:
            arrays.setdefault(task.array, []).append(task)
        for array, runs in arrays.items():
            kind = runs[0].kind
            if runs[0].level != level:
                self.before, within, level = within or self.before, [], runs[0].level
            command = [
                "-m",
                "pipeline.launch.worker",
                "task",
                str(self.session.folder.resolve()),
                str(level),
                kind,
            ]
            workers, job = number_of_workers(runs, self.launcher.workers), None
            while not job and workers:
                job = self.submit_job(array, command, self.resources[kind], runs, workers)
                workers //= 2
            if not job:
                return submitted
            within.append(job)
            submitted += len(runs)
        return submitted

    def submit_again(self, again: Sequence[str]) -> None:
        """Submit the last job, which runs the same command again.

        At the site's limit of jobs, tasks of the last arrays are cancelled to make room, and other
        jobs compute their runs. If only one task is left, the last job is not submitted.
        """
        words = []
        for word in again:
            if not word.startswith("launcher.dry_run="):
                words.append(word)
        command = ["-m", "pipeline", *words, *config_dir_flags()]
        while True:
            self.before = [*self.jobs] or self.before
            job = self.submit_job(AGAIN_JOB, command, Resources(0, None))
            if job or sum(self.jobs.values()) == 1:
                return
            last, tasks = self.jobs.popitem()
            run_slurm("scancel", f"{last}_{tasks - 1}")
            if tasks > 1:
                self.jobs |= {last: tasks - 1}

    def submit_job(
        self,
        name: str,
        command: Sequence[str],
        resources: Resources,
        runs: Sequence[Task] = (),
        tasks: int = 1,
    ) -> str | None:
        """Submit an array or the last job, and return its id.

        Returns None if earlier jobs reach the site's limit.

        Args:
            name: the name of the job's files.
            command: the command of the job.
            resources: the resources to request.
            runs: the runs that an array computes; empty for the last job.
            tasks: number of tasks.
        """
        file, launcher = self.session.folder / f"{name}.sh", self.launcher
        if runs:
            level, log = str(runs[0].level), "%A_%a"
            options = ["--requeue", "--array", f"0-{tasks - 1}"]
            script = script_of(launcher, command)
            gpus, limit = pluralize(resources.gpus, "GPU"), launcher.time or "of the site"
            what = (
                f"level {level}, {pluralize(tasks, 'task')} for {pluralize(len(runs), 'run')},"
                f" {gpus} each, time limit {limit}"
            )
        else:
            level, log = AGAIN_JOB, f"{AGAIN_JOB}-%j"
            options = ["--requeue"]
            script = script_of(launcher, command, GOES_ON, {CONTINUES: "1"})
            what = "the same command, when these are done"
        options += ["--job-name", f"{self.name}-{level}"]
        if self.before:
            options += ["--dependency", f"afterany:{':'.join(self.before)}"]
        try:
            with delay_signals():
                job = self.submit_script(file, script, resources, options, log)
                self.jobs[job] = tasks
        except PipelineError as error:
            if SUBMIT_LIMIT.search(str(error)) and (self.jobs or tasks > 1):
                return None
            raise
        file.with_suffix(".job").write_text(job)
        self.tell(f"job {job}: {what}")
        return job

    def submit_script(
        self, file: Path, script: str, resources: Resources, options: Sequence[str], log: str
    ) -> str:
        """Write a job's script and submit it. Return the job id.

        Only the owner can read a script with lines of the user, because they may hold secrets.
        """
        launcher = self.launcher
        logs = self.session.tasks[0].runs_dir.resolve() / LOGS
        logs.mkdir(parents=True, exist_ok=True)
        shares = resources.gpus  # of the cores and the memory of a node with GPUs
        partition, memory_per_gpu, gres = launcher.partition, None, None
        memory = launcher.memory
        if resources.gpus:
            gres = f"gpu:{resources.gpus}"
            if not memory:
                memory_per_gpu = launcher.memory_per_gpu
        elif launcher.cpu_partition is not None:
            partition, shares = launcher.cpu_partition, 1
            memory = memory or launcher.memory_per_gpu
        cpus = resources.cpus or shares * (launcher.cpus_per_gpu or 0)
        requested: dict[str, Any] = {
            "partition": partition,
            "account": launcher.account,
            "qos": launcher.qos,
            "time": launcher.time,
            "mem": memory,
            "mem-per-gpu": memory_per_gpu,
            "gres": gres,
            "cpus-per-task": cpus or None,
            "signal": f"B:USR1@{resources.lead}",
            "open-mode": "append",
            "output": f"{str(logs).replace('%', '%%')}/slurm-{log}.log",
            "nodes": 1,
            "ntasks": 1,
        }
        arguments = []
        for key, value in requested.items():
            if value is not None:
                arguments.append(f"--{key}={value}")
        with file.open("w", encoding="utf-8") as stream:
            if launcher.setup or launcher.wrap or launcher.options:
                os.fchmod(stream.fileno(), 0o600)
            stream.write(script)
        own_options = launcher.options or []
        arguments += [*options, *own_options]
        if launcher.dry_run:
            job = f"JOB{len(self.jobs) + 1}"
            words = []
            for word in arguments:
                words.append(word if word.startswith("afterany:$") else shlex.quote(word))
            command = f"sbatch --parsable {' '.join(words)} {shlex.quote(str(file.resolve()))}"
            self.lines.append(f"{job}=$({command})")
            return f"${job}"
        try:
            return sbatch(file.resolve(), *arguments)
        except Held:
            raise
        except PipelineError as error:
            file.unlink()
            raise PipelineError(f"{error}; requested: {shlex.join(arguments)}") from error

    def tell(self, text: str) -> None:
        """Print a message, or add it to a dry run's submit.sh as a comment."""
        if self.launcher.dry_run:
            self.lines.append(f"# {text}")
        else:
            print(text, file=sys.stderr)

    def end_dry_run(self) -> NoReturn:
        """Write and print the lines that would submit the jobs, and end the command."""
        file = self.session.folder / SUBMIT
        text = "".join(f"{line}\n" for line in self.lines)
        file.write_text(text, encoding="utf-8")
        print(
            f"{text}Nothing was submitted (launcher.dry_run=true). These lines are in {file}.",
            file=sys.stderr,
        )
        raise SystemExit(0)


# --- scripts ---


def script_of(
    launcher: Launcher,
    command: Sequence[str],
    then: str = REQUEUE,
    exported: Mapping[str, str] = {},
) -> str:
    """Return the script of a job.

    A failing line of launcher.setup ends the script, so that no run is computed in the wrong
    environment.
    """
    if launcher.wrap:
        python = "python"
    else:
        python = shlex.quote(sys.executable)
    setup = []
    if launcher.setup:
        setup += [
            "trap 'echo \"launcher.setup ended the job at: $BASH_COMMAND\" >&2; exit 1' EXIT",
            "set -e",
            *launcher.setup,
            "set +e",
            "trap - EXIT",
        ]
    added = {}
    if ADDED_CONF in os.environ:
        added = {ADDED_CONF: os.environ[ADDED_CONF]}
    variables = {**added, **exported}
    setup += [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    if launcher.hf_home:
        setup += [f"export HF_HOME={quote_with_expansion(launcher.hf_home)}"]
    if launcher.scratch:
        setup += [f'export TMPDIR={quote_with_expansion(launcher.scratch)}; mkdir -p "$TMPDIR"']
    start = " ".join(part for part in (launcher.wrap, python, shlex.join(command)) if part)
    return job_script(start, setup=setup, then=then)
