"""Benchmark files that are added after a training set was built: compared with its rows, not part of its hash."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from at_step import disturb
from fixture_types import Call
from repositories import jsonl

from pipeline.config.compose import compose
from pipeline.data import benchmarks
from pipeline.data.rows import read_jsonl
from pipeline.errors import PipelineError
from pipeline.files import sha256
from pipeline.hub.lock import Lock
from pipeline.launch.launchers import make_single_run
from pipeline.runs.graph import order_runs, reasons_unfinished
from pipeline.runs.manifest import read_manifest
from pipeline.runs.run import Run
from pipeline.stages.rows import build

WORDS = "{} hens of the old farm near the river lay eggs every single morning of the whole long week {}"
TOPICS = ("brown", "white", "red", "black", "grey", "spotted", "small", "large")


def question(topic: str, number: int = 4) -> dict[str, Any]:
    return {"question": WORDS.format(topic, "again and again " + topic), "answer": None, "answer_number": number}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Eight rows to train on, and a benchmark in English that shares text with none of them."""
    root = tmp_path / "root"
    rows = [{"question": f"{topic}: {' '.join(f'{topic}{n}' for n in range(20))}", "answer": "1"} for topic in TOPICS]
    jsonl(root / "gsm8k/train.jsonl", rows)
    jsonl(root / "mgsm/en/test.jsonl", [question("brown")])
    return root


def shares_with(topic: str) -> dict[str, Any]:
    """A question that shares 19 words in a row with the row of a topic."""
    return {"question": " ".join(f"{topic}{n}" for n in range(1, 20)), "answer": None, "answer_number": 1}


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


def test_a_set_is_identified_by_its_sources_and_knobs_alone(words: list[str], data: Path, tmp_path: Path) -> None:
    before = run_of(words).hash
    jsonl(data / "mgsm/sw/test.jsonl", [question("white")])
    jsonl(tmp_path / "other" / "flores/sw/devtest.jsonl", [{"id": 1, "sentence": "moja mbili tatu"}])
    assert run_of(words).hash == run_of([*words, f"data.benchmarks={tmp_path}/other"]).hash == before
    jsonl(data / "gsm8k/train.jsonl", [{"question": "another", "answer": "1"}])
    assert run_of(words).hash != before
    with pytest.raises(PipelineError, match="holds no file like mgsm/sw/test.jsonl"):
        run_of([*words, f"data.benchmarks={data}/mgsm"])


def test_a_later_file_that_no_row_shares_text_with_changes_nothing(words: list[str], data: Path) -> None:
    folder = make(words)
    mgsm = data / "mgsm/en/test.jsonl"
    assert recorded(folder) == {"mgsm/en/test.jsonl": sha256(mgsm)}
    rows = (folder / "train.jsonl").read_bytes()
    jsonl(data / "mgsm/sw/test.jsonl", [question("white")])
    assert reasons_unfinished([run_of(words)]) == {}
    assert make(words) == folder and (folder / "train.jsonl").read_bytes() == rows
    swahili = data / "mgsm/sw/test.jsonl"
    assert recorded(folder) == {"mgsm/en/test.jsonl": sha256(mgsm), "mgsm/sw/test.jsonl": sha256(swahili)}
    assert read_manifest(folder).attempt == 1  # type: ignore[union-attr]
    swahili.unlink()
    assert make(words) == folder  # one that is gone matters no more


def test_a_later_file_with_text_of_rows_is_refused_until_the_set_is_built_again(words: list[str], data: Path) -> None:
    folder = make(words)
    lines = [row["prompt"].partition(":")[0] for row in read_jsonl(folder / "train.jsonl")]
    held_out = [row["prompt"].partition(":")[0] for row in read_jsonl(folder / "validation.jsonl")]
    jsonl(data / "mgsm/ha/test.jsonl", [shares_with(lines[2]), question("red"), shares_with(held_out[1])])
    with pytest.raises(PipelineError) as error:
        make(words)
    told = str(error.value)
    assert f"{folder.name} has 2 rows (train.jsonl line 3, validation.jsonl line 2) that share 13 words" in told
    assert "mgsm/ha/test.jsonl" in told and "redo=true" in told
    with pytest.raises(PipelineError, match=r"train.jsonl line 3.*redo=true"):
        make(["stage=sft", "model=sandbox", *words[1:]])  # before its base is read
    child = run_of(["stage=sft", "model=sandbox", *words[1:]])
    assert make([*words, "redo=true"]) == folder
    left = [
        row["prompt"].partition(":")[0]
        for name in ("train", "validation")
        for row in read_jsonl(folder / f"{name}.jsonl")
    ]
    assert sorted(left) == sorted(set(TOPICS) - {lines[2], held_out[1]})
    assert make(words) == folder and reasons_unfinished(order_runs([child])).keys() == {child.hash}


def test_sets_of_the_hub_are_recorded_by_their_locked_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmarks, "MGSM", ("sw",))
    bare = benchmarks.compared_with(None, Lock())
    assert set(bare.values()) == {""} and any(name.startswith("facebook/belebele") for name in bare)
    source = next(one for name, one in benchmarks.hub_sources() if name == "belebele")
    label = benchmarks.label_of(source)
    entry = {"revision": "abc", "parts": {label.partition(" ")[2]: {"files": {}}}}
    locked = benchmarks.compared_with(None, Lock(datasets={str(source.hub): entry}))
    assert locked == {**bare, label: "abc"}


def test_an_interrupted_training_resumes_and_a_plan_has_nothing_new_after_a_test_language_is_added(
    base: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    table = {
        "name": "mine", "title": "t", "columns": {"English": {"in": "en"}}, "score": {"eval": "mgsm_direct_0shot"},
        "every": {"data_root": str(data), "model": "trained", "model.path": str(base), "eval.limit": 1,
                  "eval.max_gen_toks": 2},
        "runs": {"math": {"stage": "sft", "expert": "gsm8k", **STEPS}}, "rows": {"math": "math"},
    }  # fmt: skip
    file = tmp_path / "mine.yaml"
    file.write_text(json.dumps(table))
    words = [f"table={file}", f"runs_dir={tmp_path}/runs", "tracking.mode=disabled", "launcher.workers=1"]
    disturb(monkeypatch, 2, lambda model: os.kill(os.getpid(), signal.SIGTERM))
    told = call("stage=table", *words)
    assert told.status == 75, told.err
    jsonl(data / "mgsm/sw/test.jsonl", [question("white")])
    disturb(monkeypatch, 0, lambda model: None)
    told = call("stage=table", *words)
    assert told.status == 0 and "resumes after step 2" in told.err, told.err
    jsonl(data / "mgsm/ha/test.jsonl", [question("grey")])
    told = call("stage=plan", *words)
    assert told.status == 0 and "3 of 3 runs are done" in told.out, told.out
    jsonl(data / "mgsm/te/test.jsonl", [shares_with("red")])
    told = call("stage=plan", *words)
    assert told.status == 1 and "has 1 rows (train.jsonl line" in told.err and "redo=true" in told.err
    told = call("stage=report", *words)
    assert told.status == 0 and "warning: data-gsm8k" in told.err and "missing" not in told.err


STEPS = {
    "sft.seq_length": 256, "sft.batch_size": 2, "sft.micro_batch_size": 2, "sft.steps": 4, "sft.warmup_steps": 0,
    "sft.precision": "fp32",
}  # fmt: skip
