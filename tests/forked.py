"""Programs in their own processes that begin with torch imported.

Each would otherwise spend seconds on the import. They are forked from a process that has imported
neither Hugging Face nor the pipeline, because these read the environment.
"""

import atexit
import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "torch._dynamo",
        "torch.distributed.fsdp",
        "torch.distributed.tensor",
        "pandas",
        "pyarrow.dataset",
        "scipy.stats",
    ]
    + ["scipy.optimize", "wandb", "torch._inductor.utils"]
)


ENVIRONMENT = dict(os.environ)  # that of no test
FORWARDED = (
    signal.SIGTERM,
    signal.SIGUSR1,
)  # to all children of a process that trains, of which a server may be one


def start_server() -> None:
    """Start the process that all programs are forked from, without a test's environment."""
    with patch.dict(os.environ, ENVIRONMENT, clear=True):
        forkserver.ensure_running()


def started(
    words: tuple[str, ...],
    files: list[Path],
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Any:
    """Start `python WORDS` with files as standard input, output and error."""
    start_server()
    process = CONTEXT.Process(
        target=_run, args=(words, dict(os.environ if env is None else env), cwd, files)
    )
    process.start()
    return process


def popen(
    command: list[str], stdout: Any, stderr: Any, env: Mapping[str, str], start_new_session: bool
) -> Any:
    """In place of subprocess.Popen, whose output goes to open files."""
    process = started(
        tuple(command[1:]), [Path(os.devnull), Path(stdout.name), Path(stderr.name)], env
    )
    return SimpleNamespace(pid=process.pid, poll=lambda: process.exitcode, wait=process.join)


def python(
    *words: str,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    given: str = "",
    timeout: float = 300,
    after: str = "",
) -> subprocess.CompletedProcess[str]:
    """Run `python WORDS` and return its exit status and output.

    WORDS are -c CODE ... or -m MODULE ... `after` are imports that commands share. One process for
    each environment of Hugging Face executes them and forks the commands.
    """
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("in", "out", "err")]
        files[0].write_text(given)
        if after:
            there = dict(os.environ if env is None else env)
            server = _server(
                after, tuple(sorted(item for item in there.items() if item[0].startswith("HF_")))
            )
            server.send((words, there, cwd, files))
            pid = server.recv()
            exitcode = server.recv() if server.poll(timeout) else None
        else:
            process = started(words, files, env, cwd)
            process.join(timeout)
            pid, exitcode = process.pid, process.exitcode
        if exitcode is None:
            os.kill(pid, signal.SIGKILL)
            raise subprocess.TimeoutExpired(words, timeout)
        told = [file.read_text(encoding="utf-8") if file.exists() else "" for file in files[1:]]
        return subprocess.CompletedProcess(words, exitcode, *told)


@cache
def _server(after: str, of_hugging_face: tuple[tuple[str, str], ...]) -> Connection:
    """Return the pipe to a process that executes `after` and then forks commands."""
    start_server()
    here, there = CONTEXT.Pipe()
    env = {name: value for name, value in ENVIRONMENT.items() if not name.startswith("HF_")}
    CONTEXT.Process(target=_serve, args=(there, after, env | dict(of_hugging_face))).start()
    there.close()
    atexit.register(here.close)
    return here


def _serve(commands: Connection, after: str, env: dict[str, str]) -> None:
    for number in FORWARDED:
        signal.signal(number, signal.SIG_IGN)
    _set_environment(env)
    exec(after, {})
    with suppress(EOFError):
        while True:
            process = multiprocessing.get_context("fork").Process(target=_run, args=commands.recv())
            process.start()
            commands.send(process.pid)
            process.join()
            commands.send(process.exitcode)


def _set_environment(env: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(env)
    sys.path[:0] = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]


def _run(words: tuple[str, ...], env: dict[str, str], cwd: Path | None, files: list[Path]) -> None:
    gc.freeze()  # what is imported already is not searched for garbage
    for number in FORWARDED:
        signal.signal(number, signal.SIG_DFL)
    os.setsid()
    _set_environment(env)
    for number, file in enumerate(files):
        os.dup2(
            os.open(file, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_APPEND),
            number,
        )
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    if cwd:
        os.chdir(cwd)
    how, what, *rest = words
    sys.argv = [how, *rest]
    try:
        if how == "-c":
            exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
        else:
            runpy.run_module(what, run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()  # which multiprocessing leaves out
