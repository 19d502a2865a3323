"""The hash of a data run: its sources and knobs, and not the benchmark files."""

from pathlib import Path
from typing import Any

import pytest
from repositories import jsonl

from pipeline.config.compose import compose
from pipeline.errors import PipelineError
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


@pytest.fixture
def words(tmp_path: Path, data: Path) -> list[str]:
    runs = [f"runs_dir={tmp_path}/runs", "tracking.mode=disabled"]
    return ["stage=data", "expert=gsm8k", f"data_root={data}", "data.validation=2", *runs]


def run_of(words: list[str]) -> Run:
    return build(compose(words))  # type: ignore[arg-type]


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
