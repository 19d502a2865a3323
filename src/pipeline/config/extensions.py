"""Stages, merge methods, backends and benchmarks outside of the core.

They are found by the entry points of installed packages, and of extras/ in this package. Names come
from the metadata of installed distributions. A package is imported when one of its names is used; a
failing import is an error with its name.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from pipeline.config.merging import Merge, check_method
from pipeline.config.stages import Stage
from pipeline.errors import PipelineError

MERGE_METHODS = "cross_lingual_merging.merge_methods"
BENCHMARKS = "cross_lingual_merging.benchmarks"
STAGES = "cross_lingual_merging.stages"
EXPORTS = "cross_lingual_merging.exports"
BACKENDS = "cross_lingual_merging.backends"  # modules with versions() and backend(Eval, folder)
OURS = "cross-lingual-merging"


@dataclass(frozen=True)
class Extension:
    """One entry point.

    Attributes:
        name: its name.
        entry: the entry point.
        package: name and version of the distribution that declares it.
        ours: whether this is our distribution.
    """

    name: str
    entry: metadata.EntryPoint
    package: str
    ours: bool

    def load(self) -> Any:
        """Import the object of the entry point.

        Raises:
            PipelineError: the import fails.
        """
        parts = self.entry.module.split(".")[1:]
        file = Path(__file__).parents[1].joinpath(*parts).with_suffix(".py")
        if self.ours and not file.is_file():
            raise PipelineError(
                f"{self.name} is in {file}, which does not exist. Install {self.package} again."
            )
        try:
            return self.entry.load()
        except Exception as error:
            raise PipelineError(
                f"{self.name} of package {self.package} cannot be imported ({type(error).__name__}:"
                f" {error}). Report it to the package's authors."
            ) from error


@cache
def extensions(group: str) -> dict[str, Extension]:
    """Return name -> extension, without importing any.

    Raises:
        PipelineError: two packages declare a name.
    """
    by_name: dict[str, Extension] = {}
    for entry in metadata.entry_points(group=group):
        if entry.dist:
            package = f"{entry.dist.name} {entry.dist.version}"
        else:
            package = entry.value
        if entry.name in by_name and by_name[entry.name].package != package:
            raise PipelineError(
                f"{entry.name} is declared by {by_name[entry.name].package} and {package}."
                " Uninstall either package."
            )
        is_ours = entry.dist is not None and entry.dist.name == OURS
        by_name[entry.name] = Extension(entry.name, entry, package, is_ours)
    return by_name


def outside_core(group: str, name: str) -> Any:
    """Return the object of the entry point with this name.

    Raises:
        PipelineError: no installed package has it.
    """
    if name not in extensions(group):
        raise PipelineError(
            f"{name} of {group} is not declared by any installed package. Install {OURS} again."
        )
    return extensions(group)[name].load()


@cache
def merge_method(name: str) -> type[Merge] | None:
    """Return the merge method of another package, or None.

    Raises:
        PipelineError: the package cannot be imported, or its object is not a method.
    """
    extension = extensions(MERGE_METHODS).get(name)
    if extension is None:
        return None
    origin = f"merge={name} of package {extension.package}"
    kind = extension.load()
    if not (
        isinstance(kind, type) and issubclass(kind, Merge) and "__dataclass_fields__" in vars(kind)
    ):
        raise PipelineError(
            f"{origin}: {extension.entry.value} is not a dataclass of pipeline.config.merging.Merge"
        )
    check_method(kind, name, origin)
    if extension.ours:
        kind.package = ""
    else:
        kind.package = extension.package
    return kind


@cache
def stage_of_package(name: str) -> type[Stage] | None:
    """Return the configuration of a stage outside of the core, or None.

    Its `answer()` runs the stage.

    Raises:
        PipelineError: it cannot be imported, or is not a stage.
    """
    extension = extensions(STAGES).get(name)
    if extension is None:
        return None
    kind = extension.load()
    if not (isinstance(kind, type) and issubclass(kind, Stage) and hasattr(kind, "answer")):
        raise PipelineError(
            f"stage={name} of package {extension.package}: {extension.entry.value} is not a"
            " dataclass of pipeline.config.stages.Stage with answer()"
        )
    return kind
