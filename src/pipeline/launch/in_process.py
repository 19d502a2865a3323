"""Computes runs in this process, one after the other, and turns errors into one-sentence reasons."""

from __future__ import annotations

import errno
import gc
import io
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from typing import Any

from pipeline.config.defaults import HARDWARE, read_hardware
from pipeline.config.stages import EvalStage, RunStage, SelectStage, TrainStage
from pipeline.errors import Held, PipelineError, shorten_words
from pipeline.estimate.durations import History, describe_training, driver_version, guess, visible_gpus
from pipeline.estimate.gpu_budget import bytes_of_training
from pipeline.evaluate.shown_scores import score_lines
from pipeline.hub.addresses import without_credentials
from pipeline.launch.attempts import count_attempt
from pipeline.launch.preflight import refuse_too_large, training_problems
from pipeline.progress import say
from pipeline.runs import stop
from pipeline.runs.disk import check_writable, disk_full_reason
from pipeline.runs.folders import finished_manifests
from pipeline.runs.graph import order_runs, reasons_unfinished
from pipeline.runs.make import make_once, why_not_finished
from pipeline.runs.manifest import read_manifest
from pipeline.runs.run import Run, parent_runs
from pipeline.runs.unchanged import check_unchanged
from pipeline.stages.evaluation import is_bundle
from pipeline.stages.rows import RUN_STAGES, build
from pipeline.train.processes import is_follower, launched_count

OUT_OF_MEMORY = "out of memory: lower sft.micro_batch_size, sft.seq_length or eval.batch_size; nothing was published"
DEVICE_ERRORS = {  # what torch and NCCL print -> what to do
    r"OutOfMemoryError: ": OUT_OF_MEMORY,
    r"NVIDIA driver on your system is too old": "the NVIDIA driver is too old for this torch: update the driver, or "
    "install a torch for an older CUDA; nothing was published",
    r"Duplicate GPU detected": "two processes are on one GPU: give each its own, or lower sft.processes; nothing was "
    "published",
    r"libnccl|NCCL (?:is )?not available|doesn't have NCCL built in": "NCCL is missing, by which processes on GPUs "
    "exchange gradients: install torch again with its nvidia-nccl package, or give sft.processes=1; nothing was "
    "published",
}


@contextmanager
def imports_uncollected() -> Iterator[None]:
    """Import without garbage collections, a sixth of the time that torch and transformers take, and exclude what was
    imported from later collections: the one at the start of each training would take 0.2 s."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def stage_function(run: Run) -> Callable[[Run, Path, Any], dict[str, Any]]:
    """The stage's `make` function, imported on demand."""
    row = RUN_STAGES[run.config.stage]
    uncollected = nullcontext() if row.make in sys.modules else imports_uncollected()
    with uncollected, redirect_stdout(io.StringIO()):  # transformers prints, when it is imported, where W&B is offline
        if row.torch:
            os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # spinning threads on shared cores cost twenty times
        return row.import_make()


@contextmanager
def settings_of(run: Run) -> Iterator[None]:
    """Context in which torch has the run's threads. Afterwards it is as it was before: a training also leaves TF32 and
    deterministic kernels on, which the next run of this process has not asked for."""
    if not (torch := sys.modules.get("torch")):
        yield
        return
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(run.config.threads or threads)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)
        torch.set_float32_matmul_precision(precision)


def make_run(run: Run, predicted_seconds: float | None = None) -> Path:
    """The run's folder; the run is computed unless it is finished."""
    of_training = isinstance(run.config, TrainStage)
    bytes_needed: Any = bytes_of_training if of_training else RUN_STAGES[run.config.stage].bytes_needed
    with count_attempt(run):
        make = stage_function(run)  # imports, before the run's time is taken
        if of_training and why_not_finished(run):
            refuse_too_large([run])  # its base is here now, whose shape may not have been known before
        with settings_of(run):
            return make_once(run, make, bytes_needed, predicted_seconds, guess(run))


