"""Runs Slurm's commands, which may be slow or print extra lines, and parses the queue."""

from __future__ import annotations

import math
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from pipeline.errors import Held, PipelineError

SECONDS, ATTEMPTS = 30.0, 3  # timeout of a Slurm command, and number of attempts
PREFIX = "pipeline:"  # begins the squeue lines to parse, because sites print other lines
UNREACHED = re.compile("Unable to contact|[Tt]imed out|temporarily unable", re.ASCII)
JOB_LOST = "its job was cancelled, or ended before it came to this run"


def queued_jobs() -> dict[str, str]:
    """Return this user's pending and running jobs: id (12_3 for a task of an array) -> script."""
    text = run_slurm("squeue", "--me", "--noheader", "--array", f"--format={PREFIX}%i|%o")
    return dict(re.findall(rf"^{PREFIX}(\d+(?:_\d+)?)\|(.*)$", text, re.MULTILINE))


def submitted_as(script: Path) -> str | None:
    """Return the id of the queued job of a script, or None."""
    for job, command in queued_jobs().items():
        if command == str(script):
            return job.partition("_")[0]
    return None


def sbatch(script: Path, *options: str) -> str:
    """Submit a script and return the job id.

    A command that timed out may still have submitted the script. So the queue is searched before
    the next attempt, and also if the id cannot be parsed from the output of a site's wrapper.

    Raises:
        PipelineError: Slurm rejected the script, or the id cannot be determined.
        Held: Slurm did not respond.
    """
    text = run_slurm(
        "sbatch", "--parsable", *options, str(script), find_answer=lambda: submitted_as(script)
    )
    ids = set(re.findall(r"^(\d+)(?:;[\w.-]+)?$", text, re.MULTILINE))
    if len(ids) == 1:
        job = ids.pop()
    else:
        job = submitted_as(script)
    if job is None:
        output = " ".join(text.split())[:200]
        raise PipelineError(
            f"sbatch printed {output!r} and no job id, and squeue lists no job of {script}. Run"
            " squeue --me."
        )
    return job


def parse_time_limit(limit: str) -> float:
    """Return the seconds of a time limit in sbatch's forms.

    They are minutes[:seconds], hours:minutes:seconds and days-hours[:minutes[:seconds]].
    """
    days, dash, clock = limit.rpartition("-")
    parts = [float(part) for part in clock.split(":")]
    if dash or len(parts) == 3:
        units = [3600, 60, 1]
    else:
        units = [60, 1]
    seconds = 86400 * float(days or 0)
    for part, unit in zip(parts, units, strict=False):
        seconds += part * unit
    return seconds


def seconds_left(job: str) -> float:
    """Return the seconds until the time limit of a running job.

    Returns infinity if the job has no limit, and 0 if Slurm does not report it.
    """
    with suppress(OSError, subprocess.TimeoutExpired, ValueError):
        _, text, _ = run_command(["squeue", "--noheader", f"--job={job}", f"--format={PREFIX}%L"])
        limit_text = "".join(re.findall(rf"^{PREFIX}(\S+)$", text, re.MULTILINE))
        if limit_text == "UNLIMITED":
            return math.inf
        return parse_time_limit(limit_text)
    return 0.0


def last_log_line(log: Path | None) -> str | None:
    """Return the last line of a job's log, which says why no run began.

    Returns None if the log is missing or empty, if the job was cancelled, or if the job ended with
    its summary of runs.
    """
    text = ""
    with suppress(OSError):
        if log:
            text = log.read_text(encoding="utf-8", errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    cancelled = any("CANCELLED AT" in line and "REQUEUE" not in line for line in lines[-5:])
    if cancelled or not lines or re.match(r"\d+ runs?: ", lines[-1]):
        return None
    return lines[-1]


def run_slurm(*command: str, find_answer: Callable[[], str | None] = lambda: None) -> str:
    """Return the standard output of a Slurm command.

    `find_answer` is called after an attempt that timed out. It returns the output if the attempt
    took effect.

    Raises:
        PipelineError: the command failed, with its message, or is not installed.
        Held: it did not respond or did not reach its controller, ATTEMPTS times.
    """
    if shutil.which(command[0]) is None:
        raise PipelineError(
            f"launcher=slurm needs {command[0]}, which is not installed here. Use launcher=local or"
            " launcher.dry_run=true."
        )
    reason = ""
    for _ in range(ATTEMPTS):
        try:
            status, out, message = run_command(command)
        except subprocess.TimeoutExpired:
            reason = f"did not respond within {SECONDS:g} s"
        else:
            if not status:
                return out
            reason = f"refused: {message}"
            if not UNREACHED.search(message):
                raise PipelineError(f"{command[0]} {reason}")
        answer = find_answer()
        if answer is not None:
            return answer
    raise Held(
        f"{command[0]} {reason}, {ATTEMPTS} times. Rerun the same command when Slurm responds."
    )


def run_command(command: Sequence[str]) -> tuple[int, str, str]:
    """Run a command and return (exit status, output, error message).

    The command has its own session: if Ctrl-C killed it, the id of the submitted job would be lost.
    After a timeout the processes that it started are killed too, because they would keep its output
    open.
    """
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            out, errors = process.communicate(timeout=SECONDS)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    message = [re.sub(r"^\w+: (error: )?", "", line) for line in (errors or out).splitlines()]
    return process.returncode, out, "; ".join(filter(None, message))
