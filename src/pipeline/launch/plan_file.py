"""The plan of a command: a file with a line of JSON for each run to compute, parents first.

A line holds what the process that computes the run needs to know: its resolved configuration and
its parents by hash. `runs_dir/.plans/<name>.jsonl` is the newest plan of a name, which stage=status
compares with finished runs.
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

if TYPE_CHECKING:
    from pipeline.runs.run import Parent, Run

PLANS = ".plans"
LOGS = ".logs"


@dataclass(frozen=True)
class Task:
    """A run as a line of a plan.

    parents: role -> {hash, name}, and where it is unless it is a run; needs: hashes of the runs
        that are made before;
    gpus: how many it uses; models: those that an evaluation reads; seconds: predicted.
    level, kind: with launcher=slurm the longest chain of runs before it, and what it requests of a
        node.
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

        return cls(
            run.hash,
            run.name,
            run.config.stage,
            run.version,
            run.label,
            recorded_config(run.config),
            {role: _as_json(parent) for role, parent in run.parents.items()},
            [parent.hash for parent in parent_runs(run.parents)],
            gpus_requested(run),
            list(source_models(run)),
            None if seconds is None else round(seconds, 1),
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
        """The name of the job array whose tasks make it."""
        return f"{self.level}-{self.kind}"

    @property
    def log(self) -> Path:
        return self.runs_dir / LOGS / f"{folder_name(self.label, self.hash)}.log"

    def run(self) -> Run:
        """Return the run, whose parents are finished.

        Raises: PipelineError: a parent is unfinished, the folder of eval.include_path changed, or
        this version computes another hash from the same configuration.
        """
        from pipeline.config.compose import read_stage
        from pipeline.config.harness_tasks import files_of_task, include
        from pipeline.files import content_hash
        from pipeline.runs.run import Run
        from pipeline.stages.rows import RUN_STAGES

        row = RUN_STAGES[self.stage]
        config: Any = read_stage(row.config, self.config, extra="ignore")
        if self.stage == "eval" and config.eval.include_path is not None:
            include(config.eval.include_path)  # this process does not know its tasks yet
        parents = {
            role: _parent_of(role, entry, self.runs_dir) for role, entry in self.parents.items()
        }
        run = Run(config, self.label, parents, version=row.version)
        folder = parents.get("include_path")
        if folder:
            files = files_of_task(config.eval.tasks[0].task)
            if content_hash([*files], folder.folder) != folder.hash:
                raise PipelineError(
                    f"{folder.folder} was changed after {run.label} was planned: rerun the same"
                    " command"
                )
        if run.hash != self.hash:
            raise PipelineError(
                f"{self.label} was planned by another version of this program: rerun the command"
                " with this one"
            )
        return run


def tasks_of(
    runs: Sequence[Run], predict: Callable[[Run], float | None], kinds: Mapping[str, str] = {}
) -> list[Task]:
    """Return the tasks of runs, which are given parents first.

    Args: predict: expected seconds of a run. kinds: by hash of a run.
    """
    from pipeline.runs.run import parent_runs

    levels: dict[str, int] = {}
    for run in runs:
        levels[run.hash] = 1 + max(
            (levels.get(parent.hash, -1) for parent in parent_runs(run.parents)), default=-1
        )
    return [
        Task.of(run, predict(run), level=levels[run.hash], kind=kinds.get(run.hash, ""))
        for run in runs
    ]


def gpus_requested(run: Run) -> int:
    """Return the number of processes that use one GPU each."""
    if run.config.stage in ("sft", "cpt"):
        return run.config.sft.processes
    return 1


def _as_json(parent: Parent) -> dict[str, Any]:
    from pipeline.runs.run import External, Folder, Snapshot

    entry: dict[str, Any] = {"hash": parent.hash, "name": parent.name}
    if isinstance(parent, Snapshot):
        entry |= {"of": parent.run.hash, "step": parent.step}
    elif isinstance(parent, Folder):
        entry |= {"folder": str(parent.folder), "model": True}
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

    if entry.get("model"):
        return from_folder(Path(entry["folder"]), role, runs_dir)
    if "folder" in entry:
        files = tuple(map(Path, entry["files"]))
        return External(entry["name"], entry["hash"], Path(entry["folder"]), entry["hub"], files)
    folder = folder_of(entry.get("of", entry["hash"]), runs_dir)
    if folder is None:
        raise PipelineError(f"its {role} {entry['name']} is not finished")
    if "of" in entry:
        return External(
            f"{folder.name}@{entry['step']}",
            entry["hash"],
            folder / "snapshots" / f"step-{entry['step']}",
        )
    return External(folder.name, entry["hash"], folder)


# --- files ---


def plan_name(targets: Sequence[Run]) -> str:
    """Name of the table that the runs belong to; else runs- and a hash of the runs."""
    groups = {run.config.group for run in targets}
    if len(groups) == 1:
        group = groups.pop()
        if group:
            return group
    hashes = "".join(sorted(run.hash for run in targets))
    return f"runs-{hashlib.sha256(hashes.encode()).hexdigest()[:8]}"


def write_plan(file: Path, tasks: Sequence[Task]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, "".join(f"{json.dumps(vars(task))}\n" for task in tasks))


def publish_plan(runs_dir: Path, name: str, tasks: Sequence[Task]) -> None:
    """Write the newest plan of a name for stage=status, without configurations: addresses may hold
    credentials.
    """
    shown = [
        replace(task, config={"runs_dir": task.config["runs_dir"]}, parents={}) for task in tasks
    ]
    write_plan(runs_dir / PLANS / f"{name}.jsonl", shown)


def read_plan(file: Path) -> list[Task]:
    """Read the tasks of a plan.

    Raises: PipelineError: the file cannot be read.
    """
    try:
        return [Task(**json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError, TypeError) as error:
        raise PipelineError(
            f"{file} is not readable ({error}): it lists the runs of a command, so remove it and"
            " rerun that command"
        ) from error


def read_plans(runs_dir: Path) -> Iterator[tuple[str, Task]]:
    """Return the newest plans of this runs_dir, sorted by name: (name, task)."""
    for file in sorted((runs_dir / PLANS).glob("*.jsonl")):
        for task in read_plan(file):
            yield file.stem, task
