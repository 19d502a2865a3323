"""Several processes that train together, one per GPU.

torch elastic starts the processes of one node, and torchrun those on several nodes. Rank 0 writes
and returns the facts. The other ranks only train.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pipeline.config.stages import TrainStage
from pipeline.errors import PipelineError
from pipeline.runs.run import Run
from pipeline.runs.stop import STOPPING, UNFINISHED, handle_signals, heard_by
from pipeline.runs.tracking import Tracker

Train = Callable[..., dict[str, Any]]
GRACE = 5  # seconds until processes are killed after a failure or a second Ctrl-C


def launched_count() -> int | None:
    """Return the number of processes that a launcher started, or None without a launcher.

    Raises:
        PipelineError: WORLD_SIZE is set without RANK or MASTER_ADDR, so torch would wait forever,
            or srun started several tasks, which torch does not notice.
    """
    count = os.environ.get("WORLD_SIZE", "1")
    if count != "1":
        for name in ("RANK", "MASTER_ADDR"):
            if name not in os.environ:
                raise PipelineError(
                    f"WORLD_SIZE={count} is set without {name}. Unset WORLD_SIZE, or start with"
                    " torchrun, which sets both."
                )
    if {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        return int(count)
    tasks = int(os.environ.get("SLURM_STEP_NUM_TASKS", 1))
    if tasks > 1:
        raise PipelineError(
            f"srun started {tasks} tasks. Start one torchrun on each node, as"
            " slurm/several_nodes.sbatch does."
        )
    return None


def is_follower() -> bool:
    """Return True if a launcher started this process with a rank above 0."""
    return launched_count() is not None and os.environ["RANK"] != "0"


def check_launch(processes: int) -> None:
    """Raise PipelineError if a launcher started another number of processes than sft.processes."""
    count = launched_count() or processes
    if count != processes:
        raise PipelineError(
            f"sft.processes={processes}, but {count} processes were launched. Give"
            f" sft.processes={count}."
        )


def join_processes(run: Run[TrainStage]) -> None:
    """Wait for all launched processes, and share the lease of the first with them.

    The first process arrives when the run's parents are finished.
    """
    import torch
    from accelerate import PartialState
    from accelerate.utils import broadcast_object_list

    PartialState(cpu=not torch.cuda.is_available(), timeout=timedelta(hours=24))
    run.lease = broadcast_object_list([run.lease])[0]


def train_together(
    train: Train, run: Run[TrainStage], work: Path, tracker: Tracker
) -> dict[str, Any]:
    """Run `train(run, work, tracker)` in sft.processes processes, and return what rank 0 returns.

    Raises:
        PipelineError: a process raised it. Other errors come with the traceback of their process.
    """
    count = run.config.sft.processes
    check_launch(count)
    if count == 1:
        return train(run, work, tracker)
    if launched_count() is not None:
        join_processes(run)
        return train(run, run.work, tracker)
    return start_processes(count, train, run, work, tracker)


def start_processes(
    count: int, train: Train, run: Run[TrainStage], work: Path, tracker: Tracker
) -> dict[str, Any]:
    """Train in processes of this machine, which receive this process' signals.

    After a second Ctrl-C they have GRACE seconds.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # Its errors are raised below
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    one_node = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        max_restarts=0,
        run_id=run.name,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        shutdown_timeout=GRACE,
        signals_to_handle="SIGQUIT",
    )
    inbox, outbox = multiprocessing.get_context("spawn").Pipe(duplex=False)
    refusals: list[str] = []

    def listen() -> None:
        with suppress(EOFError):  # all copies of the outbox are closed
            while True:
                message = inbox.recv()
                if isinstance(message, str):
                    refusals.append(message)
                else:
                    tracker.log(*message)

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    try:
        with heard_by(forward_signal):
            return elastic_launch(one_node, train_rank)(outbox, train, run, work)[0]
    except ChildFailedError as error:
        failed = error
    finally:
        outbox.close()
        listener.join()
    if refusals:
        raise PipelineError(refusals[0])
    stopped_codes = {UNFINISHED, *(-number for number in STOPPING)}
    exit_codes = {failure.exitcode for failure in failed.failures.values()}
    if exit_codes & stopped_codes:
        raise SystemExit(UNFINISHED)
    raise RuntimeError(str(failed))  # with the traceback of each process


def forward_signal(signal_name: str) -> None:
    """Send a signal to the processes that this process started, and SIGTERM for a Ctrl-C.

    A terminal has already sent them the Ctrl-C, and a second one would end them at once.
    """
    number = signal.Signals[signal_name]
    if number == signal.SIGINT:
        number = signal.SIGTERM
    for child in multiprocessing.active_children():
        with suppress(ProcessLookupError):
            os.kill(child.pid or 0, number)


def train_rank(
    outbox: Connection, train: Train, run: Run[TrainStage], work: Path
) -> dict[str, Any]:
    """Train in one of the processes, with its share of the cores.

    The process that started it receives rank 0's log and the errors of all ranks.
    """
    import torch

    share_of_cores = max(1, torch.get_num_threads() // run.config.sft.processes)
    torch.set_num_threads(run.config.threads or share_of_cores)
    tracker: Any = SimpleNamespace(log=lambda numbers, step=None: outbox.send((numbers, step)))
    if is_follower():
        tracker = Tracker(None)
    try:
        with handle_signals():
            facts = train(run, work, tracker)
    except PipelineError as error:
        outbox.send(str(error))
        raise
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return facts
