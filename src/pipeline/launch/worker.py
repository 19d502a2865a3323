"""A process that computes runs one after the other and keeps libraries and models in memory between them.

`python -m pipeline.launch.worker` reads elements (launch/run_json.py), one line of JSON each, from standard input and
answers each with a line `{hash, ended, reason, seconds}` on standard output; ended: finished, failed, held or stopped.
With a file, it computes the elements of one line, `{requeues, elements}`: that of its task in a Slurm array. Output of
a run is written to its log, `runs_dir/.logs/<label>-<hash8>.log`.
"""

from __future__ import annotations

from pipeline.runs.stop import UNFINISHED, answer_early, convert_errors_after_signal, handle_signals

if __name__ == "__main__":
    answer_early()

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pipeline.errors import PipelineError
from pipeline.hub.addresses import masked_output
from pipeline.launch.in_process import make_run, outcome, reason_of
from pipeline.launch.run_json import Element, run_of
from pipeline.launch.slurm_commands import queued_jobs, run_command
from pipeline.merge.resident import keep_models_resident
from pipeline.progress import quiet, redirected
from pipeline.runs import state
from pipeline.runs.folders import folder_name, folder_of
from pipeline.runs.lease import live_holder, slurm_job

LOGS = ".logs"


def log_of(element: Element) -> Path:
    return Path(element["config"]["runs_dir"]) / LOGS / f"{folder_name(element['label'], element['hash'])}.log"


@contextmanager
def log_to(file: Path) -> Iterator[None]:
    """Append all output of this process and its subprocesses to a file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "ab", buffering=0) as log, redirected(log.fileno(), 1, 2):
        yield


def make_element(element: Element) -> dict[str, Any]:
    """Compute the run of an element. Returns its answer: {hash, ended, reason, seconds}."""
    begun = time.perf_counter()

    def make() -> Path:
        with convert_errors_after_signal():
            return make_run(run_of(element), element.get("predicted_seconds"))

    try:
        answer = outcome(make)
    except SystemExit as error:
        if error.code != UNFINISHED:
            raise
        answer = {"ended": "stopped", "reason": None, "seconds": time.perf_counter() - begun}
    if answer["reason"]:
        with suppress(OSError):
            print(f"{answer['ended']}: {answer['reason']}", file=sys.stderr)
    return {"hash": element["hash"], **answer}


def answer_of(element: Element) -> dict[str, Any]:
    """As make_element, with a log; failing to write the log (another user's file, a full disk) is a failure too."""
    try:
        with log_to(log_of(element)):
            return make_element(element)
    except OSError as error:
        return {"hash": element["hash"], "ended": "failed", "reason": reason_of(error), "seconds": 0.0}


def end_with_the_parent() -> None:
    """Receive SIGTERM when the parent process dies (Linux: PR_SET_PDEATHSIG)."""
    parent = os.getppid()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)
    if os.getppid() != parent:
        raise SystemExit(UNFINISHED)


@masked_output()
def main() -> int:
    quiet()
    if len(sys.argv) > 1:
        return run_array_task(Path(sys.argv[1]))
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    end_with_the_parent()
    with handle_signals():
        with keep_models_resident():
            for line in iter(sys.stdin.readline, ""):
                answer = answer_of(json.loads(line))
                answers.write(json.dumps(answer) + "\n")
                if answer["ended"] == "stopped":
                    return UNFINISHED
    return 0


# ---------------------------------------------------------------------------------------------------- a task of Slurm


def run_array_task(file: Path) -> int:
    """Compute the runs of this task. Returns the exit status: 0 finished, 75 requeue, 1 failed or out of requeues."""
    with open(file, encoding="utf-8") as lines:
        task = next(line for number, line in enumerate(lines) if number == int(os.environ["SLURM_ARRAY_TASK_ID"]))
    record = json.loads(task)
    ended: list[str] = []
    with handle_signals():
        with keep_models_resident():
            for element in record["elements"]:
                ended.append(run_task_element(element))
                if ended[-1] == "stopped":
                    break
    counts = ", ".join(f"{count} {how}" for how, count in Counter(ended).items())
    print(f"{len(record['elements'])} runs: {counts}", file=sys.stderr)
    if not {"stopped", "held"} & set(ended):
        return int("failed" in ended)
    if int(os.environ.get("SLURM_RESTART_COUNT", 0)) >= record["requeues"]:
        print(f"not requeued: launcher.requeues={record['requeues']} are used up", file=sys.stderr)
        return 1
    return UNFINISHED


def run_task_element(element: Element) -> str:
    """How the run of an element ended; "held" also while a parent is running or in the queue."""
    runs_dir, restarts = Path(element["config"]["runs_dir"]), int(os.environ.get("SLURM_RESTART_COUNT", 0))
    workplace = runs_dir / ".work" / element["hash"]
    record = state.read_state(workplace)
    if restarts and record.get("state") == "failed" and record.get("job") == slurm_job():
        return "failed"  # before this task was requeued
    with suppress(OSError, subprocess.TimeoutExpired):  # job names are run names
        run_command(["scontrol", "update", f"JobId={slurm_job()}", f"JobName={element['label']}"])
    named = {parent.get("of", parent["hash"]): parent["name"] for parent in element["parents"].values()
             if "folder" not in parent}  # fmt: skip
    waits = {key: name for key, name in named.items() if folder_of(key, runs_dir) is None}
    failed = [name for key, name in waits.items() if not may_still_finish(workplace.with_name(key))]
    if waits:
        ended = "failed" if failed else "held"
        first = next(iter(failed or waits.values()))
        reason = f"its parent {first} {'was not made' if failed else 'is not finished yet'}"
        with suppress(OSError), log_to(log_of(element)):
            print(reason, file=sys.stderr)
    else:
        answer = answer_of(element)
        ended, reason = str(answer["ended"]), answer["reason"]
    if reason:
        print(f"{element['label']} {ended}: {reason}", file=sys.stderr)  # in the log of the job
    if ended == "failed" or waits:
        now = "waiting" if ended == "held" else "blocked" if waits else "failed"
        with suppress(OSError):
            workplace.mkdir(parents=True, exist_ok=True)
        state.update_state(workplace, state=now, last_line=reason, job=slurm_job())
    return ended


def may_still_finish(workplace: Path) -> bool:
    """Whether an unfinished run may still finish: a process holds its lease, or its job is in the queue."""
    record = state.read_state(workplace)
    if live_holder(workplace):
        return True
    try:
        return record.get("state") not in ("failed", "blocked") and record.get("job") in queued_jobs()
    except PipelineError:  # squeue does not respond here: the number of requeues is the bound
        return record.get("state") in ("running", "waiting", "stopped")


if __name__ == "__main__":
    sys.exit(main())
