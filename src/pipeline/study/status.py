"""Stage status: all finished runs, and what is in work."""

from __future__ import annotations

from pathlib import Path

from pipeline.config.stages import StatusStage
from pipeline.report.text import aligned
from pipeline.runs.folders import finished


def show_status(config: StatusStage) -> str:
    """All finished runs of runs_dir, and what is in work, as a table in text."""
    runs_dir = Path(config.runs_dir)
    rows = [("run", "stage", "seconds", "attempt", "made")]
    found = [(one.name, one.stage, f"{one.seconds:.0f}", str(one.attempt), one.started) for one in finished(runs_dir)]
    rows += sorted(found, key=lambda row: row[4])  # oldest first
    hashes = sorted(path.name for path in (runs_dir / ".work").glob("*") if path.is_dir() and not path.suffix)
    digits = 8 if len({one[:8] for one in hashes}) == len(hashes) else 12  # as in the names of folders
    work = [one[:digits] for one in hashes]
    return "\n".join([*aligned(rows), f"{len(rows) - 1} finished, unpublished work: {', '.join(work) or 'none'}"])
