"""Several processes that train together, one a GPU: started here, or by torchrun, accelerate or srun, one each.

Rank 0 writes and answers; the others only train. Their terminal output is dropped, their errors are not.
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
GRACE = 3  # seconds in which tasks of srun may end by themselves after one has ended
BY_SRUN = "PIPELINE_BY_SRUN"  # in the environment of a process whose rank was set here


def launched_count() -> int | None:
    """Number of processes that a launcher started, including this one; None without a launcher."""
    set_ranks_from_srun()
    return int(os.environ["WORLD_SIZE"]) if {"RANK", "WORLD_SIZE"} <= os.environ.keys() else None


def is_follower() -> bool:
    """Whether a launcher started this process as another than the first."""
    return launched_count() is not None and os.environ["RANK"] != "0"


def set_ranks_from_srun() -> bool:
    """Whether srun started this process as one of several; if so sets the variables that torchrun would set.

    The first node is reached at its NodeAddr, at a port derived from the job id; a task takes one visible device.
    """
    environment = os.environ
    count = int(environment.get("SLURM_STEP_NUM_TASKS", 1))
    if count == 1 or ("RANK" in environment and BY_SRUN not in environment):
        return False
    if BY_SRUN not in environment:
        local = int(environment["SLURM_LOCALID"])
        visible = [device for device in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if device]
        if len(visible) > 1:
            if len(visible) <= local:
                raise PipelineError(
                    f"srun started {local + 1} or more tasks on a node with {len(visible)} GPUs visible: give "
                    "--ntasks-per-node as many as --gpus-per-node"
                )
            environment["CUDA_VISIBLE_DEVICES"] = visible[local]
        port = 15000 + (int(environment["SLURM_JOB_ID"]) * 31 + int(environment["SLURM_STEP_ID"])) % 15000
        environment.update(
            RANK=environment["SLURM_PROCID"], WORLD_SIZE=str(count), LOCAL_RANK="0" if visible else str(local),
            LOCAL_WORLD_SIZE=str(tasks_here()), MASTER_ADDR=first_address(), MASTER_PORT=str(port),
        )  # fmt: skip
        environment[BY_SRUN] = "1"
    return True


def tasks_here() -> int:
    """Number of this Slurm step's tasks on this node, parsed from SLURM_STEP_TASKS_PER_NODE such as `2(x3),1`."""
    counts: list[int] = []
    for part in os.environ["SLURM_STEP_TASKS_PER_NODE"].split(","):
        number, _, times = part.rstrip(")").partition("(x")
        counts += [int(number)] * int(times or 1)
    return counts[int(os.environ["SLURM_NODEID"])]


def first_address() -> str:
    """Address of the first node of this step, as Slurm itself reaches it."""
    try:
        names = run_scontrol("show", "hostnames", os.environ["SLURM_STEP_NODELIST"]).split()
        address = re.search(r"NodeAddr=(\S+)", run_scontrol("show", "node", names[0]))
        return address[1] if address else names[0]
    except (OSError, subprocess.SubprocessError, IndexError) as error:
        raise PipelineError(
            "srun started several tasks, and scontrol does not say where the first is: start them with torchrun"
        ) from error


def run_scontrol(*words: str) -> str:
    return subprocess.run(["scontrol", *words], capture_output=True, text=True, timeout=60, check=True).stdout


def end_all(status: int) -> None:
    """Stop (or kill, after a failure) the other tasks of srun, which wait for this one, after its end with `status`.

    Where all end by themselves, as for a wrong knob, the step is over before that, with their status.
    """
    if status == 0 or BY_SRUN not in os.environ:
        return
    number = "TERM" if status == UNFINISHED else "KILL"
    step = f"{os.environ['SLURM_JOB_ID']}.{os.environ['SLURM_STEP_ID']}"
    command, null = f"sleep {GRACE}; exec scancel --signal={number} {step}", subprocess.DEVNULL
    with suppress(OSError):
        subprocess.Popen(["sh", "-c", command], stdin=null, stdout=null, stderr=null, start_new_session=True)


