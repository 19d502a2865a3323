"""Upload of a folder to the Hub in one commit. Access is checked before the folder is written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.errors import PipelineError, first_line
from pipeline.hub.addresses import REPOSITORY

if TYPE_CHECKING:
    from huggingface_hub import HfApi

OWN = ".gitattributes"  # the file that the Hub puts into a new repository


def ready_for(name: str, knob: str, private: bool) -> HfApi:
    """Return a logged-in HfApi that may write a new or empty model repository.

    Args:
        name: the repository, org/name.
        knob: the configuration key that names it.
        private: the visibility of the repository.

    Raises:
        PipelineError: there is no token, the Hub does not answer, or the repository has files or
            another visibility.
    """
    from huggingface_hub import HfApi, get_token

    given = f"{knob}=hub:{name}"
    if not re.fullmatch(REPOSITORY, name):
        raise PipelineError(f"{given} is not a repository on the Hub. Write hub:org/name.")
    token = get_token()
    if not token:
        raise PipelineError(
            f"{given} needs a token of the Hub. Log in (hf auth login), or set HF_TOKEN."
        )
    api = HfApi(token=token)
    try:
        if not api.repo_exists(name):
            return api
        existing = api.model_info(name)
    except Exception as error:  # any error of the network or the Hub
        raise refusal_of_upload(name, knob, error) from error
    files = [file.rfilename for file in existing.siblings or () if file.rfilename != OWN]
    if files:
        raise PipelineError(
            f"{given} is not empty ({files[0]} and {len(files) - 1} more files). Name a new"
            " repository."
        )
    if existing.private != private:
        visibility, flag = ("private", "true") if existing.private else ("public", "false")
        raise PipelineError(
            f"{given} is {visibility}. Give export.private={flag}, or name a new repository."
        )
    return api


def publish_folder(api: HfApi, name: str, folder: Path, private: bool, knob: str) -> str:
    """Upload a finished folder in one commit, and return the address of its page."""
    try:
        address = api.create_repo(name, private=private, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder, commit_message="Upload model")
    except Exception as error:
        raise refusal_of_upload(name, knob, error) from error
    return str(address)


def refusal_of_upload(name: str, knob: str, error: Exception) -> PipelineError:
    return PipelineError(
        f"{knob}=hub:{name} cannot be written ({first_line(error)}). Check the network and the"
        " token's rights, or name a folder."
    )
