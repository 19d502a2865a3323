"""mgsm_steps: which of four calculations comes next in the worked solution of an MGSM question, by likelihood.

For models that are too small to answer MGSM. Built from MGSM's and GSM8K's own files (calculations.py); three tasks:
the question, `nums` (its numbers in place of its text) and `shuffled` (its numbers in another question's text). Scores:
`acc`, and `bits`, the log2 probability of the gold calculations, summed over the steps of a question.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path

from pipeline.benchmarks.benchmark import Benchmark
from pipeline.benchmarks.calculations import (
    QUESTIONS,
    Problem,
    build_problems,
    missing_operands,
    verify_gsm8k,
    verify_mgsm,
    write_number,
)
from pipeline.benchmarks.local_files import Missing, Row, rows_of
from pipeline.benchmarks.number_words import SPANS
from pipeline.benchmarks.task_files import (
    Ask,
    Definition,
    check_exemplars,
    local_files,
    own_task_file,
    read_from,
    write_task,
)
from pipeline.errors import PipelineError
from pipeline.languages import MGSM

_NUMBER = r"\d+(?:\.\d+)?"
CALCULATION = re.compile(rf"{_NUMBER}(?:\s*[-+*/]\s*{_NUMBER})+\s*=\s*{_NUMBER}")


def define(ask: Ask) -> list[Definition]:
    """The task files of one of the three tasks, its items, and the list of what was excluded, beside it.

    Raises PipelineError for a language without MGSM, and for files that are not MGSM's and GSM8K's in their order.
    """
    if not ask.data_root:
        raise Missing(f"{ask.task} is built from files: set data_root to a folder with mgsm/ and gsm8k/test.jsonl")
    if ask.split != "test":
        raise PipelineError(f"{ask.task} has no development items: leave eval.split={ask.split} out")
    train, test = local_files(ask, "mgsm", "train", "test")
    if ask.language.code not in MGSM and not test.is_file():
        raise Missing(
            f"{ask.task} has no {ask.language.name}: MGSM is in {', '.join(MGSM)}; leave {ask.language.code} out "
            f"of languages, or give {test} with equation_solution"
        )
    rows = rows_of(test, {"question": str, "answer_number": int})
    worked = {"question": str, "equation_solution": str, "answer_number": int}
    exemplars = rows_of(train, worked) if ask.num_fewshot else []
    check_exemplars(ask, ask.task, len(exemplars), train)
    solved = all(isinstance(row.get("equation_solution"), str) for row in rows)
    problems = build_problems(solutions_of(rows) if solved else read_gsm8k(ask.data_root, rows, test))
    questions = [row["question"] for row in rows]
    excluded = excluded_questions(problems, questions, ask.language.code)
    scored_problems = [problem for problem in problems if problem.scored and problem.index not in excluded]
    prompts = prompts_of(ask.task, scored_problems, questions)
    splits = {"train": [build_exemplar(row) for row in exemplars]} if exemplars else {}
    splits["test"] = [item for problem in scored_problems for item in build_items(problem, prompts[problem.index])]
    files = {split: ask.folder / f"{ask.task}.{ask.language.code}.{split}.jsonl" for split in splits}
    for split, items in splits.items():
        write_lines(files[split], items)
    card = data_card(problems, excluded)
    (ask.folder / f"{ask.task}.{ask.language.code}.card.json").write_text(json.dumps(card, indent=1), encoding="utf-8")
    body: Row = {"include": [str(own_task_file("mgsm_steps"))]}
    read_from(body, **files)
    if exemplars:
        body |= {"training_split": "train", "fewshot_split": "train"}
    return [write_task(ask, body)]


def read_gsm8k(data_root: Path, rows: Sequence[Row], file: Path) -> list[Row]:
    """The rows of GSM8K that MGSM's `rows` translate. Raises PipelineError where they do not."""
    gsm8k_file = data_root / "gsm8k" / "test.jsonl"
    gsm8k = rows_of(gsm8k_file, {"question": str, "answer": str})
    verify_gsm8k(gsm8k, gsm8k_file)
    verify_mgsm(rows, gsm8k, file)
    return gsm8k[:QUESTIONS]


def solutions_of(rows: Sequence[Row]) -> list[Row]:
    """Rows with solutions of their own, as the small world's (`equation_solution`), in GSM8K's form."""
    return [
        {"question": row["question"], "answer": "".join(f"<<{text}>>" for text in written_calculations(row))}
        for row in rows
    ]


def written_calculations(row: Row) -> list[str]:
    """The calculations in the text of an equation_solution: "5 + 6 = 11. ..." as 5+6=11."""
    return ["".join(text.split()) for text in CALCULATION.findall(row["equation_solution"])]


