"""Where the runs of a plan are computed: in this process, by local workers, or on Slurm (launcher=)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from pipeline.config.stages import Launcher, RunStage, Stage, TrainStage
from pipeline.errors import PipelineError
from pipeline.estimate.durations import describe_training
from pipeline.launch.in_process import make_single_run, refuse_contaminated
from pipeline.progress import say
from pipeline.runs.run import Run, parent_runs
from pipeline.stages.rows import STUDY_STAGES, build
from pipeline.text import pluralize

Execute = Callable[..., dict[str, str]]  # (targets, earlier failures) -> failures: run name -> reason


@contextmanager
def executor_for(
    launcher: Launcher,
    targets: Sequence[Run],
    again: Sequence[str] | None = None,
    later: Callable[[], Sequence[Run]] = tuple,
) -> Iterator[Execute]:
    """A function that computes targets, given earlier failures, and returns the failures: run name -> reason.

    again: the arguments of the command that a last Slurm job runs when the others are done; None: no such job.
    later: runs that a later call will compute, as far as known now; they count for the remaining time shown here.
    """
    if launcher.name == "slurm":
        from pipeline.launch.slurm_arrays import execute

        yield partial(execute, launcher, again)
        return
    from pipeline.launch.local_pool import local_executor

    with local_executor(launcher, targets, later) as make:
        yield make


def stage_output(config: Stage, options: Mapping[str, str]) -> str:
    """Run the stage and return what it prints: the folder of its run, for a stage that computes one. options: key ->
    value of its command."""
    if row := STUDY_STAGES.get(config.stage):
        return row.answer(config)
    if not isinstance(config, RunStage):
        return str(config.answer())  # type: ignore[attr-defined]  # of extras/, or another package
    return str((by_jobs if config.launcher.name == "slurm" else make_single_run)(config, options))


def by_jobs(config: RunStage, options: Mapping[str, str]) -> Path:
    """The folder of a run computed by Slurm jobs. Raises Held, with the submitted jobs, where it is not finished."""
    run = build(config)
    if isinstance(config, TrainStage):
        say(describe_training(run, options))
    refuse_contaminated([run])
    with executor_for(config.launcher, [run]) as execute:
        failed = execute([run])
    if failed:
        raise PipelineError(next(iter(failed.values())))
    return run.folder


def what_failed(failed: Mapping[str, str], runs: Sequence[Run]) -> str:
    """Text with the failed runs and reasons, and the number of runs that were not computed as they depend on them."""
    blocked = {run.name for run in runs if any(parent.name in failed for parent in parent_runs(run.parents))}
    own_failures = [f"{name}: {reason}" for name, reason in failed.items() if name not in blocked]
    suffix = f"; {len(own_failures) - 3} more" if len(own_failures) > 3 else ""
    summary = f"{pluralize(len(own_failures), 'run')} failed ({'; '.join(own_failures[:3])}{suffix})"
    dependents = len(failed) - len(own_failures)
    return f"{summary}, so {dependents} that depend on them were not computed" if dependents else summary
