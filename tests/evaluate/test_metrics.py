"""Numbers, scripts and languages read from answers, against what a person reads."""

import json
import os
from fractions import Fraction
from pathlib import Path

import pytest

from pipeline.evaluate import metrics
from pipeline.evaluate.answer_language import in_language, told_by
from pipeline.evaluate.shown_scores import percent_factor
from pipeline.languages import language


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("The answer is 13.0", "13"),
        # Groups of three digits are thousands, whatever parts them ...
        ("So it costs $1,234.", "1234"),
        ("12,34,567 rupees", "1234567"),
        ("1\u202f234", "1234"),
        ("1\u00a0000 roubles", "1000"),
        ("There are 7 200 ml bottles", "200"),
        ("He has 12 100-dollar bills", "100"),
        # Fractions.
        ("It is 1/2.", "1/2"),
        ("-3/4", "-3/4"),
        ("36/2 = 18", "18"),
        ("2 1/2 cups", "5/2"),
        ("on 5/12/2023", "2023"),
        ("1/0", None),
        ("a/2", "2"),
        ("CHF 1'234", "1234"),
        (r"\boxed{1{,}000}", "1000"),
        # ... unless the first begins with 0 or has more than three.
        ("0.125", "0.125"),
        ("0.000", "0"),
        ("1234.567", "1234.567"),
        ("13,5", "13.5"),
        (".5", "0.5"),
        ("it is $.50.", "0.5"),
        ("-.5", "-0.5"),
        # Two marks: thousands, then decimals.
        ("1,234.50", "1234.5"),
        ("1.234,50 €", "1234.5"),
        # Digits of the language.
        ("উত্তর হল ১২৩।", "123"),
        ("১,২৩,৪৫৬ টাকা", "123456"),
        ("సమాధానం ౧,౨౩౪.", "1234"),
        ("答えは１，２３４円です。", "1234"),
        ("答えは−５です", "-5"),
        ("คำตอบคือ ๑๘", "18"),
        # A minus touches the number or its currency.
        ("minus: -7", "-7"),
        ("\u22127", "-7"),
        ("-$5", "-5"),
        ("-₹ 1,000", "-1000"),
        ("$-5", "-5"),
        ("(-5)", "-5"),
        ("10-4=6", "6"),
        ("10-4", "4"),
        ("3\u20135 apples", "5"),
        ("it fell by 5 - 3", "3"),
        ("f(2)-3", "3"),
        ("COVID-19", "19"),
        ("5 - $3", "3"),
        # The last one, without what stands around it.
        ("first 5, then 3.", "3"),
        ("12 345 6789", "6789"),
        ("in 2024 100 came", "100"),
        ("3\n100", "100"),
        ("50%", "50"),
        ("**1,000**.", "1000"),
        # Groups of ten thousand, and powers of ten.
        ("答えは1万5000円", "15000"),
        ("約3千円", "3000"),
        ("１億２，０００万人", "120000000"),
        ("3.5万", "35000"),
        ("1億2000万5千300", "120005300"),
        ("1만5천원", "15000"),
        ("-1万", "-10000"),
        ("12千克", "12"),
        ("8兆字节", "8"),
        ("1.2345千", "1234.5"),
        ("1e3", "1000"),
        ("2.5e-3", "0.0025"),
        ("答えは98e3円です", "98000"),
        ("0x1e3", "3"),
        ("10^3 = 1000", "1000"),
        ("10^3", None),
        # What no reader could say.
        ("1.2.3", None),
        ("3,4,5", None),
        ("1,234,56", None),
        ("1,234.567.890", None),
        ("0'125", None),
        ("6.6'536", None),
        pytest.param("1" * 5000, None, id="5000 digits"),
        ("none", None),
        ("", None),
    ],
)
def test_the_last_number(text: str, meant: str | None) -> None:
    assert metrics.last_number(text) == (None if meant is None else Fraction(meant))


@pytest.mark.parametrize(
    ("code", "meant"), [("fr", 7200), ("ru", 7200), ("es", 7200), ("en", 200), ("sw", 200)]
)
def test_a_plain_space_parts_thousands_where_the_language_writes_so(code: str, meant: int) -> None:
    assert metrics.last_number("7 200 ml", code) == meant
    assert metrics.last_number("7\u202f200 ml", code) == 7200


@pytest.mark.parametrize(
    ("response", "gold", "right"),
    [
        (" 0.125", 125, 0.0),
        (" $18,000", 18, 0.0),
        (" 18.000 Euro.", 18000, 1.0),
        (" 18,000", "18,000", 1.0),
        (" 18.0", 18, 1.0),
        (" I do not know.", 5, 0.0),
    ],
)
def test_a_numeric_match_with_the_answer(response: str, gold: int | str, right: float) -> None:
    assert (metrics.last_number(response) == metrics.last_number(str(gold))) is bool(right)


