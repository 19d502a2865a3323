"""What a RUN in a configuration means to the builders: a run that is known before it is made, else what is finished."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.config.stages import RunStage
from pipeline.errors import PipelineError
from pipeline.runs.find import find_run
from pipeline.runs.folders import label_in
from pipeline.runs.manifest import read_manifest
from pipeline.runs.run import Parent, Run, Snapshot

Draft = tuple[RunStage, str, dict[str, Parent]]  # of a builder: the config as it decides, the label, the parents


@dataclass(frozen=True)
class Resolver:
    """`known`: names that a RUN may have before its run is made. `build` makes the run of a stage (stages/rows.py)."""

    runs_dir: Path
    build: Callable[[RunStage, Mapping[str, Parent]], Run]
    known: Mapping[str, Parent] = field(default_factory=dict)

    def model(self, reference: str, knob: str, revision: str | None = None) -> Parent:
        """What RUN or RUN@STEP means where a model is wanted.

        Raises:
            PipelineError: nothing, more than one thing, or a run that holds no model.
        """
        name, at, step = reference.rpartition("@")
        if reference not in self.known and at and step.isdigit() and isinstance(run := self.known.get(name), Run):
            return Snapshot(run, int(step))
        if reference in self.known:
            return self.known[reference]
        found = find_run(reference, self.runs_dir, knob, revision)
        manifest = read_manifest(found.folder)
        if manifest and manifest.stage in ("data", "eval", "analyze"):
            raise PipelineError(
                f"{knob}={reference} is a run of stage={manifest.stage}, which holds no model: name another RUN"
            )
        return found

    def data_root(self, reference: str) -> Parent | None:
        """The data run that data_root names; None where it is a plain folder."""
        if reference in self.known:
            return self.known[reference]
        folder = Path(reference)
        if folder.is_dir() and read_manifest(folder) is None:
            return None
        if ("/" in reference or reference.startswith(".")) and not folder.is_dir():
            raise PipelineError(
                f"data_root={reference} is not a folder: name one laid out like mgsm/sw/test.jsonl, or a data run"
            )
        return find_run(reference, self.runs_dir, "data_root")

    def run(self, config: RunStage, known: Mapping[str, Parent] | None = None) -> Run:
        """The run of a stage that another needs: a training's data set, the evaluations of a selection."""
        return self.build(config, {**self.known, **(known or {})})


def label_of(of: Parent) -> str:
    """A run's label; of a finished one its name without the digits of its hash."""
    return of.label if isinstance(of, Run) else label_in(of.name)
