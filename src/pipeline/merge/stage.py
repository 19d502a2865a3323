"""The merge stage, which writes a merged checkpoint."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import PipelineError
from pipeline.hub.models import local_folder
from pipeline.merge.adapters import open_source
from pipeline.merge.digests import (
    equal_to_base,
    known_digests,
    verify_source,
    verify_sources,
    weights_key,
)
from pipeline.merge.merge import Merging
from pipeline.merge.open_merge import open_merge
from pipeline.merge.summary import group_weights, plan_text
from pipeline.merge.write import make_readable
from pipeline.models.checkpoint import digest_tensors, weights_root
from pipeline.runs.run import decided_beyond_knobs

if TYPE_CHECKING:
    from pipeline.config.stages import EvalStage, MergeStage
    from pipeline.runs.run import Run
    from pipeline.runs.tracking import Tracker


def make(run: Run[MergeStage], work: Path, tracker: Tracker) -> dict[str, Any]:
    """Run the merge stage: open the parents, print the plan, write the merged checkpoint."""
    config = run.config
    if config.merge.writes_folder:
        return write_elsewhere(run, work)
    merge = merge_of(run)
    rows = group_weights(merge)
    known = known_digests(merge, config.runs_path)
    for role in equal_to_base(merge, known):
        name = run.parents[role].name
        merge.notes.append(f"{name} is equal to its base, so it adds nothing to the merge")
    done = merge.described(config.partition)
    print(plan_text(merge, run.parents, rows, done), file=sys.stderr)
    key = weights_key(merge, known)
    verify_sources(merge, config.threads)
    digests = merge.write(work, known, config.threads)
    weights = {"root": weights_root(digests), "made_of": key, "digests": digests}
    facts: dict[str, Any] = {**measure_merge(merge, key, config.threads)}
    if merge.notes:
        facts["note"] = "\n".join(merge.notes)
    return {"weights": weights, "plan": rows, "merge": done, **merge.cast(), **facts}


# Measured numbers by the key of the merge: each of its evaluations in memory needs them
_facts: dict[str, dict[str, float]] = {}


def measure_merge(merge: Merging, key: str, threads: int | None) -> dict[str, float]:
    """Measure the numbers of a merge that its run records, and print them on standard error."""
    if key not in _facts:
        _facts[key] = merge.method.measured(threads)
    facts = _facts[key]
    for name, value in facts.items():
        words = name.replace("_", " ")
        print(f"  {words}: {value:.4g}", file=sys.stderr)
    return facts


def merge_of(run: Run[MergeStage] | Run[EvalStage]) -> Merging:
    """Return the merge of a run of stage=merge or stage=eval, decided but not computed."""
    config = run.config
    assert config.merge is not None
    folders = folders_of(run)
    base_folder = folders.get("base")
    sources = {role: open_source(folder, base_folder) for role, folder in folders.items()}
    base = sources.pop("base", None)
    return open_merge(config.merge, sources, base, config.partition, config.threads)


def folders_of(run: Run[MergeStage] | Run[EvalStage]) -> dict[str, Path]:
    """Return the folders of a merge's sources by their roles.

    Raises:
        PipelineError: a file that the method reads has changed since the run was built.
    """
    merge = run.config.merge
    assert merge is not None
    for key, value in decided_beyond_knobs(run.config).items():
        if run.decided_by[key] != value:
            raise PipelineError(
                f"{run.label}: a file that merge={merge.method} reads has changed. Rerun the"
                " command."
            )
    roles = (*merge.references(), "base")  # an evaluation has other parents too
    return {role: parent.folder for role, parent in run.parents.items() if role in roles}


def write_elsewhere(run: Run[MergeStage] | Run[EvalStage], folder: Path) -> dict[str, Any]:
    """Let a method's own program write the merged checkpoint, and return the facts of the merge."""
    merge = run.config.merge
    assert merge is not None
    folders = {role: local_folder(source) for role, source in folders_of(run).items()}
    folders |= dict.fromkeys(merge.controlled_roles(), folders.get("base", folder))
    for source in folders.values():
        opened = open_source(source, folders.get("base"))
        verify_source(opened, opened.model.names, run.config.threads)
    merge.write_folder(folders, folder, run.config.threads)
    make_readable(folder)
    digests = digest_tensors(folder)
    done = merge.described(run.config.partition, None)
    return {
        "weights": {"root": weights_root(digests), "digests": digests},
        "merge": done,
    }
