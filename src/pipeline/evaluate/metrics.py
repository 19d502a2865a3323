"""Metrics added to the harness' scores: pass@k, numbers, scripts, chrF++ and BLEU."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterable, Sequence
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from typing import Any

INVALID = "[invalid]"  # the result of the harness' regex filters without a match


def finite_or_none(value: Any) -> float | None:
    """Return a finite number, or None for "N/A" (from the harness), nan and infinity."""
    if isinstance(value, int | float) and math.isfinite(value):
        return float(value)
    return None


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Return the probability that one of k answers is right if `correct` of n answers are.

    This is the unbiased estimator of Chen et al. (2021, Evaluating Large Language Models Trained on
    Code).
    """
    return 1 - math.comb(n - correct, k) / math.comb(n, k)


def majority(extracted: Sequence[str]) -> list[int]:
    """Return the places of the most frequent answer, or all places if no answer was parsed.

    Among equally frequent answers the first one wins. A number counts as the same answer however
    it is written: 1800, 1,800 and $1800.00.
    """
    votes: list[Fraction | str] = []
    parsed = []
    for text in extracted:
        vote: Fraction | str | None = last_number(text) if _WRITTEN_NUMBER.fullmatch(text) else None
        if vote is None:
            vote = text.strip()
        votes.append(vote)
        if text != INVALID:
            parsed.append(vote)
    best = max(parsed, key=parsed.count, default=INVALID)
    return [index for index, vote in enumerate(votes) if vote == best]


def bleu_ja_mecab(items: Iterable[tuple[str, str]]) -> float:
    """Return the corpus BLEU (0-100) of (reference, response) pairs in Japanese words.

    Needs `sacrebleu[ja]`.
    """
    from sacrebleu.metrics import BLEU

    references, responses = zip(*items, strict=True)
    return BLEU(tokenize="ja-mecab").corpus_score(list(responses), [list(references)]).score


def sentence_chrf(reference: str, response: str) -> float:
    """Return the chrF++ (0-100) of one sentence, for reading samples.

    The score of a set is the corpus' chrF++, which is not the mean of its sentences.
    """
    import sacrebleu

    return sacrebleu.sentence_chrf(response, [reference], word_order=2).score


def spbleu(references: Sequence[str], responses: Sequence[str], model_file: str) -> float:
    """Return the corpus BLEU (0-100) over the pieces of a SentencePiece model.

    With the model of FLORES-200 it is the published spBLEU.
    """
    from sacrebleu.metrics import BLEU
    from sentencepiece import SentencePieceProcessor

    pieces = SentencePieceProcessor(model_file=model_file)

    def cut(texts: Sequence[str]) -> list[str]:
        return [" ".join(pieces.encode(text, out_type=str)) for text in texts]

    bleu = BLEU(tokenize="none", force=True)
    return bleu.corpus_score(cut(responses), [cut(references)]).score


# --- numbers ---

NARROW = "\u202f"  # the space within a number, at which a line does not break
# Languages that separate thousands by a space (Unicode's CLDR; Spanish by its academy). In them a
# plain space also separates thousands: 1 000 is a thousand. In other languages "7 200 ml bottles"
# are seven bottles.
SPACED = tuple("bg cs es et fi fr hu lt lv nb pl pt ru sk sv uk".split())
_PLAIN = str.maketrans(
    "\uff0e\u066b\uff0c\u066c\u2019\u00a0\u2009\u202f\u2012\u2013\u2212\uff0d",
    f"..,,'{3 * NARROW}----",
)
_CURRENCY = (
    r"(?:[A-Z]{0,2}\\?[$\u00a2-\u00a5\u09f2\u09f3\u0e3f\u20a0-\u20cf\uff04\uffe0\uffe1\uffe5\uffe6]["
    rf" {NARROW}]?)"
)
_MINUS = r"(?<![-\d)\]}A-Za-z])(?<![\d)]\s)-"  # a sign, not a subtraction or a hyphen


def _number(spaces: str) -> re.Pattern[str]:
    """Return the pattern of a number whose thousands may be separated by one of these spaces."""
    return re.compile(
        rf"""( {_MINUS} (?={_CURRENCY}?\.?\d) )?
             {_CURRENCY}?
             ( [1-9]\d{{0,2}}(?:[{spaces}]\d{{3}})+(?!\d)(?:[.,]\d+)?          # 1 000
             | (?:(?<![\w.])\.)?\d+(?:(?:[.,]|'(?=\d{{3}}(?!\d)))\d+)* )   # all others""",
        re.VERBOSE,
    )


_NUMBER = _number(NARROW)
_NUMBER_WITH_SPACES = _number(f"\\ {NARROW}")
_FRACTION = re.compile(
    rf"({_MINUS})?(?<![\d/.,])(?:(\d+)\ )?(?<![\d/.,])(\d+)/(\d+)(?![\d/]|[.,]\d)"
)  # 1/2, 1 1/2
_WRITTEN_NUMBER = re.compile(rf"\s*-?{_CURRENCY}?\d[\d.,]*\s*")
_THOUSANDS = re.compile(
    r"[1-9]\d{0,2}([.,' \u202f])\d{3}(?:\1\d{3})*|[1-9]\d?(?:,\d{2})+,\d{3}"
)  # or 12,34,567, as in India

