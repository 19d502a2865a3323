"""MBPP: programs that a model wrote, run against their tests, each in a confined process of its own (confined.py)."""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pipeline.knobs import PipelineError

SECONDS, MEMORY = 10, 2**29  # a program may compute so long, and use so many bytes
GRACE = 5  # seconds more by the clock: waiting costs no computing time
PASSED = "passed"

# What a confined program must not be able to do, each tried before a model is loaded.
_ESCAPES = {
    "reach the network": "import socket\nsocket.socket()",
    "write files": "open('/escaped', 'w')",
    "remove files": "import os\nos.rmdir('/no such folder')",
    "start processes": "import os\nos.fork()",
    "signal processes": "import os\nos.kill(os.getppid(), 0)",
    "take all memory": "bytearray(2**31)",
    "run for ever": "while True: pass",
}
_REFUSALS = {"take all memory": ("MemoryError",), "run for ever": ("timed out", "killed")}


def run(program: str, seconds: int = SECONDS, memory: int = MEMORY) -> str:
    """What comes of a program: passed (it reached its end), the name of its error, timed out, or killed.

    It computes `seconds` at most, has `memory` bytes and a bare environment, and writes nothing. Files it may read, as
    imports do, but of what it reads it can tell no more than the name of a built-in error.
    """
    password = secrets.token_hex(16)
    child = subprocess.Popen(
        [sys.executable, "-I", "-S", "-B", str(Path(__file__).with_name("confined.py")), str(seconds), str(memory)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        env={}, cwd="/", start_new_session=True,
    )  # fmt: skip
    assert child.stdin and child.stdout
    try:
        child.stdin.write(f"{password}\n{program}".encode(errors="replace"))
        child.stdin.close()
        child.wait(seconds + GRACE)
        told = os.read(child.stdout.fileno(), 4096).decode(errors="replace")
    except subprocess.TimeoutExpired:
        return "timed out"
    except BrokenPipeError:
        return "killed"
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
    if told.startswith("not confined"):
        raise PipelineError(f"eval.run_code=true: programs cannot be confined here ({told}): use Linux on x86-64")
    return PASSED if told == password else told or "killed"


def check_confinement() -> None:
    """Try to escape. Raises PipelineError where programs cannot be confined on this machine."""

    def escape(what: str) -> str | None:
        seconds = 1 if what == "run for ever" else SECONDS
        found = run(_ESCAPES[what], seconds)
        return None if found in _REFUSALS.get(what, ("PermissionError",)) else what

    with ThreadPoolExecutor(len(_ESCAPES)) as pool:
        escaped = [what for what in pool.map(escape, _ESCAPES) if what]
    if run("import math, re, heapq, collections, itertools\nassert math.gcd(4, 6) == 2") != PASSED:
        raise PipelineError("eval.run_code=true: a confined program cannot even compute here: use Linux on x86-64")
    if escaped:
        raise PipelineError(
            f"eval.run_code=true: programs of a model could {', '.join(escaped)} on this machine: use Linux on x86-64"
        )


def code_of(response: str) -> str:
    """The program in an answer: its first fenced block where it has one, else all of it, as in the stock task."""
    fenced = re.search(r"```(?:\w+)?\n(.*?)(?:```|\Z)", response, re.DOTALL)
    return fenced[1] if fenced else response


def outcomes(responses: Sequence[Sequence[str]], docs: Sequence[dict[str, Any]]) -> list[str]:
    """For each answer what came of its program with the tests after it. A filter of the harness (tasks/mbpp.yaml)."""
    programs = [
        code_of(answers[0]) + "\n" + "\n".join(doc["test_list"]) for answers, doc in zip(responses, docs, strict=True)
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(run, programs))


def passed(doc: dict[str, Any], results: Sequence[str]) -> dict[str, float]:
    """pass@1 of one problem. Named by tasks/mbpp.yaml."""
    return {"pass_at_1": float(results[0] == PASSED)}
