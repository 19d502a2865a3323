"""Runs made here, one after the other; and what went wrong, in a sentence."""

from __future__ import annotations

import errno
import io
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from pathlib import Path
from typing import Any

from pipeline.config.stages import EvalStage, RunStage, SelectStage, TrainStage
from pipeline.errors import Held, PipelineError
from pipeline.estimate.durations import History, guess
from pipeline.hub.addresses import without_credentials
from pipeline.launch.attempts import counted
from pipeline.report.load.scores import score_lines
from pipeline.runs import stop
from pipeline.runs.adopt import adoptable
from pipeline.runs.disk import check_writable, full
from pipeline.runs.folders import finished
from pipeline.runs.graph import ordered, unfinished
from pipeline.runs.make import make_once, why_not_finished
from pipeline.runs.manifest import read_manifest
from pipeline.runs.run import Run, runs_behind
from pipeline.runs.unchanged import check_unchanged
from pipeline.stages.evaluation import is_bundle
from pipeline.stages.rows import RUN_STAGES, build
from pipeline.train.processes import Relay, is_follower, launched


def stage_function(run: Run) -> Callable[[Run, Path, Any], dict[str, Any]]:
    """The stage's `make`, imported when it is needed."""
    row = RUN_STAGES[run.config.stage]
    if row.torch:
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # spinning threads on shared cores cost twenty times
        import torch

        if run.config.threads:
            torch.set_num_threads(run.config.threads)
    with redirect_stdout(io.StringIO()):  # transformers prints, when it is imported, where W&B is offline
        return row.maker()


def make_run(run: Run, predicted_seconds: float | None = None) -> Path:
    """The run's folder, made unless it is finished."""
    needed = RUN_STAGES[run.config.stage].bytes_needed
    alone = launched() is None  # else other processes wait for this one to train with them

    def stage(*given: Any) -> dict[str, Any]:
        return stage_function(run)(*given)

    with counted(run):
        if not (alone and adoptable(run)):
            stage_function(run)  # imports, before the run's time is taken
        return make_once(run, stage, needed, predicted_seconds, guess(run), adopts=alone)


def gpus_asked(run: Run) -> tuple[str, int]:
    """The knob and the number of processes that take a GPU each."""
    if isinstance(run.config, TrainStage):
        return "sft.processes", run.config.sft.processes
    return "eval.shards", run.config.eval.shards if isinstance(run.config, EvalStage) else 1


def refuse_without_gpus(runs: Iterable[Run]) -> None:
    """Refuse what asks for more GPUs than this machine has, before anything is made. Without any they share the CPU."""
    for run in runs:
        knob, count = gpus_asked(run)
        if count == 1 or launched() is not None:  # a launcher's processes may be of several nodes
            continue
        import torch

        if 0 < (gpus := torch.cuda.device_count()) < count:
            raise PipelineError(f"{knob}={count}, but {gpus} GPUs are visible here ({run.name}): give at most {gpus}")


def execute(targets: list[Run], before: Mapping[str, str] | None = None, aloud: bool = True) -> dict[str, str]:
    """Make what is not finished, in order; go on after a failure with what does not depend on it.

    Gives the failures: run name -> reason. A fault of the program is one of them, after its traceback. `before`: those
    of an earlier call, which are not tried again; aloud: print each failure, where the caller does not.

    Raises:
        Held: when all else is done, for a run that another process makes.
    """
    runs = ordered(targets)
    history = History(finished(runs[0].runs_dir) if runs else ())
    reasons, names = unfinished(runs), {run.hash: run.name for run in runs}
    left = [run for run in runs if run.hash in reasons]
    if left:
        check_writable(runs[0].runs_dir)
    refuse_without_gpus(left)
    failed: dict[str, str] = dict(before or {})
    held: dict[str, Held] = {}  # run hash -> who makes it
    if stop.asked() and left:  # before the first run: of the attempt the training is told, as it is what takes long
        with counted(next((run for run in left if isinstance(run.config, TrainStage)), left[0])):
            pass
    for number, run in enumerate(runs, start=1):
        stop.check()
        if run.name in failed:
            continue
        waits_for = next((one.hash for one in runs_behind(run.parents) if one.hash in held), None)
        if waits_for:
            held[run.hash] = held[waits_for]
            continue
        blocked = [one.name for one in runs_behind(run.parents) if names.get(one.hash) in failed]
        if blocked:
            failed[run.name] = f"its parent {blocked[0]} failed"
            continue
        try:
            if not run.config.redo and why_not_finished(run) is None:
                check_unchanged(run.folder)
                continue
            begun, seconds = time.perf_counter(), history.predict(run)
            head = f"[{number}/{len(runs)}]"
            told, comma, omitted = history.sum(left).partition(", ")
            print(f"{head} {run.name} ({run.config.stage}), {told} left in all{comma}{omitted}", file=sys.stderr)
            make_run(run, None if seconds is None else round(seconds, 1))
            print(f"{head} done in {time.perf_counter() - begun:.1f} s", file=sys.stderr)
            if manifest := read_manifest(run.folder):
                history.add(manifest)
        except Held as error:
            held[run.hash] = error
            if aloud:
                print(error, file=sys.stderr)
        except Exception as error:
            failed[run.name] = reason_of(error)
            if aloud:
                print(f"{run.name} failed: {failed[run.name]}", file=sys.stderr)
        finally:
            left = [later for later in left if later.hash != run.hash]
    if held:
        first = next(iter(held.values()))
        first.failed = failed
        raise first
    return failed


def one(config: RunStage) -> Path:
    """A stage that makes one run, with the parents that it needs. Gives its folder.

    Where a launcher started several processes, the first does this, and the others train with it.
    """
    run = build(config)
    found = not config.redo and why_not_finished(run) is None
    if is_follower():
        if not found:
            stage_function(run)(run, run.work, Relay(None))
        return run.folder
    with keeping_models(run):
        failed = execute([run], aloud=False)
    if failed:
        name, reason = next(iter(failed.items()))  # what failed after it, failed because of it
        raise PipelineError(reason if name == run.name else f"{name}, which {run.name} needs, failed: {reason}")
    if found:
        print(f"{run.name} was finished before", file=sys.stderr)
    for line in score_lines(run.folder):
        print(line, file=sys.stderr)
    return run.folder


def keeping_models(run: Run) -> AbstractContextManager[None]:
    """The model of several scores stays in memory from one to the next."""
    if not (is_bundle(run) or isinstance(run.config, SelectStage)):
        return nullcontext()
    from pipeline.merge.resident import resident

    return resident()


def reason_of(error: Exception) -> str:
    """Why a run failed, in a sentence; where it is a fault of the program, after its traceback."""
    told = sentence(error)
    if told is None:
        traceback.print_exc()
    return told or without_credentials(f"{type(error).__name__}: {error}")


def sentence(error: BaseException) -> str | None:
    """An error that the user can fix as one sentence; None where it is a fault of the program."""
    if isinstance(error, PipelineError):
        return without_credentials(str(error))
    if isinstance(error, OSError) and error.errno is not None:
        told = f"{error.strerror}: {error.filename or 'no file named'}; nothing was published"
        shared = "; people who share a runs_dir need group rights: chmod -R g+rwsX, umask 002"
        return told + (shared if error.errno in (errno.EACCES, errno.EPERM) else "")
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return "out of memory: lower sft.micro_batch_size, sft.seq_length or eval.batch_size; nothing was published"
    return f"{reason}; nothing was published" if (reason := full(error)) else None
