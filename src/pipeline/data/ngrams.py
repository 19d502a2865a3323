"""N-grams of texts as 64-bit numbers, and sets of them: fast enough for millions of rows on one core.

Text is compared by its letters and digits alone, whatever their case (Unicode's case folding of the compatibility form
NFKC), format characters (category Cf, as zero-width joiners), variation selectors and diacritics that no letter of NFKC
holds aside, digits of all scripts taken for those of ASCII. A
word is a run of letters, marks and digits; in scripts without spaces each character is one, at half the weight. An
n-gram begins at each word and holds n words, twice as many characters of such a script, or a mix of the weight.

Everything is arithmetic modulo 2^64 on whole batches: a word is a polynomial of its characters, an n-gram one of its
words, and both come from prefix sums. Two different n-grams share a number with a chance of 2^-64 a pair.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from functools import cache, lru_cache
from typing import Any

import numpy as np
import pandas as pd

Numbers = Any  # numpy arrays of uint64
BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2^64
INVERSE = pow(BASE, -1, 2**64)
END = "\x00"  # between texts
NONE, WORD, CHARACTER, FORMAT = 0, 1, 2, 3
UNSPACED = (  # scripts written without spaces between words
    (0x0E00, 0x0EFF), (0x1000, 0x109F), (0x1780, 0x17FF), (0x2E80, 0x2FDF), (0x3005, 0x3007), (0x3040, 0x30FF),
    (0x31F0, 0x31FF), (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF),
)  # fmt: skip

SELECTORS = ((0x180B, 0x180F), (0xFE00, 0xFE0F), (0xE0100, 0xE01EF))  # of variants of one character
DIACRITICS = re.compile(
    "[\u0300-\u036f\u1ab0-\u1aff\u1dc0-\u1dff\u20d0-\u20ff\u3099\u309a\ufe20-\ufe2f]"
)  # of no script
BATCH = 1000  # texts that are hashed together
NUMBER = re.compile(r"\d+(?:[.,\u066b\u066c]\d+)*")


@lru_cache(maxsize=1)
def character_kinds() -> Any:
    """For each code point whether it is part of a word, a word of its own, to be ignored, or none. Beyond 2^16 Han is a
    word of its own, the rest (emoji) none."""
    categories = [unicodedata.category(chr(code)) for code in range(0x10000)]
    table = np.zeros(0x110000, dtype=np.uint8)
    table[:0x10000] = [category[0] in "LMN" for category in categories]
    for low, high in UNSPACED:
        table[low : high + 1] *= CHARACTER
    table[0x20000:0x30000] = CHARACTER
    table[[code for code, category in enumerate(categories) if category == "Nd"]] = WORD
    table[[code for code, category in enumerate(categories) if category == "Cf"]] = FORMAT
    for low, high in SELECTORS:
        table[low : high + 1] = FORMAT
    return table


@cache
def powers_of_base(size: int) -> tuple[Numbers, Numbers]:
    """BASE^0, BASE^1 ... and their inverses, modulo 2^64, `size` of each."""
    steps = np.full((2, size), [[BASE], [INVERSE]], dtype=np.uint64)
    steps[:, 0] = 1
    base, inverse = np.cumprod(steps, axis=1, dtype=np.uint64)
    return base, inverse


def scramble(values: Numbers) -> Numbers:
    """Each number through a fixed bijection that spreads its bits, in place (Stafford's mix 13, from splitmix64)."""
    values ^= values >> np.uint64(30)
    values *= np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(27)
    values *= np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values


@lru_cache(maxsize=1)
def letter_numbers() -> Numbers:
    """A number for each code point: that of a digit below 2^16 is that of the same digit in ASCII."""
    codes = np.arange(0x110000, dtype=np.uint64)
    for code in range(0x10000):
        if (digit := unicodedata.decimal(chr(code), None)) is not None:
            codes[code] = ord("0") + int(digit)
    return scramble(codes + np.uint64(1))


def prefix_sums(values: Numbers) -> Numbers:
    sums = np.empty(len(values) + 1, dtype=np.uint64)
    sums[0] = 0
    np.cumsum(values, out=sums[1:])
    return sums


def fold_text(text: str) -> str:
    """A text as it is compared, but for its digits."""
    if not text.isascii():
        codes = code_points(text)
        dropped = character_kinds()[codes] == FORMAT
        if dropped.any():  # before the rest, as they keep marks from joining their letters
            text = codes[~dropped].tobytes().decode("utf-32-le", "surrogatepass")
        text = unicodedata.normalize("NFKC", text.casefold())  # letters like ℌ have a case in that form alone
        text = DIACRITICS.sub("", text)
    return text.casefold()


def code_points(text: str) -> Any:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)


