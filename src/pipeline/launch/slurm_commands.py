"""Runs Slurm's commands, which may be slow or print extra lines, and parses the jobs in its
queue.
"""

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

SECONDS, ATTEMPTS = 30.0, 3  # timeout of a Slurm command, and how often it is tried
PREFIX = "pipeline:"  # starts the lines of squeue that are parsed: sites print lines of their own
UNREACHED = re.compile("Unable to contact|[Tt]imed out|temporarily unable", re.ASCII)
JOB_LOST = "its job was cancelled, or ended before it came to this run"


def queued_jobs() -> dict[str, str]:
    """Pending and running jobs of this user: id (arrays task by task, 12_3) -> script."""
    text = run_slurm("squeue", "--me", "--noheader", "--array", f"--format={PREFIX}%i|%o")
    return dict(re.findall(rf"^{PREFIX}(\d+(?:_\d+)?)\|(.*)$", text, re.MULTILINE))


def submitted_as(script: Path) -> str | None:
    """Id of the queued job of a script; None if there is none."""
    return next(
        (job.partition("_")[0] for job, command in queued_jobs().items() if command == str(script)),
        None,
    )


def sbatch(script: Path, *options: str) -> str:
    """Submit a script. Returns the job id.

    A command that did not respond may still have submitted it, so the queue is searched before the
    next attempt, and also if the id cannot be parsed from the output of a site's wrapper.

    Raises:
        PipelineError: Slurm rejected it, or the id cannot be determined.
        Held: it did not respond.
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
            f"sbatch printed {output!r} and no job id, and squeue lists no job of {script}: run"
            " squeue --me"
        )
    return job


def parse_time_limit(limit: str) -> float:
    """Seconds of a limit: minutes[:seconds], hours:minutes:seconds or
    days-hours[:minutes[:seconds]], as of sbatch.
    """
    days, dash, clock = limit.rpartition("-")
    parts = [float(part) for part in clock.split(":")]
    units = (3600, 60, 1) if dash or len(parts) == 3 else (60, 1)
    return 86400 * float(days or 0) + sum(
        part * unit for part, unit in zip(parts, units, strict=False)
    )


def seconds_left(job: str) -> float:
    """Seconds until the time limit of a running job, infinite without one; 0 where Slurm does not
    say.
    """
    with suppress(OSError, subprocess.TimeoutExpired, ValueError):
        _, text, _ = run_command(["squeue", "--noheader", f"--job={job}", f"--format={PREFIX}%L"])
        limit_text = "".join(re.findall(rf"^{PREFIX}(\S+)$", text, re.MULTILINE))
        if limit_text == "UNLIMITED":
            return math.inf
        return parse_time_limit(limit_text)
    return 0.0


def last_log_line(log: Path | None) -> str | None:
    """Return the last line of a job's log: why it failed before it started a run.

    None if there is no log, or the job was cancelled or stopped by a signal before.
    """
    lines: list[str] = []
    with suppress(OSError):
        text = ""
        if log:
            text = log.read_text(encoding="utf-8", errors="replace")
        lines = []
        for line in text.splitlines():
            if line.strip():
                lines.append(line.strip())
    cancelled = any("CANCELLED AT" in line and "REQUEUE" not in line for line in lines[-5:])
    if cancelled or not lines or re.match(r"\d+ runs?: ", lines[-1]):
        return None
    return lines[-1]


def run_slurm(*command: str, find_answer: Callable[[], str | None] = lambda: None) -> str:
    """Standard output of a Slurm command.

    find_answer: called after an attempt that did not respond; returns the output if the attempt
        took effect.

    Raises:
        PipelineError: it failed (has its message), or is not installed.
        Held: it did not respond, or could not reach its controller, ATTEMPTS times.
    """
    if shutil.which(command[0]) is None:
        raise PipelineError(
            f"launcher=slurm needs {command[0]}, which is not here: use launcher=local, or"
            " launcher.dry_run=true"
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
        f"{command[0]} {reason}, {ATTEMPTS} times; rerun the same command when Slurm responds"
    )


def run_command(command: Sequence[str]) -> tuple[int, str, str]:
    """(exit status, output, error message) of a command.

    It runs in its own session, because after a Ctrl-C nobody would know the id of the submitted
    job. On a timeout the processes that it started are killed too, as they would keep its output
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
