"""N-grams of texts.

Only letters and digits are compared. Case is removed (Unicode's case folding of the compatibility
form NFKC). Format characters (category Cf, such as zero-width joiners), variation selectors and
diacritics that are not part of a letter in NFKC are removed. Digits of all scripts become ASCII
digits. A word is a run of letters, marks and digits. In scripts without spaces each character is a
word of half the weight. An n-gram begins at each word and has the weight of n words: twice as many
characters of such a script, or a mixture.

An n-gram's number is Python's hash of its words. The numbers are only valid in this process.
"""

from __future__ import annotations

import re
import unicodedata
from functools import cache
from typing import NamedTuple

UNSPACED = re.compile(  # scripts written without spaces between words
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\u2fdf\u3005-\u3007\u3040-\u30ff"
    "\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]"
)
# variation selectors
SELECTORS = {*range(0x180B, 0x1810), *range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0)}
DIACRITICS = re.compile(  # for any script
    "[\u0300-\u036f\u1ab0-\u1aff\u1dc0-\u1dff\u20d0-\u20ff\u3099\u309a\ufe20-\ufe2f]"
)
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


def ngrams_of(text: str, n: int) -> set[int]:
    """Return the hashes of a text's n-grams."""
    words = words_in(text)
    found: set[int] = set()
    end = weight = 0
    for start, first in enumerate(words):
        while weight < 2 * n and end < len(words):
            weight += weight_of(words[end])
            end += 1
        if weight < 2 * n:
            break
        found.add(hash(tuple(words[start:end])))
        weight -= weight_of(first)
    return found


def weight_of(word: str) -> int:
    """Return 1 for a character of a script without spaces, and 2 for other words."""
    is_single = word in alphabet().single or word > "\U0001ffff"
    return 1 if is_single else 2


def without_numbers(text: str) -> str:
    return NUMBER.sub(" ", text)
