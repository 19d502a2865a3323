"""What is computed beside the harness' own scores: standard errors, shares, numbers, scripts, and BLEU for Japanese."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterable, Sequence
from fractions import Fraction
from functools import lru_cache
from pathlib import Path

INVALID = "[invalid]"  # what the harness' regex filters give back when they find nothing

# The metric and filter that stand for a task where one number is wanted.
PRIMARY = {
    "mgsm": ("exact_match", "flexible-extract"),
    "mgsm_en_cot": ("exact_match", "flexible-extract"),
    "mgsm_direct": ("exact_match", "flexible-extract"),
    "belebele": ("acc", "none"),
    "global_mmlu": ("acc", "none"),
    "flores": ("chrf++", "none"),
    "mbpp": ("pass_at_1", "tests"),
}


def mean(values: Sequence[float]) -> float:
    """The mean of at least one value."""
    return math.fsum(values) / len(values)


def mean_stderr(values: Sequence[float]) -> float | None:
    """Standard error of a mean, with the sample's deviation (n - 1) as the harness has it; None for a single value."""
    if len(values) < 2:
        return None
    center = mean(values)
    return math.sqrt(math.fsum((value - center) ** 2 for value in values) / (len(values) - 1) / len(values))


def is_unparsed(extracted: str) -> bool:
    """Whether the filter found no answer in the response."""
    return extracted == INVALID


def ran_out(tokens: Sequence[int], text: str, max_gen_toks: int, stop: Iterable[str], eos: int | None) -> bool:
    """Whether an answer ended because its tokens were used up: no end token and no stop string among them.

    `tokens` are the generated ones, which a batch may carry on past the answer's end; `text` is all of them decoded.
    """
    return len(tokens) >= max_gen_toks and eos not in tokens and not any(word and word in text for word in stop)


def bleu_ja_mecab(items: Iterable[tuple[str, str]]) -> float:
    """Corpus BLEU (0-100) of (reference, response) pairs in Japanese words. Needs `sacrebleu[ja]`."""
    from sacrebleu.metrics import BLEU

    references, responses = zip(*items, strict=True)
    return BLEU(tokenize="ja-mecab").corpus_score(list(responses), [list(references)]).score


def sentence_chrf(reference: str, response: str) -> float:
    """chrF++ (0-100) of one sentence, for looking at samples; the score of a set is the corpus', not their mean."""
    import sacrebleu

    return sacrebleu.sentence_chrf(response, [reference], word_order=2).score


def spbleu(references: Sequence[str], responses: Sequence[str], model_file: Path) -> float:
    """Corpus BLEU (0-100) over the pieces of a SentencePiece model, that of FLORES-200 for the published spBLEU."""
    from sacrebleu.metrics import BLEU
    from sentencepiece import SentencePieceProcessor

    pieces = SentencePieceProcessor(model_file=str(model_file))
    cut = [[" ".join(pieces.encode(text, out_type=str)) for text in side] for side in (responses, references)]
    return BLEU(tokenize="none", force=True).corpus_score(cut[0], [cut[1]]).score


# ------------------------------------------------------------------------------------------------------- numbers

_NUMBER = re.compile(  # \d: a digit of any script; a minus after a number subtracts
    r"((?<![\d)])(?<![\d)]\s)[-\u2212])?(\d(?:[\d.,\u066b\u066c\u00a0\u202f\uff0c\uff0e'\u2019]*\d)?)"
)
_GROUPED = re.compile(r"\d{1,3}(?:\D\d{3})+|\d{1,2}(?:\D\d{2})+\D\d{3}")  # 1,234,567, and 12,34,567 as in India


def last_number(text: str) -> set[Fraction]:
    """What the last number of a text may mean; empty where there is none.

    Digits of any script, separators of thousands, decimals: 13.0, $1,234, ১২৩. 1.234 is 1234 where the point
    separates thousands and a little more than 1 where it does not, so both are meant.
    """
    found = _NUMBER.findall(text)
    if not found:
        return set()
    minus, written = found[-1]
    plain = "".join(str(unicodedata.digit(mark)) if mark.isdigit() else mark for mark in written)
    separators = re.sub(r"\d", "", plain)
    readings = set()
    if not separators:
        readings.add(plain)
    if _GROUPED.fullmatch(plain) and len(set(separators)) == 1:
        readings.add(re.sub(r"\D", "", plain))
    if separators and separators[-1] in ".,\u066b\uff0c\uff0e" and separators.count(separators[-1]) == 1:
        whole, _, part = plain.rpartition(separators[-1])
        if len(separators) == 1 or _GROUPED.fullmatch(whole):
            readings.add(f"{re.sub(r'[^0-9]', '', whole)}.{part}")
    return {Fraction(reading) * (-1 if minus else 1) for reading in readings}


# ------------------------------------------------------------------------------------------------------- scripts


@lru_cache(maxsize=65536)
def _script(letter: str) -> str:
    return unicodedata.name(letter, "").partition(" ")[0]


def share_in(scripts: Sequence[str], text: str) -> float | None:
    """The share of a text's letters that are of these scripts (as Unicode names letters); None without ten letters."""
    letters = [mark for mark in text if mark.isalpha()]
    if len(letters) < 10:
        return None
    return sum(_script(letter) in scripts for letter in letters) / len(letters)
