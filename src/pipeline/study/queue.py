"""What Slurm says: its commands, and which jobs are in its queue."""

from __future__ import annotations

import subprocess
from pathlib import Path

from pipeline.errors import PipelineError


def in_queue() -> set[str]:
    """The tasks of this user's arrays that wait or run, 12_3."""
    return set(slurm("squeue", "--me", "--noheader", "--array", "--format=%i").split())


def last_words(log: Path) -> str | None:
    """The last line of a job's own log: why it ended before it came to a run, on a node without Python for one."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return None
    return next((line.strip() for line in reversed(lines) if line.strip()), None)


def slurm(*command: str) -> str:
    """What a command of Slurm prints. PipelineError with its words where it refuses, or where there is none."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    except FileNotFoundError as error:
        raise PipelineError(f"launcher=slurm needs {command[0]}, which is not here: use launcher=local") from error
    if done.returncode:
        words = " ".join((done.stderr or done.stdout).split())
        raise PipelineError(f"{command[0]} refused: {words}")
    return done.stdout
