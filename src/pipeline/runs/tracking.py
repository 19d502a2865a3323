"""W&B: opens, tags and finishes a run, and nothing else knows it.

The W&B id is run hash + attempt, so that a requeued job goes on in its own run; the group is the table, the job type
the stage. Online where a key is configured, offline otherwise; it never asks.
"""

from __future__ import annotations

import netrc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from pipeline.errors import PipelineError
from pipeline.progress import say

if TYPE_CHECKING:
    from pipeline.runs.run import Run

MODES = ("online", "offline", "disabled")


class Tracker:
    """What a stage may tell of itself: numbers over steps, a summary, tables, plots.

    W&B works in a process of its own, which a signal to the whole tree ends first. Its failures end no run: it is told
    nothing more, and a line says so.
    """

    def __init__(self, wandb_run: Any) -> None:
        self._run = wandb_run

    def log(self, numbers: dict[str, float], step: int | None = None) -> None:
        self._tell(lambda run: run.log(numbers, step=step))

    def summary(self, numbers: dict[str, Any]) -> None:
        self._tell(lambda run: run.summary.update(numbers))

    def table(self, name: str, columns: list[str], rows: list[list[Any]]) -> None:
        import wandb

        self._tell(lambda run: run.log({name: wandb.Table(columns=list(columns), data=rows)}))

    def image(self, name: str, path: Path) -> None:
        import wandb

        self._tell(lambda run: run.log({name: wandb.Image(str(path))}))

    def finish(self, exit_code: int) -> None:
        self._tell(lambda run: run.finish(exit_code=exit_code))

    def _tell(self, what: Callable[[Any], None]) -> None:
        if self._run is None:
            return
        try:
            what(self._run)
        except Exception as error:
            self._run = None
            told = f"{type(error).__name__}: {error}".rstrip(": ")
            say(f"warning: W&B failed ({told}); the run goes on without it")
            _forget_the_service()


def _forget_the_service() -> None:
    """So that the next run of this process starts another, and nothing is said of it at the end."""
    import wandb

    with suppress(Exception, SystemExit):  # it exits with the status of a service that was killed
        wandb.teardown()


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
    except Exception as error:
        told = "the run goes on without it; tracking.mode=offline does without its server"
        print(f"warning: W&B opened no run ({error}); {told}", file=sys.stderr)
        _forget_the_service()
        run = None
    except BaseException:  # asked to stop meanwhile, with W&B's service, which would be missed at the end
        _forget_the_service()
        raise
    finally:
        sys.argv = words
    exit_code, tracker = 1, Tracker(run)
    try:
        yield tracker
        exit_code = 0
    finally:
        tracker.finish(exit_code)


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
