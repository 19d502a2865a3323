"""Programs in processes of their own that begin with torch imported, which each would otherwise spend seconds on.

They are forked from a process that has imported nothing of Hugging Face, nor of the pipeline: these read the
environment, which may be another here.
"""

import atexit
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor", "pandas", "pyarrow.dataset", "scipy.stats"]
    + ["scipy.optimize", "wandb", "torch._inductor.utils"]
)


def started(
    words: tuple[str, ...], files: list[Path], env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> Any:
    """The process of `python WORDS`, its standard input, output and error being files."""
    process = CONTEXT.Process(target=_run, args=(words, dict(os.environ if env is None else env), cwd, files))
    process.start()
    return process


def popen(command: list[str], stdout: Any, stderr: Any, env: Mapping[str, str], start_new_session: bool) -> Any:
    """In place of subprocess.Popen, whose output goes to open files."""
    process = started(tuple(command[1:]), [Path(os.devnull), Path(stdout.name), Path(stderr.name)], env)
    return SimpleNamespace(pid=process.pid, poll=lambda: process.exitcode, wait=process.join)


def python(
    *words: str, env: Mapping[str, str] | None = None, cwd: Path | None = None, given: str = "", timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """What `python WORDS` ends with and prints, where the words are -c CODE ... or -m MODULE ..."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("in", "out", "err")]
        files[0].write_text(given)
        process = started(words, files, env, cwd)
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            raise subprocess.TimeoutExpired(words, timeout)
        told = [file.read_text(encoding="utf-8") if file.exists() else "" for file in files[1:]]
        return subprocess.CompletedProcess(words, process.exitcode, *told)


def _run(words: tuple[str, ...], env: dict[str, str], cwd: Path | None, files: list[Path]) -> None:
    os.setsid()
    os.environ.clear()
    os.environ.update(env)
    sys.path[:0] = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    for number, file in enumerate(files):
        os.dup2(os.open(file, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
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
