"""Models on the Hub, taken from its cache or fetched."""

from __future__ import annotations

from pathlib import Path

from pipeline.errors import PipelineError, first_line
from pipeline.hub.reach import is_refusal
from pipeline.models.files import HUB_COPIES, HUB_PATTERNS

SECONDS = 10  # for the Hub to answer


def local_folder(folder: Path, revision: str | None = None, fetch: bool = True) -> Path:
    """Return a folder, or the snapshot of the Hub's model org/name (or org/name@revision).

    The Hub is queried once before anything is fetched, because a download that cannot reach it
    retries for half a minute.

    Args:
        folder: a folder or a name on the Hub.
        revision: the revision; by default the name's.
        fetch: if False, only check that the model could be fetched, and return its name.

    Raises:
        PipelineError: the Hub cannot be reached and the cache has no copy, or the Hub denies
            access.
    """
    if not of_hub(folder):
        return folder
    from huggingface_hub import HfApi, snapshot_download

    name, _, named_revision = str(folder).partition("@")
    revision = revision or named_revision or None
    reached = True
    try:
        HfApi().model_info(name, revision=revision, timeout=SECONDS)
    except hub_errors() as error:
        if is_refusal(error):
            raise refusal_of_model(name, error) from error
        reached = False
    if reached and not fetch:
        return folder
    try:
        return Path(
            snapshot_download(
                name,
                revision=revision,
                allow_patterns=HUB_PATTERNS,
                ignore_patterns=HUB_COPIES,
                local_files_only=not reached,
            )
        )
    except hub_errors() as error:
        if reached:
            raise refusal_of_model(name, error) from error
        raise PipelineError(
            f"hub:{name} cannot be reached, and is not in the local cache. Run stage=prefetch on a"
            " node that reaches the Hub, or name a folder that holds it."
        ) from error


def hub_errors() -> tuple[type[Exception], ...]:
    """Return the exception types of requests to the Hub and its cache.

    They are network errors, offline mode, refusals and missing files, but not other errors such as
    a full disk.
    """
    from huggingface_hub.errors import (
        EntryNotFoundError,
        HFValidationError,
        HTTPError,
        OfflineModeIsEnabled,
    )

    return HTTPError, OfflineModeIsEnabled, EntryNotFoundError, HFValidationError


def of_hub(folder: Path) -> bool:
    """Return True if this is a name on the Hub, org/name, and not a folder."""
    return not folder.is_dir() and not folder.is_absolute() and len(folder.parts) <= 2


def refusal_of_model(name: str, error: Exception) -> PipelineError:
    return PipelineError(
        f"hub:{name} cannot be fetched ({first_line(error)}). Accept its terms on its page and log"
        " in (hf auth login, or HF_TOKEN), or name a folder that holds it."
    )
