"""N-grams of texts as 64-bit numbers, and sets of them: fast enough for millions of rows on one
core.

Text is compared by its letters and digits alone, whatever their case (Unicode's case folding of the
compatibility form NFKC), format characters (category Cf, as zero-width joiners), variation
selectors and diacritics that no letter of NFKC holds aside, digits of all scripts taken for those
of ASCII. A word is a run of letters, marks and digits; in scripts without spaces each character is
one, at half the weight. An n-gram begins at each word and holds n words, twice as many characters
of such a script, or a mix of the weight.

A word's number is Python's hash of it, an n-gram's a polynomial of its words modulo 2^64, from
prefix sums. Two different n-grams share a number with a chance of 2^-64 a pair. The numbers are of
this process.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import chain
from typing import Any

import numpy as np
import pandas as pd

Numbers = Any  # numpy arrays of uint64
BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2^64
INVERSE = pow(BASE, -1, 2**64)
UNSPACED = re.compile(  # scripts written without spaces between words
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\u2fdf\u3005-\u3007\u3040-\u30ff"
    "\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]"
)
SELECTORS = {
    *range(0x180B, 0x1810),
    *range(0xFE00, 0xFE10),
    *range(0xE0100, 0xE01F0),
}  # of variants of one character
DIACRITICS = re.compile(
    "[\u0300-\u036f\u1ab0-\u1aff\u1dc0-\u1dff\u20d0-\u20ff\u3099\u309a\ufe20-\ufe2f]"
)  # of no script
BATCH = 1000  # texts that are hashed together
NUMBER = re.compile(r"\d+(?:[.,\u066b\u066c]\d+)*")


@cache
def alphabet() -> tuple[re.Pattern[str], set[str], dict[int, str | None]]:
    """Return the patterns of words, of characters that are words of their own, and a table for
    str.translate.

    Beyond 2^16 each Han character is a word; other characters there, such as emoji, are none.
    """
    category = {letter: unicodedata.category(letter) for letter in map(chr, range(0x10000))}
    letters = set()
    for letter, kind in category.items():
        if kind[0] in "LMN":
            letters.add(letter)
    digits = set()
    for letter, kind in category.items():
        if kind == "Nd":
            digits.add(letter)
    single = set(filter(UNSPACED.match, letters - digits))
    words = re.compile(f"[{''.join(letters - single)}]+|[{''.join(single)}\U00020000-\U0002ffff]")
    dropped = {ord(letter) for letter, kind in category.items() if kind == "Cf"} | SELECTORS
    replaced = {letter: str(unicodedata.decimal(letter)) for letter in digits}
    return words, single, str.maketrans(replaced | dict.fromkeys(dropped))


def fold_text(text: str) -> str:
    """Fold a text into the form in which texts are compared."""
    if not text.isascii():
        text = text.translate(
            alphabet()[2]
        )  # before the rest, as format characters keep marks from joining letters
        text = unicodedata.normalize(
            "NFKC", text.casefold()
        )  # letters like ℌ have a case in that form alone
        text = DIACRITICS.sub("", text)
    return text.casefold()


def words_in(text: str) -> list[str]:
    """Return the words of a text, as they are compared."""
    return alphabet()[0].findall(fold_text(text))


def hash_ngrams(texts: list[str], n: int) -> tuple[Numbers, Any]:
    """Return the n-grams of a batch of texts as numbers, and the index of the text of each.

    No n-gram spans two texts.
    """
    single = alphabet()[1]
    by_text = list(map(words_in, texts))
    words = list(chain.from_iterable(by_text))
    owner = np.repeat(np.arange(len(texts)), np.fromiter(map(len, by_text), np.int64))
    weight = np.cumsum([0, *(2 - (word in single or word > "\U0001ffff") for word in words)])
    after = np.searchsorted(weight, weight[:-1] + 2 * n)
    first = np.flatnonzero(after <= len(words))
    first = first[owner[first] == owner[after[first] - 1]]
    steps = np.full((2, len(words)), [[BASE], [INVERSE]], dtype=np.uint64)
    power, inverse = np.cumprod(steps, axis=1, dtype=np.uint64)
    sums = np.zeros(len(words) + 1, dtype=np.uint64)
    np.cumsum(np.fromiter(map(hash, words), np.int64).astype(np.uint64) * power, out=sums[1:])
    return (sums[after[first]] - sums[first]) * inverse[first], owner[first]


class NgramSet:
    """The n-grams of some sets of texts: a bit for each set that an n-gram is of, the first set's
    the lowest.

    bare: of texts without their numbers. short: texts without a whole n-gram.
    """

    def __init__(self, sets: Iterable[list[str]], n: int, bare: bool = False) -> None:
        self.n, self.bare, self.short = n, bare, list[str]()
        found = [(np.empty(0, dtype=np.uint64), np.empty(0, dtype=np.uint16))]
        for bit, texts in enumerate(sets):
            whole = np.zeros(len(texts), dtype=bool)
            for numbers, owner in self.batches(texts):
                whole[owner] = True
                numbers = np.unique(numbers)
                found.append((numbers, np.full(len(numbers), 1 << bit, dtype=np.uint16)))
            self.short += [texts[index] for index in np.flatnonzero(~whole)]
        joined, bits = map(np.concatenate, zip(*found, strict=True))
        known, place = np.unique(joined, return_inverse=True)
        self.numbers, self.marks = pd.Index(known), np.zeros(len(known), dtype=np.uint16)
        np.bitwise_or.at(self.marks, place, bits)

    def batches(self, texts: list[str]) -> Iterator[tuple[Numbers, Any]]:
        """Yield the n-grams of the texts, BATCH of these at a time, and the index of the text of
        each.
        """
        for at in range(0, len(texts), BATCH):
            batch = texts[at : at + BATCH]
            numbers, owner = hash_ngrams(
                [NUMBER.sub(" ", text) for text in batch] if self.bare else batch, self.n
            )
            yield numbers, at + owner

    def marks_of(self, texts: list[str]) -> Any:
        """Return the bits of the sets that each text shares an n-gram with: uint16, one a text."""
        bits = np.zeros(len(texts), dtype=np.uint16)
        for numbers, owner in self.batches(texts):
            at = self.numbers.get_indexer(pd.Index(numbers))  # -1: not known
            np.bitwise_or.at(bits, owner[at >= 0], self.marks[at[at >= 0]])
        return bits
