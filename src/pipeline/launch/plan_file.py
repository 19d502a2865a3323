"""The plan of a command: a file with one line of JSON per run, parents first.

A line holds the resolved configuration and the hashes of the parents, which is all that the
computing process needs. `runs_dir/.plans/<name>.jsonl` is the newest plan of a name; stage=status
compares it with the finished runs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import PipelineError
from pipeline.files import write_atomically
from pipeline.runs.folders import folder_name, folder_of
from pipeline.runs.manifest import SNAPSHOTS

if TYPE_CHECKING:
    from pipeline.runs.run import Parent, Run

PLANS = ".plans"
LOGS = ".logs"


@dataclass(frozen=True)
class Task:
    """A run as a line of a plan.

    Attributes:
        parents: role -> {hash, name}, and the folder if the parent is not a run.
        needs: hashes of the parents that are runs.
        gpus: number of GPUs.
        models: the models that an evaluation loads.
        seconds: predicted duration.
        level: the longest chain of runs before this run.
        kind: with launcher=slurm, the name of the requested resources.
    """

    hash: str
    name: str
    stage: str
    version: int
    label: str
    config: dict[str, Any]
    parents: dict[str, dict[str, Any]]
    needs: list[str]
    gpus: int
    models: list[str]
    seconds: float | None = None
    level: int = 0
    kind: str = ""

    @classmethod
    def of(cls, run: Run, seconds: float | None = None, **more: Any) -> Task:
        from pipeline.runs.run import parent_runs, recorded_config
        from pipeline.stages.evaluation import source_models

        parents = {role: _as_json(parent) for role, parent in run.parents.items()}
        needs = [parent.hash for parent in parent_runs(run.parents)]
        if seconds is not None:
            seconds = round(seconds, 1)
        return cls(
            hash=run.hash,
            name=run.name,
            stage=run.config.stage,
            version=run.version,
            label=run.label,
            config=recorded_config(run.config),
            parents=parents,
            needs=needs,
            gpus=gpus_requested(run),
            models=list(source_models(run)),
            seconds=seconds,
            **more,
        )

    @property
    def runs_dir(self) -> Path:
        return Path(self.config["runs_dir"])

    @property
    def workplace(self) -> Path:
        return self.runs_dir / ".work" / self.hash

    @property
    def array(self) -> str:
        """The name of the job array that computes this run."""
        return f"{self.level}-{self.kind}"

    @property
    def log(self) -> Path:
        return self.runs_dir / LOGS / f"{folder_name(self.label, self.hash)}.log"

    def run(self) -> Run:
        """Return the run, whose parents must be finished.

        Raises:
            PipelineError: a parent is unfinished, or this version computes another hash from the
                same configuration.
        """
        from pipeline.config.compose import read_stage
        from pipeline.config.harness_tasks import include
        from pipeline.runs.run import Run
        from pipeline.stages.rows import RUN_STAGES

        row = RUN_STAGES[self.stage]
        config: Any = read_stage(row.config, self.config, extra="ignore")
        if self.stage == "eval" and config.eval.include_path is not None:
            include(config.eval.include_path)  # this process has not registered these tasks yet
        parents = {}
        for role, entry in self.parents.items():
            parents[role] = _parent_of(role, entry, self.runs_dir)
        run = Run(config, self.label, parents, version=row.version)
        if run.hash != self.hash:
            raise PipelineError(
                f"{self.label} was planned by another version of this program. Rerun the command"
                " with this version."
            )
        return run


def tasks_of(
    runs: Sequence[Run], predict: Callable[[Run], float | None], kinds: Mapping[str, str] = {}
) -> list[Task]:
    """Return the tasks of runs.

    Args:
        runs: the runs, parents first.
        predict: returns the expected seconds of a run.
        kinds: the resources to request, by the hash of a run.
    """
    from pipeline.runs.run import parent_runs

    levels: dict[str, int] = {}
    tasks = []
    for run in runs:
        before = [levels.get(parent.hash, -1) for parent in parent_runs(run.parents)]
        level = 1 + max(before, default=-1)
        levels[run.hash] = level
        tasks.append(Task.of(run, predict(run), level=level, kind=kinds.get(run.hash, "")))
    return tasks


def gpus_requested(run: Run) -> int:
    """Return the number of GPUs of a run, one for each of its processes."""
    if run.config.stage in ("sft", "cpt"):
        return run.config.sft.processes
    return 1


def _as_json(parent: Parent) -> dict[str, Any]:
    from pipeline.runs.run import External, Folder, Snapshot

    entry: dict[str, Any] = {"hash": parent.hash, "name": parent.name}
    if isinstance(parent, Snapshot):
        entry |= {"of": parent.run.hash, "step": parent.step}
    elif isinstance(parent, Folder):
        entry["folder"] = str(parent.folder)
    elif isinstance(parent, External):
        entry |= {
            "folder": str(parent.folder),
            "hub": parent.hub,
            "files": [*map(str, parent.files)],
        }
    return entry


def _parent_of(role: str, entry: Mapping[str, Any], runs_dir: Path) -> Parent:
    from pipeline.runs.find import from_folder
    from pipeline.runs.run import External

    if "files" in entry:
        files = tuple(map(Path, entry["files"]))
        return External(entry["name"], entry["hash"], Path(entry["folder"]), entry["hub"], files)
    if "folder" in entry:
        return from_folder(Path(entry["folder"]), role, runs_dir)
    folder = folder_of(entry.get("of", entry["hash"]), runs_dir)
    if folder is None:
        raise PipelineError(f"its {role} {entry['name']} is not finished")
    if "of" in entry:
        folder = folder / SNAPSHOTS / f"step-{entry['step']}"
    return from_folder(folder, role, runs_dir)


# --- files ---


def plan_name(targets: Sequence[Run]) -> str:
    """Return the name of the table that all runs belong to, otherwise `runs-` and a hash."""
    groups = {run.config.group for run in targets}
    if len(groups) == 1:
        group = groups.pop()
        if group:
            return group
    hashes = "".join(sorted(run.hash for run in targets))
    return f"runs-{hashlib.sha256(hashes.encode()).hexdigest()[:8]}"


def write_plan(file: Path, tasks: Sequence[Task]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(vars(task)) for task in tasks]
    write_atomically(file, "".join(f"{line}\n" for line in lines))


def publish_plan(runs_dir: Path, name: str, tasks: Sequence[Task]) -> None:
    """Write the newest plan of a name for stage=status.

    Configurations are left out, because addresses in them may hold credentials.
    """
    shown = [
        replace(task, config={"runs_dir": task.config["runs_dir"]}, parents={}) for task in tasks
    ]
    write_plan(runs_dir / PLANS / f"{name}.jsonl", shown)


def read_plan(file: Path) -> list[Task]:
    """Read the tasks of a plan.

    Raises:
        PipelineError: the file cannot be read.
    """
    try:
        return [Task(**json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError, TypeError) as error:
        raise PipelineError(
            f"{file} is not readable ({error}). It lists the runs of a command: remove it and rerun"
            " that command."
        ) from error


def read_plans(runs_dir: Path) -> Iterator[tuple[str, Task]]:
    """Yield (name, task) of the newest plans of this runs_dir, sorted by name."""
    for file in sorted((runs_dir / PLANS).glob("*.jsonl")):
        for task in read_plan(file):
            yield file.stem, task
