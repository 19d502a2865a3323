"""N-grams of texts as 64-bit numbers, and sets of n-grams.

They are fast enough for millions of rows on one core.

Only letters and digits are compared. Case is removed (Unicode's case folding of the compatibility
form NFKC). Format characters (category Cf, such as zero-width joiners), variation selectors and
diacritics that are not part of a letter in NFKC are removed. Digits of all scripts become ASCII
digits. A word is a run of letters, marks and digits. In scripts without spaces each character is a
word of half the weight. An n-gram begins at each word and has the weight of n words: twice as many
characters of such a script, or a mixture.

A word's number is Python's hash of the word. An n-gram's number is a polynomial of its words modulo
2^64, from prefix sums. Two different n-grams have the same number with a probability of 2^-64. The
numbers are only valid in this process.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

Numbers = Any  # numpy arrays of uint64
BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2^64
INVERSE = pow(BASE, -1, 2**64)
UNSPACED = re.compile(  # scripts written without spaces between words
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\u2fdf\u3005-\u3007\u3040-\u30ff"
    "\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]"
)
# variation selectors
SELECTORS = {*range(0x180B, 0x1810), *range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0)}
DIACRITICS = re.compile(  # for any script
    "[\u0300-\u036f\u1ab0-\u1aff\u1dc0-\u1dff\u20d0-\u20ff\u3099\u309a\ufe20-\ufe2f]"
)
BATCH = 1000  # texts that are hashed together
NUMBER = re.compile(r"\d+(?:[.,\u066b\u066c]\d+)*")


class Alphabet(NamedTuple):
    """The pattern of words, the characters that are words, and a table for str.translate."""

    words: re.Pattern[str]
    single: set[str]
    table: dict[int, str | None]


@cache
def alphabet() -> Alphabet:
    """Return how texts are split into words.

    Beyond 2^16 each Han character is a word; other characters there, such as emoji, are ignored.
    """
    letters, digits, dropped = set(), {}, set(SELECTORS)
    for letter in map(chr, range(0x10000)):
        kind = unicodedata.category(letter)
        if kind[0] in "LMN":
            letters.add(letter)
        if kind == "Nd":
            digits[letter] = str(unicodedata.decimal(letter))
        if kind == "Cf":
            dropped.add(ord(letter))
    single = set(filter(UNSPACED.match, letters - digits.keys()))
    runs, singles = "".join(letters - single), "".join(single)
    words = re.compile(f"[{runs}]+|[{singles}\U00020000-\U0002ffff]")
    return Alphabet(words, single, str.maketrans(digits | dict.fromkeys(dropped)))


def fold_text(text: str) -> str:
    """Return a text in the form that is compared."""
    if not text.isascii():
        # first, because format characters keep marks from joining letters
        text = text.translate(alphabet().table)
        # after case folding; letters like ℌ have a case only in NFKC, so it is folded again below
        text = unicodedata.normalize("NFKC", text.casefold())
        text = DIACRITICS.sub("", text)
    return text.casefold()


def words_in(text: str) -> list[str]:
    """Return the words of a text in the form that is compared."""
    return alphabet().words.findall(fold_text(text))


def hash_ngrams(texts: list[str], n: int) -> tuple[Numbers, Any]:
    """Return the n-grams of a batch of texts as numbers, and the index of each n-gram's text.

    An n-gram never spans two texts.
    """
    single = alphabet().single
    words: list[str] = []
    lengths = []
    for text in texts:
        of_text = words_in(text)
        words += of_text
        lengths.append(len(of_text))
    counts = np.array(lengths, dtype=np.int64)
    owner = np.repeat(np.arange(len(texts)), counts)
    weights = [1 if word in single or word > "\U0001ffff" else 2 for word in words]
    before = np.cumsum([0, *weights])
    end = np.searchsorted(before, before[:-1] + 2 * n)
    first = np.flatnonzero(end <= len(words))
    first = first[owner[first] == owner[end[first] - 1]]
    steps = np.full((2, len(words)), [[BASE], [INVERSE]], dtype=np.uint64)
    power, inverse = np.cumprod(steps, axis=1, dtype=np.uint64)
    hashes = np.fromiter(map(hash, words), np.int64).astype(np.uint64)
    sums = np.zeros(len(words) + 1, dtype=np.uint64)
    np.cumsum(hashes * power, out=sums[1:])
    numbers = (sums[end[first]] - sums[first]) * inverse[first]
    return numbers, owner[first]


class NgramSet:
    """The n-grams of several sets of texts, each with a bit for each set that contains it.

    The first set has the lowest bit.

    Attributes:
        n: Words in an n-gram.
        bare: Whether numbers are removed from the texts.
        short: The texts that are shorter than an n-gram.
        numbers: The n-grams, as an index.
        marks: The bits of each n-gram.
    """

    def __init__(self, sets: Iterable[list[str]], n: int, bare: bool = False) -> None:
        self.n, self.bare, self.short = n, bare, list[str]()
        numbers = [np.empty(0, dtype=np.uint64)]
        marks = [np.empty(0, dtype=np.uint16)]
        for bit, texts in enumerate(sets):
            is_whole = np.zeros(len(texts), dtype=bool)
            for found, owner in self.batches(texts):
                is_whole[owner] = True
                numbers.append(np.unique(found))
                marks.append(np.full(len(numbers[-1]), 1 << bit, dtype=np.uint16))
            self.short += [texts[index] for index in np.flatnonzero(~is_whole)]
        known, place = np.unique(np.concatenate(numbers), return_inverse=True)
        self.numbers = pd.Index(known)
        self.marks = np.zeros(len(known), dtype=np.uint16)
        np.bitwise_or.at(self.marks, place, np.concatenate(marks))

    def batches(self, texts: list[str]) -> Iterator[tuple[Numbers, Any]]:
        """Yield the n-grams of BATCH texts, and the index of each n-gram's text."""
        for at in range(0, len(texts), BATCH):
            batch = texts[at : at + BATCH]
            if self.bare:
                batch = [NUMBER.sub(" ", text) for text in batch]
            numbers, owner = hash_ngrams(batch, self.n)
            yield numbers, at + owner

    def marks_of(self, texts: list[str]) -> Any:
        """Return the bits of the sets that each text shares an n-gram with: uint16, one a text."""
        bits = np.zeros(len(texts), dtype=np.uint16)
        for numbers, owner in self.batches(texts):
            at = self.numbers.get_indexer(pd.Index(numbers))
            is_known = at >= 0
            np.bitwise_or.at(bits, owner[is_known], self.marks[at[is_known]])
        return bits
