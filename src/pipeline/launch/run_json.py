"""An element: a run as one line of JSON, and the run of such a line, for the process that makes it.

`{hash, stage, label, config, parents: {role: {hash, name}}}`, the config resolved. Parents are finished when it is
made, and found by their hashes; of one that no run of ours made, its folder and its name on the Hub stand there too.
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
    parents = {role: told_of(parent) for role, parent in run.parents.items()}
    config = asdict(run.config)
    return {"hash": run.hash, "stage": run.config.stage, "label": run.label, "config": config, "parents": parents}


def told_of(parent: Parent) -> dict[str, Any]:
    told: dict[str, Any] = {"hash": parent.hash, "name": parent.name}
    if isinstance(parent, Snapshot):
        told |= {"of": parent.run.hash, "step": parent.step}
    elif not isinstance(parent, Run):
        told |= {"folder": str(parent.folder)} | ({"model": True} if isinstance(parent, Folder) else {})
        told |= {"hub": parent.hub} if isinstance(parent, External) and parent.hub else {}
    return told


def run_of(element: Element) -> Run:
    """The run of an element, its parents being finished.

    Raises:
        PipelineError: a parent is not, or this program would make another run of the same words.
    """
    row = RUN_STAGES[element["stage"]]
    config = rebuilt(row.config, element["config"])
    runs_dir = Path(config.runs_dir)
    parents = {role: parent_of(role, told, element, runs_dir) for role, told in element["parents"].items()}
    run = Run(config, element["label"], parents, version=row.version)
    if run.hash != element["hash"]:
        raise PipelineError(
            f"{element['label']} was planned by another version of this program: ask for it again with this one"
        )
    return run


def parent_of(role: str, told: dict[str, Any], element: Element, runs_dir: Path) -> Parent:
    if told.get("model"):
        return from_folder(Path(told["folder"]), role, runs_dir)
    if "folder" in told:
        return External(told["name"], told["hash"], Path(told["folder"]), told.get("hub"))
    folder = folder_of(told.get("of", told["hash"]), runs_dir)
    if folder is None:
        raise PipelineError(f"its {role} {told['name']} is not finished")
    if "of" in told:
        return External(f"{folder.name}@{told['step']}", told["hash"], folder / "snapshots" / f"step-{told['step']}")
    return External(folder.name, told["hash"], folder)


def rebuilt(kind: Any, value: Any) -> Any:
    """A value of JSON as what `asdict` made it of: dataclasses, also in lists and dicts; a merge by its method."""
    if value is None:
        return None
    if get_origin(kind) in (Union, UnionType):
        return rebuilt(next(one for one in get_args(kind) if one is not NoneType), value)
    if isinstance(value, list) and get_origin(kind) is list:
        return [rebuilt(get_args(kind)[0], one) for one in value]
    if isinstance(value, dict) and get_origin(kind) is dict:
        return {key: rebuilt(get_args(kind)[1], one) for key, one in value.items()}
    if not is_dataclass(kind):
        return value
    made: Any = METHODS[value["method"]] if kind is Merge else kind
    hints = get_type_hints(made)
    known = {item.name for item in fields(made)}
    return made(**{name: rebuilt(hints[name], one) for name, one in value.items() if name in known})
