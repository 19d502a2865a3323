"""Metrics added to the harness' scores: standard errors, shares, numbers, scripts, and BLEU for
Japanese.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterable, Sequence, Set
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from typing import Any

INVALID = "[invalid]"  # what the harness' regex filters give back when they find nothing


def finite_or_none(value: Any) -> float | None:
    """Return the number, or None where the harness writes "N/A" or a model gives nan or
    infinity.
    """
    if isinstance(value, int | float) and math.isfinite(value):
        return float(value)
    return None


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Return the probability that one of k answers is right, where `correct` of n are.

    It is the unbiased estimator of Chen et al. (2021, Evaluating Large Language Models Trained on
    Code).
    """
    return 1 - math.comb(n - correct, k) / math.comb(n, k)


def majority(extracted: Sequence[str]) -> list[int]:
    """Return the places of the most frequent answer, the first of equally frequent ones; all if
    none is parsed.

    A number is the same answer however it is written: 1800, 1,800, $1800.00 and 1800.
    """
    numbers = [last_number(text) if _WRITTEN_NUMBER.fullmatch(text) else None for text in extracted]
    votes = [
        text.strip() if number is None else number
        for number, text in zip(numbers, extracted, strict=True)
    ]
    parsed = []
    for vote, text in zip(votes, extracted, strict=True):
        if text != INVALID:
            parsed.append(vote)
    best = max(parsed, key=parsed.count, default=INVALID)
    return [index for index, vote in enumerate(votes) if vote == best]


def ran_out(
    tokens: Sequence[int], text: str, max_gen_toks: int, stop: Iterable[str], ends: Set[int]
) -> bool:
    """Whether an answer ended because its tokens were used up: no end token and no stop string
    among them.

    `tokens` are the generated ones, which a batch may carry on past the answer's end; `text` is all
    of them decoded.
    """
    return (
        len(tokens) >= max_gen_toks
        and ends.isdisjoint(tokens)
        and not any(stop_text and stop_text in text for stop_text in stop)
    )


def bleu_ja_mecab(items: Iterable[tuple[str, str]]) -> float:
    """Corpus BLEU (0-100) of (reference, response) pairs in Japanese words.

    Needs `sacrebleu[ja]`.
    """
    from sacrebleu.metrics import BLEU

    references, responses = zip(*items, strict=True)
    return BLEU(tokenize="ja-mecab").corpus_score(list(responses), [list(references)]).score


def sentence_chrf(reference: str, response: str) -> float:
    """chrF++ (0-100) of one sentence, for looking at samples; the score of a set is the corpus',
    not their mean.
    """
    import sacrebleu

    return sacrebleu.sentence_chrf(response, [reference], word_order=2).score


def spbleu(references: Sequence[str], responses: Sequence[str], model_file: str) -> float:
    """Corpus BLEU (0-100) over the pieces of a SentencePiece model, that of FLORES-200 for the
    published spBLEU.
    """
    from sacrebleu.metrics import BLEU
    from sentencepiece import SentencePieceProcessor

    pieces = SentencePieceProcessor(model_file=model_file)
    cut = [
        [" ".join(pieces.encode(text, out_type=str)) for text in side]
        for side in (responses, references)
    ]
    return BLEU(tokenize="none", force=True).corpus_score(cut[0], [cut[1]]).score


# --- numbers ---

NARROW = "\u202f"  # the space within a number, in which no line may break
# Languages that part thousands by a space, by Unicode's CLDR, and Spanish, by its academy: 1 000 is
# a thousand there where a plain space stands for NARROW, too. In others "7 200 ml bottles" are
# seven bottles.
SPACED = (
    "bg",
    "cs",
    "es",
    "et",
    "fi",
    "fr",
    "hu",
    "lt",
    "lv",
    "nb",
    "pl",
    "pt",
    "ru",
    "sk",
    "sv",
    "uk",
)
_PLAIN = str.maketrans(
    "\uff0e\u066b\uff0c\u066c\u2019\u00a0\u2009\u202f\u2012\u2013\u2212\uff0d",
    f"..,,'{3 * NARROW}----",
)
_CURRENCY = (
    r"(?:[A-Z]{0,2}\\?[$\u00a2-\u00a5\u09f2\u09f3\u0e3f\u20a0-\u20cf\uff04\uffe0\uffe1\uffe5\uffe6]["
    rf" {NARROW}]?)"
)
_MINUS = r"(?<![-\d)\]}A-Za-z])(?<![\d)]\s)-"  # does not subtract or join


def _number(spaces: str) -> re.Pattern[str]:
    """Return the pattern of a number whose thousands may be parted by one of these spaces."""
    return re.compile(
        rf"""( {_MINUS} (?={_CURRENCY}?\.?\d) )?
             {_CURRENCY}?
             ( [1-9]\d{{0,2}}(?:[{spaces}]\d{{3}})+(?!\d)(?:[.,]\d+)?          # 1 000
             | (?:(?<![\w.])\.)?\d+(?:(?:[.,]|'(?=\d{{3}}(?!\d)))\d+)* )   # all others""",
        re.VERBOSE,
    )


_NUMBER, _NUMBER_WITH_SPACES = _number(NARROW), _number(f"\\ {NARROW}")
_FRACTION = re.compile(
    rf"({_MINUS})?(?<![\d/.,])(?:(\d+)\ )?(?<![\d/.,])(\d+)/(\d+)(?![\d/]|[.,]\d)"
)  # 1/2, 1 1/2
_WRITTEN_NUMBER = re.compile(rf"\s*-?{_CURRENCY}?\d[\d.,]*\s*")
_THOUSANDS = re.compile(
    r"[1-9]\d{0,2}([.,' \u202f])\d{3}(?:\1\d{3})*|[1-9]\d?(?:,\d{2})+,\d{3}"
)  # or 12,34,567, as in India

