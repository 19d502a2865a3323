"""Settings and interface of all merges, and the map of changed parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

from omegaconf import MISSING

from pipeline.config.knob import Knobs, knob
from pipeline.config.training import Partition
from pipeline.errors import PipelineError

References = dict[str, tuple[str, Any]]  # role of a source -> the key that names it, and its RUN


@dataclass
class Merge(Knobs):
    """Settings of all merges. A LoRA expert is its base and its adapter, read as float32."""

    # Below the fields is the interface that method-independent code uses. A method's file in
    # merge/methods/ overrides it.

    method: str = MISSING
    dtype: str | None = knob(
        None, options=("float32", "bfloat16", "float16")
    )  # null: the sources' dtype
    base: str | None = knob(
        None, run=True
    )  # null: the base that the experts' manifests name, if the merge needs one
    files_from: str | None = (
        None  # the role whose tokenizer, template and configs the merge gets; null: the first
    )
    # auto: an adapter if all experts are adapters and their merge is exactly an adapter
    form: str = knob("auto", options=("auto", "dense", "adapter"))
    control: list[str] | None = (
        None  # roles whose expert is replaced by the base after weights were computed; null: none
    )

    reads_partition: ClassVar[bool] = False
    writes_folder: ClassVar[bool] = (
        False  # whether another program computes it, by `write_folder` instead of `decide`
    )
    fewest: ClassVar[int] = 2  # experts
    package: ClassVar[str] = (
        ""  # name and version of the package if another package has the method; hashed
    )

    def references(self) -> References:
        """Return the sources in the order of the merge, without the base.

        The result has the layout of the first source.
        """
        raise NotImplementedError

    def decide(self, opened: Any) -> Any:
        """Return how each parameter is merged: `Linear` weights or a `Computed` formula.

        `opened` is `Opened` of merge/adapters.py. Only headers are read, except for weights by
        magnitude.
        """
        raise NotImplementedError

    def write_folder(self, sources: Mapping[str, Path], folder: Path, threads: int | None) -> None:
        """Write the merged checkpoint of the sources' folders, by role, into an existing folder."""
        raise NotImplementedError

    def needs_base(self) -> bool:
        """Return True if the merge reads the base.

        The base defines task vectors, or weights experts by their distance from it.
        """
        return False

    def result_dtype(self) -> str | None:
        """Return torch's name of the stored dtype, or None for the sources' dtype."""
        return self.dtype

    def beyond_knobs(self) -> dict[str, Any]:
        """Return further content of the hash, besides the settings.

        Examples are the version of another package, and the content of a file.
        """
        if self.package:
            return {"packages": {self.method: self.package}}
        return {}

    def controlled_roles(self) -> list[str]:
        """Return the roles of `control`. A side that is a list stands for all of its experts.

        Raises:
            PipelineError: the merge does not have a role, or no expert is left.
        """
        roles, requested = list(self.references()), self.control or []
        sides = {role.partition(".")[0] for role in roles}
        unknown = next((role for role in requested if role not in (*roles, *sides)), None)
        if unknown:
            raise PipelineError(
                f"merge.control={self.control}: {unknown} is not a role. Choose from"
                f" {', '.join(roles)}."
            )
        controlled = []
        for role in roles:
            if {role, role.partition(".")[0]} & set(requested):
                controlled.append(role)
        if controlled == roles:
            raise PipelineError(
                f"merge.control={self.control} leaves no expert. Name only the language expert."
            )
        return controlled

    def exact_for_adapters(self) -> bool:
        """Return True if a merge of LoRA experts is exactly an adapter.

        This holds for weighted sums of whole parameters.
        """
        return True

    def refuse(self, partition: Partition | None, layers: int | None) -> None:
        """Raise PipelineError for settings that contradict each other or the number of layers.

        Args:
            partition: the partition of the layers, or None.
            layers: the number of layers, or None if the model is not on this machine yet.
        """

    def settled(self, partition: Partition | None) -> Merge:
        """Fill in defaults that depend on whether there is a partition."""
        return self

    def refuse_sides(self, declared: Mapping[str, str | None]) -> None:
        """Check that roles fit the sides for which the sources were trained, if known.

        Raises:
            PipelineError: a role contradicts a side.
        """

    def label(self, partition: Partition | None, layers: int | None) -> str:
        """Return the beginning of run names, before the experts' labels.

        The arguments are those of `refuse`.
        """
        return self.method

    def described(self, partition: Partition | None, layers: int | None) -> str:
        """Describe the merge for readers, in layers of the model if their number is known."""
        if getattr(self, "weights", 0) is not None:
            parts = []
        else:
            parts = ["equal weights"]
        for item in fields(self):
            value = getattr(self, item.name)
            is_own = not hasattr(Merge, item.name) and not item.metadata.get("run")
            is_number = type(value) in (int, float)
            if is_own and value is not None and (is_number or value != item.default):
                parts.append(
                    f"{item.name.replace('_', ' ')} {value:g}"
                    if type(value) is float
                    else f"{item.name} {value}"
                )
        if partition:
            parts.append(f"partition {partition.name}")
        return ", ".join(parts)


def numbered_references(experts: Sequence[Any]) -> References:
    """Return the references of merge.experts: roles "0", "1", ... in their order."""
    return {str(index): ("merge.experts", expert) for index, expert in enumerate(experts)}


@dataclass
class Analyze(Knobs):
    """The map of changed parameters: mean absolute change per row.

    A row is an input or an output feature.
    """

    axis: str = knob("input", options=("input", "output"))  # input: as in the published figures
    threshold: float | None = knob(
        None, ge=0
    )  # null: the published threshold of the expert's side, below
    threshold_math: float = knob(
        1.0e-5, ge=0
    )  # layer_swapping figure 2, which does not assign the values to experts
    threshold_language: float = knob(1.9e-5, ge=0)
