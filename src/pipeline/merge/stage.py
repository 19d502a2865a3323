"""The merge stage: open the parents, state the plan, write the merged checkpoint and its card."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import PipelineError
from pipeline.merge.adapters import open_source
from pipeline.merge.compatibility import refuse_unmoved
from pipeline.merge.digests import SourceDigests
from pipeline.merge.merge import Merging, open_merge
from pipeline.merge.summary import card, cells, tell
from pipeline.models.checkpoint import weights_root

if TYPE_CHECKING:
    from pipeline.runs.run import Run
    from pipeline.runs.tracking import Tracker


def make(run: Run, work: Path, tracker: Tracker) -> dict[str, Any]:
    """The merge stage: open the parents, state the plan, write the merged checkpoint and its card."""
    merge = merge_of(run)
    config, rows, size = merge.config, merge.plan_rows(), merge.bytes()
    tell(config, run.parents, rows, size)
    free = shutil.disk_usage(work).free
    if free < size["written"]:
        raise PipelineError(f"{work.parent} has {free:,} bytes free, the merge is of {size['written']:,}: free some")
    tracker.table("merge_plan", ["where", "what", "weights"], [cells(row) for row in rows])
    (work / "plan.json").write_text(json.dumps(rows, indent=2) + "\n")
    (work / "README.md").write_text(card(config, run.parents, rows, size))
    sources = SourceDigests(merge, Path(run.config.runs_dir))
    digests = merge.write(work, config.files_from, sources.known, run.config.threads)
    sources.keep(digests)
    weights = {"root": weights_root(digests), "digests": digests}
    return {"weights": weights, "plan": rows, "bytes": size, **merge.cast(), **merge.measured(run.config.threads)}


def merge_of(run: Run) -> Merging:
    """The merge that a run of stage=merge, or of stage=eval with a merge, asks for: headers read, nothing computed."""
    config: Any = run.config
    wanted = (*config.merge.references(), "base")  # an evaluation has other parents too
    parents = {role: parent for role, parent in run.parents.items() if role in wanted}
    refuse_unmoved(parents)
    base = parents["base"].folder if "base" in parents else None
    sources = {role: open_source(parent.folder, base) for role, parent in parents.items()}
    return open_merge(config.merge, sources, sources.pop("base", None), config.partition, config.threads)
