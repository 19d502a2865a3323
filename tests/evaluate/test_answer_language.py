"""The language of worked answers, written by hand in several scripts, and of MGSM's own."""

import json
import os
from pathlib import Path

import pytest

from pipeline.evaluate.answer_language import in_another_language, in_language, told_by

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


def test_the_share_by_hand() -> None:
    answers = [SWAHILI, ENGLISH, "Jibu ni 11 tu, bila hesabu yoyote.", "5 + 5 = 11"]
    assert in_another_language(answers, "sw") == [False, True, False]


@pytest.mark.real_data
@pytest.mark.parametrize("code", ["en", "de", "fr", "zh", "ru", "es", "ja", "bn", "sw", "te", "th"])
def test_mgsms_own_worked_answers(code: str) -> None:
    file = Path(os.environ["PIPELINE_TEST_DATA"]) / "mgsm" / code / "train.jsonl"
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line]
    assert in_another_language([row["answer"] for row in rows], code) == [False] * 8


@pytest.mark.real_data
@pytest.mark.parametrize("code", ["en", "de", "fr", "zh", "ru", "es", "ja", "bn", "sw", "te", "th"])
def test_the_identifier_knows_mgsms_questions(code: str) -> None:
    file = Path(os.environ["PIPELINE_TEST_DATA"]) / "mgsm" / code / "test.jsonl"
    asked = [json.loads(line)["question"] for line in file.read_text(encoding="utf-8").split("\n") if line]
    told = [in_language(question, code) for question in asked]
    assert sum(one is True for one in told) >= 247, sum(one is True for one in told)
