"""The merge methods, a file each, found by listing this folder; conf/merge/ has an option for each.

A file holds one dataclass, a subclass of config's `Merge` whose `method` is the file's name: its knobs are the fields,
and its interface is `Merge`. The command line imports all files at its start, so NumPy, torch and
what needs them are imported inside functions.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from dataclasses import fields, make_dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

from pipeline.config.knob import Knobs, knob
from pipeline.config.merging import Merge, check_method
from pipeline.errors import PipelineError

NOT_SWEPT = ("method", "form", "files_from", "vocabulary")  # nor is a RUN


def method_in(module: ModuleType) -> type[Merge]:
    """The method that a file holds. Raises PipelineError where it is none, or lacks what `Merge` requires."""
    name = module.__name__.rpartition(".")[2]
    classes = [kind for kind in vars(module).values() if isinstance(kind, type) and kind.__module__ == module.__name__]
    merges = [kind for kind in classes if issubclass(kind, Merge) and "__dataclass_fields__" in vars(kind)]
    if len(merges) != 1:
        raise PipelineError(f"merge/methods/{name}.py must hold one dataclass of Merge, it holds {len(merges)}")
    (merge,) = merges
    check_method(merge, name, f"merge/methods/{name}.py")
    return merge


def sweep_of(methods: Mapping[str, type[Merge]]) -> Any:
    """The dataclass of sweep.<knob>: a list for each knob of the methods that is no RUN, and the shard."""
    knobs = {item.name for method in methods.values() for item in fields(method) if not item.metadata.get("run")}
    lists = [(name, list[Any] | None, knob(None)) for name in sorted(knobs - set(NOT_SWEPT))]
    remedy = "sweep.<knob of the merge>=[...]: a list each; shard i/n scores each n-th point."
    shard = ("shard", str, knob("1/1", hashed=False))
    return make_dataclass("Sweep", [*lists, shard], bases=(Knobs,), namespace={"__doc__": remedy})


METHODS = {
    one.name: method_in(import_module(f"{__name__}.{one.name}")) for one in pkgutil.iter_modules(__path__)
}  # in the order of their names