_BIG = {
    "万": 4,
    "萬": 4,
    "만": 4,
    "億": 8,
    "亿": 8,
    "억": 8,
    "兆": 12,
}  # powers of ten that close a group
_SMALL = {"百": 2, "千": 3, "천": 3}
_UNIT = (  # 千克 is the kilogram
    r"(?:[万萬만億亿억천]|千(?![克米瓦卡帕伏赫焦字比])|百(?![分帕])|兆(?![赫瓦帕字比]))"
)
_DIGITS = r"\d[\d,]*(?:\.\d+)?"
_GROUPS = re.compile(rf"(?:{_DIGITS}{_UNIT}+)+(?:{_DIGITS})?")
_POWER = re.compile(r"(?<![A-Za-z0-9_.,])(\d[\d,]*(?:\.\d+)?)[eE]([-+]?\d{1,3})(?![A-Za-z0-9_])")


def _written_out(match: re.Match[str]) -> str:
    """1万5000 as 15000, 2千5百万 as 25000000: what is below 万 belongs to the next 万, 億 or 兆."""
    total = group = Decimal(0)
    for digits, units in re.findall(rf"({_DIGITS})({_UNIT}*)", match[0]):
        part = Decimal(digits.replace(",", ""))
        for unit in units:
            part = part.scaleb(_SMALL.get(unit, 0))
            if unit in _BIG:
                total, group, part = (
                    total + (group + part).scaleb(_BIG[unit]),
                    Decimal(0),
                    Decimal(0),
                )
        group += part
    return _plainly(total + group)


def _plainly(value: Decimal) -> str:
    """Digits without an exponent; a further 0 keeps three decimals from being taken for
    thousands.
    """
    written = f"{value:f}"
    if "." in written:
        return written + "0"
    return written


def numeric_match(response: str, gold: int | str, language: str = "en") -> float:
    """Return 1.0 if the last number of a response in this language is the right one, otherwise
    0.0.
    """
    number = last_number(response, language)
    return float(number is not None and number == last_number(str(gold)))


def last_number(text: str, language: str = "en") -> Fraction | None:
    """Return the last number of a text, or None if there is none or it cannot be read: 1.2.3,
    3,4,5.

    Languages differ in what a point and a comma mean, models mix them, and the right answers are
    nearly all whole. So the form decides, in every language and in the digits of any script:

    - A first group of one to three digits, not beginning with 0, and groups of three after it are
      thousands, by
      whichever mark they are parted: 1,000, 1.000 and 1'000 are 1000, and 1.234 is 1234. 12,34,567
      is 1234567. A plain space parts them in the languages SPACED alone, a narrow or non-breaking
      space in all.
    - Otherwise one point or comma begins the decimals: 0.125, 0,125, 1,5, 13.0, 1234.567; and .5 is
      0.5.
    - Of two marks the first parts thousands, the second begins the decimals: 1,234.50 and 1.234,50.
    - A minus (hyphen, minus sign, en dash) counts where it touches the number or its currency: -5,
      –5, -$5; not after a
      digit, a closing bracket or a Latin letter (10-4, 3–5, COVID-19), nor before a space.

    - 1/2 is a half, 2 1/2 two and a half; 5/12/2023 is no fraction.
    - 1万5000, 3千, 12億 and 1e3 are 15000, 3000, 1200000000 and 1000; 5千克 (kilograms) is 5.

    Full stops, units and currencies around it are no part of it. Numbers in words (thirteen, 十三)
    are not read, and neither is a power, 10^3.
    """
    plain = re.sub(r"\d", lambda digit: str(unicodedata.decimal(digit[0])), text.translate(_PLAIN))
    plain = _POWER.sub(
        lambda power: _plainly(Decimal(power[1].replace(",", "")).scaleb(int(power[2]))), plain
    )
    plain = _GROUPS.sub(_written_out, plain)
    plain = re.sub(r"\{,\}|\\,", ",", plain)  # TeX's 1{,}000 and 1\,000
    if language in SPACED:
        pattern = _NUMBER_WITH_SPACES
    else:
        pattern = _NUMBER
    match = next(reversed(list(pattern.finditer(plain))), None)
    if match:
        minus, written = (match[1], match[2])
    else:
        minus, written = ("", "")
    power = match is not None and re.search(r"\^\{?\s*$", plain[: match.start()])
    if match is None or power or len(written) > 1000:  # Python converts no more than 4,300 digits
        return None
    for fraction in _FRACTION.finditer(plain):
        if fraction.end() == match.end():
            return _fraction_value(fraction)
    integer, part = written, "0"
    if not _THOUSANDS.fullmatch(written) and not written.isdigit():
        mark = max(".,", key=written.rfind)
        integer, _, part = written.rpartition(mark)
        readable = (
            integer == ""
            or integer.isdigit()
            or (_THOUSANDS.fullmatch(integer) and mark not in integer)
        )
        if not readable or not part.isdigit():
            return None
    value = Fraction(f"{re.sub(r'[^0-9]', '', integer) or 0}.{part}")
    if minus:
        return -value
    return value


def _fraction_value(fraction: re.Match[str]) -> Fraction | None:
    """Return the value of a fraction or mixed number, or None if it divides by zero."""
    minus, whole, numerator, denominator = fraction.groups()
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
    """Return the share of a text's letters in these scripts, as Unicode names letters;

    None below ten letters.
    """
    letters = [mark for mark in text if mark.isalpha()]
    if len(letters) < 10:
        return None
    return sum(_script(letter) in scripts for letter in letters) / len(letters)
