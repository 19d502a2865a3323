"""Computes a run in this process, and turns errors into one-sentence reasons."""

from __future__ import annotations

import errno
import gc
import io
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from typing import Any

from pipeline.config.stages import TrainStage
from pipeline.errors import PipelineError, shorten_words
from pipeline.estimate.durations import guess
from pipeline.estimate.gpu_budget import bytes_of_training
from pipeline.hub.addresses import without_credentials
from pipeline.launch.attempts import count_attempt
from pipeline.launch.plan_file import gpus_requested
from pipeline.launch.preflight import refuse_too_large
from pipeline.progress import say
from pipeline.runs.make import make_once, why_not_finished
from pipeline.runs.run import Run
from pipeline.runs.stop import convert_errors_after_signal
from pipeline.stages.rows import RUN_STAGES
from pipeline.text import printable
from pipeline.train.processes import launched_count

OUT_OF_MEMORY = (
    "out of memory: lower sft.micro_batch_size, sft.seq_length or eval.batch_size; nothing was"
    " published"
)
DISK_FULL = (
    "the disk of runs_dir or of TMPDIR is full: free some (stage=clean), or give another runs_dir;"
    " nothing was published"
)
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
DEVICE_ERRORS = {  # messages of torch, NCCL and safetensors -> the remedy
    r"PytorchStreamWriter failed writing": DISK_FULL,
    r"OutOfMemoryError: ": OUT_OF_MEMORY,
    r"NVIDIA driver on your system is too old": (
        "the NVIDIA driver is too old for this torch: update the driver, or "
        "install a torch for an older CUDA; nothing was published"
    ),
    r"Duplicate GPU detected": (
        "two processes are on one GPU: start each on its own GPU, or lower sft.processes; nothing"
        " was published"
    ),
    r"libnccl|NCCL (?:is )?not available|doesn't have NCCL built in": (
        "NCCL, with which processes on GPUs exchange gradients, is missing: install torch again"
        " with its nvidia-nccl package, or set sft.processes=1; nothing was published"
    ),
}


@contextmanager
def imports_uncollected() -> Iterator[None]:
    """Import without garbage collection, which takes a sixth of the time.

    Imported objects are then excluded from later collections. Otherwise each training would start
    with a collection of 0.2 s.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def stage_function(run: Run) -> Callable[[Run, Path, Any], dict[str, Any]]:
    """Import the stage's `make` function on demand."""
    row = RUN_STAGES[run.config.stage]
    uncollected = nullcontext() if row.make in sys.modules else imports_uncollected()
    with (
        uncollected,
        redirect_stdout(io.StringIO()),
    ):  # transformers prints on import if W&B is offline
        if row.torch:
            os.environ.setdefault(
                "OMP_WAIT_POLICY", "passive"
            )  # spinning threads on shared cores cost a factor of twenty
        return row.import_make()


@contextmanager
def settings_of(run: Run) -> Iterator[None]:
    """Set torch's number of threads for a run, and restore torch's settings afterwards.

    A training also enables TF32 and deterministic kernels, which the next run of this process did
    not request. Before the run, garbage collection frees models and trainers of earlier runs.
    """
    torch = sys.modules.get("torch")
    if not torch:
        yield
        return
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(run.config.threads or threads)
    gc.collect()  # takes milliseconds, because imported objects are frozen
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)
        torch.set_float32_matmul_precision(precision)


def make_run(
    run: Run, predicted_seconds: float | None = None, begin: Callable[[], None] | None = None
) -> Path:
    """Compute a run unless it is finished, and return its folder.

    `begin` is called before the run is computed, as in make_once.
    """
    of_training = isinstance(run.config, TrainStage)
    if of_training:
        bytes_needed: Any = bytes_of_training
    else:
        bytes_needed = RUN_STAGES[run.config.stage].bytes_needed
    with count_attempt(run):
        make = stage_function(run)  # imports are not part of the run's time
        if of_training and why_not_finished(run):
            refuse_too_large([run])  # the shape of a downloaded base is known only now
        with settings_of(run), convert_errors_after_signal():
            return make_once(run, make, bytes_needed, predicted_seconds or guess(run), begin)


def refuse_without_gpus(runs: Iterable[Run]) -> None:
    """Check that each training finds the GPUs of its processes, before anything is computed.

    On a machine without GPUs, processes share the CPU.

    Raises:
        PipelineError: too few GPUs are visible.
    """
    if launched_count() is not None:  # the processes of a launcher may run on several nodes
        return
    for run in runs:
        count = gpus_requested(run)
        if count == 1:
            continue
        import torch

        if 0 < (gpus := torch.cuda.device_count()) < count:
            raise PipelineError(
                f"sft.processes={count}, but {gpus} GPUs are visible here ({run.name}). Give at"
                f" most {gpus}."
            )


def reason_of(error: Exception) -> str:
    """Return why a run failed, in one sentence, and print the traceback of an unexpected error."""
    text = error_sentence(error)
    if text is None:
        say(traceback.format_exc().rstrip())
    return text or without_credentials(f"{type(error).__name__}: {error}")


def error_sentence(error: BaseException) -> str | None:
    """Return a sentence for an error that the user can fix, or None for an unexpected exception."""
    if isinstance(error, PipelineError):
        return printable(shorten_words(without_credentials(str(error))))
    if isinstance(error, OSError) and error.errno is not None:
        if error.errno in FULL and not error.filename:  # as of a failed write
            return f"{error.strerror}: {DISK_FULL}"
        file = shorten_words(str(error.filename or "no file named"))
        text = f"{error.strerror}: {file}; nothing was published"
        shared = "; people who share a runs_dir need group rights: chmod -R g+rwsX, umask 002"
        return text + (shared if error.errno in (errno.EACCES, errno.EPERM) else "")
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return OUT_OF_MEMORY
    for code in FULL:
        if f"(os error {code})" in str(error):  # as safetensors writes it
            return f"{os.strerror(code)}: {DISK_FULL}"
    for (
        pattern,
        sentence,
    ) in DEVICE_ERRORS.items():  # the text may be the traceback of another process
        if re.search(pattern, str(error)):
            return sentence
    return None
