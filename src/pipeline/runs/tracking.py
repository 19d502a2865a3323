"""W&B: opens, tags and finishes a run, and nothing else knows it.

The W&B id is run hash + attempt, so that a requeued job goes on in its own run; the group is the table, the job type
the stage. Online where a key is configured, offline otherwise; it never asks.
"""

from __future__ import annotations

import netrc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from pipeline.errors import PipelineError

if TYPE_CHECKING:
    from pipeline.runs.run import Run

MODES = ("online", "offline", "disabled")


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

        self._run.log({name: wandb.Table(columns=list(columns), data=rows)})

    def image(self, name: str, path: Path) -> None:
        import wandb

        self._run.log({name: wandb.Image(str(path))})


def mode(asked: str) -> str:
    """online, offline or disabled. WANDB_MODE, where set, stands above auto.

    Raises:
        PipelineError: online without a key, where W&B would ask for one; or WANDB_MODE is none of the three.
    """
    if asked == "auto":
        asked = os.environ.get("WANDB_MODE") or ("online" if has_key() else "offline")
        if asked not in MODES:
            raise PipelineError(f"WANDB_MODE must be one of {', '.join(MODES)}, got {asked!r}")
    if asked == "online" and not has_key():
        raise PipelineError("W&B is to be online and has no key: set WANDB_API_KEY, or give tracking.mode=offline")
    return asked


def has_key() -> bool:
    """Whether W&B would find a key: WANDB_API_KEY, or its host in ~/.netrc (or the file NETRC)."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    try:
        return host in netrc.netrc(os.environ.get("NETRC")).hosts
    except (OSError, netrc.NetrcParseError):
        return False


@contextmanager
def open_run(folder: Path, tracking: Any, **described: Any) -> Iterator[Tracker]:
    """A W&B run whose files lie in folder/wandb; finished on every way out, as failed where there was an error."""
    wanted: Any = mode(tracking.mode)
    os.environ.setdefault("WANDB_SILENT", "true")
    import wandb

    from pipeline.hub.addresses import without_credentials

    words = sys.argv
    try:
        sys.argv = without_credentials(words)  # which W&B keeps
        run = wandb.init(
            dir=str(folder), project=tracking.project, entity=tracking.entity, mode=wanted,
            settings=wandb.Settings(console="off", silent=True), resume="allow", reinit="finish_previous", **described,
        )  # fmt: skip
    except wandb.Error as error:
        raise PipelineError(f"W&B opened no run ({error}): tracking.mode=offline does without its server") from error
    finally:
        sys.argv = words
    exit_code = 1
    try:
        yield Tracker(run)
        exit_code = 0
    finally:
        run.finish(exit_code=exit_code)


@contextmanager
def tracked(run: Run, attempt: int) -> Iterator[Tracker]:
    """The W&B run of one run of ours."""
    from pipeline.hub.addresses import without_credentials

    config = run.config
    parents = {role: parent.name for role, parent in run.parents.items()}
    described = {
        "id": f"{run.hash[:32]}-{attempt}",
        "name": run.name,
        "group": config.group,
        "job_type": config.stage,
        "config": without_credentials({**asdict(config), "parents": parents}),
    }
    with open_run(run.work, config.tracking, **described) as tracker:
        yield tracker
