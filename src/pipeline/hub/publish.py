"""Upload of a folder to the Hub as one commit; access is checked before the folder is written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.errors import PipelineError, first_line
from pipeline.hub.addresses import REPOSITORY

if TYPE_CHECKING:
    from huggingface_hub import HfApi

OWN = ".gitattributes"  # what the Hub itself puts into a new repository


def ready_for(name: str, knob: str, private: bool) -> HfApi:
    """Return a logged-in HfApi that may write the model repository org/name, which is new or empty.

    Raises:
        PipelineError: no token, no permission, no answer of the Hub, a repository with files, or a
            repository of another visibility.
    """
    from huggingface_hub import HfApi, get_token

    if not re.fullmatch(REPOSITORY, name):
        raise PipelineError(f"{knob}=hub:{name} is not a repository on the Hub: write hub:org/name")
    token = get_token()
    if not token:
        raise PipelineError(
            f"{knob}=hub:{name} needs a token of the Hub: log in (hf auth login), or set HF_TOKEN"
        )
    api, owner = HfApi(token=token), name.partition("/")[0]
    try:
        me = api.whoami()
        owners = [owner["name"] for owner in (me, *(me.get("orgs") or ()))]
        existing = None
        if api.repo_exists(name):
            existing = api.model_info(name)
    except Exception as error:  # any error of the network or the Hub
        raise refusal_of_upload(name, knob, error) from error
    if owner not in owners:
        raise PipelineError(
            f"{knob}=hub:{name}: the token belongs to {owners[0]}, who is not in {owner}: "
            "name one of your organizations"
        )
    files_there = []
    for file in (existing and existing.siblings) or ():
        if file.rfilename != OWN:
            files_there.append(file.rfilename)
    if files_there:
        raise PipelineError(
            f"{knob}=hub:{name} is not empty ({files_there[0]} and {len(files_there) - 1} more"
            " files): name a new repository"
        )
    if existing and existing.private != private:
        kinds = "public, give export.private=false"
        if existing.private:
            kinds = "private, give export.private=true"
        raise PipelineError(f"{knob}=hub:{name} is {kinds}, or name a new repository")
    return api


def publish_folder(api: HfApi, name: str, folder: Path, private: bool, knob: str) -> str:
    """Upload a finished folder in one commit, all or nothing. Returns the address of its page."""
    try:
        address = api.create_repo(name, private=private, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder, commit_message="Upload model")
    except Exception as error:
        raise refusal_of_upload(name, knob, error) from error
    return str(address)


def refusal_of_upload(name: str, knob: str, error: Exception) -> PipelineError:
    return PipelineError(
        f"{knob}=hub:{name} cannot be written ({first_line(error)}): check the network and the"
        " token's rights, or name a folder"
    )
