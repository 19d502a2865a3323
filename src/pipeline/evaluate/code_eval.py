"""MBPP: a model's programs, each run with its tests in a separate confined process (confined.py).

This module decides the outcome from how the process ended and from one line that it wrote. From
that line it keeps only the name of a built-in exception. The line begins with a nonce, which no
object of the interpreter holds while the program runs. So a program cannot pass by what it prints,
raises or writes.

Forgery that targets this code is not stopped, because program and tests share an interpreter, as in
the stock task. A program can replace the values that its tests compare with, or do what confined.py
does at its end. In this way it can pass its own tests, but it cannot reach other problems, secrets
or processes.
"""

from __future__ import annotations

import builtins
import functools
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipeline.errors import PipelineError
from pipeline.files import cores

SECONDS, MEMORY = 10, 2**29  # limits of a program: seconds of computing, bytes
GRACE = 5  # further seconds by the clock: a program that waits uses no computing time
POLL, LOOKS = 0.5, 5  # after the grace time: seconds between polls, and checks in each poll

_SECRET = re.compile(
    r"(?:^|_)(?:API_?KEY|ACCESS_KEY|PRIVATE_KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS)$"
)


# An outcome is a constant below, NOT_CONFINED with the reason, or the name of the built-in
# exception that the program raised ("Exception" for other classes).
PASSED = "passed"  # the program and its tests reached their end
TIMED_OUT = "timed out"
KILLED = "killed"  # by a signal; or it exited early, or wrote no valid outcome
NOT_CONFINED = "not confined"  # it was not started


@functools.cache
def has_landlock() -> bool:
    """Return True if the kernel can hide files from a process.

    Needs Linux 5.13 or later, with Landlock enabled.
    """
    if sys.platform != "linux":
        return False
    from pipeline.evaluate.confined import landlock_version

    return landlock_version() > 0


def run_program(program: str, seconds: int = SECONDS, memory: int = MEMORY) -> str:
    """Run a program and return its outcome, never an exception.

    The program has an empty environment and no capabilities, and cannot write. With Landlock it
    reads only Python's own files, otherwise everything that the user may read (see
    `refuse_secrets`).

    `seconds` limits the computing time, and `memory` the bytes of memory.
    """
    nonce = secrets.token_hex(16)
    code = program.encode(errors="replace")
    limits = map(str, (seconds, memory, int(has_landlock()), len(code)))
    script = str(Path(__file__).with_name("confined.py"))
    child = subprocess.Popen(
        [sys.executable, "-I", "-S", "-B", script, *limits],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={},
        cwd="/",
        start_new_session=True,
    )
    assert child.stdin and child.stdout
    try:
        child.stdin.write(code + nonce.encode())
        child.stdin.close()
        status = wait_while_computing(child, seconds + GRACE)
        line = os.read(child.stdout.fileno(), 4096)
        return outcome_of(status, line, nonce)
    except subprocess.TimeoutExpired:
        return TIMED_OUT
    except BrokenPipeError:
        return KILLED
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


def wait_while_computing(child: subprocess.Popen[bytes], seconds: float) -> int:
    """Wait for a process and return its exit status.

    After `seconds` by the clock, a process that computes or waits for a core continues up to its
    limit of computing time. So its outcome does not depend on how many processes share the cores.

    Raises:
        subprocess.TimeoutExpired: The process waits for something else, such as a sleep.
    """
    try:
        return child.wait(seconds)
    except subprocess.TimeoutExpired:
        while is_computing(child.pid):
            with suppress(subprocess.TimeoutExpired):
                return child.wait(POLL)
        raise


def is_computing(pid: int) -> bool:
    """Return True if a process runs or waits for a core in any of a few checks."""
    for _ in range(LOOKS):
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(") ")[2][0]
        if state in "RZX":  # runnable, or ended meanwhile
            return True
        time.sleep(POLL / LOOKS)
    return False


def outcome_of(status: int, line: bytes, nonce: str) -> str:
    """Return the outcome of a process.

    Args:
        status: Its exit status, or minus the signal that ended it.
        line: The line that it wrote.
        nonce: The text that a genuine line begins with.
    """
    if status == -signal.SIGXCPU:
        return TIMED_OUT
    answer, _, exception_name = line.decode(errors="replace").partition(" ")
    outcome, _, detail = exception_name.partition(" ")
    if answer != nonce:
        return KILLED
    if status == 0 and exception_name == "passed":
        return PASSED
    if status == 1 and outcome == "raised":
        kind = getattr(builtins, detail, None)
        if isinstance(kind, type) and issubclass(kind, BaseException):
            return detail
        return "Exception"
    if status == 1 and outcome == "unconfined":
        return f"{NOT_CONFINED}: {detail}"
    return KILLED


def check_confinement() -> None:
    """Raise PipelineError if a harmless program cannot be confined on this machine."""
    refuse_secrets()
    program = "import math, re, heapq, collections, itertools\nassert math.gcd(4, 6) == 2"
    outcome = run_program(program)
    if outcome != PASSED:
        reason = outcome.removeprefix(f"{NOT_CONFINED}: ")
        raise PipelineError(
            f"eval.run_code=true: programs cannot be confined on this machine ({reason}). Use"
            " Linux on x86-64."
        )


def refuse_secrets() -> None:
    """Raise PipelineError if a program could read secrets because Landlock is missing.

    Without Landlock a program can read this process' environment and the user's files.
    """
    if has_landlock():
        return
    long = [name for name, value in os.environ.items() if len(value) >= 8]
    names = sorted(name for name in long if _SECRET.search(name.upper()))
    cache = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    hub_home = os.environ.get("HF_HOME", os.path.join(cache, "huggingface"))
    token_file = os.environ.get("HF_TOKEN_PATH", os.path.join(hub_home, "token"))
    for file in (os.environ.get("NETRC", "~/.netrc"), token_file):
        if Path(file).expanduser().is_file():
            names.append(file)
    if names:
        raise PipelineError(
            "eval.run_code=true: this kernel has no Landlock, so a model's programs could read"
            f" {', '.join(names)}. Remove these secrets for this evaluation, or use Linux 5.13 or"
            " later with Landlock."
        )


def code_of(response: str) -> str:
    """Return the program in an answer: its first fenced block, otherwise the whole answer.

    This is the rule of the stock task.
    """
    fenced = re.search(r"```(?:\w+)?\n(.*?)(?:```|\Z)", response, re.DOTALL)
    if fenced:
        return fenced[1]
    return response


def outcomes(responses: Sequence[Sequence[str]], docs: Sequence[dict[str, Any]]) -> list[str]:
    """Run each answer's program with its tests and return the outcomes.

    A filter of the harness (tasks/mbpp.yaml).
    """
    programs = []
    for answers, doc in zip(responses, docs, strict=True):
        tests = "\n".join(doc["test_list"])
        programs.append(f"{code_of(answers[0])}\n{tests}")
    with ThreadPoolExecutor(cores()) as pool:
        return list(pool.map(run_program, programs))


def passed(doc: dict[str, Any], results: Sequence[str]) -> dict[str, float]:
    """Return pass@1 of one problem. Named by tasks/mbpp.yaml."""
    return {"pass_at_1": float(results[0] == PASSED)}
