"""W&B: opens, tags and finishes a run, and nothing else knows it.

The W&B id is run hash + attempt, so that a requeued job goes on in its own run; the group is the table, the job type
the stage. Online where a key is configured, offline otherwise; it never asks. Each call of W&B runs in a daemon thread
with a deadline: neither its service nor its server can keep a run or the process from ending.
"""

from __future__ import annotations

import atexit
import netrc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from pipeline.errors import PipelineError
from pipeline.progress import say

if TYPE_CHECKING:
    from pipeline.config.stages import Tracking
    from pipeline.runs.run import Run

T = TypeVar("T")
MODES = ("online", "offline", "disabled")


class Tracker:
    """What a stage logs: numbers over steps, a summary, tables, plots.

    W&B works in a process of its own, which may die, stop responding, or wait for a server. Each call has a deadline of
    `seconds`, and a failure ends no run: one line reports it, and the rest of the run is not logged.
    """

    def __init__(self, wandb_run: Any, mode: str = "offline", seconds: float = 30.0) -> None:
        self._run, self._mode, self._seconds = wandb_run, mode, seconds

    def log(self, numbers: dict[str, float], step: int | None = None) -> None:
        self._call(lambda run: run.log(numbers, step=step))

    def summary(self, numbers: dict[str, Any]) -> None:
        self._call(lambda run: run.summary.update(numbers))

    def table(self, name: str, columns: list[str], rows: list[list[Any]]) -> None:
        self._call(lambda run: run.log({name: wandb_module().Table(columns=list(columns), data=rows)}))

    def image(self, name: str, path: Path) -> None:
        self._call(lambda run: run.log({name: wandb_module().Image(str(path))}))

    def finish(self, exit_code: int) -> None:
        self._call(lambda run: run.finish(exit_code=exit_code))

    def _call(self, request: Callable[[Any], None]) -> None:
        if self._run is None:
            return
        run = self._run
        try:
            within(self._seconds, lambda: request(run))
        except Exception as error:
            self._run = None
            say(f"warning: {give_up(error, self._mode, self._seconds)}")


_mode_after_failure: str | None = None  # of the rest of this process, once W&B failed online or did not respond


def give_up(error: Exception, mode: str, seconds: float) -> str:
    """End W&B's service after a failed call. Gives the line that reports it.

    After a failure online, later runs of this process are offline; after a call offline that did not return, without
    W&B. Else each of them would wait as long.
    """
    global _mode_after_failure
    late = isinstance(error, TimeoutError)
    end_service(0.0 if late else GRACE)
    if mode == "online":
        _mode_after_failure, then = "offline", "; later runs of this process are offline (wandb sync uploads them)"
    elif late:
        _mode_after_failure, then = "disabled", ", as do later runs of this process"
    else:
        then = ""
    problem = f"did not respond within tracking.timeout={seconds:g} s" if late else f"failed ({reason(error)})"
    return f"W&B {problem}; the run continues without it{then}"


def reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")


def wandb_module() -> Any:
    import wandb

    return wandb


GRACE = 3.0  # seconds that W&B's service has to end when it is asked to


def in_thread(call: Callable[[], T]) -> Future[T]:
    """Call it in a daemon thread, which does not keep the process from ending."""
    outcome: Future[T] = Future()

    def work() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=work, name="W&B", daemon=True).start()
    return outcome


def within(seconds: float, call: Callable[[], T]) -> T:
    """The result of a call.

    Raises:
        TimeoutError: it did not return within `seconds`; it is left to its thread.
    """
    return in_thread(call).result(seconds)


