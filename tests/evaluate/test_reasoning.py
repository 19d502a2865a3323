"""What stands in worked answers, on answers written by hand in several scripts, and on MGSM's own."""

from __future__ import annotations

import json
import os
import time
from fractions import Fraction
from pathlib import Path

import pytest

from pipeline.evaluate.reasoning import answer_shares, equations, in_language, same_plan, told_by


def held(text: str) -> list[bool]:
    return [one.holds for one in equations(text)]


@pytest.mark.parametrize(
    "text, wanted",
    [
        ("5 + 6 = 11.", [True]),
        ("5 + 6 = 12.", [False]),
        ("রজারের ৫ + ৬ = ১১টি বল।", [True]),
        ("৫ + ৬ = ১২", [False]),
        ("సమాధానం ౫+౬=౧౧.", [True]),
        ("๒ × ๓ = ๖", [True]),
        ("５＋６＝１１個", [True]),
        ("Jibu: 5 * 3 = dola 15. 23 - 15 = 8.", [True, True]),
        ("5 balls + 6 tennis balls = 11 tennis balls", [True]),
        ("$5 + $6 = $11; 5 x 6 = 30; 5x6=31", [True, True, False]),
        (r"\$5 \times 3 = \$15 and 10 \div 4 = 2.5", [True, True]),
        ("1,000 + 234 = 1,234", [True]),
        ("10 / 3 = 3.33 and 10 / 3 = 3.34 and 10 / 3 = 3", [True, False, False]),
        ("3,5 + 1,5 = 5", [True]),
        ("(3 + 4) * 2 = 14, 3 + 4 * 2 = 11", [True, True]),
        ("2 * 3 + 5 = 6 + 5 = 11", [True, True]),
        ("20% * 50 = 10, 1 / 4 = 25%, 5 / 10 * 100 = 50%", [True, True, True]),
        ("-5 + 3 = -2, 3 - -2 = 5", [True, True]),
        ("10 : 2 = 5", [True]),
        ("7 / 0 = 0", [False]),
        ("x = 5, 5 = 5, the answer is 11, from 3-5 pm", []),
        ("3 + 2 jest = ?", []),
        ("", []),
    ],
)
def test_equations_and_whether_they_hold(text: str, wanted: list[bool]) -> None:
    assert held(text) == wanted


def test_what_an_equation_is_made_of() -> None:
    (one,) = equations("12 apples + 0.5 apples = 12.5 apples")
    assert one.terms == (12, "+", Fraction(1, 2)) and one.result == Fraction(25, 2)


