"""Commands of stage=check in processes of their own: ended in time, killed on purpose, and the probe of devices."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pipeline.config.compose import compose
from pipeline.config.stages import TrainStage
from pipeline.errors import PipelineError
from pipeline.estimate import cpu
from pipeline.files import added_conf
from pipeline.launch.in_process import error_sentence, refuse_without_gpus
from pipeline.runs.provenance import environment_for

REDUCED = 2**26  # numbers that the processes add up, 256 MB


class Wrong(PipelineError):
    """The line that is being checked is wrong; the message says why."""


@contextmanager
def started(
    log: Path, words: Sequence[str], code: Sequence[str] = ("-m", "pipeline")
) -> Iterator[subprocess.Popen[str]]:
    """Context of a command in a process group of its own, which is killed at the end if it is still there."""
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, *code, *words, *(f"--config-dir={path}" for path in added_conf())]
    environment = {**environment_for(None), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    options: Any = {"stdout": subprocess.PIPE, "text": True, "env": environment, "start_new_session": True}
    with open(log, "w") as file:
        process = subprocess.Popen(command, stderr=file, **options)
    try:
        yield process
    finally:
        kill_group(process)


def kill_group(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def finished(process: subprocess.Popen[str], log: Path, limit: float) -> str:
    """Standard output of a process that ends well within `limit` seconds. Raises Wrong otherwise."""
    try:
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired as error:
        kill_group(process)
        raise Wrong(f"no end within {limit:.0f} s, last printed: {last_line(log)}") from error
    if process.returncode:
        raise Wrong(last_line(log) or f"exit status {process.returncode}")
    return output


def last_lines(log: Path, count: int = 20) -> list[str]:
    """The last lines that a command printed; none where it has not begun."""
    text = log.read_text(errors="replace") if log.is_file() else ""
    lines = [line.rpartition("\r")[2].rstrip() for line in text.splitlines()]
    return [line for line in lines if line][-count:]


def last_line(log: Path) -> str:
    """The error that a command printed, else its last line."""
    lines = last_lines(log)
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (errors or lines or [""])[-1]


def kill_after_resume_point(process: subprocess.Popen[str], runs_dir: Path, limit: float) -> bool:
    """Kill a training as soon as it has a resume point. False where it ended before, or has none in `limit` seconds."""
    end = time.monotonic() + limit
    while process.poll() is None and time.monotonic() < end:
        if any(runs_dir.glob(".work/*/*/resume.json")):
            kill_group(process)
            return any(runs_dir.glob(".work/*/*/resume.json"))  # removed when a training ends
        time.sleep(0.005)
    return False


def probe_main() -> None:
    """Print the facts of the devices as JSON: the command of the line `devices`, with the words of a training."""
    from pipeline.train.processes import train_together

    try:
        config = compose(sys.argv[1:])
        assert isinstance(config, TrainStage)
        run: Any = SimpleNamespace(config=config, name="stage=check", label="check")
        refuse_without_gpus([run])
        facts: Any = train_together(probe, run, Path("."), None)  # type: ignore[arg-type]
    except Exception as error:
        sentence = error_sentence(error)
        if sentence is None:
            raise
        print(f"error: {sentence}", file=sys.stderr)
        sys.exit(1)
    print(json.dumps(facts))


def probe(run: Any, work: Path, tracker: Any) -> dict[str, Any]:
    """Facts of all processes, which take their devices and their backend as in a training."""
    import torch
    from accelerate import PartialState

    cuda = torch.cuda.is_available()
    state = PartialState(cpu=not cuda)
    device = state.device
    numbers = torch.full((REDUCED if cuda else 1024,), float(state.process_index + 1), device=device)
    seconds = None
    if state.num_processes > 1:
        torch.distributed.all_reduce(numbers)
        if cuda:
            again = torch.zeros_like(numbers)
            torch.cuda.synchronize()
            begun = time.perf_counter()
            torch.distributed.all_reduce(again)
            torch.cuda.synchronize()
            seconds = time.perf_counter() - begun
    properties = torch.cuda.get_device_properties(device) if cuda else None
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) if cuda else cpu.memory()
    facts = {
        "rank": state.process_index, "sum": [numbers[0].item(), numbers[-1].item()],
        "uuid": str(getattr(properties, "uuid", device)), "name": properties.name if properties else "the CPU",
        "memory": properties.total_memory if properties else cpu.memory(), "free": free,
    }  # fmt: skip
    ranks: list[Any] = [facts] * state.num_processes
    if state.num_processes > 1:
        torch.distributed.all_gather_object(ranks, facts)
    nccl = torch.cuda.nccl.version() if cuda else None
    return {
        "ranks": ranks, "backend": str(state.backend or "no backend"), "cuda": torch.version.cuda if cuda else None,
        "nccl": ".".join(map(str, nccl)) if nccl else None,
        "gigabytes_a_second": numbers.nbytes / seconds / 1e9 if seconds else None,
    }  # fmt: skip