# powers of ten that close a group
_BIG = {"万": 4, "萬": 4, "만": 4, "億": 8, "亿": 8, "억": 8, "兆": 12}
_SMALL = {"百": 2, "千": 3, "천": 3}
_UNIT = (  # 千克 is the kilogram
    r"(?:[万萬만億亿억천]|千(?![克米瓦卡帕伏赫焦字比])|百(?![分帕])|兆(?![赫瓦帕字比]))"
)
_DIGITS = r"\d[\d,]*(?:\.\d+)?"
_GROUPS = re.compile(rf"(?:{_DIGITS}{_UNIT}+)+(?:{_DIGITS})?")
_POWER = re.compile(r"(?<![A-Za-z0-9_.,])(\d[\d,]*(?:\.\d+)?)[eE]([-+]?\d{1,3})(?![A-Za-z0-9_])")


def _written_out(match: re.Match[str]) -> str:
    """Write 1万5000 as 15000 and 2千5百万 as 25000000.

    A part below 万 is multiplied by the next 万, 億 or 兆.
    """
    zero = Decimal(0)
    total = group = zero
    for digits, units in re.findall(rf"({_DIGITS})({_UNIT}*)", match[0]):
        part = Decimal(digits.replace(",", ""))
        for unit in units:
            part = part.scaleb(_SMALL.get(unit, 0))
            if unit in _BIG:
                total += (group + part).scaleb(_BIG[unit])
                group = part = zero
        group += part
    return _plainly(total + group)


def _power_written_out(match: re.Match[str]) -> str:
    """Write 1e3 as 1000."""
    digits, exponent = match.groups()
    return _plainly(Decimal(digits.replace(",", "")).scaleb(int(exponent)))


def _plainly(value: Decimal) -> str:
    """Write a number without an exponent.

    A 0 is appended to decimals, so that three of them are not read as thousands.
    """
    written = f"{value:f}"
    if "." in written:
        return written + "0"
    return written


def last_number(text: str, language: str = "en") -> Fraction | None:
    """Return the last number of a text, or None if it has none or an unreadable one (1.2.3, 3,4,5).

    Languages use point and comma differently, models mix them, and nearly all right answers are
    whole. So the form decides, in every language and in the digits of any script:

    - A first group of one to three digits, not beginning with 0, and groups of three after it are
      thousands, with any separator: 1,000, 1.000 and 1'000 are 1000, and 1.234 is 1234. 12,34,567
      is 1234567. A plain space separates them only in the languages of SPACED, a narrow or
      non-breaking space in all languages.
    - Otherwise one point or comma begins the decimals: 0.125, 0,125, 1,5, 13.0, 1234.567; and .5 is
      0.5.
    - If there are two marks, the first separates thousands and the second begins the decimals:
      1,234.50 and 1.234,50.
    - A minus (hyphen, minus sign, en dash) counts if it touches the number or its currency: -5, –5,
      -$5. It does not count after a digit, a closing bracket or a Latin letter (10-4, 3–5,
      COVID-19), nor before a space.
    - 1/2 is a half, 2 1/2 two and a half; 5/12/2023 is not a fraction.
    - 1万5000, 3千, 12億 and 1e3 are 15000, 3000, 1200000000 and 1000; 5千克 (kilograms) is 5.

    Full stops, units and currencies around the number are ignored. Numbers in words (thirteen,
    十三) are not read, and neither is a power, 10^3.
    """
    plain = _plain_digits(text)
    pattern = _NUMBER_WITH_SPACES if language in SPACED else _NUMBER
    matches = list(pattern.finditer(plain))
    if not matches:
        return None
    match = matches[-1]
    minus, written = match.groups()
    is_exponent = re.search(r"\^\{?\s*$", plain[: match.start()])
    if is_exponent or len(written) > 1000:  # Python converts no more than 4,300 digits
        return None
    for fraction in _FRACTION.finditer(plain):
        if fraction.end() == match.end():
            return _fraction_value(fraction)
    value = _decimal_value(written)
    if minus and value is not None:
        return -value
    return value


def _plain_digits(text: str) -> str:
    """Return a text with ASCII digits and marks, and without 万, 1e3 and TeX's commas."""

    def ascii_digit(match: re.Match[str]) -> str:
        return str(unicodedata.decimal(match[0]))

    plain = re.sub(r"\d", ascii_digit, text.translate(_PLAIN))
    plain = _POWER.sub(_power_written_out, plain)
    plain = _GROUPS.sub(_written_out, plain)
    return re.sub(r"\{,\}|\\,", ",", plain)  # TeX's 1{,}000 and 1\,000


def _decimal_value(written: str) -> Fraction | None:
    integer, decimals = written, "0"
    if not _THOUSANDS.fullmatch(written) and not written.isdigit():
        mark = max(".,", key=written.rfind)
        integer, _, decimals = written.rpartition(mark)
        is_grouped = _THOUSANDS.fullmatch(integer) and mark not in integer
        readable = integer == "" or integer.isdigit() or is_grouped
        if not readable or not decimals.isdigit():
            return None
    digits = re.sub(r"[^0-9]", "", integer) or "0"
    return Fraction(f"{digits}.{decimals}")


def _fraction_value(match: re.Match[str]) -> Fraction | None:
    """Return the value of a fraction or mixed number, or None if it divides by zero."""
    minus, whole, numerator, denominator = match.groups()
    if int(denominator) == 0:
        return None
    value = int(whole or 0) + Fraction(int(numerator), int(denominator))
    if minus:
        return -value
    return value


# --- scripts ---


@lru_cache(maxsize=65536)
def _script(letter: str) -> str:
    return unicodedata.name(letter, "").partition(" ")[0]


def share_in(scripts: Sequence[str], text: str) -> float | None:
    """Return the share of a text's letters that are in these scripts, or None below ten letters.

    The scripts have the names that Unicode's letter names begin with.
    """
    letters = [mark for mark in text if mark.isalpha()]
    if len(letters) < 10:
        return None
    return sum(_script(letter) in scripts for letter in letters) / len(letters)
