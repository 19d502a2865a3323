"""A single query of the Hub before libraries retry many times, and offline use of its cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeline.errors import PipelineError
from pipeline.hub.lock import Lock

SECONDS = 5  # for the Hub to answer


def refusal_of_set(repository: str) -> Exception | None:
    """Return the exception of one query of a dataset, or None if the Hub gives access to it."""
    from huggingface_hub import HfApi

    try:
        HfApi().dataset_info(repository, timeout=SECONDS)
    except Exception as error:  # any network error, HF_HUB_OFFLINE, or denied access
        return error
    return None


def is_refusal(error: Exception) -> bool:
    """Return True if the Hub answered and refuses, so that its cache is no substitute."""
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", 500)  # without an answer there is no code
    return status < 500 and status != 429  # 429: too many requests


@contextmanager
def force_offline() -> Iterator[None]:
    """Load datasets only from the cache within this context.

    `datasets` would query an unreachable Hub six times, for half a minute.
    """
    import datasets
    from huggingface_hub import constants

    with (
        replaced(datasets.config, "HF_HUB_OFFLINE", True),
        replaced(constants, "HF_HUB_OFFLINE", True),
    ):
        yield


@contextmanager
def replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    """Replace a setting or function of a library within this context."""
    original = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, original)


@contextmanager
def at_locked_revisions(lock: Lock) -> Iterator[None]:
    """Load locked datasets at their revisions within this context.

    The harness calls `datasets.load_dataset` with the name only. Offline, `datasets` uses the
    revision that its cache was given last, for any request. Another revision raises PipelineError.
    """
    import datasets

    load = datasets.load_dataset

    def load_locked(path: str, *args: Any, **how: Any) -> Any:
        if path not in lock.datasets or "revision" in how:
            return load(path, *args, **how)
        revision = lock.datasets[path]["revision"]
        loaded: Any = load(path, *args, revision=revision, **how)
        part = loaded
        if "split" not in how:
            part = next(iter(loaded.values()))
        for file in part.cache_files:
            cached = Path(file["filename"]).parent.name
            if cached != revision:
                raise PipelineError(
                    f"{path} is locked at {revision[:8]}, but the cache of datasets gives"
                    f" {cached[:8]}. Run stage=prefetch where the Hub can be reached, or set"
                    " HF_HOME to the cache it filled."
                )
        return loaded

    with replaced(datasets, "load_dataset", load_locked):
        yield


@contextmanager
def reach_or_offline(repository: str) -> Iterator[None]:
    """Load a dataset within this context, only from the cache if the Hub does not answer.

    Raises:
        ConnectionError: the Hub does not answer, and the cache does not have the dataset. Other
            errors (not found, gated) are raised by the library that loads it.
    """
    error = refusal_of_set(repository)
    if error is None or is_refusal(error):
        yield
        return
    with force_offline():
        try:
            yield
        except PipelineError:
            raise
        except Exception as failed:
            raise ConnectionError(str(error)) from failed
