"""Several processes that train together, one a GPU: started here, or by torchrun, accelerate or srun, one each.

Rank 0 writes and answers; the others only train. What they tell the terminal is dropped, what they fail with is not.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import PipelineError
from pipeline.runs.stop import STOPPING, UNFINISHED, handle_signals, heard_by

if TYPE_CHECKING:
    from pipeline.config.stages import TrainStage
    from pipeline.runs.run import Run
    from pipeline.runs.tracking import Tracker

Train = Callable[..., dict[str, Any]]
GRACE = 3  # seconds in which tasks of srun end by themselves where one has ended
BY_SRUN = "PIPELINE_BY_SRUN"  # in the environment of a process that was named to torch here


def launched() -> int | None:
    """The number of processes that a launcher started, this one among them; None where there was no launcher."""
    by_srun()
    return int(os.environ["WORLD_SIZE"]) if {"RANK", "WORLD_SIZE"} <= os.environ.keys() else None


def is_follower() -> bool:
    """Whether a launcher started this process as another than the first."""
    return launched() is not None and os.environ["RANK"] != "0"


def by_srun() -> bool:
    """Whether srun started this process as one of several: then names it to torch as torchrun does.

    The first node is reached at its NodeAddr, at a port by the number of the job; a task takes one visible device.
    """
    given = os.environ
    count = int(given.get("SLURM_STEP_NUM_TASKS", 1))
    if count == 1 or ("RANK" in given and BY_SRUN not in given):
        return False
    if BY_SRUN not in given:
        local = int(given["SLURM_LOCALID"])
        visible = [one for one in given.get("CUDA_VISIBLE_DEVICES", "").split(",") if one]
        if len(visible) > 1:
            if len(visible) <= local:
                raise PipelineError(
                    f"srun started {local + 1} or more tasks on a node with {len(visible)} GPUs visible: give "
                    "--ntasks-per-node as many as --gpus-per-node"
                )
            given["CUDA_VISIBLE_DEVICES"] = visible[local]
        port = 15000 + (int(given["SLURM_JOB_ID"]) * 31 + int(given["SLURM_STEP_ID"])) % 15000
        given.update(
            RANK=given["SLURM_PROCID"], WORLD_SIZE=str(count), LOCAL_RANK="0" if visible else str(local),
            LOCAL_WORLD_SIZE=str(tasks_here()), MASTER_ADDR=first_address(), MASTER_PORT=str(port),
        )  # fmt: skip
        given[BY_SRUN] = "1"
    return True


def tasks_here() -> int:
    """Of this step on this node: SLURM_STEP_TASKS_PER_NODE is 2(x3),1."""
    counts: list[int] = []
    for part in os.environ["SLURM_STEP_TASKS_PER_NODE"].split(","):
        number, _, times = part.rstrip(")").partition("(x")
        counts += [int(number)] * int(times or 1)
    return counts[int(os.environ["SLURM_NODEID"])]


def first_address() -> str:
    """Of the first node of this step, as Slurm itself reaches it."""
    try:
        names = scontrol("show", "hostnames", os.environ["SLURM_STEP_NODELIST"]).split()
        found = re.search(r"NodeAddr=(\S+)", scontrol("show", "node", names[0]))
        return found[1] if found else names[0]
    except (OSError, subprocess.SubprocessError, IndexError) as error:
        raise PipelineError(
            "srun started several tasks, and scontrol does not say where the first is: start them with torchrun"
        ) from error


def scontrol(*words: str) -> str:
    return subprocess.run(["scontrol", *words], capture_output=True, text=True, timeout=60, check=True).stdout


def end_all(status: int) -> None:
    """One of srun's tasks ends with this status: others that wait for it are stopped, or killed, when it is gone.

    Where all end by themselves, as all refuse a wrong knob, the step is over before that, with their status.
    """
    if status == 0 or BY_SRUN not in os.environ:
        return
    number = "TERM" if status == UNFINISHED else "KILL"
    step = f"{os.environ['SLURM_JOB_ID']}.{os.environ['SLURM_STEP_ID']}"
    command, null = f"sleep {GRACE}; exec scancel --signal={number} {step}", subprocess.DEVNULL
    with suppress(OSError):
        subprocess.Popen(["sh", "-c", command], stdin=null, stdout=null, stderr=null, start_new_session=True)


def check_launch(processes: int) -> None:
    """Refuse a launcher's count that is not sft.processes, which is what the run's hash holds."""
    there = launched()
    if there is not None and there != processes:
        raise PipelineError(
            f"sft.processes={processes}, but {there} processes were launched: give sft.processes={there}"
        )


def meet() -> None:
    """Wait for all that a launcher started: the first comes when the run's parents are made, which may take hours."""
    if BY_SRUN in os.environ and os.environ["RANK"] != "0":
        wait_for_the_first()
    import torch
    from accelerate import PartialState

    PartialState(cpu=not torch.cuda.is_available(), timeout=timedelta(hours=24))


