"""state.json of a run in work: what stage=status reads, and what was seen of attempts before.

Written by whoever makes the run, beside its leases; gone when the run is published.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pipeline.files import write_atomically
from pipeline.runs.lease import Holder
from pipeline.runs.stop import as_asked

STATE = "state.json"
EVERY = 2.0  # seconds between two steps that are written
_written: dict[Path, float] = {}
_first: dict[Path, tuple[int, float]] = {}  # the first step that this attempt did, and when


def read(workplace: Path) -> dict[str, Any]:
    """{state, step, steps, seconds_a_step, pid, host, job, since, last_line}, and name, stage, stops; empty where
    nothing is in work.

    state: running, waiting (submitted), blocked (a parent was not made), stopped (the same command goes on), failed.
    stops: of the last attempts that a signal ended, the steps of their resume points (launch/attempts.py).
    """
    with suppress(OSError, ValueError):
        state = json.loads((workplace / STATE).read_bytes())
        return state if isinstance(state, dict) else {}
    return {}


def write(workplace: Path, **changes: Any) -> None:
    """Change some of it. It is a report, so a file system that refuses ends nothing."""
    with suppress(OSError):
        write_atomically(workplace / STATE, json.dumps({**read(workplace), **changes}), durable=False)
        _written[workplace] = time.monotonic()


def at_step(workplace: Path, step: int, steps: int) -> None:
    """The step that a training has done: its first at once, then every few seconds."""
    now = time.monotonic()
    first, begun = _first.setdefault(workplace, (step, now))
    if step == first or now - _written.get(workplace, 0.0) >= EVERY:
        took = round((now - begun) / (step - first), 4) if step > first else None
        write(workplace, step=step, steps=steps, seconds_a_step=took)


@contextmanager
def told(workplace: Path, by: Holder, name: str, stage: str) -> Iterator[None]:
    """Running, and how it ended where the run was not published."""
    earlier = read(workplace)
    carried = {key: earlier[key] for key in ("step", "steps", "stops", "stalled_at", "resubmitted") if key in earlier}
    owner = {"pid": by.pid, "host": by.host, "job": by.job, "since": by.since}
    write(workplace, **carried, name=name, stage=stage, state="running", last_line=None, seconds_a_step=None, **owner)
    _first.pop(workplace, None)
    try:
        with as_asked():
            yield
    except (SystemExit, KeyboardInterrupt):
        write(workplace, state="stopped")
        raise
    except BaseException as error:
        write(workplace, state="failed", last_line=str(error) or type(error).__name__)
        raise


def forget(workplace: Path) -> None:
    """When the run is published; what a writer that was killed left goes as well."""
    for path in workplace.glob(f"{STATE}*"):
        path.unlink(missing_ok=True)
