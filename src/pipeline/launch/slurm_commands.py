"""Slurm's commands, which may be slow or print more than their answer, and the jobs in its queue."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from pipeline.errors import Held, PipelineError

SECONDS, ATTEMPTS = 30.0, 3  # that a command of Slurm may take, and how often it is run
OURS = "pipeline:"  # begins a line of squeue that answers a question of ours: sites print lines of their own
UNREACHED = re.compile("Unable to contact|[Tt]imed out|temporarily unable", re.ASCII)
GONE = "its job was cancelled, or ended before it came to this run"


def check_installed(*tools: str) -> None:
    """Refuse a machine without these commands of Slurm."""
    for tool in tools:
        if shutil.which(tool) is None:
            raise PipelineError(f"launcher=slurm needs {tool}, which is not here: use launcher=local")


class NoAnswer(Held):
    """A command of Slurm did not respond, several times; the same command may be run later (exit status 75)."""


def in_queue() -> dict[str, str]:
    """The jobs of this user that wait or run, arrays task by task (12_3), and the script of each."""
    text = slurm("squeue", "--me", "--noheader", "--array", f"--format={OURS}%i|%o")
    return dict(re.findall(rf"^{OURS}(\d+(?:_\d+)?)\|(.*)$", text, re.MULTILINE))


def seconds_left(job: str) -> float | None:
    """Until a job's time limit; before it starts, its whole limit. None where it has none, or squeue does not say."""
    text = slurm("squeue", "--noheader", f"--jobs={job}", f"--format={OURS}%L")
    found = re.search(rf"^{OURS}([\d:-]+)\s*$", text, re.MULTILINE)
    return seconds_of(found[1]) if found else None


def submitted_as(script: Path) -> str | None:
    """The id of the job of a script that is in the queue."""
    return next((job.partition("_")[0] for job, command in in_queue().items() if command == str(script)), None)


def sbatch(script: Path, *options: str) -> str:
    """Submit a script. Gives the id of its job.

    A command that did not respond may have submitted it all the same, so the queue is searched before the next attempt;
    there the id is found, too, that is not told from other output, of a site's wrapper.

    Raises:
        PipelineError: Slurm refuses, or the id cannot be told.
        NoAnswer: it did not respond.
    """
    text = slurm("sbatch", "--parsable", *options, str(script), done=lambda: submitted_as(script))
    ids = set(re.findall(r"^(\d+)(?:;[\w.-]+)?$", text, re.MULTILINE))
    job = ids.pop() if len(ids) == 1 else submitted_as(script)
    if job is None:
        told = " ".join(text.split())[:200]
        raise PipelineError(
            f"sbatch printed {told!r} and no job id, and squeue lists no job of {script}: run squeue --me"
        )
    return job


def seconds_of(limit: str) -> float:
    """A limit as sbatch reads it: minutes[:seconds], hours:minutes:seconds, days-hours[:minutes[:seconds]]."""
    days, dash, rest = limit.rpartition("-")
    parts = [float(part) for part in rest.split(":") if re.fullmatch(r"\d+", part)]
    if not 1 <= len(parts) <= 3 or len(parts) != len(rest.split(":")) or (dash and not days.isdigit()):
        forms = "hours:minutes:seconds or days-hours, 24:00:00 or 2-12"
        raise PipelineError(f"launcher.time={limit} is not a time limit: write {forms}")
    units = (3600, 60, 1) if dash or len(parts) == 3 else (60, 1)
    return 86400 * float(days or 0) + sum(part * unit for part, unit in zip(parts, units, strict=False))


def last_words(log: Path) -> str | None:
    """The last line of a job's own log: why it failed before it came to a run, on a node without Python for one.

    None where it did not fail: it was cancelled or asked to stop before.
    """
    try:
        text = log.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    cancelled = any("CANCELLED AT" in line and "REQUEUE" not in line for line in lines[-5:])
    return None if cancelled or not lines or re.match(r"\d+ runs?: ", lines[-1]) else lines[-1]


def slurm(*command: str, done: Callable[[], str | None] = lambda: None) -> str:
    """What a command of Slurm prints.

    done: the answer, where a call before, which did not respond, did what was asked.

    Raises:
        PipelineError: it refuses, in its words, or is not installed.
        NoAnswer: ATTEMPTS times it did not respond, or could not reach its controller.
    """
    check_installed(command[0])
    told = ""
    for _ in range(ATTEMPTS):
        try:
            status, out, words = run(command)
        except subprocess.TimeoutExpired:
            told = f"did not respond within {SECONDS:g} s"
        else:
            if not status:
                return out
            told = f"refused: {words}"
            if not UNREACHED.search(words):
                raise PipelineError(f"{command[0]} {told}")
        if (answer := done()) is not None:
            return answer
    raise NoAnswer(f"{command[0]} {told}, {ATTEMPTS} times; rerun the same command when Slurm responds")


def run(command: Sequence[str]) -> tuple[int, str, str]:
    """Exit status, output and error words of a command. Out of reach of a Ctrl-C: a job whose number is not heard would
    be nobody's. With it end the processes that it started, which would hold its output open."""
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
        start_new_session=True,
    ) as process:  # fmt: skip
        try:
            out, errors = process.communicate(timeout=SECONDS)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    words = [re.sub(r"^\w+: (error: )?", "", line) for line in (errors or out).splitlines()]
    return process.returncode, out, "; ".join(filter(None, words))
