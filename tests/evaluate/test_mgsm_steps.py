"""mgsm_steps: items from real MGSM and GSM8K, scored by the stock harness and by torch."""

import csv
import json
import math
import re
import shutil
from collections import defaultdict
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch
from by_lm_eval import answered_by_lm_eval
from made_up import asked, choice, likelihood, needs_real_data, write_rows
from mgsm_steps.calculations import QUESTIONS, build_problem, build_problems, missing_operands
from mgsm_steps.items import build_items, shuffled_text, write_items
from mgsm_steps.number_words import read_numbers
from mgsm_steps_tokens import with_items
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline.__main__ import main
from pipeline.benchmarks import BENCHMARKS
from pipeline.errors import PipelineError
from pipeline.evaluate.prompts import load_tasks
from pipeline.evaluate.tasks import task_specs
from pipeline.hub.lock import Lock
from pipeline.languages import MGSM

UNUSABLE = [1, 15, 24, 26, 46, 88, 91, 136, 141, 160, 184, 185, 211, 214, 232]
# questions whose operands a translation does not give: clocks, words without a list, changed
# quantities
EXCLUDED = {
    "en": 0,
    "sw": 3,
    "bn": 1,
    "te": 2,
    "ja": 7,
    "de": 3,
    "fr": 2,
    "zh": 1,
    "ru": 3,
    "es": 1,
    "th": 5,
}


def rows(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line]


@needs_real_data
def test_gsm8k_gives_634_steps_in_235_questions(real_data: Path) -> None:
    gsm8k = rows(real_data / "gsm8k/test.jsonl")
    problems = build_problems(gsm8k[:QUESTIONS])
    assert (
        sum(len(problem.scored) for problem in problems)
        == BENCHMARKS["mgsm_steps"].questions
        == 634
    )
    assert [problem.index for problem in problems if not problem.scored] == UNUSABLE
    assert problems == build_problems(gsm8k[:QUESTIONS])
    for problem, row in zip(problems, gsm8k, strict=False):
        for place in problem.scored:
            step = problem.steps[place]
            assert f"<<{step.text}>>" in row["answer"].replace(",", "").replace("$", "").replace(
                " ", ""
            )
            four = [step.text, *step.alternatives]
            values = [Fraction(text.partition("=")[2]) for text in four]
            assert (
                len(set(values)) == 4
                and all(
                    abs(eval(text.partition("=")[0]) - float(value)) < 1e-6  # noqa: S307
                    for text, value in zip(four[1:], values[1:], strict=True)
                )
            )


@needs_real_data
def test_questions_excluded_in_each_language(real_data: Path, tmp_path: Path) -> None:
    found = {}
    for code in MGSM:
        folder = with_items(real_data, tmp_path / "data", code) / "mgsm_steps" / code
        card = json.loads((folder / "card.json").read_text())
        items = rows(folder / "mgsm_steps.jsonl")
        assert list(card["without_a_usable_step"]) == [str(index) for index in UNUSABLE]
        found[code] = len(card["operands_not_in_the_text"])
        assert card["questions"] == 235 - found[code] == len({item["index"] for item in items})
        assert card["steps"] == len(items)
        if code == "sw":
            assert {"23", "51"} <= card["operands_not_in_the_text"].keys()  # the six-hour clock
    assert found == EXCLUDED


def test_numbers_of_a_text() -> None:
    def has(text: str, number: float, language: str) -> bool:
        return Fraction(str(number)) in read_numbers(text, language)

    for text in ("80 000 euros", "80,000", "80.000", "80\u202f000", "80\u00a0000"):
        assert has(text, 80000, "fr")
    assert has("à 13 h", 13, "fr") and not has("à 13 h", 1, "fr") and has("1,5 Liter", 1.5, "de")
    assert (
        has("১২০টি", 120, "bn")
        and has("๑๒", 12, "th")
        and has("8万ドル", 80000, "ja")
        and has("５個", 5, "ja")
    )
    assert has("mayai matatu", 3, "sw") and has("तीन", 3, "bn") is False
    assert read_numbers("Three ducks, $1,000.50 and 16.", "en") == [3, Fraction("1000.5"), 16]
    assert read_numbers("someone", "en") == []


