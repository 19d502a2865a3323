"""The merge methods, a file each, found by listing this folder; conf/merge/ has an option for each.

A file holds one dataclass, a subclass of config's `Merge` whose `method` is the file's name: its
knobs are the fields, and its interface is `Merge`. The command line imports all files at its start,
so NumPy, torch and what needs them are imported inside functions.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module

from pipeline.config.merging import Merge


def method_of(name: str) -> type[Merge]:
    """Return the class of merge/methods/<name>.py whose `method` is that name."""
    kinds = vars(import_module(f"{__name__}.{name}")).values()
    return next(
        kind for kind in kinds if isinstance(kind, type) and getattr(kind, "method", None) == name
    )


METHODS = {
    one.name: method_of(one.name) for one in pkgutil.iter_modules(__path__)
}  # in the order of their names
