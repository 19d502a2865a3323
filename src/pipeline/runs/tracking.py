"""W&B: opens, tags and finishes a run; no other module uses W&B.

The W&B id is run hash + attempt, so that a requeued job resumes its own run. The group is the
table, and the job type is the stage. The configuration names the parents with their hashes, with
which their ids begin. W&B is online if a key is configured, otherwise offline, and never prompts.
A failure of W&B ends no run.
"""

from __future__ import annotations

import hashlib
import netrc
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from pipeline.errors import PipelineError
from pipeline.progress import say
from pipeline.runs.manifest import SNAPSHOTS, Manifest

if TYPE_CHECKING:
    from pipeline.config.stages import Tracking
    from pipeline.runs.run import Parent, Run

MODES = ("online", "offline", "disabled")


class Tracker:
    """Logs numbers over steps, a summary, tables, plots and weights of a run.

    If a call fails, one line reports it, and the rest of the run is not logged.
    """

    def __init__(self, wandb_run: Any) -> None:
        self._run = wandb_run

    def log(self, numbers: dict[str, float], step: int | None = None) -> None:
        self._call(lambda run: run.log(numbers, step=step))

    def summary(self, numbers: dict[str, Any]) -> None:
        self._call(lambda run: run.summary.update(numbers))

    def table(self, name: str, columns: list[str], rows: list[list[Any]]) -> None:
        """Log rows whose columns are numbers or texts, with None for missing values."""
        import wandb

        self._call(lambda run: run.log({name: wandb.Table(columns=[*columns], data=rows)}))

    def figure(self, path: Path) -> None:
        """Log an SVG file, which W&B shows as HTML, under the name of the file."""
        import wandb

        text = path.read_text(encoding="utf-8")
        self._call(lambda run: run.log({path.stem: wandb.Html(text, inject=False)}))

    def weights(self, run: Run, manifest: Manifest) -> None:
        """Log the weights of a run that has its manifest as an artifact."""
        artifact = build_artifact(run.work, manifest)
        self._call(lambda wandb_run: wandb_run.log_artifact(artifact))

    def finish(self, exit_code: int) -> None:
        self._call(lambda run: run.finish(exit_code=exit_code))

    def _call(self, request: Callable[[Any], None]) -> None:
        if self._run is None:
            return
        try:
            request(self._run)
        except Exception as error:
            self._run = None
            report_failure(error)


def build_artifact(work: Path, manifest: Manifest) -> Any:
    """Return the artifact of a run's weights.

    W&B copies the files, because `wandb sync` deletes the files that it has uploaded.
    """
    import wandb

    name = re.sub(r"[^\w.-]", "-", manifest.name, flags=re.ASCII)[-120:] + "-weights"
    described = {"run": wandb_id(manifest.hash, manifest.attempt), "hash": manifest.hash}
    artifact = wandb.Artifact(name, type="weights", metadata=described)
    for file in sorted(manifest.files):
        if not file.startswith(f"{SNAPSHOTS}/"):
            artifact.add_file(str(work / file), name=file, policy="mutable", skip_cache=True)
    return artifact


def wandb_id(run_hash: str, attempt: int) -> str:
    return f"{run_hash[:32]}-{attempt}"


def report_failure(error: Exception) -> None:
    """Print a line about a failed call, and end W&B's service, so that the next run starts one."""
    import wandb

    text = f"{type(error).__name__}: {error}".rstrip(": ")
    say(f"warning: W&B failed ({text}); the run continues without it")
    with suppress(Exception, SystemExit):
        wandb.teardown()


def resolve_mode(requested: str) -> str:
    """Return online, offline or disabled. WANDB_MODE, if set, overrides auto.

    Raises:
        PipelineError: For online without a key, because W&B would prompt for it, and for an unknown
            WANDB_MODE.
    """
    if requested == "auto":
        default = "online" if has_key() else "offline"
        requested = os.environ.get("WANDB_MODE") or default
        if requested not in MODES:
            raise PipelineError(f"WANDB_MODE={requested} is unknown. Use {', '.join(MODES)}.")
    if requested == "online" and not has_key():
        raise PipelineError(
            "W&B is to be online and has no key. Set WANDB_API_KEY, or give tracking.mode=offline."
        )
    return requested


