"""MBPP: programs that a model wrote, run against their tests, each in a confined process of its own
(confined.py).

The outcome is decided here, from how the process ended and from one line that it wrote, of which
nothing but the name of a built-in exception is kept. The line begins with a nonce, which no object
of the interpreter holds while the program runs: what it prints, raises or writes is no pass. Not
stopped is forgery that is meant for this very code: program and tests share an interpreter, as in
the stock task, so that a program can replace what its tests compare with, or do what confined.py
does at its end. It so claims a pass for itself; it reaches no other problem, secret or process.
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

SECONDS, MEMORY = 10, 2**29  # a program may compute so long, and use so many bytes
# seconds more by the clock, after which a program that waits is ended: waiting costs no computing
# time
GRACE = 5
POLL, LOOKS = 0.5, 5  # seconds between looks at a program beyond that, and looks in them

_SECRET = re.compile(
    r"(?:^|_)(?:API_?KEY|ACCESS_KEY|PRIVATE_KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS)$"
)


# What came of a program: one of these, NOT_CONFINED with the reason, or the name of the built-in
# exception that left it (others are Exception).
PASSED = "passed"  # it reached its end, the tests after it included
TIMED_OUT = "timed out"
KILLED = "killed"  # by a signal; or it left by itself before its end, or wrote what is no outcome
NOT_CONFINED = "not confined"  # it was not begun


@functools.cache
def has_landlock() -> bool:
    """Whether this kernel can keep a process from files: Linux 5.13 or later, with Landlock on."""
    if sys.platform != "linux":
        return False
    from pipeline.evaluate.confined import landlock_version

    return landlock_version() > 0


def run_program(program: str, seconds: int = SECONDS, memory: int = MEMORY) -> str:
    """Run a program and return its outcome, never an exception.

    It computes `seconds` at most, has `memory` bytes, an empty environment and no capabilities, and
    writes nothing. With Landlock it reads only Python's own files; without, what the user may read
    (see `refuse_secrets`).
    """
    nonce, code = secrets.token_hex(16), program.encode(errors="replace")
    arguments = map(str, (seconds, memory, int(has_landlock()), len(code)))
    child = subprocess.Popen(
        [
            sys.executable,
            "-I",
            "-S",
            "-B",
            str(Path(__file__).with_name("confined.py")),
            *arguments,
        ],
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
        return outcome_of(status, os.read(child.stdout.fileno(), 4096), nonce)
    except subprocess.TimeoutExpired:
        return TIMED_OUT
    except BrokenPipeError:
        return KILLED
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


def wait_while_computing(child: subprocess.Popen[bytes], seconds: float) -> int:
    """The exit status.

    After `seconds` by the clock a process that still computes, or waits for a core, is left to its
    limit of computing time, so that its outcome does not depend on how many others share the cores.

    Raises:
        subprocess.TimeoutExpired: it waits for something else, as a sleeping one does.
    """
    try:
        return child.wait(seconds)
    except subprocess.TimeoutExpired:
        while is_computing(child.pid):
            with suppress(subprocess.TimeoutExpired):
                return child.wait(POLL)
        raise


def is_computing(pid: int) -> bool:
    """Whether a process runs or waits for a core, in one of a few looks."""
    for _ in range(LOOKS):
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(") ")[2][0]
        if state in "RZX":  # runnable; or ended meanwhile
            return True
        time.sleep(POLL / LOOKS)
    return False


def outcome_of(status: int, line: bytes, nonce: str) -> str:
    """Return the outcome of a process by its exit status (minus the signal that ended it) and the
    line that it wrote.
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
        is_builtin = isinstance(kind, type) and issubclass(kind, BaseException)
        if is_builtin:
            return detail
        return "Exception"
    if status == 1 and outcome == "unconfined":
        return f"{NOT_CONFINED}: {detail}"
    return KILLED


def check_confinement() -> None:
    """Raise PipelineError where programs cannot be confined on this machine, found with one that
    does no harm.
    """
    refuse_secrets()
    begun = run_program(
        "import math, re, heapq, collections, itertools\nassert math.gcd(4, 6) == 2"
    )
    if begun != PASSED:
        reason = begun.removeprefix(f"{NOT_CONFINED}: ")
        raise PipelineError(
            f"eval.run_code=true: programs cannot be confined here ({reason}): use Linux on x86-64"
        )


def refuse_secrets() -> None:
    """Raise PipelineError where secrets are in the environment: without Landlock a program can read
    it, and the user's files.
    """
    if has_landlock():
        return
    secrets = sorted(
        name
        for name, value in os.environ.items()
        if _SECRET.search(name.upper()) and len(value) >= 8
    )
    home = os.environ.get(
        "HF_HOME", os.path.join(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface")
    )
    files = (
        os.environ.get("NETRC", "~/.netrc"),
        os.environ.get("HF_TOKEN_PATH", os.path.join(home, "token")),
    )
    for file in files:
        if Path(file).expanduser().is_file():
            secrets.append(file)
    if secrets:
        raise PipelineError(
            "eval.run_code=true: this kernel has no Landlock, so programs of a model could read"
            f" {', '.join(secrets)}: take what is secret away for this evaluation, or use Linux"
            " 5.13 or later with Landlock"
        )


def code_of(response: str) -> str:
    """Return the program in an answer: its first fenced block if it has one, else all of it, as in
    the stock task.
    """
    fenced = re.search(r"```(?:\w+)?\n(.*?)(?:```|\Z)", response, re.DOTALL)
    if fenced:
        return fenced[1]
    return response


def outcomes(responses: Sequence[Sequence[str]], docs: Sequence[dict[str, Any]]) -> list[str]:
    """For each answer what came of its program with the tests after it.

    A filter of the harness (tasks/mbpp.yaml).
    """
    programs = [
        code_of(answers[0]) + "\n" + "\n".join(doc["test_list"])
        for answers, doc in zip(responses, docs, strict=True)
    ]
    with ThreadPoolExecutor(cores()) as pool:
        return list(pool.map(run_program, programs))


def passed(doc: dict[str, Any], results: Sequence[str]) -> dict[str, float]:
    """pass@1 of one problem. Named by tasks/mbpp.yaml."""
    return {"pass_at_1": float(results[0] == PASSED)}