@pytest.mark.parametrize("text", ["1.,", "(", "5", "5 = 5 + ", "5%", "a ", "5-", "5 a b ", "= ", "5 a + ", "(5 "])
def test_no_text_takes_long(text: str) -> None:
    start = time.process_time()
    equations(text * (3000 // len(text)))
    assert time.process_time() - start < 2


SOLUTION = "2 * 3 = 6. 5 + 6 = 11."


@pytest.mark.parametrize(
    "answer, wanted",
    [
        ("2 cans of 3: 2 * 3 = 6. 5 + 6 = 11. The answer is 11.", True),
        ("২ × ৩ = ৬। ৫ + ৬ = ১১।", True),
        ("2 * 3 = 7. 5 + 7 = 12.", True),  # a slip of arithmetic, carried on
        ("2 * 3 = 7. 5 + 6 = 11.", True),
        ("2 * 3 = 6. 6 + 5 = 11.", False),  # not in this order
        ("2 + 3 = 5. 5 + 6 = 11.", False),
        ("2 * 3 = 6. 5 - 6 = -1.", False),
        ("2 * 3 = 7. 5 + 8 = 13.", False),
        ("5 + 6 = 11.", False),
        ("2 * 3 = 6. 5 + 6 = 11. 11 + 1 = 12.", False),
        ("The answer is 11.", False),
    ],
)
def test_the_plan(answer: str, wanted: bool) -> None:
    assert same_plan(answer, SOLUTION) is wanted


SWAHILI = "Roger alianza kwa mipira 5. Mikebe 2 yenye mipira 3 kila moja ni mipira 6. 5 + 6 = 11. Jibu ni 11."
ENGLISH = "Roger started with 5 balls. 2 cans of 3 tennis balls each is 6 tennis balls. 5 + 6 = 11. The answer is 11."
BENGALI = "রজারের শুরুতে ৫টি বল ছিল। ২টি ক্যানের প্রতিটিতে ৩টি বল। ৫ + ৬ = ১১। উত্তর হল ১১।"
JAPANESE = "ロジャーは最初に5個のボールを持っていました。5 + 6 = 11です。答えは11です。"
CHINESE = "罗杰一开始有5个网球。2罐网球每罐3个，一共是6个网球。5 + 6 = 11。答案是11。"


@pytest.mark.parametrize(
    "text, code, wanted",
    [
        (SWAHILI, "sw", True),
        (ENGLISH, "sw", False),
        (ENGLISH, "en", True),
        (SWAHILI, "en", False),
        (BENGALI, "bn", True),
        (ENGLISH, "bn", False),
        (JAPANESE, "ja", True),
        (CHINESE, "ja", False),
        (CHINESE, "zh", True),
        (JAPANESE, "zh", False),
        ("Roger hatte zu Anfang 5 Bälle. Die Antwort ist 11.", "de", True),
        ("Roger hatte zu Anfang 5 Bälle. Die Antwort ist 11.", "es", False),
        ("5 + 6 = 11", "sw", None),
        ("11 dola", "sw", None),
        ("zor mipu tak velu, 5 + 6 = 11", "qac", True),  # by its letters: no identifier knows it
        (BENGALI, "qac", False),
    ],
)
def test_the_language(text: str, code: str, wanted: bool | None) -> None:
    assert in_language(text, code) is wanted


def test_how_a_language_is_told() -> None:
    assert {code: told_by(code) for code in ("sw", "ja", "bn", "te", "th", "ru", "qac")} == {
        "sw": "py3langid", "ja": "py3langid", "bn": "script", "te": "script", "th": "script", "ru": "script",
        "qac": "script",
    }  # fmt: skip


def test_shares_by_hand() -> None:
    answers = [SWAHILI, ENGLISH, "Jibu ni 11 tu, bila hesabu yoyote.", "5 + 5 = 11"]
    found = {one.metric: one for one in answer_shares(answers, "sw", ["5 + 6 = 11.", "4 + 7 = 11.", None, None])}
    assert {name: (sum(one.each), len(one.each)) for name, one in found.items()} == {
        "no_equation": (1, 4), "equations_true": (2, 3), "other_language": (1, 3), "plan": (1, 2),
    }  # fmt: skip
    assert [one.how for one in found.values()] == ["none", "none", "py3langid", "none"]


@pytest.mark.real_data
@pytest.mark.parametrize("code", ["en", "de", "fr", "zh", "ru", "es", "ja", "bn", "sw", "te", "th"])
def test_mgsms_own_worked_answers(code: str) -> None:
    """Eight a language: all in it, all equations true, and the plan that of `equation_solution`, but for what is not
    written as an equation (sw 32 + 42 + 74; ja one sum in words)."""
    file = Path(os.environ["PIPELINE_TEST_DATA"]) / "mgsm" / code / "train.jsonl"
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line]
    found = {
        one.metric: one
        for one in answer_shares([row["answer"] for row in rows], code, [row["equation_solution"] for row in rows])
    }
    assert len(found["other_language"].each) == 8 and not any(found["other_language"].each)
    assert len(found["equations_true"].each) >= 12 and all(found["equations_true"].each)
    assert sum(found["plan"].each) >= (7 if code in ("sw", "ja") else 8)


@pytest.mark.real_data
@pytest.mark.parametrize("code", ["en", "de", "fr", "zh", "ru", "es", "ja", "bn", "sw", "te", "th"])
def test_the_identifier_knows_mgsms_questions(code: str) -> None:
    file = Path(os.environ["PIPELINE_TEST_DATA"]) / "mgsm" / code / "test.jsonl"
    asked = [json.loads(line)["question"] for line in file.read_text(encoding="utf-8").split("\n") if line]
    told = [in_language(question, code) for question in asked]
    assert sum(one is True for one in told) >= 247, sum(one is True for one in told)