def has_key() -> bool:
    """Return True if W&B would find a key.

    It looks for WANDB_API_KEY, or its host in ~/.netrc (or the file NETRC).
    """
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    try:
        return host in netrc.netrc(os.environ.get("NETRC")).hosts
    except (OSError, netrc.NetrcParseError):
        return False


@contextmanager
def open_run(folder: Path, tracking: Tracking, **described: Any) -> Iterator[Tracker]:
    """Open a W&B run whose files are in folder/wandb.

    It is always finished at the end, as failed after an error.
    """
    exit_code, tracker = 1, Tracker(None)
    mode = resolve_mode(tracking.mode)
    if mode != "disabled":
        tracker = Tracker(start_run(folder, tracking, mode, described))
    try:
        yield tracker
        exit_code = 0
    finally:
        tracker.finish(exit_code)


def start_run(folder: Path, tracking: Tracking, mode: Any, described: dict[str, Any]) -> Any:
    """Return the W&B run of wandb.init, or None if it failed, which a line reports."""
    os.environ.setdefault("WANDB_SILENT", "true")
    if not os.environ.get("WANDB_MODE", "offline"):
        del os.environ["WANDB_MODE"]  # W&B does not treat an empty value as unset
    import wandb

    from pipeline.hub.addresses import without_credentials

    finish_timeout = tracking.timeout
    if tracking.weights:
        finish_timeout = 0.0  # no limit, because an upload may take hours
    settings = wandb.Settings(
        console="off", silent=True, init_timeout=tracking.timeout, finish_timeout=finish_timeout
    )
    arguments = sys.argv
    try:
        sys.argv = without_credentials(arguments)  # W&B records them
        return wandb.init(
            dir=str(folder),
            project=tracking.project,
            entity=tracking.entity,
            mode=mode,
            resume="allow",
            settings=settings,
            reinit="finish_previous",
            **described,
        )
    except Exception as error:
        report_failure(error)
        return None
    finally:
        sys.argv = arguments


def track_run(run: Run, attempt: int) -> AbstractContextManager[Tracker]:
    """Return a tracker of the W&B run that belongs to a run."""
    from pipeline.hub.addresses import without_credentials
    from pipeline.runs.run import recorded_config

    config = run.config
    parents = {}
    for role, parent in run.parents.items():
        parents[role] = {"name": parent.name, "hash": parent.hash}
    recorded = {**recorded_config(config), "parents": parents}
    return open_run(
        run.work,
        config.tracking,
        id=wandb_id(run.hash, attempt),
        name=run.name,
        group=config.group,
        job_type=config.stage,
        config=without_credentials(recorded),
    )


def track_report(
    folder: Path,
    tracking: Tracking,
    name: str,
    parents: Iterable[Parent],
) -> None:
    """Log the report of a table as one W&B run: its CSV files as tables, its plots as figures.

    Its id covers the runs that it reports, so that the same report, written again, is the same W&B
    run.
    """
    import pandas as pd

    hashes = {parent.name: parent.hash for parent in parents}
    identity = " ".join(["table", name, *sorted(hashes.values())])
    with open_run(
        folder,
        tracking,
        id=hashlib.sha256(identity.encode()).hexdigest()[:32],
        name=f"table-{name}",
        group=name,
        job_type="table",
        config={"parents": hashes},
    ) as tracker:
        for path in sorted(folder.glob("*.csv")):
            frame = pd.read_csv(path, keep_default_na=False, na_values=[""]).astype(object)
            rows = frame.where(frame.notna(), None).to_numpy().tolist()
            tracker.table(path.stem, list(frame.columns), rows)
        for path in sorted(folder.glob("plots/*.svg")):
            tracker.figure(path)