def test_an_item_and_one_whose_alternatives_collapse() -> None:
    answer = "<<8*2=16>>16 and <<16-3-4=9>>9, <<16+9=25>>25\n#### 25"
    problem = build_problem(
        0, {"question": "8 hens lay 2 eggs each and one lays 3.", "answer": answer}
    )
    assert problem.scored == [0, 2]
    assert problem.steps[1].reason == "not one operation on two numbers"
    assert set(problem.steps[0].alternatives) == {"8+2=10", "8-2=6", "8/2=4"}
    first, second = build_items(problem, "Q?")
    assert (
        first["prompt"] == "Question: Q?\nAnswer:" and first["choices"][first["label"]] == " 8*2=16"
    )
    assert second["prompt"] == "Question: Q?\nAnswer: 8*2=16\n16-3-4=9"
    assert second["choices"][second["label"]] == "\n16+9=25"
    lonely = build_problem(0, {"question": "One hen.", "answer": "<<1*1=1>>1"})
    assert not lonely.scored and lonely.steps[0].reason == "1 alternatives with other values"
    assert missing_operands(problem, "Kuku wanane hutaga mayai 2", "sw") == []
    assert missing_operands(problem, "Kuku hutaga mayai 2", "sw") == [8]
    questions = ["own 1 2", "other 30 and 40 it is", "another 7"]
    assert shuffled_text(0, ["5", "6"], questions, [2, 2, 1]) == "other 5 and 6 it is"


@needs_real_data
def test_wrong_data_is_an_error(real_data: Path, tmp_path: Path) -> None:
    for folder in ("gsm8k", "mgsm/en"):
        shutil.copytree(real_data / folder, tmp_path / "data" / folder)
        for file in (tmp_path / "data" / folder).iterdir():
            file.chmod(0o644)
        (tmp_path / "data" / folder).chmod(0o755)
    root, steps = tmp_path / "data", [asked("mgsm_steps", 1)]
    with pytest.raises(
        PipelineError, match=f"make_mgsm_steps.py {root} en writes it from MGSM's and GSM8K's files"
    ):
        task_specs(choice(*steps), ["en"], root, tmp_path / "t")
    with pytest.raises(PipelineError, match="has no mgsm/lg/test.jsonl"):
        write_items(root, "lg")
    gsm8k, mgsm = rows(root / "gsm8k/test.jsonl"), rows(root / "mgsm/en/test.jsonl")
    write_rows(root / "mgsm/en/test.jsonl", mgsm[:-1])
    with pytest.raises(PipelineError, match="row 250 of 249"):
        write_items(root, "en")
    for wrong in ([gsm8k[1], gsm8k[0], *gsm8k[2:]], gsm8k[:249]):
        write_rows(root / "gsm8k/test.jsonl", wrong)
        with pytest.raises(PipelineError, match="rows differ from GSM8K's test set"):
            write_items(root, "en")


