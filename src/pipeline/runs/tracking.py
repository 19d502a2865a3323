"""W&B: opens, tags and finishes a run; no other module uses W&B.

The W&B id is run hash + attempt, so that a requeued job resumes its own run. The group is the
table, and the job type is the stage. The configuration names the parents' ids. W&B is online if a
key is configured, otherwise offline, and never prompts. W&B's service is killed if a call takes
longer than tracking.timeout, which W&B's own timeouts do not bound. So neither this process nor the
server can keep a run from ending.
"""

from __future__ import annotations

import atexit
import csv
import hashlib
import netrc
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from pipeline.errors import PipelineError
from pipeline.files import link_or_copy
from pipeline.progress import redirected, say
from pipeline.runs.manifest import SNAPSHOTS, Malformed, Manifest, home_of, read_manifest

if TYPE_CHECKING:
    from pipeline.config.stages import Tracking
    from pipeline.runs.run import Parent, Run

MODES = ("online", "offline", "disabled")
UPLOAD_SPEED = 1e7  # expected minimum of bytes per second for hashing and uploading weights
GRACE = 3.0  # seconds that W&B's service has to end when requested


class Tracker:
    """Logs numbers over steps, a summary, tables, plots and weights of a run.

    W&B works in another process, which may die, stop responding, or wait for a server. Each call
    has a deadline of `seconds`, and a failure ends no run: one line reports it, and the rest of the
    run is not logged.
    """

    def __init__(self, wandb_run: Any, mode: str = "offline", seconds: float = 30.0) -> None:
        self._run, self._mode, self._seconds = wandb_run, mode, seconds

    def log(self, numbers: dict[str, float], step: int | None = None) -> None:
        self._call(lambda run: run.log(numbers, step=step))

    def summary(self, numbers: dict[str, Any]) -> None:
        self._call(lambda run: run.summary.update(numbers))

    def table(self, name: str, columns: list[str], rows: list[list[Any]]) -> None:
        """Log rows whose columns are numbers or texts, with None for missing values.

        W&B gets each column's type. It would find the type by each value, which takes longer than
        the deadline for 50,000 rows.
        """
        types: list[type] = []
        for column in zip(*rows, strict=True):
            is_number = all(isinstance(value, int | float | None) for value in column)
            types.append(float if is_number else str)

        def log_table(run: Any) -> None:
            table = wandb_module().Table(columns=columns, data=[], dtype=types or None)
            table.data = rows
            run.log({name: table})

        self._call(log_table)

    def figure(self, path: Path) -> None:
        """Log an image file, or an SVG, which W&B shows as HTML, under the name of the file."""

        def log_figure(run: Any) -> None:
            wandb = wandb_module()
            is_svg = path.suffix == ".svg"
            if is_svg:
                shown = wandb.Html(path.read_text(encoding="utf-8"), inject=False)
            else:
                shown = wandb.Image(str(path))
            run.log({path.stem: shown})

        self._call(log_figure)

    def weights(self, run: Run, manifest: Manifest) -> None:
        """Log the weights of a run that has its manifest as an artifact."""
        files = []
        for name in sorted(manifest.files):
            if not name.startswith(f"{SNAPSHOTS}/"):
                files.append(name)
                self._seconds += manifest.files[name]["bytes"] / UPLOAD_SPEED
        home = run.work
        if self._mode == "offline":
            home = run.folder  # W&B reads the files after the run was published
        work = run.work
        self._call(
            lambda wandb_run: wandb_run.log_artifact(build_artifact(work, home, manifest, files))
        )

    def finish(self, exit_code: int) -> None:
        self._call(lambda run: run.finish(exit_code=exit_code))

    def _call(self, request: Callable[[Any], None]) -> None:
        if self._run is None:
            return
        try:
            with time_limit(self._seconds):
                request(self._run)
        except Exception as error:
            self._run = None
            say(f"warning: {give_up(error, self._mode, self._seconds)}")


def build_artifact(work: Path, home: Path, manifest: Manifest, files: Iterable[str]) -> Any:
    """Return the artifact of a run's weights.

    It has links to the files, because `wandb sync` deletes the files that it has uploaded.

    Args:
        work: The work folder of the run.
        home: The folder that `work` becomes before W&B reads the links.
        manifest: The run's manifest.
        files: The names of the weights.
    """
    name = re.sub(r"[^\w.-]", "-", manifest.name, flags=re.ASCII)[-120:] + "-weights"
    described = {"run": wandb_id(manifest.hash, manifest.attempt), "hash": manifest.hash}
    artifact = wandb_module().Artifact(name, type="weights", metadata=described)
    for file in files:
        link = Path("wandb", "artifacts", file)
        (work / link).parent.mkdir(parents=True, exist_ok=True)
        (work / link).unlink(missing_ok=True)  # an interrupted attempt left it
        link_or_copy(work / file, work / link)
        entry = artifact.add_file(str(work / link), name=file, policy="immutable", skip_cache=True)
        entry.local_path = str((home / link).absolute())
    return artifact


def wandb_id(run_hash: str, attempt: int) -> str:
    return f"{run_hash[:32]}-{attempt}"


def parent_id(parent: Parent) -> str:
    """Return the W&B id of a parent (or of a snapshot's training), or its hash without one."""
    folder = home_of(parent.folder)
    with suppress(Malformed):  # a file of this name in the folder of an external model
        manifest = read_manifest(folder)
        if manifest and (folder / "wandb").is_dir():
            return wandb_id(manifest.hash, manifest.attempt)
    return parent.hash


# the mode for the rest of this process, after W&B failed online or did not respond
_mode_after_failure: str | None = None


