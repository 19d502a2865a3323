"""The state.json of an unfinished run, which stage=status reads, and a record of earlier attempts.

The process that computes the run writes it next to its leases. It is removed when the run is
published.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pipeline.files import write_atomically
from pipeline.hub.addresses import without_credentials
from pipeline.runs.lease import Holder
from pipeline.runs.stop import convert_errors_after_signal

STATE = "state.json"
WRITE_INTERVAL = 2.0  # seconds between two writes of steps
_written: dict[Path, float] = {}
_first: dict[Path, tuple[int, float]] = {}  # the first step of this attempt, and its time


def read_state(workplace: Path) -> dict[str, Any]:
    """Return the content of state.json; empty without the file.

    The keys are name, stage, state, step, steps, seconds_a_step, pid, host, job, since, last_line
    and stops. `state` is running, stopped (rerun the same command to resume), or failed. `stops`
    has the steps of the resume points of the last attempts that a signal ended
    (launch/attempts.py).
    """
    with suppress(OSError, ValueError):
        state = json.loads((workplace / STATE).read_bytes())
        if isinstance(state, dict):
            return state
    return {}


def update_state(workplace: Path, **changes: Any) -> None:
    """Change some entries of state.json.

    It is only a report: errors of the file system are ignored.
    """
    with suppress(OSError):
        write_atomically(
            workplace / STATE, json.dumps({**read_state(workplace), **changes}), durable=False
        )
        _written[workplace] = time.monotonic()


def record_step(workplace: Path, step: int, steps: int) -> None:
    """Write the step that a training has finished, at most every few seconds."""
    time_now = time.monotonic()
    first, started = _first.setdefault(workplace, (step, time_now))
    if step == first or time_now - _written.get(workplace, 0.0) >= WRITE_INTERVAL:
        seconds_a_step = None
        if step > first:
            seconds_a_step = round((time_now - started) / (step - first), 4)
        update_state(workplace, step=step, steps=steps, seconds_a_step=seconds_a_step)


@contextmanager
def track_state(workplace: Path, holder: Holder, name: str, stage: str) -> Iterator[None]:
    """Inside, the state is running. After an error or a signal, it is failed or stopped."""
    update_state(  # the other entries of an earlier attempt stay
        workplace,
        name=name,
        stage=stage,
        state="running",
        last_line=None,
        seconds_a_step=None,
        pid=holder.pid,
        host=holder.host,
        job=holder.job,
        since=holder.since,
    )
    _first.pop(workplace, None)
    try:
        with convert_errors_after_signal():
            yield
    except (SystemExit, KeyboardInterrupt):
        update_state(workplace, state="stopped")
        raise
    except BaseException as error:
        reason = without_credentials(str(error)) or type(error).__name__
        update_state(workplace, state="failed", last_line=reason)
        raise


def remove_state(workplace: Path) -> None:
    """Remove state.json of a published run, and temporary files of a killed writer."""
    for path in workplace.glob(f"{STATE}*"):
        path.unlink(missing_ok=True)
