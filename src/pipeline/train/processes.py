"""Several processes that train together, one a GPU: torch elastic starts those of one node,
torchrun those of several.

Rank 0 writes and answers; the others only train.
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
GRACE = 5  # seconds until processes are killed after another has failed, or a second Ctrl-C


def launched_count() -> int | None:
    """Count the processes that a launcher started, including this one; None without a launcher.

    Raises: PipelineError: WORLD_SIZE without RANK or MASTER_ADDR, with which torch would wait for
    processes that do not come; or several tasks of srun, which tells torch nothing.
    """
    count = os.environ.get("WORLD_SIZE", "1")
    missing = next((name for name in ("RANK", "MASTER_ADDR") if name not in os.environ), None)
    if count != "1" and missing:
        raise PipelineError(
            f"WORLD_SIZE={count} is set without {missing}: unset WORLD_SIZE, or start with"
            " torchrun, which sets both"
        )
    if {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        return int(count)
    tasks = int(os.environ.get("SLURM_STEP_NUM_TASKS", 1))
    if tasks > 1:
        raise PipelineError(
            f"srun started {tasks} tasks: start a torchrun on each node, as"
            " slurm/several_nodes.sbatch does"
        )
    return None


def is_follower() -> bool:
    """Whether a launcher started this process as another than the first."""
    return launched_count() is not None and os.environ["RANK"] != "0"


def check_launch(processes: int) -> None:
    """Raise PipelineError where a launcher started another number of processes than sft.processes,
    which is hashed.
    """
    count = launched_count() or processes
    if count != processes:
        raise PipelineError(
            f"sft.processes={processes}, but {count} processes were launched: give"
            f" sft.processes={count}"
        )


def join_processes(run: Run[TrainStage]) -> None:
    """Wait for all launched processes, of which the first arrives when the run's parents are
    finished: all take its lease.
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

    Raises: PipelineError: any of them raised one; other failures come with the traceback of their
    process.
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
    """Train in processes of this machine.

    Signals reach them all; after a second Ctrl-C they have GRACE seconds.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(
        logging.CRITICAL
    )  # its errors are raised below
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
        with suppress(EOFError):  # when all copies of the outbox are closed
            while True:
                message = inbox.recv()
                refusals.append(message) if isinstance(message, str) else tracker.log(*message)

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
    if {failure.exitcode for failure in failed.failures.values()} & {
        UNFINISHED,
        *(-number for number in STOPPING),
    }:
        raise SystemExit(UNFINISHED)
    raise RuntimeError(str(failed))  # with the traceback of each


def forward_signal(signal_name: str) -> None:
    """Send a signal to the processes that this one started, a Ctrl-C as SIGTERM: from a terminal
    they have received one already, and a second one would end them at once.
    """
    for child in multiprocessing.active_children():
        with suppress(ProcessLookupError):
            os.kill(
                child.pid or 0,
                signal.SIGTERM if signal_name == "SIGINT" else signal.Signals[signal_name],
            )


def train_rank(
    outbox: Connection, train: Train, run: Run[TrainStage], work: Path
) -> dict[str, Any]:
    """Train in one of these processes, with its share of the cores.

    What rank 0 logs, and why any refuses, goes to the process that started it.
    """
    import torch

    torch.set_num_threads(
        run.config.threads or max(1, torch.get_num_threads() // run.config.sft.processes)
    )
    log: Any = SimpleNamespace(log=lambda numbers, step=None: outbox.send((numbers, step)))
    try:
        with handle_signals():
            facts = train(run, work, Tracker(None) if is_follower() else log)
    except PipelineError as error:
        outbox.send(str(error))
        raise
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return facts
