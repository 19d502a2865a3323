"""Training sets: what is taken, dropped and counted, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.config import Data, DataStage, Expert, Source
from pipeline.data.load import read
from pipeline.data.mixture import build, read_jsonl
from pipeline.knobs import PipelineError

MATH = Source(file="orca_math/train.jsonl", rows="orca_math")


def put(root: Path, name: str, rows: list[dict[str, object]]) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def stage(data: Data, seed: int = 0, **sources: Source) -> DataStage:
    return DataStage(stage="data", seed=seed, expert=Expert(name="e", side="math", sources=sources), data=data)


def problems(count: int) -> list[dict[str, object]]:
    return [{"question": f"q{n}", "answer": f"a{n}"} for n in range(count)]


def test_duplicates_and_empty_rows_are_dropped_and_counted(tmp_path: Path):
    put(tmp_path, "orca_math/train.jsonl", [*problems(5), *problems(2), {"question": "q", "answer": " "}])
    put(tmp_path, "more.jsonl", [*problems(6)])
    more = Source(file="more.jsonl", rows="gsm8k")
    counts = build(stage(Data(), first=MATH, second=more), tmp_path, tmp_path)
    none = {"contaminated": 0, "word_problems": 0, "shared": {}}
    assert counts == {
        "first": {"rows": 8, "empty": 1, "duplicates": 2, "left": 5, **none},
        "second": {"rows": 6, "empty": 0, "duplicates": 5, "left": 1, **none},
        "train": 6,
        "validation": 0,
    }
    assert sorted(row["prompt"] for row in read_jsonl(tmp_path / "train.jsonl")) == [f"q{n}" for n in range(6)]
    assert "| first | local | not pinned |" in (tmp_path / "data_card.md").read_text()


def test_size_validation_and_order_follow_the_seed(tmp_path: Path):
    put(tmp_path, "orca_math/train.jsonl", problems(50))

    def taken(seed: int, data: Data) -> tuple[list[str], list[str]]:
        build(stage(data, seed, a=MATH), tmp_path, tmp_path)
        train, validation = (read_jsonl(tmp_path / f"{name}.jsonl") for name in ("train", "validation"))
        return [row["prompt"] for row in train], [row["prompt"] for row in validation]

    train, validation = taken(0, Data(size=30, validation=10))
    assert len(train) == 30 and len(validation) == 10 and not set(train) & set(validation)
    assert taken(0, Data(size=30, validation=10)) == (train, validation)
    assert taken(1, Data(size=30, validation=10)) != (train, validation)
    assert taken(0, Data(shuffle=False))[0] == [f"q{n}" for n in range(50)]
    with pytest.raises(PipelineError, match=r"data.size=45 and data.validation=10 ask for 55 rows, expert=e has 50"):
        taken(0, Data(size=45, validation=10))


def test_a_language_is_chosen_by_the_name_aya_gives_it(tmp_path: Path):
    rows = [
        {"inputs": "Mji mkuu wa Kenya ni upi?", "targets": "Nairobi.", "language": "Swahili", "language_code": "swh"},
        {"inputs": "Hauptstadt?", "targets": "Berlin.", "language": "German", "language_code": "deu"},
    ]
    put(tmp_path, "aya/train.jsonl", rows)  # type: ignore[arg-type]
    swahili = Source(file="aya/train.jsonl", rows="aya", language="sw")
    assert list(read("aya", swahili, tmp_path)) == [{"prompt": "Mji mkuu wa Kenya ni upi?", "completion": "Nairobi."}]
    with pytest.raises(PipelineError, match="source aya has no rows in language te"):
        list(read("aya", Source(file="aya/train.jsonl", rows="aya", language="te"), tmp_path))


def test_kinds_of_rows_are_not_mixed(tmp_path: Path):
    put(tmp_path, "orca_math/train.jsonl", problems(2))
    put(tmp_path, "text.jsonl", [{"text": "plain"}])
    with pytest.raises(PipelineError, match="mixes plain text with prompts"):
        build(stage(Data(), a=MATH, b=Source(file="text.jsonl", rows="text")), tmp_path, tmp_path)


def test_rows_of_a_joint_set_say_their_side(tmp_path: Path):
    put(tmp_path, "orca_math/train.jsonl", problems(2))
    put(tmp_path, "more.jsonl", [{"question": "habari", "answer": "nzuri"}])
    math = Source(file="orca_math/train.jsonl", rows="orca_math", side="math")
    other = Source(file="more.jsonl", rows="gsm8k", side="language")
    build(stage(Data(), math=math, other=other), tmp_path, tmp_path)
    sides = {row["prompt"]: row["side"] for row in read_jsonl(tmp_path / "train.jsonl")}
    assert sides == {"q0": "math", "q1": "math", "habari": "language"}
