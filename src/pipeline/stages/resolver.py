"""Resolution of a RUN in a configuration: a planned run, a finished run, a folder or the Hub."""

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

# the result of a builder: the resolved configuration, the label, the parents
Draft = tuple[RunStage, str, dict[str, Parent]]


@dataclass(frozen=True)
class Resolver:
    """Finds the run, snapshot or folder that a RUN in a configuration names.

    Attributes:
        runs_dir: The folder of finished runs.
        build: Plans the run of a stage (stages/rows.py).
        references: Parents by names that a RUN may have before its run exists.
    """

    runs_dir: Path
    build: Callable[[RunStage, Mapping[str, Parent]], Run]
    references: Mapping[str, Parent] = field(default_factory=dict)

    def model(self, reference: str, knob: str, revision: str | None = None) -> Parent:
        """Return the model that RUN or RUN@STEP refers to.

        Raises:
            PipelineError: There is no such model, there are several, or the run has no model.
        """
        if reference in self.references:
            return self.references[reference]
        name, _, step = reference.rpartition("@")
        run = self.references.get(name)
        if isinstance(run, Run) and step.isdigit():
            sft = getattr(run.config, "sft", None)
            if sft is None or sft.snapshot_every is None:
                raise PipelineError(
                    f"{knob}={reference}: {name} stores no snapshots. Set sft.snapshot_every=N."
                )
            return Snapshot(run, int(step))
        parent = find_run(reference, self.runs_dir, knob, revision)
        manifest = read_manifest(parent.folder)
        if manifest and manifest.stage in ("data", "eval", "analyze"):
            raise PipelineError(
                f"{knob}={reference} is a run of stage={manifest.stage}, which has no model. Name"
                " another RUN."
            )
        return parent

    def data_root(self, reference: str) -> Parent | None:
        """Return the data run that data_root names, or None if it is a plain folder."""
        if reference in self.references:
            return self.references[reference]
        folder = Path(reference)
        if folder.is_dir():
            if read_manifest(folder) is None:
                return None
            reference = str(folder.absolute())  # a name would be looked up in runs_dir
        if ("/" in reference or reference.startswith(".")) and not folder.is_dir():
            raise PipelineError(
                f"data_root={reference} is not a folder. Name a folder with files like"
                " mgsm/sw/test.jsonl, or a data run."
            )
        return find_run(reference, self.runs_dir, "data_root")

    def run(self, config: RunStage, references: Mapping[str, Parent] | None = None) -> Run:
        """Return the run of another stage that a stage needs.

        Examples are a training's data set, and the evaluations of a selection.
        """
        return self.build(config, {**self.references, **(references or {})})


def label_of(parent: Parent) -> str:
    """Return the label of a run: for a finished run, its name without the digits of its hash."""
    if isinstance(parent, Run):
        return parent.label
    return label_in(parent.name)
