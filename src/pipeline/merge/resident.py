"""Models that stay in memory from one merge to the next.

A process without evaluations imports no torch for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

LIVE_MODELS: list[Any] = []  # of merge.live.Live
_keeping = False


@contextmanager
def keep_models_resident() -> Iterator[None]:
    """Context in which a model stays in memory from one merge to the next, whatever their sources:
    a base, its experts and all their merges are one model, of which only the parameters that differ
    are copied anew.
    """
    global _keeping
    _keeping = True
    try:
        yield
    finally:
        _keeping = False
        release_models()


def release_models() -> None:
    """Free the memory of resident models, for a training for instance."""
    LIVE_MODELS.clear()


def keeps_models() -> bool:
    return _keeping