def check_launch(processes: int) -> None:
    """Raise PipelineError where a launcher started another number of processes than sft.processes, which is hashed."""
    count = launched_count()
    if count is not None and count != processes:
        raise PipelineError(
            f"sft.processes={processes}, but {count} processes were launched: give sft.processes={count}"
        )


def init_process_group() -> None:
    """Wait for all launched processes: the first one arrives when the run's parents are finished."""
    if BY_SRUN in os.environ and os.environ["RANK"] != "0":
        wait_for_the_first()
    import torch
    from accelerate import PartialState

    PartialState(cpu=not torch.cuda.is_available(), timeout=timedelta(hours=24))


def wait_for_the_first() -> None:
    """Wait until the first process listens, while handling signals, which torch's own waiting would not."""
    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    while True:
        with suppress(OSError), socket.create_connection(place, timeout=10):
            return
        time.sleep(1)


def shared_lease(lease: str | None) -> str | None:
    """The lease of the first process, broadcast to all."""
    from accelerate.utils import broadcast_object_list

    return broadcast_object_list([lease])[0]


def train_together(train: Train, run: Run[TrainStage], work: Path, tracker: Tracker) -> dict[str, Any]:
    """What rank 0 returns of `train(run, work, tracker)` in sft.processes processes.

    Raises:
        PipelineError: one that any of them raised; other failures come with the traceback of their process.
    """
    count = run.config.sft.processes
    check_launch(count)
    if count == 1:
        return train(run, work, tracker)
    if launched_count() is not None:
        init_process_group()
        run.lease = shared_lease(run.lease)
        return train(run, run.work, tracker)
    import torch

    context = torch.multiprocessing.get_context("spawn")
    answers = context.Queue()
    started: Any = torch.multiprocessing.spawn(
        _train_rank, args=(count, _free_port(), answers, train, run, work), nprocs=count, join=False
    )
    facts, problem = None, None
    failure: Exception | None = None
    all_ended = False
    with stopped_together(started.pids()):
        while not all_ended or not answers.empty():
            while not answers.empty():
                kind, value = answers.get()
                if kind == "log":
                    tracker.log(*value)
                elif kind == "facts":
                    facts = value
                else:
                    problem = problem or value
            try:
                all_ended = all_ended or started.join(timeout=0.2)
            except Exception as error:
                failure, all_ended = error, True
    if problem is not None:
        raise PipelineError(problem)
    if getattr(failure, "exit_code", None) in (UNFINISHED, *(-number for number in STOPPING)):
        raise SystemExit(UNFINISHED)
    if failure is not None:
        raise failure
    assert facts is not None
    return facts


@contextmanager
def stopped_together(pids: list[int]) -> Iterator[None]:
    """Forward stop signals to the processes that this one started; a second Ctrl-C kills them.

    A terminal sends Ctrl-C to them too: it is forwarded as SIGTERM, which does not count as their second.
    """

    def send_to_all(number: signal.Signals) -> None:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def forward_signal(signal_name: str) -> None:
        send_to_all(signal.SIGTERM if signal_name == "SIGINT" else signal.Signals[signal_name])

    try:
        with heard_by(forward_signal):
            yield
    except KeyboardInterrupt:
        send_to_all(signal.SIGKILL)
        raise


def _train_rank(rank: int, count: int, port: int, answers: Any, train: Train, run: Run[TrainStage], work: Path) -> None:
    """Train in one process, with the variables that a launcher would set and its share of the cores."""
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
    """The tracker in a training process: rank 0's logs go to the process that started it."""

    def __init__(self, answers: Any) -> None:
        self.answers = answers

    def log(self, numbers: dict[str, float], step: int | None = None) -> None:
        if self.answers is not None:
            self.answers.put(("log", (numbers, step)))


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
