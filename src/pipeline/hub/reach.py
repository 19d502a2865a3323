"""Whether the Hub answers, queried once before libraries retry many times, and offline use without
it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeline.errors import PipelineError
from pipeline.hub.lock import Lock

SECONDS = 5  # for the Hub to answer


def refusal_of_set(repository: str) -> Exception | None:
    """None where the Hub gives access to this dataset, else the exception of one query."""
    from huggingface_hub import HfApi

    try:
        HfApi().dataset_info(repository, timeout=SECONDS)
    except Exception as error:  # whatever the network does, HF_HUB_OFFLINE, or access is denied
        return error
    return None


@contextmanager
def force_offline() -> Iterator[None]:
    """Context in which datasets come from the cache only: `datasets` queries an unreachable Hub six
    times, half a minute.
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
    """Context in which a library's own setting, or function, is another one."""
    original = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, original)


@contextmanager
def at_locked_revisions(lock: Lock) -> Iterator[None]:
    """Context in which `datasets.load_dataset`, which the harness calls by name alone, reads a
    locked set at its revision. Offline `datasets` takes the revision that its cache was last given,
    whichever is asked for: another one raises PipelineError.
    """
    import datasets

    load = datasets.load_dataset

    def load_locked(path: str, *args: Any, **how: Any) -> Any:
        if path not in lock.datasets or "revision" in how:
            return load(path, *args, **how)
        revision = lock.datasets[path]["revision"]
        loaded: Any = load(path, *args, revision=revision, **how)
        if "split" in how:
            part = loaded
        else:
            part = next(iter(loaded.values()))
        for cached in {Path(file["filename"]).parent.name for file in part.cache_files} - {
            revision
        }:
            raise PipelineError(
                f"{path} is locked at {revision[:8]}, and the cache of datasets gives {cached[:8]}:"
                " run stage=prefetch where the Hub can be reached, or set HF_HOME to the cache it"
                " filled"
            )
        return loaded

    with replaced(datasets, "load_dataset", load_locked):
        yield


@contextmanager
def reach_or_offline(repository: str) -> Iterator[None]:
    """Context for loading a dataset: from the cache only where the Hub does not answer.

    Raises:
        ConnectionError: the Hub does not answer, and the cache does not have the dataset. Other
            errors (not found, gated) are raised by the library that loads it.
    """
    error = refusal_of_set(repository)
    status = getattr(
        getattr(error, "response", None), "status_code", 500
    )  # without an answer there is none
    if error is None or status < 500:
        yield
        return
    with force_offline():
        try:
            yield
        except PipelineError:
            raise
        except Exception as failed:
            raise ConnectionError(str(error)) from failed
