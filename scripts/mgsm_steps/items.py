"""mgsm_steps: which of four calculations comes next in the worked solution of an MGSM question.

Built from the files of MGSM and GSM8K (calculations.py); three tasks: the question, `nums` (its
numbers in place of its text) and `shuffled` (its numbers in another question's text).
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path

from mgsm_steps.calculations import (
    QUESTIONS,
    Problem,
    build_problems,
    missing_operands,
    verify_gsm8k,
    verify_mgsm,
    write_number,
)
from mgsm_steps.number_words import SPANS
from pipeline.benchmarks.local_files import Row, rows_of
from pipeline.errors import PipelineError

TASKS = ("mgsm_steps", "mgsm_steps_nums", "mgsm_steps_shuffled")
_NUMBER = r"\d+(?:\.\d+)?"
CALCULATION = re.compile(rf"{_NUMBER}(?:\s*[-+*/]\s*{_NUMBER})+\s*=\s*{_NUMBER}")


def write_items(data_root: Path, code: str) -> Row:
    """Write the files of one language below data_root/mgsm_steps, and return their card.

    The files hold the items of three tasks, exemplars if mgsm/CODE/train.jsonl exists, and a card
    that says what is asked and what is left out.

    Raises:
        PipelineError: the files are not those of MGSM and GSM8K in their order.
    """
    train, test = (data_root / "mgsm" / code / f"{split}.jsonl" for split in ("train", "test"))
    rows = rows_of(test, {"question": str, "answer_number": int})
    worked = {"question": str, "equation_solution": str, "answer_number": int}
    exemplars = []
    if train.is_file():
        exemplars = rows_of(train, worked)
    solved = all(isinstance(row.get("equation_solution"), str) for row in rows)
    problems = build_problems(solutions_of(rows) if solved else read_gsm8k(data_root, rows, test))
    questions = [row["question"] for row in rows]
    excluded = excluded_questions(problems, questions, code)
    scored_problems = []
    for problem in problems:
        if problem.scored and problem.index not in excluded:
            scored_problems.append(problem)
    files = {}
    if exemplars:
        files = {"train": [build_exemplar(row) for row in exemplars]}
    for task in TASKS:
        prompts = prompts_of(task, scored_problems, questions)
        files[task] = [
            item
            for problem in scored_problems
            for item in build_items(problem, prompts[problem.index])
        ]
    folder = data_root / "mgsm_steps" / code
    folder.mkdir(parents=True, exist_ok=True)
    for name, items in files.items():
        lines = "".join(json.dumps(item, ensure_ascii=False) + "\n" for item in items)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    card = data_card(problems, excluded)
    (folder / "card.json").write_text(json.dumps(card, indent=1), encoding="utf-8")
    return card


def read_gsm8k(data_root: Path, rows: Sequence[Row], file: Path) -> list[Row]:
    """Return the rows of GSM8K that MGSM's `rows` translate.

    Raises:
        PipelineError: they are not translations.
    """
    gsm8k_file = data_root / "gsm8k" / "test.jsonl"
    gsm8k = rows_of(gsm8k_file, {"question": str, "answer": str})
    verify_gsm8k(gsm8k, gsm8k_file)
    verify_mgsm(rows, gsm8k, file)
    return gsm8k[:QUESTIONS]


def solutions_of(rows: Sequence[Row]) -> list[Row]:
    """Return rows with their own solutions (`equation_solution`) in GSM8K's form.

    The small world has such rows.
    """
    return [
        {
            "question": row["question"],
            "answer": "".join(f"<<{text}>>" for text in written_calculations(row)),
        }
        for row in rows
    ]


def written_calculations(row: Row) -> list[str]:
    """Return the calculations in an equation_solution: "5 + 6 = 11. ..." as 5+6=11."""
    return ["".join(text.split()) for text in CALCULATION.findall(row["equation_solution"])]


def excluded_questions(
    problems: Sequence[Problem], questions: Sequence[str], language: str
) -> dict[int, list[Fraction]]:
    """Return row -> operands that the English question has but this language's text lacks.

    Only operands of scored steps count.
    """
    missing = {}
    for item in problems:
        if item.scored:
            missing[item.index] = missing_operands(item, questions[item.index], language)
    found = {}
    for index, values in missing.items():
        if values:
            found[index] = values
    return found


def data_card(problems: Sequence[Problem], excluded: Mapping[int, Sequence[Fraction]]) -> Row:
    """Return what is asked in a language, and what is left out and why, by MGSM's row."""
    scored_problems = []
    for problem in problems:
        if problem.scored and problem.index not in excluded:
            scored_problems.append(problem)
    return {
        "questions": len(scored_problems),
        "steps": sum(len(problem.scored) for problem in scored_problems),
        "without_a_usable_step": {
            str(problem.index): [f"{step.text}: {step.reason}" for step in problem.steps]
            for problem in problems
            if not problem.scored
        },
        "operands_not_in_the_text": {
            str(index): [str(value) for value in values] for index, values in excluded.items()
        },
    }


