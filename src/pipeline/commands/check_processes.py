"""Commands of stage=check in processes of their own: ended in time, killed on purpose, and the probe of devices."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pipeline.config.compose import compose
from pipeline.errors import PipelineError
from pipeline.estimate import cpu
from pipeline.files import config_dir_flags
from pipeline.launch.in_process import error_sentence, refuse_without_gpus
from pipeline.runs.provenance import environment_for

REDUCED = 2**26  # numbers that the processes add up, 256 MB


class Wrong(PipelineError):
    """The line that is being checked is wrong; the message says why."""


def run_command(
    log: Path, overrides: Sequence[str], limit: float, code: Sequence[str] = ("-m", "pipeline"),
    until: Callable[[], bool] = lambda: False,
) -> str | None:  # fmt: skip
    """Standard output of a command, in a process group of its own that is killed where it takes more than `limit`
    seconds; None where it was killed as soon as `until` was true. Raises Wrong for one that fails, or is late."""
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, *code, *overrides, *config_dir_flags()]
    environment = {**environment_for(None), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    end, output = time.monotonic() + limit, log.with_suffix(".out")
    with open(log, "w") as errors, open(output, "w") as printed:
        process = subprocess.Popen(command, stdout=printed, stderr=errors, env=environment, start_new_session=True)
        try:
            while (status := process.poll()) is None and time.monotonic() < end and not until():
                time.sleep(0.005)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if status is None and time.monotonic() < end:
        return None if until() else ""  # where it had ended just before
    lines = last_lines(log)
    message = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), "".join(lines[-1:]))
    if status is None:
        raise Wrong(f"no end within {limit:.0f} s, last printed: {message}")
    if status:
        raise Wrong(message or f"exit status {status}")
    return output.read_text()


def last_lines(log: Path) -> list[str]:
    """The last twenty lines that a command printed; none where it has not begun."""
    text = log.read_text(errors="replace") if log.is_file() else ""
    lines = [line.rpartition("\r")[2].rstrip() for line in text.splitlines()]
    return list(filter(None, lines))[-20:]


def probe_main() -> None:
    """Print the facts of the devices as JSON: the command of the line `devices`, with the words of a training."""
    from pipeline.train.processes import train_together

    try:
        run: Any = SimpleNamespace(config=compose(sys.argv[1:]), name="stage=check", label="check")
        refuse_without_gpus([run])
        print(json.dumps(train_together(probe, run, Path("."), None)))  # type: ignore[arg-type]
    except Exception as error:
        if (sentence := error_sentence(error)) is None:
            raise
        sys.exit(f"error: {sentence}")


def probe(run: Any, work: Path, tracker: Any) -> dict[str, Any]:
    """Facts of all processes, which take their devices and their backend as in a training."""
    import torch
    from accelerate import PartialState

    cuda = torch.cuda.is_available()
    state = PartialState(cpu=not cuda)
    device, several = state.device, state.num_processes > 1
    numbers = torch.full((REDUCED if cuda else 1024,), float(state.process_index + 1), device=device)
    again, seconds = torch.zeros_like(numbers), 0.0
    for reduced in (numbers, again) if several else ():  # the second is timed: the first connects the processes
        begun = time.perf_counter()
        torch.distributed.all_reduce(reduced)
        if cuda:
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
    if several:
        torch.distributed.all_gather_object(ranks, facts)
    nccl = torch.cuda.nccl.version() if cuda else ()
    return {
        "ranks": ranks, "backend": str(state.backend or "no backend"), "cuda": torch.version.cuda if cuda else None,
        "nccl": ".".join(map(str, nccl)) or None,
        "gigabytes_a_second": numbers.nbytes / seconds / 1e9 if cuda and several else None,
    }  # fmt: skip
