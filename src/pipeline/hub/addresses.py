"""Addresses: what names a repository on the Hub, and how others may be shown and kept, without credentials."""

from __future__ import annotations

import re
from typing import Any

REPOSITORY = r"[\w-][\w.-]*/[\w.-]+"  # org/name on the Hub


def without_credentials(value: Any) -> Any:
    """The same structure with user:password@, and what follows a ? or #, as tokens do, taken out of every address."""
    if isinstance(value, dict):
        return {key: without_credentials(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_credentials(inner) for inner in value]
    if not isinstance(value, str):
        return value
    return re.sub(r"(\w+://[^\s?#]*)[?#]\S*", r"\1", re.sub(r"(\w+://)[^/\s]+@", r"\1", value))