def give_up(error: Exception, mode: str, seconds: float) -> str:
    """Return a line about a failed call, and end W&B's service.

    After a failure online, later runs of this process are offline. After an offline call that timed
    out, they run without W&B. Otherwise each of them would wait as long.
    """
    global _mode_after_failure
    late = isinstance(error, TimeoutError)
    if late:
        end_service(0.0)
        problem = f"did not respond within tracking.timeout={seconds:g} s"
    else:
        end_service(GRACE)
        text = f"{type(error).__name__}: {error}".rstrip(": ")
        problem = f"failed ({text})"
    consequence = ""
    if mode == "online":
        _mode_after_failure = "offline"
        consequence = "; later runs of this process are offline (wandb sync uploads them)"
    elif late:
        _mode_after_failure, consequence = "disabled", ", as do later runs of this process"
    return f"W&B {problem}; the run continues without it{consequence}"


def wandb_module() -> Any:
    import wandb

    return wandb


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Kill W&B's service after `seconds`, so that waiting calls end.

    Raises:
        TimeoutError: In place of the error of the call that waited.
    """
    timer, begun = threading.Timer(seconds, kill_service), time.monotonic()
    timer.daemon = True
    timer.start()
    try:
        yield
    except Exception as error:
        if time.monotonic() - begun >= seconds:
            raise TimeoutError from error
        raise
    finally:
        timer.cancel()


def end_service(grace: float = GRACE) -> None:
    """End W&B's service, and kill it after `grace` seconds, so that no exit hook waits for it."""
    if "wandb" not in sys.modules:
        return
    # teardown exits with the status of a service that was killed
    with suppress(Exception, SystemExit), time_limit(grace):
        wandb_module().teardown()
    kill_service()  # W&B does not know a service that stopped while starting
    os.environ.pop("WANDB_SERVICE", None)  # it would point later runs to the dead service


def kill_service() -> None:
    for pid in service_pids():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def service_pids() -> list[int]:
    """Return the process ids of the W&B services that this process started (Linux)."""
    processes = []
    for children in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):
            for pid in map(int, children.read_text().split()):
                if "wandb-core" in Path(f"/proc/{pid}/cmdline").read_text():
                    processes.append(pid)
    return processes


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
    wandb_mode: Any = _mode_after_failure or resolve_mode(tracking.mode)
    exit_code, tracker = 1, Tracker(None)
    if wandb_mode != "disabled":
        wandb_run = start_run(folder, tracking, wandb_mode, described)
        tracker = Tracker(wandb_run, wandb_mode, tracking.timeout)
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

    arguments = sys.argv
    try:
        sys.argv = without_credentials(arguments)  # W&B records them
        # without standard error, where W&B's service prints hundreds of lines if memory is short
        with (
            open(os.devnull, "w") as nothing,
            redirected(nothing.fileno(), 2),
            time_limit(tracking.timeout),
        ):
            return wandb.init(
                dir=str(folder),
                project=tracking.project,
                entity=tracking.entity,
                mode=mode,
                resume="allow",
                settings=wandb.Settings(console="off", silent=True),
                reinit="finish_previous",
                **described,
            )
    except Exception as error:
        say(f"warning: {give_up(error, mode, tracking.timeout)}")
        return None
    except BaseException:
        # a signal to stop also ended W&B's service, which would be missing at the end
        end_service()
        raise
    finally:
        sys.argv = arguments
        atexit.unregister(end_service)
        atexit.register(end_service)  # after W&B's hook, so that it is called first


def track_run(run: Run, attempt: int) -> AbstractContextManager[Tracker]:
    """Return a tracker of the W&B run that belongs to a run."""
    from pipeline.hub.addresses import without_credentials
    from pipeline.runs.run import recorded_config

    config = run.config
    parents = {}
    for role, parent in run.parents.items():
        parents[role] = {"name": parent.name, "id": parent_id(parent)}
    recorded = {**recorded_config(config), "parents": parents}
    described = {
        "id": wandb_id(run.hash, attempt),
        "name": run.name,
        "group": config.group,
        "job_type": config.stage,
        "config": without_credentials(recorded),
    }
    return open_run(run.work, config.tracking, **described)


def track_report(
    folder: Path,
    tracking: Tracking,
    job_type: str,
    name: str,
    parents: Iterable[Parent],
    **config: Any,
) -> None:
    """Log the report of a table as one W&B run: its CSV files as tables, its plots as figures.

    Its id covers the runs that it reports, so that the same report, written again, is the same W&B
    run.
    """
    ids = {parent.name: parent_id(parent) for parent in parents}
    identity = " ".join([job_type, name, *sorted(ids.values())])
    described = {
        "id": hashlib.sha256(identity.encode()).hexdigest()[:32],
        "name": f"{job_type}-{name}",
        "group": name,
        "job_type": job_type,
        "config": {**config, "parents": ids},
    }
    with open_run(folder, tracking, **described) as tracker:
        for path in sorted(folder.glob("*.csv")):
            with open(path, encoding="utf-8", newline="") as stream:
                names, *rows = csv.reader(stream)
            columns = [numbers_or_texts(column) for column in zip(*rows, strict=True)]
            typed_rows = [list(row) for row in zip(*columns, strict=True)]
            tracker.table(path.stem, names, typed_rows)
        for path in sorted(folder.glob("plots/*.svg")):
            tracker.figure(path)


def numbers_or_texts(column: Iterable[str]) -> list[float | None] | list[str | None]:
    """Return a column of a CSV file as numbers if all its values are, so that W&B sorts by them.

    Empty values are None.
    """
    texts = [text or None for text in column]
    numbers: list[float | None] = []
    for text in texts:
        try:
            numbers.append(None if text is None else float(text))
        except ValueError:
            return texts
    return numbers
