"""Nested columns as OPUS and WMT have them, and the names of labels."""

import json
from pathlib import Path

import pytest

from pipeline.config.data import Source
from pipeline.data.load import open_source, read_examples
from pipeline.errors import PipelineError
from pipeline.stages.lengths import rows_of

ROWS = [
    {"translation": {"en": f"{n} cows", "sw": f"Ng'ombe {n}"}, "about": {"by": {"name": "Ada"}}}
    for n in range(3)
]


@pytest.fixture(params=["a.jsonl", "a.parquet"])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    from datasets import Dataset, Features, Translation, Value

    path = tmp_path / request.param
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    else:
        kinds = {
            "translation": Translation(languages=["en", "sw"]),
            "about": {"by": {"name": Value("string")}},
        }
        Dataset.from_list(ROWS, features=Features(kinds)).to_parquet(path)
    return path


def read(file: Path, prompt: str, completion: str, **more: str) -> list[str]:
    words = {"rows": "template", **more}
    source = Source(file=file.name, prompt=prompt, completion=completion, **words)
    rows = list(read_examples("own", source, open_source("own", source, file.parent)))
    if file.suffix == ".jsonl":
        assert rows_of(file, source) == len(rows)
    return [f"{row['prompt']} | {row['completion']}" for row in rows if isinstance(row, dict)]


@pytest.mark.parametrize(
    ("english", "other"),
    [("{translation.en}", "{translation.sw}"), ("{translation[en]}", "{translation[sw]}")],
)
def test_nested_columns_in_two_spellings(file: Path, english: str, other: str) -> None:
    assert read(file, english, f"{other}!") == [f"{n} cows | Ng'ombe {n}!" for n in range(3)]
    assert read(file, english, "{about.by.name}") == [f"{n} cows | Ada" for n in range(3)]
    pairs = read(file, english, other, rows="bitext", language="sw")
    assert all("cows" in pair and "Ng'ombe" in pair for pair in pairs) and len(pairs) == 3


def test_a_nested_column_that_is_not_there_is_named(file: Path) -> None:
    with pytest.raises(
        PipelineError, match=r"has no column translations\.en. Its columns are translation, about"
    ):
        read(file, "{translations.en}", "{translation.sw}")
    with pytest.raises(
        PipelineError, match=r"has no column translation\.en\.x. Its columns are translation, about"
    ):
        read(file, "{translation.en.x}", "{translation.sw}")


def test_a_column_with_a_dot_in_its_name_comes_first(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        json.dumps({"q.en": "flat", "q": {"en": "deep"}, "a": "b"}) + "\n"
    )
    assert read(tmp_path / "a.jsonl", "{q.en}", "{a}") == ["flat | b"]
    assert read(tmp_path / "a.jsonl", "{q[en]}", "{a}") == ["deep | b"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_label_is_its_name(stream: bool, tmp_path: Path) -> None:
    from datasets import ClassLabel, Dataset, Features, Value

    kinds = Features({"text": Value("string"), "label": ClassLabel(names=["negative", "positive"])})
    rows = [{"text": f"film {n}", "label": label} for n, label in enumerate((0, 1, 0, -1))]
    Dataset.from_list(rows, features=kinds).to_parquet(tmp_path / "a.parquet")
    source = Source(
        file="a.parquet",
        rows="template",
        prompt="{text}",
        completion="{label}",
        stream=stream,
        candidates=None,
    )
    found = list(read_examples("own", source, open_source("own", source, tmp_path)))
    names = {row["prompt"]: row["completion"] for row in found if isinstance(row, dict)}
    assert (
        names == {"film 0": "negative", "film 1": "positive", "film 2": "negative"}
        and "empty" in found
    )
