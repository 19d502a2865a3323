"""Results without private data: local paths and credentials."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

from pipeline.hub.addresses import without_credentials

UNCHANGED = ("folder", "answers")  # of runs; and what models answered
ABSOLUTE = re.compile(r"(?<![\w.:/-])(?:~|[A-Za-z]:)?/(?:[^\s/:,;\"'()\[\]<>|]+/)*([^\s/:,;\"'()\[\]<>|]+)")


def without_private(value: Any, roots: Sequence[str] = ()) -> Any:
    """The same structure without private data: only the last part of absolute paths, no credentials; folders of runs in
    dataclasses stay.

    roots: local folders to remove from texts, also if their names contain spaces.
    """
    if is_dataclass(value) and not isinstance(value, type):
        public = {item.name: getattr(value, item.name) for item in fields(value) if item.name not in UNCHANGED}
        return replace(value, **{name: without_private(part, roots) for name, part in public.items()})
    if isinstance(value, Mapping):
        return {key: without_private(part, roots) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [without_private(part, roots) for part in value]
    if not isinstance(value, str):
        return value
    for root in roots:
        value = value.replace(root, "…")
    return ABSOLUTE.sub(r"…/\1", str(without_credentials(value)))
