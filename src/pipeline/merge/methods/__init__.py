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
from typing import Any

from pipeline.config.knob import Knobs, knob
from pipeline.config.merging import Merge

NOT_SWEPT = ("method", "form", "files_from", "vocabulary")  # nor is a RUN


def method_of(name: str) -> type[Merge]:
    """The class of merge/methods/<name>.py whose `method` is that name."""
    kinds = vars(import_module(f"{__name__}.{name}")).values()
    return next(kind for kind in kinds if isinstance(kind, type) and getattr(kind, "method", None) == name)


def sweep_of(methods: Mapping[str, type[Merge]]) -> Any:
    """The dataclass of sweep.<knob>: a list for each knob of the methods that is no RUN, and the shard."""
    knobs = {item.name for method in methods.values() for item in fields(method) if not item.metadata.get("run")}
    lists = [(name, list[Any] | None, knob(None)) for name in sorted(knobs - set(NOT_SWEPT))]
    remedy = "sweep.<knob of the merge>=[...]: a list each; shard i/n scores each n-th point."
    shard = ("shard", str, knob("1/1", hashed=False))
    return make_dataclass("Sweep", [*lists, shard], bases=(Knobs,), namespace={"__doc__": remedy})


METHODS = {one.name: method_of(one.name) for one in pkgutil.iter_modules(__path__)}  # in the order of their names
