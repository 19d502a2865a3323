"""The text of a job script, for launcher=slurm and for slurm/*.sbatch.

The script forwards signals to the program and acts on its exit status. It handles USR1, which
arrives before the time limit, from its first line on. After status 75 the job is requeued, unless
TERM ended it: then Slurm decides what happens next.
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

    Args:
        start: the command, as bash reads it.
        head: comments and #SBATCH lines.
        setup: lines of bash before the command.
        on_usr1: bash that notifies the running command ($PID) of USR1.
        on_term: the same for TERM.
        then: bash that runs after the command, with its $STATUS.
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
    """Return bash that requeues a job after status 75.

    Args:
        job: the job's id, in bash.
        condition: a further condition, in bash.
    """
    return REQUEUE.format(job=job, condition=condition)


def quote_with_expansion(text: str) -> str:
    """Quote a bash word, but expand $NAME and a leading ~/."""
    text = re.sub(r'[\\"`]|\$\(', r"\\\g<0>", text)
    if text.startswith("~/"):
        text = "$HOME" + text[1:]
    return f'"{text}"'