def gpus_requested(run: Run) -> int:
    """The number of processes that use one GPU each."""
    return run.config.sft.processes if isinstance(run.config, TrainStage) else 1


def refuse_without_gpus(runs: Iterable[Run]) -> None:
    """Raise PipelineError if a run requests more GPUs than are visible, or GPUs that torch cannot use, before anything
    is computed.

    On a machine without GPUs, processes share the CPU.
    """
    for run in runs:
        count = gpus_requested(run)
        by_torch = isinstance(run.config, TrainStage | EvalStage)
        if launched_count() is not None:  # a launcher's processes may be of several nodes
            continue
        if count == 1 and not (by_torch and driver_version() and visible_gpus()):
            continue
        import torch

        if by_torch and torch.version.cuda and not torch.cuda.is_available() and driver_version() and visible_gpus():
            raise PipelineError(
                f"torch {torch.__version__}, built for CUDA {torch.version.cuda}, cannot use the GPUs under NVIDIA "
                f"driver {driver_version()}: update the driver, install a torch for an older CUDA, or set "
                "CUDA_VISIBLE_DEVICES= to compute on the CPU"
            )
        if 0 < (gpus := torch.cuda.device_count()) < count:
            raise PipelineError(
                f"sft.processes={count}, but {gpus} GPUs are visible here ({run.name}): give at most {gpus}"
            )
        if count > 1 and torch.cuda.is_available() and not torch.distributed.is_nccl_available():
            raise PipelineError(
                f"sft.processes={count} needs NCCL, which torch {torch.__version__} lacks here: install a torch with "
                "it, or give sft.processes=1"
            )


def execute(
    targets: list[Run],
    earlier_failures: Mapping[str, str] | None = None,
    aloud: bool = True,
    later: Callable[[], Sequence[Run]] = tuple,
) -> dict[str, str]:
    """Compute the unfinished runs in order; after a failure, continue with the runs that do not depend on it.

    Returns the failures: run name -> reason. An unexpected exception is a failure too, after its traceback.
    earlier_failures: failures of an earlier call, which are not retried; aloud: print each failure, where the caller
    does not; later: runs of a later call, which count for the remaining time.

    Raises:
        Held: when all else is done, for a run that another process holds.
    """
    runs = order_runs(targets)
    history = History(finished_manifests(runs[0].runs_dir) if runs else ())
    reasons, names = reasons_unfinished(runs, targets), {run.hash: run.name for run in runs}
    remaining = [run for run in runs if run.hash in reasons]
    if remaining:
        check_writable(runs[0].runs_dir)
    later_runs = later() if remaining else ()
    refuse_without_gpus(remaining)
    failed: dict[str, str] = dict(earlier_failures or {})
    held_runs: dict[str, Held] = {}  # run hash -> who holds its lease
    if stop.stop_signal_name() and remaining:
        # before the first run: the attempt is counted for the training, which takes longest
        with count_attempt(next((run for run in remaining if isinstance(run.config, TrainStage)), remaining[0])):
            pass
    for number, run in enumerate(runs, start=1):
        stop.raise_if_signalled()
        if run.name in failed:
            continue
        waits_for = next((parent.hash for parent in parent_runs(run.parents) if parent.hash in held_runs), None)
        if waits_for:
            held_runs[run.hash] = held_runs[waits_for]
            continue
        blocked = [parent.name for parent in parent_runs(run.parents) if names.get(parent.hash) in failed]
        if blocked:
            failed[run.name] = f"its parent {blocked[0]} failed"
            continue
        try:
            if not run.config.redo and why_not_finished(run) is None:
                check_unchanged(run.folder, weights=False)
                continue
            if run.hash not in reasons and not run.folder.exists():
                continue  # deleted, and no longer needed
            begun, seconds = time.perf_counter(), history.predict(run)
            head = f"[{number}/{len(runs)}]"
            total, unknown = history.sum([*remaining, *later_runs])
            excluded = f", not including {unknown}" if unknown else ""
            following = next((f"; next {next_run.name}" for next_run in remaining if next_run.hash != run.hash), "")
            say(f"{head} {run.name} ({run.config.stage}), {total} left in all{excluded}{following}")
            make_run(run, None if seconds is None else round(seconds, 1))
            say(f"{head} done in {time.perf_counter() - begun:.1f} s")
            if manifest := read_manifest(run.folder):
                history.add(manifest)
        except Held as error:
            held_runs[run.hash] = error
            if aloud:
                say(str(error))
        except Exception as error:
            failed[run.name] = reason_of(error)
            if aloud:
                say(f"{run.name} failed: {failed[run.name]}")
        finally:
            remaining = [later for later in remaining if later.hash != run.hash]
    if held_runs:
        first = next(iter(held_runs.values()))
        first.failed = failed
        raise first
    return failed


