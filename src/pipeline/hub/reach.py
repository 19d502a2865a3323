"""Whether the Hub answers, queried once before libraries retry many times, and offline use without it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pipeline.errors import PipelineError, first_line

SECONDS = 5  # for the Hub to answer


def refusal_of_set(repository: str) -> Exception | None:
    """None where the Hub gives access to this dataset, else the exception of one query."""
    from huggingface_hub import HfApi

    try:
        HfApi().dataset_info(repository, timeout=SECONDS)
    except Exception as error:  # whatever the network does, HF_HUB_OFFLINE, or access is denied
        return error
    return None


def why_not(repository: str) -> str | None:
    """None where the Hub gives access to this dataset, else the reason, in one line."""
    error = refusal_of_set(repository)
    return None if error is None else first_line(error)


@contextmanager
def force_offline() -> Iterator[None]:
    """Context in which datasets come from the cache only: `datasets` queries an unreachable Hub six times, half a
    minute."""
    import datasets
    from huggingface_hub import constants

    settings = datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE = settings


@contextmanager
def reach_or_offline(repository: str) -> Iterator[None]:
    """Context for loading a dataset: from the cache only where the Hub does not answer.

    Raises:
        ConnectionError: the Hub does not answer, and the cache does not have the dataset. Other errors (not found,
            gated) are raised by the library that loads it.
    """
    error = refusal_of_set(repository)
    status = getattr(getattr(error, "response", None), "status_code", 500)  # without an answer there is none
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
