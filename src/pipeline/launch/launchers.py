"""Who makes the runs of a plan: this process, workers of this machine, or Slurm (launcher=)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from pipeline.config.stages import Launcher
from pipeline.runs.run import Run

Execute = Callable[..., dict[str, str]]  # of targets, and of the failures of earlier calls: run name -> reason


@contextmanager
def makers_for(launcher: Launcher, targets: Sequence[Run], again: Sequence[str] | None = None) -> Iterator[Execute]:
    """A function of targets and of earlier failures that makes them, and gives the failures: run name -> reason.

    again: the words of the command, where it goes on by itself when jobs are done.
    """
    if launcher.name == "slurm":
        from pipeline.launch.slurm_arrays import execute

        yield partial(execute, launcher, again)
        return
    from pipeline.launch.local_pool import makers

    with makers(launcher, targets) as make:
        yield make
