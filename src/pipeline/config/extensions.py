"""Stages, merge methods, backends and benchmarks outside of the core, found by the entry points of
installed packages: of others, and of extras/ in this one.

Names are read from the metadata of installed distributions; a package is imported when one of its
names is used, and a failing import is an error with its name.
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
BACKENDS = "cross_lingual_merging.backends"  # modules with versions() and backend(Eval)
OURS = "cross-lingual-merging"


@dataclass(frozen=True)
class Extension:
    """One entry point.

    package: name and version of the distribution that declares it; ours: whether that is this one.
    """

    name: str
    entry: metadata.EntryPoint
    package: str
    ours: bool

    def load(self) -> Any:
        """Import what the entry point names.

        Raises: PipelineError: the import fails.
        """
        file = (
            Path(__file__).parents[1].joinpath(*self.entry.module.split(".")[1:]).with_suffix(".py")
        )
        if self.ours and not file.is_file():
            raise PipelineError(
                f"{self.name} is in {file}, which is not there: install {self.package} again"
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
    """Name -> extension, without importing any.

    Raises PipelineError for a name that two packages declare.
    """
    by_name: dict[str, Extension] = {}
    for entry in metadata.entry_points(group=group):
        if entry.dist:
            package = f"{entry.dist.name} {entry.dist.version}"
        else:
            package = entry.value
        if entry.name in by_name and by_name[entry.name].package != package:
            raise PipelineError(
                f"{entry.name} is of package {by_name[entry.name].package} and {package}:"
                " uninstall one"
            )
        by_name[entry.name] = Extension(
            entry.name, entry, package, entry.dist is not None and entry.dist.name == OURS
        )
    return by_name


def outside_core(group: str, name: str) -> Any:
    """Return what the entry point of this name gives.

    Raises: PipelineError: no installed package has it.
    """
    if name not in extensions(group):
        raise PipelineError(
            f"{name} of {group} is declared by no installed package: install {OURS} again"
        )
    return extensions(group)[name].load()


@cache
def merge_method(name: str) -> type[Merge] | None:
    """Return the merge method of another package, or None.

    Raises: PipelineError: the package cannot be imported, or what it declares is not a method.
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
    """Return the configuration of a stage outside of the core, whose `answer()` runs it, or None.

    Raises: PipelineError: it cannot be imported, or is none.
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
