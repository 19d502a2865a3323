"""Items of `mgsm_steps`: the next calculation of GSM8K's worked solution (`<<48/2=24>>`).

Four calculations are offered. MGSM's 250 questions (Shi et al. 2023) are the first 250 of GSM8K's
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
# Of questions and answers, as digest_questions computes it
DIGEST = "bfbaed6d5282196c68546e8d7a34762b6d255c7902bea01bfef1701046b52cc7"
_NUMBER = r"(\d[\d,]*\.?\d*|\.\d+)"
_BINARY = re.compile(rf"{_NUMBER}([-+*/]){_NUMBER}={_NUMBER}")


@dataclass(frozen=True)
class Step:
    """One annotated calculation.

    `alternatives`: with other operators or operands, none with the gold's value; empty where the
    calculation cannot be asked (`reason` says why), so that it is shown but not scored.
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
        needed, computed = set(), set()
        for step in self.steps:
            if step.alternatives:
                for value in step.operands:
                    if value in self.given and value not in computed:
                        needed.add(value)
            computed.add(value_of(step.text))
        return needed


def value_of(calculation: str) -> Fraction | None:
    return _fraction(calculation.rpartition("=")[2])


def digest_questions(rows: Sequence[Row]) -> str:
    """SHA-256 of questions and answers, in order."""
    texts = [[row["question"], row["answer"]] for row in rows]
    return hashlib.sha256(json.dumps(texts, ensure_ascii=False).encode()).hexdigest()


def verify_gsm8k(rows: Sequence[Row], file: Path) -> None:
    """Check that the rows begin with the questions that MGSM translates, in order.

    Raises:
        PipelineError: they do not.
    """
    if len(rows) < QUESTIONS or digest_questions(rows[:QUESTIONS]) != DIGEST:
        raise PipelineError(
            f"{file}: its first {QUESTIONS} of {len(rows)} rows are not those of GSM8K's test set"
            " in their order, which MGSM translates: download openai/gsm8k (main, split test)"
            " again, all rows in order"
        )


def verify_mgsm(rows: Sequence[Row], gsm8k: Sequence[Row], file: Path) -> None:
    """Check that the rows answer GSM8K's first questions, one by one.

    Raises:
        PipelineError: they do not.
    """
    gold = [int(row["answer"].rpartition("####")[2].replace(",", "")) for row in gsm8k[:QUESTIONS]]
    answers = [row["answer_number"] for row in rows]
    if answers != gold:
        at = next(
            (
                n
                for n, (answer, expected) in enumerate(zip(answers, gold, strict=False))
                if answer != expected
            ),
            len(answers),
        )
        raise PipelineError(
            f"{file}: row {at + 1} of {len(rows)} is not row {at + 1} of GSM8K's test set (the"
            f" answers differ, or rows are missing): download MGSM's {QUESTIONS} test questions"
            " again, in order"
        )


def build_problems(rows: Sequence[Row]) -> list[Problem]:
    """Return the calculations of rows in GSM8K's form, with their alternatives.

    The number of a row is the seed of its random draws.
    """
    return [build_problem(index, row) for index, row in enumerate(rows)]


def build_problem(index: int, row: Row) -> Problem:
    given = tuple(dict.fromkeys(read_numbers(row["question"], "en")))
    pool, rng, steps = (
        [value for value in read_numbers(row["question"], "") if value > 0],
        random.Random(index),
        [],
    )
    pool = list(dict.fromkeys(pool))
    for text in calculations_of(row["answer"]):
        match = _BINARY.fullmatch(text)
        if not match:
            steps.append(Step(text, reason="not one operation on two numbers"))
            continue
        first, second, value = _fraction(match[1]), _fraction(match[3]), _fraction(match[4])
        assert first is not None and second is not None and value is not None
        alternatives = draw_alternatives(first, match[2], second, value, pool, rng)
        if len(alternatives) < ALTERNATIVES:
            steps.append(
                Step(
                    text,
                    (first, second),
                    reason=f"{len(alternatives)} alternatives with other values",
                )
            )
        else:
            steps.append(Step(text, (first, second), tuple(alternatives[:ALTERNATIVES])))
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
        if result and result > 0:
            written = [write_number(number) for number in (left, right, result)]
        else:
            written = [None]
        if result not in used_values and None not in written:
            assert result is not None
            used_values.add(result)
            alternatives.append(f"{written[0]}{sign}{written[1]}={written[2]}")

    for sign in "+-*/":
        if sign != operator:
            add(first, sign, second)
    further = [number for number in pool if number not in (first, second)]
    candidates = [(number_instead, second) for number_instead in further] + [
        (first, number_instead) for number_instead in further
    ]
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
    return {"+": left + right, "-": left - right, "*": left * right}[sign]


def _fraction(text: str) -> Fraction | None:
    try:
        return Fraction(text.replace(",", ""))
    except (ValueError, ZeroDivisionError):
        return None


def write_number(number: Fraction) -> str | None:
    """In decimals; None where four do not suffice."""
    if number.denominator == 1:
        return str(number.numerator)
    text = f"{float(number):.4f}".rstrip("0")
    if Fraction(text) == number:
        return text
    return None


def missing_operands(problem: Problem, question: str, language: str) -> list[Fraction]:
    """Operands from the question that its text in a language does not have."""
    return sorted(problem.operands - set(read_numbers(question, language)))