def test_the_share_of_a_script() -> None:
    telugu, japanese = language("te").scripts, language("ja").scripts
    assert metrics.share_in(telugu, "సమాధానం పదమూడు, అంటే 13") == 1
    assert metrics.share_in(telugu, "The answer is thirteen") == 0
    assert metrics.share_in(telugu, "ఆరు 13") is None  # too few letters to say
    assert metrics.share_in(japanese, "答えはカタカナでも十三です") == 1
    assert metrics.share_in(language("qac").scripts, "ba da ga ka la ma") == 1


def test_spbleu_is_bleu_over_the_pieces_of_a_model(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in cuts each letter off: spBLEU is then BLEU over letters."""
    import sys
    from types import SimpleNamespace

    import sacrebleu

    class Letters:
        def __init__(self, model_file: str) -> None:
            assert model_file == str(tmp_path / "spm.model")

        def encode(self, text: str, out_type: type) -> list[str]:
            return list(text.replace(" ", "_"))

    monkeypatch.setitem(
        sys.modules, "sentencepiece", SimpleNamespace(SentencePieceProcessor=Letters)
    )
    references, responses = ["the cat sat here", "a dog ran"], ["the cat sits here", "a dog ran"]
    found = metrics.spbleu(references, responses, str(tmp_path / "spm.model"))
    spaced = [
        [" ".join(text.replace(" ", "_")) for text in side] for side in (responses, references)
    ]
    assert found == pytest.approx(
        sacrebleu.corpus_bleu(spaced[0], [spaced[1]], tokenize="none", force=True).score
    )


def test_a_perfect_answer_has_100_in_every_metric_of_the_harness() -> None:
    """As the harness' own functions score it.

    Shares of 1, ROUGE and BLEU out of 100, EQ-Bench out of 100.
    """
    from lm_eval.tasks.eq_bench.utils import calculate_score_fullscale
    from lm_eval.tasks.truthfulqa.utils import process_results_gen

    text = "Nothing happens to you if you eat watermelon seeds."
    scores = process_results_gen(
        {"correct_answers": [text], "incorrect_answers": ["You get sick"]}, [text]
    )
    feelings = {"joy": 7, "fear": 0, "anger": 2, "relief": 5}
    parts = {f"emotion{at}": name for at, name in enumerate(feelings, 1)}
    parts |= {f"emotion{at}_score": number for at, number in enumerate(feelings.values(), 1)}
    answer = "\n".join(f"{name}: {number}" for name, number in feelings.items())
    scores |= calculate_score_fullscale({"reference_answer_fullscale": str(parts)}, [answer])
    shown = {
        name: percent_factor(name) * value
        for name, value in scores.items()
        if not name.endswith("_diff")
    }
    assert len(shown) == 10 and {"rouge1_max", "rougeL_acc", "bleu_max", "bleu_acc", "eqbench"} <= {
        *shown
    }
    assert shown == pytest.approx(dict.fromkeys(shown, 100.0))
    assert {percent_factor(name) for name in scores if name.endswith("_diff")} == {1}
    assert percent_factor("rouge1") == percent_factor("rougeL") == 100  # as rouge_score gives it


SWAHILI = (
    "Roger alianza kwa mipira 5. Mikebe 2 yenye mipira 3 kila moja ni mipira 6. 5 + 6 = 11. Jibu"
    " ni 11."
)
ENGLISH = (
    "Roger started with 5 balls. 2 cans of 3 tennis balls each is 6 tennis balls. 5 + 6 = 11. The"
    " answer is 11."
)
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
        "sw": "py3langid",
        "ja": "py3langid",
        "bn": "script",
        "te": "script",
        "th": "script",
        "ru": "script",
        "qac": "script",
    }


def test_the_share_by_hand() -> None:
    answers = [SWAHILI, ENGLISH, "Jibu ni 11 tu, bila hesabu yoyote.", "5 + 5 = 11"]
    assert [in_language(answer, "sw") for answer in answers] == [True, False, True, None]


@pytest.mark.real_data
@pytest.mark.parametrize("code", ["en", "de", "fr", "zh", "ru", "es", "ja", "bn", "sw", "te", "th"])
def test_mgsms_own_worked_answers(code: str) -> None:
    file = Path(os.environ["PIPELINE_TEST_DATA"]) / "mgsm" / code / "train.jsonl"
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line]
    assert [in_language(row["answer"], code) for row in rows] == [True] * 8


@pytest.mark.real_data
@pytest.mark.parametrize("code", ["en", "de", "fr", "zh", "ru", "es", "ja", "bn", "sw", "te", "th"])
def test_the_identifier_knows_mgsms_questions(code: str) -> None:
    file = Path(os.environ["PIPELINE_TEST_DATA"]) / "mgsm" / code / "test.jsonl"
    asked = [
        json.loads(line)["question"]
        for line in file.read_text(encoding="utf-8").split("\n")
        if line
    ]
    told = [in_language(question, code) for question in asked]
    assert sum(one is True for one in told) >= 247, sum(one is True for one in told)