def build_exemplar(row: Row) -> Row:
    """Return an exemplar of MGSM with its calculations in place of the words of its answer."""
    question = re.split("[:：]", row["question"], maxsplit=1)[-1].strip()
    lines = written_calculations(row)
    if not lines:
        raise PipelineError(
            f"equation_solution {row['equation_solution']!r} has no calculation: use MGSM's"
            " train.jsonl"
        )
    answer = "\n".join([*lines, f"#### {row['answer_number']}"])
    return {
        "index": -1,
        "step": 0,
        "prompt": f"Question: {question}\nAnswer:",
        "choices": [f" {answer}"],
        "label": 0,
    }


def build_items(problem: Problem, question: str) -> list[Row]:
    """Return an item for each scored step.

    An item has the question, the steps before it, and four calculations, each on a line. The row
    and the step are the seed of the order of the four.
    """
    items, prompt = [], f"Question: {question}\nAnswer:"
    for place, step in enumerate(problem.steps):
        space = "\n" if place else " "
        if step.alternatives:
            choices = [step.text, *step.alternatives]
            random.Random(problem.index * 100 + place).shuffle(choices)
            label = choices.index(step.text)
            items.append(
                {
                    "index": problem.index,
                    "step": place,
                    "prompt": prompt,
                    "choices": [space + choice for choice in choices],
                    "label": label,
                }
            )
        prompt += space + step.text
    return items


def prompts_of(task: str, problems: Sequence[Problem], questions: Sequence[str]) -> dict[int, str]:
    """Row -> what is in the question's place in a task."""
    if task == "mgsm_steps":
        return {problem.index: questions[problem.index] for problem in problems}
    numbers = {
        problem.index: [write_number(value) or str(value) for value in problem.given]
        for problem in problems
    }
    if task == "mgsm_steps_nums":
        return {index: " ".join(values) or "-" for index, values in numbers.items()}
    counts = [len(SPANS.findall(text)) for text in questions]
    return {
        index: shuffled_text(index, values, questions, counts) for index, values in numbers.items()
    }


def shuffled_text(
    index: int, numbers: Sequence[str], questions: Sequence[str], counts: Sequence[int]
) -> str:
    """Return another question's text with these numbers in place of its own, in order.

    The other question has as many numbers in digits; the row is the seed of the draw. If no
    question has as many, one with the next higher number is used, and the numbers are repeated.
    Otherwise one with the most numbers is used, and the remaining numbers end the text.

    Args:
        index: the row.
        numbers: the numbers to write.
        questions: the texts.
        counts: numbers in digits of each question.
    """
    donors = []
    for place in range(len(questions)):
        if place != index and counts[place]:
            donors.append(place)
    distance = {
        place: (counts[place] < len(numbers), abs(counts[place] - len(numbers))) for place in donors
    }
    nearest = min(distance.values())
    donor = questions[
        random.Random(index).choice([place for place in donors if distance[place] == nearest])
    ]
    count = max(len(numbers), len(SPANS.findall(donor)))
    if numbers:
        values = [numbers[place % len(numbers)] for place in range(count)]
    else:
        values = ["-"] * count
    remaining = iter(values)
    text = SPANS.sub(lambda match: next(remaining), donor)
    return " ".join([text, *remaining])
