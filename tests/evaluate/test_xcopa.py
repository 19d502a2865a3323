"""A benchmark that is added in one file (xcopa.py, two choices).

Scored, planned, kept out of training, reported.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import xcopa
import yaml
from made_up import likelihood, write_rows
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline import benchmarks
from pipeline.__main__ import main
from pipeline.benchmarks import BENCHMARKS, BY_TASK
from pipeline.config.data import Data, Expert, Source
from pipeline.config.stages import DataStage
from pipeline.data.stage import make_training_set
from pipeline.errors import PipelineError

QUESTIONS = 12


@pytest.fixture(autouse=True)
def added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BENCHMARKS, "xcopa", xcopa.BENCHMARK)
    monkeypatch.setitem(BY_TASK, "xcopa", xcopa.BENCHMARK)


@pytest.fixture
def questions(tmp_path: Path) -> list[dict]:
    """Rows below data/xcopa/sw/test.jsonl; half ask for a cause, half for an effect."""
    rows = [
        {
            "premise": f"Mtu wa {number} alifungua mlango mkubwa wa nyumba yake asubuhi.",
            "choice1": f"Alisikia sauti {number}.",
            "choice2": f"Upepo {number * 7} uliingia ndani.",
            "question": ("cause", "effect")[number % 2],
            "label": number // 2 % 2,
            "idx": number,
        }
        for number in range(QUESTIONS)
    ]
    write_rows(tmp_path / "data/xcopa/sw/test.jsonl", rows)
    return rows


def right_answers(folder: Path, questions: list[dict]) -> int:
    """Return the right answers by transformers, with the XCOPA paper's prompts in Swahili.

    They are `premise kwa sababu choice`.
    """
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder).eval(),
        AutoTokenizer.from_pretrained(folder),
    )
    right = 0
    for row in questions:
        prompt = (
            f"{row['premise'][:-1]} {'kwa sababu' if row['question'] == 'cause' else 'kwa hiyo'}"
        )
        choices = [f" {row[name][0].lower()}{row[name][1:]}" for name in ("choice1", "choice2")]
        first, second = (likelihood(model, tokenizer, prompt, choice) for choice in choices)
        right += (second > first) == row["label"]
    return right


def test_it_is_planned_scored_and_reported(
    questions: list[dict], tiny: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    option, table = tmp_path / "conf/eval/xcopa_0shot.yaml", tmp_path / "mine.yaml"
    option.parent.mkdir(parents=True)
    option.write_text("name: xcopa_0shot\ntasks:\n  - {task: xcopa, num_fewshot: 0}\n")
    plan = {
        "name": "mine",
        "title": "mine",
        "every": {"data_root": str(tmp_path / "data")},
        "runs": {"one": {"checkpoint": str(tiny)}, "two": {"checkpoint": str(tiny)}},
        "score": {"eval": "xcopa_0shot", "in": "sw"},
        "columns": {"first": "one", "second": "two"},
        "rows": {"XCOPA": {}},
        "compare": {"first": "second"},
    }
    table.write_text(yaml.safe_dump(plan, sort_keys=False))
    words = [f"--config-dir={tmp_path / 'conf'}", f"table={table}", f"runs_dir={tmp_path / 'runs'}"]
    assert main(["stage=plan", *words]) == 0
    assert "1 run, 0 done" in capfd.readouterr().out
    assert main(["stage=table", *words, "launcher.workers=1"]) == 0
    page = Path(capfd.readouterr().out.strip())
    (scores,) = (tmp_path / "runs").glob("eval-xcopa_0shot-*/scores.json")
    (row,) = json.loads(scores.read_text())["rows"]
    right = right_answers(tiny, questions)
    assert (row["metric"], row["n"], row["value"]) == (
        "acc",
        QUESTIONS,
        pytest.approx(right / QUESTIONS),
    )
    text = page.read_text()
    assert "xcopa: acc, 0-shot, n = 12" in text and "where guessing gives 50 ± 28.9" in text


def test_a_training_row_that_holds_a_question_is_dropped(
    questions: list[dict], tmp_path: Path
) -> None:
    text = " ".join(questions[3][name] for name in xcopa.COLUMNS)
    write_rows(
        tmp_path / "data/a.jsonl",
        [{"text": text}, {"text": "Habari nyingine kabisa za siku hii ya leo."}],
    )
    source = Source(file="a.jsonl", rows="text")
    expert = Expert(name="e", side="language", sources={"a": source})
    counts = make_training_set(
        DataStage(stage="data", seed=0, expert=expert, data=Data()), tmp_path / "data", tmp_path
    )
    assert counts["a"]["contaminated"] == 1 and counts["train"] == 1
    assert text not in (tmp_path / "train.jsonl").read_text()


def test_a_file_of_the_folder_is_a_benchmark() -> None:
    folder = Path(benchmarks.__file__).parent
    held = {file.stem for file in folder.glob("*.py") if "\nBENCHMARK = " in file.read_text()}
    held |= {file.stem for file in folder.glob("*.yaml")}
    assert {name for name in BENCHMARKS if name != "xcopa"} == held
    with pytest.raises(PipelineError, match="xcopa: kind=choice has choices=0. Give 2 or more"):
        replace(xcopa.BENCHMARK, choices=0)
