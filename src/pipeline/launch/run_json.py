"""An element: a run as one line of JSON, written for and read by the process that computes it.

`{hash, stage, label, config, parents: {role: {hash, name}}}`, the config resolved. Parents are finished when the run
starts and are found by hash; entries of external models also contain the folder and the name on the Hub.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipeline.config.compose import read_stage
from pipeline.config.harness_tasks import include, included_folder
from pipeline.config.stages import EvalStage
from pipeline.errors import PipelineError
from pipeline.runs.find import from_folder
from pipeline.runs.folders import folder_of
from pipeline.runs.run import External, Folder, Parent, Run, Snapshot
from pipeline.stages.rows import RUN_STAGES

Element = dict[str, Any]


def element_of(run: Run) -> Element:
    parents = {role: parent_to_json(parent) for role, parent in run.parents.items()}
    config = asdict(run.config)
    return {"hash": run.hash, "stage": run.config.stage, "label": run.label, "config": config, "parents": parents}


def parent_to_json(parent: Parent) -> dict[str, Any]:
    entry: dict[str, Any] = {"hash": parent.hash, "name": parent.name}
    if isinstance(parent, Snapshot):
        entry |= {"of": parent.run.hash, "step": parent.step}
    elif not isinstance(parent, Run):
        entry |= {"folder": str(parent.folder)} | ({"model": True} if isinstance(parent, Folder) else {})
        entry |= {"hub": parent.hub} if isinstance(parent, External) and parent.hub else {}
        entry |= {"files": [*map(str, parent.files)]} if isinstance(parent, External) and parent.files else {}
    return entry


def run_of(element: Element) -> Run:
    """The run of an element whose parents are finished.

    Raises:
        PipelineError: a parent is not finished, the folder of eval.include_path was changed, or this version computes
            another hash from the same configuration.
    """
    row = RUN_STAGES[element["stage"]]
    config: Any = read_stage(row.config, element["config"], extra="ignore")
    if isinstance(config, EvalStage) and config.eval.include_path is not None:
        include(config.eval.include_path)  # this process does not know its tasks yet
    runs_dir = Path(config.runs_dir)
    parents = {role: parent_of(role, entry, element, runs_dir) for role, entry in element["parents"].items()}
    run = Run(config, element["label"], parents, version=row.version)
    own = included_folder(config.eval.tasks[0].task) if "include_path" in parents else None
    if own and own[1] != parents["include_path"].hash:
        raise PipelineError(f"{own[0]} was changed after {run.label} was planned: rerun the same command")
    if run.hash != element["hash"]:
        raise PipelineError(
            f"{element['label']} was planned by another version of this program: rerun the command with this one"
        )
    return run


def parent_of(role: str, entry: dict[str, Any], element: Element, runs_dir: Path) -> Parent:
    if entry.get("model"):
        return from_folder(Path(entry["folder"]), role, runs_dir)
    if "folder" in entry:
        files = tuple(map(Path, entry.get("files", ())))
        return External(entry["name"], entry["hash"], Path(entry["folder"]), entry.get("hub"), files)
    folder = folder_of(entry.get("of", entry["hash"]), runs_dir)
    if folder is None:
        raise PipelineError(f"its {role} {entry['name']} is not finished")
    if "of" in entry:
        return External(f"{folder.name}@{entry['step']}", entry["hash"], folder / "snapshots" / f"step-{entry['step']}")
    return External(folder.name, entry["hash"], folder)
