"""Models on the Hub, with a hub that answers, refuses, or is not there."""

from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import pytest
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
)

from pipeline.errors import PipelineError
from pipeline.hub.models import local_folder
from pipeline.models.files import HUB_COPIES, HUB_PATTERNS


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """Return a stand-in for the Hub.

    `answer` and `fetch` are raised if they are set, `cached` means that a snapshot exists, and
    `calls` lists the requests.
    """
    state: dict[str, Any] = {"answer": None, "fetch": None, "cached": False, "calls": []}

    def model_info(self: Any, name: str, *, revision: Any, timeout: float) -> None:
        state["calls"].append((name, revision, timeout))
        if state["answer"]:
            raise state["answer"]

    def snapshot_download(
        name: str,
        *,
        revision: Any,
        allow_patterns: Any,
        ignore_patterns: Any,
        local_files_only: bool,
    ) -> str:
        assert (allow_patterns, ignore_patterns) == (HUB_PATTERNS, HUB_COPIES)
        state["calls"].append((name, revision, local_files_only))
        if local_files_only and not state["cached"]:
            raise LocalEntryNotFoundError("no such folder")
        if state["fetch"]:
            raise state["fetch"]
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return state


def refused() -> GatedRepoError:
    return GatedRepoError(
        "403: ask for access",
        response=httpx.Response(403, request=httpx.Request("GET", "http://x")),
    )


def test_a_folder_is_itself_and_the_hub_is_not_asked(hub: dict[str, Any], tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "gone", Path("a/b/c")):
        assert local_folder(folder) == folder
    assert hub["calls"] == []


@pytest.mark.parametrize(
    ("folder", "revision", "wanted"),
    [("a/b", None, None), ("a/b@v1", None, "v1"), ("a/b", "v2", "v2")],
)
def test_a_name_is_fetched_at_its_revision(
    hub: dict[str, Any], tmp_path: Path, folder: str, revision: str | None, wanted: str | None
) -> None:
    assert local_folder(Path(folder), revision) == tmp_path
    assert hub["calls"] == [("a/b", wanted, 10), ("a/b", wanted, False)]


def answered(status: int) -> HfHubHTTPError:
    return HfHubHTTPError(
        "not now", response=httpx.Response(status, request=httpx.Request("GET", "http://x"))
    )


@pytest.mark.parametrize(
    "error", [HTTPError("no route"), answered(429), answered(503), OfflineModeIsEnabled("1")]
)
def test_without_the_hub_its_cache_serves(
    hub: dict[str, Any], tmp_path: Path, error: Exception
) -> None:
    hub["answer"] = error
    with pytest.raises(
        PipelineError,
        match="hub:a/b cannot be reached, and is not in the local cache. Run stage=prefetch",
    ):
        local_folder(Path("a/b"))
    hub["cached"] = True
    assert local_folder(Path("a/b")) == tmp_path and hub["calls"][-1] == ("a/b", None, True)


@pytest.mark.parametrize("when", ["answer", "fetch"])
def test_a_refusal_says_what_to_do(hub: dict[str, Any], when: str) -> None:
    hub[when] = refused()
    with pytest.raises(
        PipelineError, match=r"hub:a/b cannot be fetched \(403: ask for access.*Accept its terms"
    ):
        local_folder(Path("a/b"))


@pytest.mark.parametrize("when", ["answer", "fetch"])
@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), TypeError("a mistake of ours")]
)
def test_an_error_of_another_kind_is_itself(
    hub: dict[str, Any], when: str, error: Exception
) -> None:
    """Not a Hub that cannot be reached, nor a refusal of it."""
    hub[when] = error
    with pytest.raises(type(error)) as raised:
        local_folder(Path("a/b"))
    assert raised.value is error


def test_copies_of_the_weights_are_left_on_the_hub() -> None:
    """Files of Mistral 7B, Llama 3.1 8B, OPT and a training, as huggingface_hub filters them."""
    from huggingface_hub.utils import filter_repo_objects

    wanted = [
        "config.json",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer.model",
        "chat_template.jinja",
        "adapter_model.safetensors",
        "adapter_config.json",
    ]
    left = [
        "consolidated.safetensors",
        "consolidated.00.pth",
        "original/params.json",
        "original/consolidated.00.pth",
        "model.fp16.safetensors",
        "model.safetensors.index.fp16.json",
        "checkpoint-500/model.safetensors",
        "checkpoint-500/config.json",
        "pytorch_model.bin",
        "README.md",
        "onnx/model.onnx",
    ]
    found = filter_repo_objects(
        [*wanted, *left], allow_patterns=HUB_PATTERNS, ignore_patterns=HUB_COPIES
    )
    assert list(found) == wanted
