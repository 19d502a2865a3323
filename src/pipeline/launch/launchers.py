"""Where the runs of a plan are computed (launcher=): in this process, by workers, or on Slurm."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

from pipeline.config.stages import (
    EvalStage,
    Launcher,
    RunStage,
    SelectStage,
    Stage,
    TrainStage,
)
from pipeline.errors import PipelineError, first_few
from pipeline.estimate.durations import visible_gpus
from pipeline.evaluate.shown_scores import score_lines
from pipeline.files import cores
from pipeline.launch.in_process import settings_of, stage_function
from pipeline.launch.local import Local, execute_here
from pipeline.launch.plan_file import gpus_requested
from pipeline.launch.preflight import training_problems
from pipeline.launch.work import BLOCKED
from pipeline.merge.resident import keep_models_resident
from pipeline.progress import say
from pipeline.runs.graph import order_runs, reasons_unfinished
from pipeline.runs.make import why_not_finished
from pipeline.runs.run import Run
from pipeline.runs.unchanged import check_unchanged
from pipeline.stages.evaluation import is_bundle
from pipeline.stages.rows import STUDY_STAGES, build
from pipeline.text import pluralize
from pipeline.train.processes import is_follower

Execute = Callable[[list[Run]], dict[str, str]]  # targets -> failures: a run's name -> the reason


@contextmanager
def executor_for(
    launcher: Launcher,
    targets: Sequence[Run],
    again: Sequence[str] | None = None,
) -> Iterator[Execute]:
    """Yield a function that computes targets, and returns the failures by run name.

    Args:
        launcher: the configuration.
        targets: the runs of the first call.
        again: arguments of the command that a last Slurm job runs when all other jobs are done, or
            None for no such job.
    """
    if launcher.name == "slurm":
        from pipeline.launch.slurm import execute

        yield partial(execute, launcher, again)
        return
    count = workers_of(launcher, order_runs(list(targets)))
    with keep_models_resident(), Local(count, visible_gpus()) as local:
        yield local.execute


def workers_of(launcher: Launcher, runs: Sequence[Run]) -> int:
    """Return the number of processes of this machine that compute a plan's runs.

    `launcher.workers` has priority. Otherwise it is one per GPU. Without GPUs it is the number of
    cores divided by a run's threads, or one if a run uses several processes.
    """
    count = launcher.workers or len(visible_gpus())
    if count:
        return count
    if any(gpus_requested(run) > 1 for run in runs):
        return 1
    heavy = []
    for run in runs:
        if isinstance(run.config, TrainStage | EvalStage):
            heavy.append(run.config.threads or cores())
    return max(1, cores() // max(heavy, default=cores()))


def stage_output(config: Stage, options: Mapping[str, str]) -> str:
    """Run the stage and return what it prints.

    A stage that computes a run prints the run's folder.

    `options` has the keys and values of the command, for the line that describes a training.
    """
    row = STUDY_STAGES.get(config.stage)
    if row:
        return row.answer(config)
    if not isinstance(config, RunStage):
        return str(config.answer())  # type: ignore[attr-defined]  # of extras/, or another package
    return str(make_single_run(config, options))


def make_single_run(config: RunStage, options: Mapping[str, str] | None = None) -> Path:
    """Compute the run of one stage and its unfinished parents, and return its folder.

    If a launcher has started several processes, the first does this and the others train with it.

    `options` has the keys and values of the command, for the line that describes a training.

    Raises:
        PipelineError: the run failed, or a run that it needs.
        Held: Slurm jobs compute the run.
    """
    run = build(config)
    was_finished = not config.redo and why_not_finished(run) is None
    if is_follower():
        if not was_finished:
            make = stage_function(run)
            with settings_of(run):
                make(run, run.work, None)  # the first process logs
        return run.folder
    if isinstance(config, TrainStage) and options is not None and not was_finished:
        recipe, mixture = options.get("recipe", "default"), options.get("mixture", "all")
        say(f"{run.label}: recipe={recipe} mixture={mixture}")
    runs = order_runs([run])
    for problem in training_problems(runs, reasons_unfinished(runs, [run])):
        raise PipelineError(problem)  # a finished training set that must be built again
    if config.launcher.name == "slurm":
        with executor_for(config.launcher, [run]) as execute:
            failed = execute([run])
    else:
        with (
            keep_models_resident()
            if is_bundle(run) or isinstance(run.config, SelectStage)
            else nullcontext()
        ):
            failed = execute_here([run], aloud=False)
    if failed:
        name, reason = next(iter(failed.items()))  # later failures follow from the first
        if name != run.name:
            reason = f"{name}, which {run.name} needs, failed: {reason}"
        raise PipelineError(reason)
    if was_finished:
        check_unchanged(run.folder)
        print(f"{run.name} was finished before", file=sys.stderr)
    for line in score_lines(run.folder):
        print(line, file=sys.stderr)
    return run.folder


def what_failed(failed: Mapping[str, str]) -> str:
    """Return a sentence about the failed runs.

    It has up to three reasons, and the number of runs that depend on failed runs.
    """
    own_failures = []
    for name, reason in failed.items():
        if not reason.startswith(BLOCKED):
            own_failures.append(f"{name}: {reason}")
    reasons = first_few(own_failures, 3, "; ")
    summary = f"{pluralize(len(own_failures), 'run')} failed ({reasons})"
    dependents = len(failed) - len(own_failures)
    if dependents:
        return f"{summary}, so {dependents} that depend on them were not computed"
    return summary