def wait_for_the_first() -> None:
    """Until the first process listens, where signals are heard: torch waits without hearing them."""
    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    while True:
        with suppress(OSError), socket.create_connection(place, timeout=10):
            return
        time.sleep(1)


def same_lease(lease: str | None) -> str | None:
    """That of the first process, who makes the run, in all."""
    from accelerate.utils import broadcast_object_list

    return broadcast_object_list([lease])[0]


def together(train: Train, run: Run[TrainStage], work: Path, tracker: Tracker) -> dict[str, Any]:
    """`train(run, work, tracker)` in sft.processes processes; what rank 0 gives.

    Raises:
        PipelineError: what any of them raised as one; other failures come with the traceback of their process.
    """
    count = run.config.sft.processes
    check_launch(count)
    if count == 1:
        return train(run, work, tracker)
    if launched() is not None:
        meet()
        run.lease = same_lease(run.lease)
        return train(run, run.work, tracker)
    import torch

    context = torch.multiprocessing.get_context("spawn")
    answers = context.Queue()
    started: Any = torch.multiprocessing.spawn(
        _one_of, args=(count, _free_port(), answers, train, run, work), nprocs=count, join=False
    )
    facts, refused = None, None
    failure: Exception | None = None
    done = False
    with stopped_together(started.pids()):
        while not done or not answers.empty():
            while not answers.empty():
                kind, value = answers.get()
                if kind == "log":
                    tracker.log(*value)
                elif kind == "facts":
                    facts = value
                else:
                    refused = refused or value
            try:
                done = done or started.join(timeout=0.2)
            except Exception as error:
                failure, done = error, True
    if refused is not None:
        raise PipelineError(refused)
    if getattr(failure, "exit_code", None) in (UNFINISHED, *(-number for number in STOPPING)):
        raise SystemExit(UNFINISHED)
    if failure is not None:
        raise failure
    assert facts is not None
    return facts


@contextmanager
def stopped_together(pids: list[int]) -> Iterator[None]:
    """What asks this process to stop asks those that it started, which a second Ctrl-C kills.

    A terminal sends its Ctrl-C to them too: it is passed on as SIGTERM, which does not count as their second.
    """

    def send(number: signal.Signals) -> None:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def forward(signal_name: str) -> None:
        send(signal.SIGTERM if signal_name == "SIGINT" else signal.Signals[signal_name])

    try:
        with heard_by(forward):
            yield
    except KeyboardInterrupt:
        send(signal.SIGKILL)
        raise


def _one_of(rank: int, count: int, port: int, answers: Any, train: Train, run: Run[TrainStage], work: Path) -> None:
    """One process: named to torch as a launcher would, with its share of the cores."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    import torch

    torch.set_num_threads(run.config.threads or max(1, torch.get_num_threads() // count))
    if rank:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
    try:
        with handle_signals():
            facts = train(run, work, Relay(answers if rank == 0 else None))
    except PipelineError as error:
        answers.put(("refused", str(error)))
        raise
    if rank == 0:
        answers.put(("facts", facts))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


class Relay:
    """The tracker of a process that trains: what rank 0 logs goes to the one that started it."""

    def __init__(self, answers: Any) -> None:
        self.answers = answers

    def log(self, numbers: dict[str, float], step: int | None = None) -> None:
        if self.answers is not None:
            self.answers.put(("log", (numbers, step)))


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