def end_service(grace: float = GRACE) -> None:
    """Ask W&B's service to end, and kill it after `grace` seconds, so that no exit hook of W&B waits for it."""
    if "wandb" not in sys.modules:
        return
    import wandb

    def teardown() -> None:
        with suppress(BaseException):  # it exits with the status of a service that was killed
            wandb.teardown()

    ending = in_thread(teardown)
    with suppress(TimeoutError):
        ending.result(grace)
    for pid in services():  # one that stopped while it started, too, which W&B does not know of
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    with suppress(TimeoutError):
        ending.result(1.0)
    os.environ.pop("WANDB_SERVICE", None)  # which would point later runs to it


def services() -> list[int]:
    """The process ids of the W&B services that this process started (Linux)."""
    processes = []
    for children in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):
            for pid in map(int, children.read_text().split()):
                if "wandb-core" in Path(f"/proc/{pid}/cmdline").read_text():
                    processes.append(pid)
    return processes


def mode(requested: str) -> str:
    """online, offline or disabled. WANDB_MODE, where set, stands above auto.

    Raises:
        PipelineError: online without a key, where W&B would ask for one; or WANDB_MODE is none of the three.
    """
    if requested == "auto":
        requested = os.environ.get("WANDB_MODE") or ("online" if has_key() else "offline")
        if requested not in MODES:
            raise PipelineError(f"WANDB_MODE must be one of {', '.join(MODES)}, got {requested!r}")
    if requested == "online" and not has_key():
        raise PipelineError("W&B is to be online and has no key: set WANDB_API_KEY, or give tracking.mode=offline")
    return requested


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
def open_run(folder: Path, tracking: Tracking, **described: Any) -> Iterator[Tracker]:
    """A W&B run whose files are in folder/wandb; finished on every way out, as failed where there was an error."""
    wandb_mode: Any = _mode_after_failure or mode(tracking.mode)
    exit_code, tracker = 1, Tracker(None)
    if wandb_mode != "disabled":
        tracker = Tracker(start(folder, tracking, wandb_mode, described), wandb_mode, tracking.timeout)
    try:
        yield tracker
        exit_code = 0
    finally:
        tracker.finish(exit_code)


def start(folder: Path, tracking: Tracking, mode: Any, described: dict[str, Any]) -> Any:
    """wandb.init: the run of W&B, or None where it opens none, which a line reports."""
    os.environ.setdefault("WANDB_SILENT", "true")
    if not os.environ.get("WANDB_MODE", "offline"):
        del os.environ["WANDB_MODE"]  # empty, which W&B does not take for unset
    import wandb

    from pipeline.hub.addresses import without_credentials

    def init() -> Any:
        return wandb.init(
            dir=str(folder), project=tracking.project, entity=tracking.entity, mode=mode,
            settings=wandb.Settings(console="off", silent=True), resume="allow", reinit="finish_previous", **described,
        )  # fmt: skip

    words = sys.argv
    try:
        sys.argv = without_credentials(words)  # which W&B keeps
        with quiet_service():
            return within(tracking.timeout, init)
    except Exception as error:
        say(f"warning: {give_up(error, mode, tracking.timeout)}")
        return None
    except BaseException:  # asked to stop meanwhile, with W&B's service, which would be missed at the end
        end_service()
        raise
    finally:
        sys.argv = words
        atexit.unregister(end_service)
        atexit.register(end_service)  # after W&B's own hook, so that it is called before


@contextmanager
def quiet_service() -> Iterator[None]:
    """A service that starts inside has no standard error: where memory is short, it prints hundreds of lines there."""
    saved, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(nowhere)


@contextmanager
def tracked(run: Run, attempt: int) -> Iterator[Tracker]:
    """The W&B run of one run of ours."""
    from pipeline.hub.addresses import without_credentials
    from pipeline.runs.run import recorded

    config = run.config
    parents = {role: parent.name for role, parent in run.parents.items()}
    described = {
        "id": f"{run.hash[:32]}-{attempt}",
        "name": run.name,
        "group": config.group,
        "job_type": config.stage,
        "config": without_credentials({**recorded(config), "parents": parents}),
    }
    with open_run(run.work, config.tracking, **described) as tracker:
        yield tracker
