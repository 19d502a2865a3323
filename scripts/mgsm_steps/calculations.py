"""Items of `mgsm_steps`: the next calculation of GSM8K's worked solution (`<<48/2=24>>`).

An item has four calculations to choose from. MGSM's 250 questions (Shi et al. 2023) are the first 250 of GSM8K's
test set (Cobbe et al. 2021), in order. So the annotated calculations of the English solutions
belong to the questions in every language. No heavy package is imported.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from mgsm_steps.number_words import read_numbers
from pipeline.benchmarks.local_files import Row
from pipeline.data.sources import calculations_of
from pipeline.errors import PipelineError

QUESTIONS = 250
ALTERNATIVES = 3
# The digest of GSM8K's questions and answers, by digest_questions
DIGEST = "bfbaed6d5282196c68546e8d7a34762b6d255c7902bea01bfef1701046b52cc7"
_NUMBER = r"(\d[\d,]*\.?\d*|\.\d+)"
_BINARY = re.compile(rf"{_NUMBER}([-+*/]){_NUMBER}={_NUMBER}")


@dataclass(frozen=True)
class Step:
    """One annotated calculation.

    `alternatives` have other operators or operands, and other values than the gold calculation. If
    they are empty, the calculation is shown but not scored, and `reason` says why.
    """

    text: str  # 48/2=24
    operands: tuple[Fraction, ...] = ()
    alternatives: tuple[str, ...] = ()
    reason: str = ""


@dataclass(frozen=True)
class Problem:
    """The calculations of one question, in their order."""

    index: int  # row of GSM8K's test set and of MGSM's
    steps: tuple[Step, ...]
    given: tuple[Fraction, ...]  # numbers of the English question, in its order

    @property
    def scored(self) -> list[int]:
        found = []
        for place, step in enumerate(self.steps):
            if step.alternatives:
                found.append(place)
        return found

    @property
    def operands(self) -> set[Fraction]:
        """Return the operands of scored steps that the question states.

        Operands that an earlier step computes are left out.
        """
        needed: set[Fraction] = set()
        computed: set[Fraction | None] = set()
        for step in self.steps:
            if step.alternatives:
                needed |= set(step.operands) & set(self.given) - computed
            computed.add(value_of(step.text))
        return needed


def value_of(calculation: str) -> Fraction | None:
    return _fraction(calculation.rpartition("=")[2])


def digest_questions(rows: Sequence[Row]) -> str:
    """Return the SHA-256 of questions and answers, in order."""
    texts = [[row["question"], row["answer"]] for row in rows]
    return hashlib.sha256(json.dumps(texts, ensure_ascii=False).encode()).hexdigest()


def verify_gsm8k(rows: Sequence[Row], file: Path) -> None:
    """Check that the rows begin with the questions that MGSM translates, in order.

    Raises:
        PipelineError: they do not.
    """
    if len(rows) < QUESTIONS or digest_questions(rows[:QUESTIONS]) != DIGEST:
        raise PipelineError(
            f"{file}: the first {QUESTIONS} of {len(rows)} rows differ from GSM8K's test set, which"
            " MGSM translates. Download openai/gsm8k (main, split test) again, with all rows in"
            " order."
        )


def verify_mgsm(rows: Sequence[Row], gsm8k: Sequence[Row], file: Path) -> None:
    """Check that the rows answer GSM8K's first questions, one by one.

    Raises:
        PipelineError: they do not.
    """
    gold = [final_answer(row) for row in gsm8k[:QUESTIONS]]
    answers = [row["answer_number"] for row in rows]
    if answers != gold:
        number = 1
        for answer, expected in zip(answers, gold, strict=False):
            if answer != expected:
                break
            number += 1
        raise PipelineError(
            f"{file}: row {number} of {len(rows)} is not row {number} of GSM8K's test set (the"
            f" answers differ, or rows are missing). Download MGSM's {QUESTIONS} test questions"
            " again, in order."
        )


def final_answer(row: Row) -> int:
    """Return the number behind #### in a GSM8K answer."""
    _, _, number = row["answer"].rpartition("####")
    return int(number.replace(",", ""))


def build_problems(rows: Sequence[Row]) -> list[Problem]:
    """Return the calculations of rows in GSM8K's form, with their alternatives.

    The number of a row is the seed of its random draws.
    """
    return [build_problem(index, row) for index, row in enumerate(rows)]


def build_problem(index: int, row: Row) -> Problem:
    given = tuple(dict.fromkeys(read_numbers(row["question"], "en")))
    pool: list[Fraction] = []
    for number in read_numbers(row["question"], ""):
        if number > 0 and number not in pool:
            pool.append(number)
    rng = random.Random(index)
    steps = []
    for text in calculations_of(row["answer"]):
        match = _BINARY.fullmatch(text)
        if not match:
            steps.append(Step(text, reason="not one operation on two numbers"))
            continue
        first, second, value = (_fraction(match[group]) for group in (1, 3, 4))
        assert first is not None and second is not None and value is not None
        operands = (first, second)
        alternatives = draw_alternatives(first, match[2], second, value, pool, rng)
        if len(alternatives) < ALTERNATIVES:
            reason = f"{len(alternatives)} alternatives with other values"
            steps.append(Step(text, operands, reason=reason))
        else:
            steps.append(Step(text, operands, tuple(alternatives[:ALTERNATIVES])))
        if value not in pool:
            pool.append(value)
    return Problem(index, tuple(steps), given)


def draw_alternatives(
    first: Fraction,
    operator: str,
    second: Fraction,
    value: Fraction,
    pool: Sequence[Fraction],
    rng: random.Random,
) -> list[str]:
    """Return up to four other calculations, all with different values.

    First come other operators, then (at random) other operands from `pool`. Values are positive,
    have finite decimals, and differ from the gold value.
    """
    used_values, alternatives = {value}, []

    def add(left: Fraction, sign: str, right: Fraction) -> None:
        result = _compute(left, sign, right)
        if result is None or result <= 0 or result in used_values:
            return
        written = [write_number(number) for number in (left, right, result)]
        if None not in written:
            used_values.add(result)
            alternatives.append(f"{written[0]}{sign}{written[1]}={written[2]}")

    for sign in "+-*/":
        if sign != operator:
            add(first, sign, second)
    further = [number for number in pool if number not in (first, second)]
    candidates = [(number, second) for number in further]
    candidates += [(first, number) for number in further]
    rng.shuffle(candidates)
    for left, right in candidates:
        if len(alternatives) > ALTERNATIVES:
            break
        add(left, operator, right)
    return alternatives


def _compute(left: Fraction, sign: str, right: Fraction) -> Fraction | None:
    if sign == "/":
        if right:
            return left / right
        return None
    if sign == "+":
        return left + right
    if sign == "-":
        return left - right
    return left * right


def _fraction(text: str) -> Fraction | None:
    try:
        return Fraction(text.replace(",", ""))
    except (ValueError, ZeroDivisionError):
        return None


def write_number(number: Fraction) -> str | None:
    """Return a number with up to four decimals, or None if it has more."""
    if number.denominator == 1:
        return str(number.numerator)
    text = f"{float(number):.4f}".rstrip("0")
    if Fraction(text) == number:
        return text
    return None


def missing_operands(problem: Problem, question: str, language: str) -> list[Fraction]:
    """Return the operands from the English question that its translation lacks."""
    return sorted(problem.operands - set(read_numbers(question, language)))
