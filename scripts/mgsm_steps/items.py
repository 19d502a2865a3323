"""Items of mgsm_steps: choose the next of four calculations in a worked MGSM solution.

The items come from the files of MGSM and GSM8K (calculations.py). There are three tasks: the
question, `nums` (only its numbers) and `shuffled` (its numbers in another question's text).
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

    The files have the items of three tasks, exemplars if mgsm/CODE/train.jsonl exists, and a card
    that counts the items and lists the excluded questions.

    Raises:
        PipelineError: the files differ from MGSM and GSM8K, or their order does.
    """
    train, test = (data_root / "mgsm" / code / f"{split}.jsonl" for split in ("train", "test"))
    rows = rows_of(test, {"question": str, "answer_number": int})
    worked = {"question": str, "equation_solution": str, "answer_number": int}
    exemplars = []
    if train.is_file():
        exemplars = rows_of(train, worked)
    solved = all(isinstance(row.get("equation_solution"), str) for row in rows)
    if solved:
        solutions = solutions_of(rows)
    else:
        solutions = read_gsm8k(data_root, rows, test)
    problems = build_problems(solutions)
    questions = [row["question"] for row in rows]
    excluded = excluded_questions(problems, questions, code)
    scored_problems = included(problems, excluded)
    files: dict[str, list[Row]] = {}
    if exemplars:
        files["train"] = [build_exemplar(row) for row in exemplars]
    for task in TASKS:
        prompts = prompts_of(task, scored_problems, questions)
        files[task] = []
        for problem in scored_problems:
            files[task] += build_items(problem, prompts[problem.index])
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
    solutions = []
    for row in rows:
        answer = "".join(f"<<{text}>>" for text in written_calculations(row))
        solutions.append({"question": row["question"], "answer": answer})
    return solutions


def written_calculations(row: Row) -> list[str]:
    """Return the calculations in an equation_solution: "5 + 6 = 11. ..." as 5+6=11."""
    return ["".join(text.split()) for text in CALCULATION.findall(row["equation_solution"])]


def excluded_questions(
    problems: Sequence[Problem], questions: Sequence[str], language: str
) -> dict[int, list[Fraction]]:
    """Return row -> operands that the English question has but this language's text lacks.

    Only operands of scored steps count.
    """
    found = {}
    for problem in problems:
        if problem.scored:
            missing = missing_operands(problem, questions[problem.index], language)
            if missing:
                found[problem.index] = missing
    return found


def included(
    problems: Sequence[Problem], excluded: Mapping[int, Sequence[Fraction]]
) -> list[Problem]:
    """Return the problems with a scored step whose question is not excluded."""
    found = []
    for problem in problems:
        if problem.scored and problem.index not in excluded:
            found.append(problem)
    return found


def data_card(problems: Sequence[Problem], excluded: Mapping[int, Sequence[Fraction]]) -> Row:
    """Return the counts of a language's items, and why other rows of MGSM have no item."""
    scored_problems = included(problems, excluded)
    reasons = {}
    for problem in problems:
        if not problem.scored:
            steps = [f"{step.text}: {step.reason}" for step in problem.steps]
            reasons[str(problem.index)] = steps
    missing = {}
    for index, values in excluded.items():
        missing[str(index)] = [str(value) for value in values]
    return {
        "questions": len(scored_problems),
        "steps": sum(len(problem.scored) for problem in scored_problems),
        "without_a_usable_step": reasons,
        "operands_not_in_the_text": missing,
    }


def build_exemplar(row: Row) -> Row:
    """Return an exemplar of MGSM whose answer has only the calculations."""
    question = re.split("[:：]", row["question"], maxsplit=1)[-1].strip()
    lines = written_calculations(row)
    if not lines:
        raise PipelineError(
            f"equation_solution {row['equation_solution']!r} has no calculation. Use MGSM's"
            " train.jsonl."
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
    and the step are the random seed of the order of the four.
    """
    items = []
    prompt = f"Question: {question}\nAnswer:"
    space = " "
    for place, step in enumerate(problem.steps):
        if step.alternatives:
            choices = [step.text, *step.alternatives]
            random.Random(problem.index * 100 + place).shuffle(choices)
            item: Row = {"index": problem.index, "step": place, "prompt": prompt}
            item["choices"] = [space + choice for choice in choices]
            item["label"] = choices.index(step.text)
            items.append(item)
        prompt += space + step.text
        space = "\n"
    return items


def prompts_of(task: str, problems: Sequence[Problem], questions: Sequence[str]) -> dict[int, str]:
    """Return row -> the text of the question in a task."""
    counts = [len(SPANS.findall(text)) for text in questions]
    texts = {}
    for problem in problems:
        index = problem.index
        numbers = [write_number(value) or str(value) for value in problem.given]
        if task == "mgsm_steps":
            texts[index] = questions[index]
        elif task == "mgsm_steps_nums":
            texts[index] = " ".join(numbers) or "-"
        else:
            texts[index] = shuffled_text(index, numbers, questions, counts)
    return texts


def shuffled_text(
    index: int, numbers: Sequence[str], questions: Sequence[str], counts: Sequence[int]
) -> str:
    """Return another question's text, with its numbers replaced by these in order.

    The other question has as many numbers in digits, and is drawn with the row as seed. If no
    question has as many, a question with the next higher number is used, and the numbers are
    repeated. Otherwise a question with the most numbers is used, and the remaining numbers end the
    text.

    Args:
        index: the row.
        numbers: the numbers to write.
        questions: the texts.
        counts: numbers in digits of each question.
    """
    places_by_distance: dict[tuple[bool, int], list[int]] = {}
    for place, count in enumerate(counts):
        if place != index and count:
            distance = (count < len(numbers), abs(count - len(numbers)))
            places_by_distance.setdefault(distance, []).append(place)
    nearest = places_by_distance[min(places_by_distance)]
    donor = questions[random.Random(index).choice(nearest)]
    count = max(len(numbers), len(SPANS.findall(donor)))
    if numbers:
        values = [numbers[place % len(numbers)] for place in range(count)]
    else:
        values = ["-"] * count
    remaining = iter(values)
    text = SPANS.sub(lambda match: next(remaining), donor)
    return " ".join([text, *remaining])
