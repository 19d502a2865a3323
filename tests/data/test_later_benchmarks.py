"""Benchmark files that are added after a training set was built.

Compared with its rows, not part of its hash.
"""

from pathlib import Path
from typing import Any

import pytest
from repositories import jsonl

from pipeline.config.compose import compose
from pipeline.data import benchmarks
from pipeline.data.rows import read_jsonl
from pipeline.errors import PipelineError
from pipeline.files import sha256
from pipeline.hub.lock import Lock
from pipeline.launch.launchers import make_single_run
from pipeline.runs.graph import reasons_unfinished
from pipeline.runs.manifest import read_manifest
from pipeline.runs.run import Run
from pipeline.stages.rows import build

WORDS = (
    "{} hens of the old farm near the river lay eggs every single morning of the whole long week {}"
)
TOPICS = ("brown", "white", "red", "black", "grey", "spotted", "small", "large")


def question(topic: str, number: int = 4) -> dict[str, Any]:
    return {
        "question": WORDS.format(topic, "again and again " + topic),
        "answer": None,
        "answer_number": number,
    }


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Eight rows to train on, and a benchmark in English that shares text with none of them."""
    root = tmp_path / "root"
    rows = [
        {"question": f"{topic}: {' '.join(f'{topic}{n}' for n in range(20))}", "answer": "1"}
        for topic in TOPICS
    ]
    jsonl(root / "gsm8k/train.jsonl", rows)
    jsonl(root / "mgsm/en/test.jsonl", [question("brown")])
    return root


def shares_with(topic: str) -> dict[str, Any]:
    """Return a question that shares 19 words in a row with the row of a topic."""
    return {
        "question": " ".join(f"{topic}{n}" for n in range(1, 20)),
        "answer": None,
        "answer_number": 1,
    }


@pytest.fixture
def words(tmp_path: Path, data: Path) -> list[str]:
    runs = [f"runs_dir={tmp_path}/runs", "tracking.mode=disabled"]
    return ["stage=data", "expert=gsm8k", f"data_root={data}", "data.validation=2", *runs]


def run_of(words: list[str]) -> Run:
    return build(compose(words))  # type: ignore[arg-type]


def make(words: list[str]) -> Path:
    return make_single_run(compose(words))  # type: ignore[arg-type]


def recorded(folder: Path) -> dict[str, str]:
    manifest = read_manifest(folder)
    assert manifest is not None
    return manifest.facts["benchmarks"]


def test_a_set_is_identified_by_its_sources_and_knobs_alone(
    words: list[str], data: Path, tmp_path: Path
) -> None:
    before = run_of(words).hash
    jsonl(data / "mgsm/sw/test.jsonl", [question("white")])
    jsonl(
        tmp_path / "other" / "flores/sw/devtest.jsonl", [{"id": 1, "sentence": "moja mbili tatu"}]
    )
    assert (
        run_of(words).hash == run_of([*words, f"data.benchmarks={tmp_path}/other"]).hash == before
    )
    jsonl(data / "gsm8k/train.jsonl", [{"question": "another", "answer": "1"}])
    assert run_of(words).hash != before
    with pytest.raises(PipelineError, match="has no file like mgsm/sw/test.jsonl"):
        run_of([*words, f"data.benchmarks={data}/mgsm"])


def test_a_benchmark_that_comes_later_is_named_until_the_set_is_built_again(
    words: list[str], data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make(words)
    rows = (folder / "train.jsonl").read_bytes()
    assert recorded(folder) == {"mgsm/en/test.jsonl": sha256(data / "mgsm/en/test.jsonl")}
    jsonl(data / "mgsm/ha/test.jsonl", [shares_with("red")])
    assert reasons_unfinished([run_of(words)]) == {}
    capsys.readouterr()
    assert make(words) == folder
    told = " ".join(capsys.readouterr().err.split())
    assert f"{folder.name} were not compared with mgsm/ha/test.jsonl" in told
    assert "redo=true" in told
    assert (folder / "train.jsonl").read_bytes() == rows
    make([*words, "redo=true"])
    assert recorded(folder).keys() == {"mgsm/en/test.jsonl", "mgsm/ha/test.jsonl"}
    assert (
        len(read_jsonl(folder / "train.jsonl")) + len(read_jsonl(folder / "validation.jsonl"))
        == len(TOPICS) - 1
    )
    capsys.readouterr()
    make(words)
    assert "not compared" not in capsys.readouterr().err


def test_sets_of_the_hub_are_recorded_by_their_locked_revision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(benchmarks, "MGSM", ("sw",))
    bare = benchmarks.compared_with(None, Lock())
    assert set(bare.values()) == {""} and any(name.startswith("facebook/belebele") for name in bare)
    source = next(one for name, one in benchmarks.hub_sources() if name == "belebele")
    label = benchmarks.label_of(source)
    entry = {"revision": "abc", "parts": {label.partition(" ")[2]: {"files": {}}}}
    locked = benchmarks.compared_with(None, Lock(datasets={str(source.hub): entry}))
    assert locked == {**bare, label: "abc"}