def excluded_questions(
    problems: Sequence[Problem], questions: Sequence[str], language: str
) -> dict[int, list[Fraction]]:
    """Row -> operands of its scored steps that the English question has and this language's text does not."""
    missing = {item.index: missing_operands(item, questions[item.index], language) for item in problems if item.scored}
    return {index: values for index, values in missing.items() if values}


def data_card(problems: Sequence[Problem], excluded: Mapping[int, Sequence[Fraction]]) -> Row:
    """What is asked in a language, and what is not and why, by MGSM's row (from 0)."""
    scored_problems = [problem for problem in problems if problem.scored and problem.index not in excluded]
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
    """One of MGSM's own, with its calculations (`equation_solution`) in place of the words of its answer."""
    question = re.split("[:：]", row["question"], maxsplit=1)[-1].strip()
    lines = written_calculations(row)
    if not lines:
        raise PipelineError(
            f"equation_solution {row['equation_solution']!r} has no calculation: use MGSM's train.jsonl"
        )
    answer = "\n".join([*lines, f"#### {row['answer_number']}"])
    return {"index": -1, "step": 0, "prompt": f"Question: {question}\nAnswer:", "choices": [f" {answer}"], "label": 0}


def build_items(problem: Problem, question: str) -> list[Row]:
    """An item for each scored step: the question and the steps before it, and four calculations, each on a line.

    The order of the four is drawn with the row and the step as the seed.
    """
    items, prompt = [], f"Question: {question}\nAnswer:"
    for place, step in enumerate(problem.steps):
        space = "\n" if place else " "
        if step.alternatives:
            choices = [step.text, *step.alternatives]
            random.Random(problem.index * 100 + place).shuffle(choices)
            label = choices.index(step.text)
            items.append(
                {"index": problem.index, "step": place, "prompt": prompt,
                 "choices": [space + choice for choice in choices], "label": label}
            )  # fmt: skip
        prompt += space + step.text
    return items


def prompts_of(task: str, problems: Sequence[Problem], questions: Sequence[str]) -> dict[int, str]:
    """Row -> what is in the question's place in a task."""
    if task == "mgsm_steps":
        return {problem.index: questions[problem.index] for problem in problems}
    numbers = {problem.index: [write_number(value) or str(value) for value in problem.given] for problem in problems}
    if task == "mgsm_steps_nums":
        return {index: " ".join(values) or "-" for index, values in numbers.items()}
    counts = [len(SPANS.findall(text)) for text in questions]
    return {index: shuffled_text(index, values, questions, counts) for index, values in numbers.items()}


def shuffled_text(index: int, numbers: Sequence[str], questions: Sequence[str], counts: Sequence[int]) -> str:
    """Another question's text with these numbers for its own, in order: one with as many numbers in digits, drawn with
    the row as the seed; where none has, one with the next more (the numbers are repeated), else one with the most (the
    others end the text). counts: numbers in digits of each question."""
    donors = [place for place in range(len(questions)) if place != index and counts[place]]
    distance = {place: (counts[place] < len(numbers), abs(counts[place] - len(numbers))) for place in donors}
    nearest = min(distance.values())
    donor = questions[random.Random(index).choice([place for place in donors if distance[place] == nearest])]
    count = max(len(numbers), len(SPANS.findall(donor)))
    values = [numbers[place % len(numbers)] for place in range(count)] if numbers else ["-"] * count
    remaining = iter(values)
    text = SPANS.sub(lambda match: next(remaining), donor)
    return " ".join([text, *remaining])


def write_lines(file: Path, rows: Sequence[Row]) -> None:
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


BENCHMARK = Benchmark(
    name="mgsm_steps", variants=("mgsm_steps_nums", "mgsm_steps_shuffled"), title="MGSM, next calculation",
    kind="choice", metric="acc", measures=("bits",), choices=4, questions=634, define=define, columns=("question",),
    lost_skill=("mgsm_steps_nums", 1.0),
    differences={"reading": "mgsm_steps_shuffled", "reading_nums": "mgsm_steps_nums"},
    question_column="index", parts=2.7,
    tokens=50, continuation_tokens=25,  # of a step, 2.7 a question: measured, of SmolLM2's and Gemma 3's tokenizers
    built_from=("gsm8k/test.jsonl", "mgsm/{code}/test.jsonl"), exemplar_file="train.jsonl",
    compared={"gsm8k/test.jsonl": QUESTIONS},  # MGSM's own questions are compared by that benchmark
    texts=lambda row: [f"{row['question']}\n{row['answer']}"],
    sources=lambda spoken: [],
)  # fmt: skip
