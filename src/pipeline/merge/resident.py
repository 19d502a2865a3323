"""The models that stay in memory between merges.

It is a separate module, so that a process without evaluations does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

LIVE_MODELS: list[Any] = []  # merge.live.Live
_keeping = False


@contextmanager
def keep_models_resident() -> Iterator[None]:
    """Keep a model in memory from one merge to the next within this context.

    A base, its experts and all their merges share one model. Only parameters that differ are
    copied.
    """
    global _keeping
    _keeping = True
    try:
        yield
    finally:
        _keeping = False
        release_models()


def release_models() -> None:
    """Free the memory of resident models, for example for a training."""
    LIVE_MODELS.clear()


def keeps_models() -> bool:
    return _keeping