@needs_real_data
def test_scores_are_the_stock_harness_s_and_torch_s(
    real_data: Path, tiny: Path, tmp_path: Path
) -> None:
    """All three tasks in Swahili, all items of two questions.

    `lm_eval` on the stage's task files, and torch alone.
    """
    runs, root = tmp_path / "runs", with_items(real_data, tmp_path / "data", "sw")
    words = [
        "stage=eval",
        f"checkpoint={tiny}",
        "eval=mgsm_steps_4shot",
        "eval.limit=2",
        "languages=[sw]",
    ]
    words += [f"data_root={root}", f"runs_dir={runs}", "launcher.workers=1"]
    assert main(words) == 0
    reports = [json.loads(file.read_text()) for file in runs.glob("eval-*/scores.json")]
    (bundle,) = [report for report in reports if len({row["task"] for row in report["rows"]}) == 3]
    files, copies = sorted(runs.glob("eval-*/tasks/*.yaml")), tmp_path / "copies"
    copies.mkdir()
    for file in files:  # each in a run of its own
        shutil.copy(file, copies)
    folder = root / "mgsm_steps/sw"
    items = rows(folder / "mgsm_steps.jsonl")
    first_two = list(dict.fromkeys(item["index"] for item in items))[:2]
    items = [item for item in items if item["index"] in first_two]
    assert {row["n"] for row in bundle["rows"] if row["metric"] == "bits"} == {2} and len(items) > 2
    names = {f"{task}_sw_4shot": list(range(len(items))) for task in BENCHMARKS["mgsm_steps"].tasks}
    stock, _ = answered_by_lm_eval(
        tiny, map(Path, names), names, tmp_path / "lm_eval", "--include_path", str(copies)
    )
    ours = {(row["task"], row["metric"]): row["value"] for row in bundle["rows"] + bundle["beside"]}
    for task in BENCHMARKS["mgsm_steps"].tasks:
        theirs = stock["results"][f"{task}_sw_4shot"]
        assert ours[task, "acc"] == theirs["acc,none"]
        assert ours[task, "bits"] == pytest.approx(theirs["bits,none"], abs=1e-3)

    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(tiny).eval(),
        AutoTokenizer.from_pretrained(tiny),
    )
    per_question: dict[int, float] = defaultdict(float)
    exemplars = rows(folder / "train.jsonl")[:4]
    before = "".join(f"{one['prompt']}{one['choices'][0]}\n\n" for one in exemplars)
    assert before.startswith("Question: Roger ana") and "Answer: 5+6=11\n#### 11\n\n" in before
    right = 0
    for item in items:
        four = [
            likelihood(model, tokenizer, before + item["prompt"], text) / math.log(2)
            for text in item["choices"]
        ]
        per_question[item["index"]] += four[item["label"]]
        right += max(four) == four[item["label"]]
    assert ours["mgsm_steps", "acc"] == right / len(items)
    assert ours["mgsm_steps", "bits"] == pytest.approx(
        sum(per_question.values()) / len(per_question), abs=1e-3
    )


TABLE = """
name: steps
runs: {base: {}, other: {checkpoint: OTHER}}
score: {eval: mgsm_steps_4shot, task: mgsm_steps, in: sw, eval.limit: 5}
columns:
  acc: {}
  bits: {metric: bits}
  reading: {metric: reading}
  numbers: {metric: reading_nums}
rows: {base: base, other: other}
compare: {other: [base]}
"""


@needs_real_data
def test_a_table_of_readings(real_data: Path, tiny: Path, tmp_path: Path) -> None:
    """Cells and comparisons against the stored answers, by SciPy.

    Differences by question, and acc with questions as clusters of steps.
    """
    model = AutoModelForCausalLM.from_pretrained(tiny)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    shutil.copytree(tiny, tmp_path / "other")
    model.save_pretrained(tmp_path / "other")
    (tmp_path / "steps.yaml").write_text(TABLE.replace("OTHER", str(tmp_path / "other")))
    words = [
        "stage=table",
        f"table={tmp_path}/steps.yaml",
        f"every.model.path={tiny}",
        "every.model.name=tiny",
    ]
    root = with_items(real_data, tmp_path / "data", "sw")
    words += [
        f"data_root={root}",
        f"runs_dir={tmp_path}/runs",
        "launcher.workers=1",
        "every.model=trained",
    ]
    assert main(words) == 0
    report = tmp_path / "runs/reports/steps"
    with open(report / "cells.csv", encoding="utf-8") as stream:
        cells = {(row["row"], row["column"]): row for row in csv.DictReader(stream)}
    with open(report / "contrasts.csv", encoding="utf-8") as stream:
        contrasts = {row["place"]: row for row in csv.DictReader(stream)}
    stored: dict[tuple[str, str], list[dict]] = {}
    for folder in (tmp_path / "runs").glob("eval-*"):
        for file in folder.glob("samples/*.sw.jsonl"):
            name = "other" if "other" in folder.name else "base"
            stored[name, file.stem.removesuffix(".sw")] = rows(file)

    def bits(model: str, task: str) -> dict[int, float]:
        totals: dict[int, float] = defaultdict(float)
        for sample in stored[model, task]:
            totals[sample["scores"]["bits"][0]] += sample["scores"]["bits"][1]
        return totals

    for column, control in (("reading", "mgsm_steps_shuffled"), ("numbers", "mgsm_steps_nums")):
        values = {}
        for model_name in ("base", "other"):
            text, without = bits(model_name, "mgsm_steps"), bits(model_name, control)
            values[model_name] = [text[question] - without[question] for question in sorted(text)]
            cell = cells[model_name, column]
            assert float(cell["value"]) == pytest.approx(np.mean(values[model_name]), abs=2e-3)
            interval = scipy.stats.ttest_1samp(values[model_name], 0).confidence_interval()
            assert (float(cell["low"]), float(cell["high"])) == pytest.approx(interval, abs=2e-3)
        theirs = scipy.stats.ttest_rel(values["other"], values["base"])
        assert float(contrasts[column]["p"]) == pytest.approx(theirs.pvalue, abs=1e-4)
        assert float(contrasts[column]["difference"]) == pytest.approx(
            np.mean(values["other"]) - np.mean(values["base"]), abs=1e-3
        )
        assert contrasts[column]["unit"] == "bits"
    right = [sample["scores"]["acc"] for sample in stored["base", "mgsm_steps"]]
    assert float(cells["base", "acc"]["value"]) == pytest.approx(
        100 * np.mean([value for _, value in right])
    )
    assert contrasts["acc"]["unit"] == "points" and int(contrasts["acc"]["n"]) == len(
        {place for place, _ in right}
    )


