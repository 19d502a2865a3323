"""The text of a job script, for launcher=slurm and for slurm/*.sbatch, which scripts/make_sbatch.py
writes.

The script forwards signals to the program and acts on its exit status. USR1 (before the time limit)
is handled from the first line on. After status 75 the job is requeued, unless TERM ended it: then
Slurm itself decides what is next.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from pipeline.runs.stop import EARLY

REQUEUE = """if [ "$STATUS" = 75 ] && [ -z "$ENDED" ]{condition}; then
  scontrol requeue {job} && sleep 60
fi"""
COMPLETED = '[ "$STATUS$ASKED$ENDED" != 75 ] || STATUS=0  # the jobs that it submitted continue'


def job_script(
    start: str,
    head: Sequence[str] = (),
    setup: Sequence[str] = (),
    on_usr1: str = 'kill -USR1 "$PID" 2>/dev/null',
    on_term: str = 'kill -TERM "$PID" 2>/dev/null',
    then: str = COMPLETED,
) -> str:
    """Return the text of a job script.

    Args: start: the command, as bash reads it. head: comments and #SBATCH lines. setup: lines of
    bash before the command. on_usr1, on_term: bash that notifies the running command ($PID). then:
    bash that runs after the command, with its $STATUS.
    """
    lines = [
        "#!/bin/bash",
        *head,
        "PID=; ASKED=; ENDED=",
        f"trap 'ASKED=1; [ -z \"$PID\" ] || {on_usr1}' USR1",
        f"trap 'ENDED=1; [ -z \"$PID\" ] || {on_term}' TERM",
        *setup,
        '[ -z "$ENDED" ] || exit 143',
        f'[ -z "$ASKED" ] || export {EARLY}=SIGUSR1; EARLY=$ASKED',
        f"{start} & PID=$!",
        f'[ "$ASKED" = "$EARLY" ] || {on_usr1}  # it came between these two lines',
        'while wait "$PID"; STATUS=$?; kill -0 "$PID" 2>/dev/null; do :; done',
        '[ "$STATUS" -le 128 ] || { wait "$PID"; STATUS=$?; }  # it ended while a trap ran',
        (
            'case "$ASKED:$STATUS" in 1:138|1:-1) STATUS=75 ;; esac  # USR1 before its handler; -1:'
            " bash lost the status"
        ),
        then,
        'exit "$STATUS"',
    ]
    return "\n".join([*lines, ""])


def requeue_lines(job: str, condition: str = "") -> str:
    """Bash that requeues a job after status 75. condition: a further condition, in bash."""
    return REQUEUE.format(job=job, condition=condition)


def quote_with_expansion(text: str) -> str:
    """Quote a bash word in which $NAME and a leading ~/ are expanded and all else is literal."""
    text = re.sub(r'[\\"`]|\$\(', r"\\\g<0>", text)
    return f'"{"$HOME" + text[1:] if text.startswith("~/") else text}"'
