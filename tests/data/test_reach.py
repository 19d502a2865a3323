"""Training sets of a Hub that does not answer.

Asked for once, refused in a sentence, or taken from the cache.
"""

import os
from pathlib import Path

import datasets
import forked
import pytest
from fake_hub import serving
from huggingface_hub import constants
from reading import read_source

from pipeline.config.data import Source
from pipeline.errors import PipelineError
from pipeline.hub import reach

READ = """
import sys
from pipeline.config.data import Source
from pipeline.data.load import open_source, read_examples
from pipeline.errors import PipelineError

for stream in (True, False):
    for files in (None, "data/*.jsonl"):
        source = Source(hub="org/rows", stream=stream, files=files, file="rows.jsonl", rows="pairs")
        try:
            list(read_examples("mine", source, open_source("mine", source, None)))
        except PipelineError as error:
            print(error)
"""


def test_a_silent_hub_is_asked_once_for_a_training_set(tmp_path: Path) -> None:
    with serving() as hub:
        hub.down = True
        where = {
            "HF_ENDPOINT": hub.address,
            "HF_HOME": str(tmp_path / "hub"),
            "NO_PROXY": "127.0.0.1",
        }
        where |= {
            "HF_HUB_OFFLINE": "0",
            "HF_DATASETS_OFFLINE": "0",
            "HF_DATASETS_CACHE": str(tmp_path / "sets"),
        }
        done = forked.python("-c", READ, env=os.environ | where)
    told = done.stdout.splitlines()
    assert len(told) == 4 and all("503" in one for one in told)
    assert all(one.startswith("source mine (org/rows) cannot be reached (") for one in told)
    assert [one for one in hub.asked if "rows" in one] == [
        "GET /api/datasets/org/rows"
    ] * 4  # once a training set
    assert "Retry" not in done.stderr


def test_the_cache_stands_in_and_other_refusals_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """load_dataset_builder stands for the cache that stage=prefetch or an earlier run left."""

    class Answer(Exception):
        def __init__(self, status: int) -> None:
            super().__init__(f"{status} of the Hub")
            self.response = type("Response", (), {"status_code": status})

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    seen = []

    class Builder:
        def __init__(self, *_: object, **__: object) -> None:
            seen.append(datasets.config.HF_HUB_OFFLINE)

        def download_and_prepare(self) -> None:
            pass

        def as_dataset(self, split: str) -> datasets.Dataset:
            return datasets.Dataset.from_list([{"prompt": "p", "completion": "c"}])

    monkeypatch.setattr(datasets, "load_dataset_builder", Builder)
    source = Source(hub="org/rows", stream=False, file="rows.jsonl", rows="pairs")
    for error in (OSError("no route"), Answer(502), Answer(404), None):
        monkeypatch.setattr(reach, "refusal_of_set", lambda _, error=error: error)
        assert len(list(read_source("mine", source, None))) == 1
    assert seen == [True, True, False, False] and not datasets.config.HF_HUB_OFFLINE

    def not_there(*_: object, **__: object) -> None:
        raise Answer(404)

    monkeypatch.setattr(datasets, "load_dataset_builder", not_there)
    monkeypatch.setattr(reach, "refusal_of_set", lambda _: Answer(404))
    with pytest.raises(PipelineError, match="404 of the Hub"):
        list(read_source("mine", source, None))
    monkeypatch.setattr(reach, "refusal_of_set", lambda _: OSError("no route"))
    with pytest.raises(PipelineError, match=r"cannot be reached \(no route"):
        list(read_source("mine", source, None))