def test_training_rows_with_a_worked_solution_are_dropped(tmp_path: Path) -> None:
    """Its own decontamination.

    A row with GSM8K's test solution under other words of its own, with its numbers and with others;
    not one that shares two of the calculations by chance.
    """
    solution = (
        "Anna sells half as many clips in May as in April, that is 48/2 = <<48/2=24>>24 clips.\nIn"
        " both months together she therefore sells 48+24 = <<48+24=72>>72 clips to her"
        " friends.\n#### 72"
    )
    write_rows(
        tmp_path / "gsm8k/test.jsonl",
        [{"question": "How many clips does she sell?", "answer": solution}],
    )
    copied = {"prompt": "Work this out, please.", "completion": solution}
    varied = {"prompt": "Work this out, please.", "completion": re.sub(r"\d+", "9", solution)}
    chance = {
        "prompt": "Ben has 48 pens and loses half of them.",
        "completion": "48/2=24, so 24 remain; 48+24=72.",
    }
    write_rows(tmp_path / "own/train.jsonl", [copied, varied, chance])
    words = [
        "stage=data",
        "expert=own",
        "expert.sources.own.rows=pairs",
        "expert.side=math",
        "tracking.mode=disabled",
    ]
    assert main([*words, f"data_root={tmp_path}", f"runs_dir={tmp_path}/runs"]) == 0
    (folder,) = (tmp_path / "runs").glob("data-own-*")
    assert [row["prompt"] for row in rows(folder / "train.jsonl")] == [chance["prompt"]]
    assert "mgsm_steps" in (folder / "data_card.md").read_text(encoding="utf-8")


def test_rows_with_solutions_of_their_own(tmp_path: Path) -> None:
    """As the small world's: no GSM8K is needed, and a constructed language may be scored."""
    solutions = {
        "Eva dedu 12 zika, rigu 9, zonu 13": "12 - 9 = 3. 3 + 13 = 16.",
        "Zoe dedu 1": "1 * 1 = 1.",
    }
    lines = [
        {"question": text, "answer_number": 16, "equation_solution": by}
        for text, by in solutions.items()
    ]
    write_rows(tmp_path / "mgsm/qac/test.jsonl", lines)
    write_rows(tmp_path / "mgsm/qac/train.jsonl", lines)
    card = write_items(tmp_path, "qac")
    (definition,) = task_specs(
        choice(asked("mgsm_steps_shuffled", 1)), ["qac"], tmp_path, tmp_path / "tasks"
    )
    assert definition.num_fewshot == 1
    items = rows(tmp_path / "mgsm_steps/qac/mgsm_steps_shuffled.jsonl")
    assert [item["choices"][item["label"]] for item in items] == [" 12-9=3", "\n3+13=16"]
    assert items[0]["prompt"].startswith("Question: Zoe dedu 12")
    assert card["questions"] == 1 and list(card["without_a_usable_step"]) == ["1"]
    (tmp_path / "mgsm_steps/qac/train.jsonl").unlink()
    (definition,) = task_specs(
        choice(asked("mgsm_steps_shuffled", 0)), ["qac"], tmp_path, tmp_path / "tasks"
    )
    (task,) = load_tasks([definition], Lock())
    assert not task.has_training_docs()
    assert len(task.eval_docs) == len(items)
