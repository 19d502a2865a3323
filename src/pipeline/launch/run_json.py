"""An element: a run as one line of JSON, written for and read by the process that computes it.

`{hash, stage, label, config, parents: {role: {hash, name}}}`, the config resolved. Parents are finished when the run
starts and are found by hash; entries of external models also contain the folder and the name on the Hub.
"""

from __future__ import annotations

from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from pipeline.config.merging import Merge
from pipeline.errors import PipelineError
from pipeline.merge.methods import METHODS
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
    return entry


def run_of(element: Element) -> Run:
    """The run of an element whose parents are finished.

    Raises:
        PipelineError: a parent is not finished, or this version computes another hash from the same configuration.
    """
    row = RUN_STAGES[element["stage"]]
    config = from_json(row.config, element["config"])
    runs_dir = Path(config.runs_dir)
    parents = {role: parent_of(role, entry, element, runs_dir) for role, entry in element["parents"].items()}
    run = Run(config, element["label"], parents, version=row.version)
    if run.hash != element["hash"]:
        raise PipelineError(
            f"{element['label']} was planned by another version of this program: rerun the command with this one"
        )
    return run


def parent_of(role: str, entry: dict[str, Any], element: Element, runs_dir: Path) -> Parent:
    if entry.get("model"):
        return from_folder(Path(entry["folder"]), role, runs_dir)
    if "folder" in entry:
        return External(entry["name"], entry["hash"], Path(entry["folder"]), entry.get("hub"))
    folder = folder_of(entry.get("of", entry["hash"]), runs_dir)
    if folder is None:
        raise PipelineError(f"its {role} {entry['name']} is not finished")
    if "of" in entry:
        return External(f"{folder.name}@{entry['step']}", entry["hash"], folder / "snapshots" / f"step-{entry['step']}")
    return External(folder.name, entry["hash"], folder)


def from_json(kind: Any, value: Any) -> Any:
    """Inverse of `asdict`: JSON as a value of type `kind`, with dataclasses also in lists and dicts; a merge's class is
    chosen by its method."""
    if value is None:
        return None
    if get_origin(kind) in (Union, UnionType):
        return from_json(next(entry for entry in get_args(kind) if entry is not NoneType), value)
    if isinstance(value, list) and get_origin(kind) is list:
        return [from_json(get_args(kind)[0], entry) for entry in value]
    if isinstance(value, dict) and get_origin(kind) is dict:
        return {key: from_json(get_args(kind)[1], entry) for key, entry in value.items()}
    if not is_dataclass(kind):
        return value
    dataclass_type: Any = METHODS[value["method"]] if kind is Merge else kind
    hints = get_type_hints(dataclass_type)
    field_names = {item.name for item in fields(dataclass_type)}
    return dataclass_type(
        **{name: from_json(hints[name], entry) for name, entry in value.items() if name in field_names}
    )
