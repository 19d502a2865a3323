"""Models on the Hub: taken from its cache or fetched; a one-line error where neither is
possible.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.errors import PipelineError, first_line
from pipeline.models.files import HUB_COPIES, HUB_PATTERNS

SECONDS = 10  # for the Hub to answer


def local_folder(folder: Path, revision: str | None = None, fetch: bool = True) -> Path:
    """Return a folder, or the snapshot of the Hub's model org/name (or org/name@revision).

    With fetch=False, only check that it could be fetched, and return its name. The Hub is queried
    once before anything is fetched, because a download that cannot reach it retries for half a
    minute.

    Raises:
        PipelineError: the Hub cannot be reached and the cache has no copy, or the Hub denies
            access.
    """
    if not of_hub(folder):
        return folder
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    name, _, named_revision = str(folder).partition("@")
    revision = revision or named_revision or None
    try:
        HfApi().model_info(name, revision=revision, timeout=SECONDS)
        reached = True
    except HfHubHTTPError as error:
        # the Hub does not serve anyone at the moment: 429 is too many requests
        reached = error.response.status_code != 429 and error.response.status_code < 500
        if reached:
            raise refusal_of_model(name, error) from error
    except hub_errors():
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
            f"hub:{name} cannot be reached, and is not in its cache here: run stage=prefetch on a"
            " node that reaches the Hub, or name a folder that holds it"
        ) from error


def hub_errors() -> tuple[type[Exception], ...]:
    """Return the exception types of requests to the Hub and its cache: network errors, offline
    mode, refusals, missing files.

    Other errors, such as a full disk, are not included.
    """
    from huggingface_hub.errors import (
        EntryNotFoundError,
        HFValidationError,
        HTTPError,
        OfflineModeIsEnabled,
    )

    return HTTPError, OfflineModeIsEnabled, EntryNotFoundError, HFValidationError


def of_hub(folder: Path) -> bool:
    """Whether this names a model on the Hub, org/name, and not a folder."""
    return not folder.is_dir() and not folder.is_absolute() and len(folder.parts) <= 2


def read_metadata(folder: Path, ask: bool = True) -> dict[str, Any]:
    """Return the metadata on a model's card (the head of README.md), of a folder or of the Hub's
    org/name[@revision].

    Empty without a card, or if the card is unavailable. `ask=False` reads only the Hub's cache.
    """
    file = folder / "README.md"
    if of_hub(folder):
        from huggingface_hub import HfApi, hf_hub_download

        name, _, revision = str(folder).partition("@")
        try:
            if ask:
                HfApi().model_info(name, revision=revision or None, timeout=SECONDS)
        except hub_errors():  # the cache may have it
            ask = False
        try:
            file = Path(
                hf_hub_download(
                    name, "README.md", revision=revision or None, local_files_only=not ask
                )
            )
        except hub_errors():  # a model without a card, or one that is not in the cache
            return {}
    if not file.is_file():
        return {}
    from huggingface_hub import metadata_load
    from yaml import YAMLError

    try:
        content = metadata_load(file)
    except (YAMLError, ValueError):  # no metadata
        return {}
    if isinstance(content, dict):
        return content
    return {}


def refusal_of_model(name: str, error: Exception) -> PipelineError:
    return PipelineError(
        f"hub:{name} cannot be fetched ({first_line(error)}): accept its terms on its page and log"
        " in (hf auth login, or HF_TOKEN), or name a folder that holds it"
    )