def refuse_contaminated(targets: Sequence[Run]) -> None:
    """Raise PipelineError for a finished training set that needs to be built again."""
    runs = order_runs(list(targets))
    for problem in training_problems(runs, reasons_unfinished(runs, targets)):
        raise PipelineError(problem)


def make_single_run(config: RunStage, options: Mapping[str, str] | None = None) -> Path:
    """Compute the run of one stage and its unfinished parents. Returns its folder. options: those that its command
    chooses, of which a training is described first.

    With several processes started by a launcher, the first does this, and the others train with it.
    """
    run = build(config)
    was_finished = not config.redo and why_not_finished(run) is None
    if is_follower():
        if not was_finished:
            make = stage_function(run)
            with settings_of(run):
                make(run, run.work, None)  # the first logs
        return run.folder
    if isinstance(config, TrainStage) and options is not None and not was_finished:
        say(describe_training(run, options))
        if (name := options.get(HARDWARE)) and "plan.gpu" in read_hardware(name) and not visible_gpus():
            say(f"{HARDWARE}={name} has GPUs, and none is visible here: this trains on the CPU")
    refuse_contaminated([run])
    runs = order_runs([run])
    reasons = reasons_unfinished(runs, [run])  # without what is deleted and no longer needed
    refuse_too_large([needed for needed in runs if needed.hash in reasons])
    with keeping_models(run):
        failed = execute([run], aloud=False)
    if failed:
        name, reason = next(iter(failed.items()))  # later failures follow from the first
        raise PipelineError(reason if name == run.name else f"{name}, which {run.name} needs, failed: {reason}")
    if was_finished:
        check_unchanged(run.folder)
        print(f"{run.name} was finished before", file=sys.stderr)
    for line in score_lines(run.folder):
        print(line, file=sys.stderr)
    return run.folder


def keeping_models(run: Run) -> AbstractContextManager[None]:
    """Context that keeps a model in memory between several evaluations of it."""
    if not (is_bundle(run) or isinstance(run.config, SelectStage)):
        return nullcontext()
    from pipeline.merge.resident import keep_models_resident

    return keep_models_resident()


def reason_of(error: Exception) -> str:
    """Why a run failed, in one sentence; prints the traceback of an unexpected exception."""
    text = error_sentence(error)
    if text is None:
        say(traceback.format_exc().rstrip())
    return text or without_credentials(f"{type(error).__name__}: {error}")


def error_sentence(error: BaseException) -> str | None:
    """One sentence for an error that the user can fix; None for an unexpected exception."""
    if isinstance(error, PipelineError):
        return shorten_words(without_credentials(str(error)))
    if isinstance(error, OSError) and error.errno is not None:
        text = f"{error.strerror}: {shorten_words(str(error.filename or 'no file named'))}; nothing was published"
        shared = "; people who share a runs_dir need group rights: chmod -R g+rwsX, umask 002"
        return text + (shared if error.errno in (errno.EACCES, errno.EPERM) else "")
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return OUT_OF_MEMORY
    for pattern, sentence in DEVICE_ERRORS.items():  # also of another process, whose traceback is the error's text
        if re.search(pattern, str(error)):
            return sentence
    return f"{reason}; nothing was published" if (reason := disk_full_reason(error)) else None
