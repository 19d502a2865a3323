"""What Slurm says: its commands, and which jobs are in its queue."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

from pipeline.errors import PipelineError

GONE = "its job was cancelled, or ended before it came to this run"


def check_installed(*tools: str) -> None:
    """Refuse a machine without these commands of Slurm."""
    for tool in tools:
        if shutil.which(tool) is None:
            raise PipelineError(f"launcher=slurm needs {tool}, which is not here: use launcher=local")


def in_queue() -> set[str]:
    """The tasks of this user's arrays that wait or run, 12_3."""
    return set(slurm("squeue", "--me", "--noheader", "--array", "--format=%i").split())


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


def slurm(*command: str) -> str:
    """What a command of Slurm prints. PipelineError with its words where it refuses, or where there is none.

    It is out of reach of a Ctrl-C: a job whose number is not heard would be nobody's.
    """
    check_installed(command[0])
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, start_new_session=True)
    if done.returncode:
        words = [re.sub(r"^\w+: (error: )?", "", line) for line in (done.stderr or done.stdout).splitlines()]
        raise PipelineError(f"{command[0]} refused: {'; '.join(filter(None, words))}")
    return done.stdout
