"""Where the runs of a plan are computed: in this process, by local workers, or on Slurm (launcher=)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from pipeline.config.stages import Launcher
from pipeline.runs.run import Run

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
