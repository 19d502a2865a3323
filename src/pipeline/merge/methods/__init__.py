"""The merge methods, found by listing this folder; conf/merge/ has an option for each.

A file holds one dataclass, a subclass of config's `Merge` whose `method` is the file's name. Its
fields are the method's settings. The command line imports all files at its start, so functions
import NumPy and torch themselves.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module

from pipeline.config.merging import Merge


def method_of(name: str) -> type[Merge]:
    """Return the class of merge/methods/<name>.py whose `method` is that name."""
    kinds = vars(import_module(f"{__name__}.{name}")).values()
    return next(kind for kind in kinds if getattr(kind, "method", None) == name)


# In the order of their names
METHODS = {module.name: method_of(module.name) for module in pkgutil.iter_modules(__path__)}
