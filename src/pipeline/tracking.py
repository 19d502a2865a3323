"""W&B: opens, tags and finishes a run, and nothing else knows it.

The W&B id is run hash + attempt, so that a requeued job goes on in its own run; the group is the table, the job type the
stage. Online where a key is configured, offline otherwise; it never asks.
"""

from __future__ import annotations

import netrc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.runs import Run


class Tracker:
    """What a stage may tell of itself: numbers over steps, a summary, tables, plots."""

    def __init__(self, wandb_run: Any) -> None:
        self._run = wandb_run

    def log(self, numbers: dict[str, float], step: int | None = None) -> None:
        self._run.log(numbers, step=step)

    def summary(self, numbers: dict[str, Any]) -> None:
        self._run.summary.update(numbers)

    def table(self, name: str, columns: list[str], rows: list[list[Any]]) -> None:
        import wandb

        self._run.log({name: wandb.Table(columns=columns, data=rows)})

    def image(self, name: str, path: Path) -> None:
        import wandb

        self._run.log({name: wandb.Image(str(path))})


def mode(asked: str) -> str:
    """online, offline or disabled. WANDB_MODE, where set, stands above auto."""
    if asked != "auto":
        return asked
    return os.environ.get("WANDB_MODE") or ("online" if has_key() else "offline")


def has_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        hosts = netrc.netrc().hosts
    except (OSError, netrc.NetrcParseError):
        return False
    return any(host.endswith("wandb.ai") for host in hosts)


@contextmanager
def open_run(folder: Path, tracking: Any, **described: Any) -> Iterator[Tracker]:
    """A W&B run whose files lie in folder/wandb; finished on every way out, as failed where there was an error."""
    os.environ.setdefault("WANDB_SILENT", "true")
    import wandb

    settings = wandb.Settings(console="off", silent=True)
    run = wandb.init(
        dir=str(folder), project=tracking.project, entity=tracking.entity, mode=mode(tracking.mode),
        settings=settings, resume="allow", reinit="finish_previous", **described,
    )  # fmt: skip
    exit_code = 1
    try:
        yield Tracker(run)
        exit_code = 0
    finally:
        run.finish(exit_code=exit_code)


@contextmanager
def tracked(run: Run, attempt: int) -> Iterator[Tracker]:
    """The W&B run of one run of ours."""
    from pipeline.runs import without_credentials

    config = run.config
    described = {
        "id": f"{run.hash[:32]}-{attempt}",
        "name": run.name,
        "group": config.group,
        "job_type": config.stage,
        "config": without_credentials({**asdict(config), "parents": {role: parent.name for role, parent in run.parents.items()}}),
    }
    with open_run(run.work, config.tracking, **described) as tracker:
        yield tracker
