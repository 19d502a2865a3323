"""The plan that a launcher writes to `runs_dir/.plans/<name>.json`, which stage=status compares with finished runs.

`{name, runs: {hash: {name, stage, version, parents: [hash], job}}}`; job: the id of its Slurm job, 12_3.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.errors import PipelineError
from pipeline.files import write_atomically
from pipeline.runs.run import Run, parent_runs

PLANS = ".plans"


def plan_name(targets: Sequence[Run]) -> str:
    """Name of the table that the runs belong to; else runs- and a hash of the runs."""
    groups = {run.config.group for run in targets}
    if len(groups) == 1 and (group := groups.pop()):
        return group
    return f"runs-{hashlib.sha256(''.join(sorted(run.hash for run in targets)).encode()).hexdigest()[:8]}"


def write_plan(name: str, runs: Sequence[Run], jobs: Mapping[str, str]) -> None:
    """Write the plan of these runs, parents included; jobs: run hash -> job."""
    if not runs:
        return
    folder = runs[0].runs_dir / PLANS
    folder.mkdir(parents=True, exist_ok=True)
    entries = {
        run.hash: {
            "name": run.name, "stage": run.config.stage, "version": run.version,
            "parents": [parent.hash for parent in parent_runs(run.parents)], "job": jobs.get(run.hash),
        }
        for run in runs
    }  # fmt: skip
    file, text = folder / f"{name}.json", json.dumps({"name": name, "runs": entries})
    if not file.is_file() or file.read_bytes() != text.encode():
        write_atomically(file, text)


def read_plans(runs_dir: Path) -> Iterator[dict[str, Any]]:
    """The plans of this runs_dir, sorted by name.

    Raises:
        PipelineError: one of them cannot be read; without it, jobs that are queued would be submitted again.
    """
    for path in sorted((runs_dir / PLANS).glob("*.json")):
        try:
            plan = json.loads(path.read_bytes())
            if not all("job" in run for run in plan["runs"].values()):
                raise ValueError("an entry without its job")
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise PipelineError(
                f"{path} is not readable ({error}): it lists the jobs of its runs, so check squeue, cancel them, then "
                "remove the file and rerun the command of its table"
            ) from error
        yield plan