def hash_ngrams(texts: list[str], n: int) -> tuple[Numbers, Any]:
    """The n-grams of a batch of texts, none across two: their numbers, and the index of the text of each."""
    codes = code_points(fold_text(END.join(text.replace(END, " ") for text in texts)))
    kind = character_kinds()[codes]
    is_word = kind == WORD
    single = kind == CHARACTER
    opens, closes = is_word.copy(), is_word.copy()
    opens[1:] &= ~is_word[:-1]
    closes[:-1] &= ~is_word[1:]
    starts, ends = np.flatnonzero(opens | single), np.flatnonzero(closes | single) + 1
    if len(starts) == 0:
        return np.empty(0, dtype=np.uint64), np.empty(0, dtype=np.int64)

    power, inverse = powers_of_base(1 << len(codes).bit_length())  # few sizes
    sums = prefix_sums(letter_numbers()[codes] * power[: len(codes)])
    words = scramble((sums[ends] - sums[starts]) * inverse[starts])

    ends_of_texts = np.flatnonzero(codes == 0)
    owner = np.searchsorted(ends_of_texts, starts)
    weight = np.zeros(len(words) + 1, dtype=np.int64)
    np.cumsum(np.where(single[starts], 1, 2), out=weight[1:])
    first = np.arange(len(words))
    after = np.searchsorted(weight, weight[:-1] + 2 * n) if single.any() else first + n
    complete = after <= len(words)
    first, after = first[complete], after[complete]
    same = owner[first] == owner[after - 1]
    first, after = first[same], after[same]
    sums = prefix_sums(words * power[: len(words)])
    return scramble((sums[after] - sums[first]) * inverse[first]), owner[first]


class NgramSet:
    """The n-grams of some sets of texts: a bit for each set that an n-gram is of, the first set's the lowest.

    bare: of texts without their numbers. short: texts without a whole n-gram.
    """

    def __init__(self, sets: Iterable[list[str]], n: int, bare: bool = False) -> None:
        self.n, self.bare, self.short = n, bare, 0
        found = [(np.empty(0, dtype=np.uint64), np.empty(0, dtype=np.uint16))]
        for bit, texts in enumerate(sets):
            for at in range(0, len(texts), BATCH):
                numbers, owner = self.hash(texts[at : at + BATCH])
                self.short += len(texts[at : at + BATCH]) - len(np.unique(owner))
                numbers = np.unique(numbers)
                found.append((numbers, np.full(len(numbers), 1 << bit, dtype=np.uint16)))
        joined, bits = map(np.concatenate, zip(*found, strict=True))
        known, place = np.unique(joined, return_inverse=True)
        self.numbers, self.marks = pd.Index(known), np.zeros(len(known), dtype=np.uint16)
        np.bitwise_or.at(self.marks, place, bits)

    def hash(self, texts: list[str]) -> tuple[Numbers, Any]:
        return hash_ngrams([NUMBER.sub(" ", text) for text in texts] if self.bare else texts, self.n)

    def marks_of(self, texts: list[str]) -> Any:
        """The bits of the sets that each text shares an n-gram with: uint16, one a text."""
        bits = np.zeros(len(texts), dtype=np.uint16)
        numbers, owner = self.hash(texts)
        at = self.numbers.get_indexer(pd.Index(numbers))  # -1: not known
        np.bitwise_or.at(bits, owner[at >= 0], self.marks[at[at >= 0]])
        return bits
