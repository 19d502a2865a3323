"""The languages: our code (as MGSM spells it), and what the other benchmarks and data sets call the same language."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from pipeline.errors import PipelineError


@dataclass(frozen=True)
class Language:
    """One language. `stock` is the code whose stock task file of the harness is used: English for constructed ones."""

    code: str
    name: str  # English name, as prompts spell it
    flores: str  # FLORES and Belebele
    aya: str  # the column `language` of the Aya dataset
    aya_codes: tuple[str, ...]  # the column `language_code`, which is not the same in every release
    constructed: bool = False
    scripts: tuple[str, ...] = ("LATIN",)  # as Unicode names its letters

    @property
    def stock(self) -> str:
        return "en" if self.constructed else self.code


_TABLE = (
    Language("en", "English", "eng_Latn", "English", ("eng",)),
    Language("sw", "Swahili", "swh_Latn", "Swahili", ("swh", "swa")),
    Language("bn", "Bengali", "ben_Beng", "Bengali", ("ben",), scripts=("BENGALI",)),
    Language("te", "Telugu", "tel_Telu", "Telugu", ("tel",), scripts=("TELUGU",)),
    Language(
        "ja", "Japanese", "jpn_Jpan", "Japanese", ("jpn",), scripts=("HIRAGANA", "KATAKANA", "KATAKANA-HIRAGANA", "CJK")
    ),
    Language("de", "German", "deu_Latn", "German", ("deu",)),
    Language("fr", "French", "fra_Latn", "French", ("fra",)),
    Language("zh", "Chinese", "zho_Hans", "Simplified Chinese", ("zho",), scripts=("CJK",)),
    Language("ru", "Russian", "rus_Cyrl", "Russian", ("rus",), scripts=("CYRILLIC",)),
    Language("es", "Spanish", "spa_Latn", "Spanish", ("spa",)),
    Language("th", "Thai", "tha_Thai", "Thai", ("tha",), scripts=("THAI",)),
)
LANGUAGES = {language.code: language for language in _TABLE}
TEN = ("en", "de", "fr", "zh", "ru", "es", "ja", "bn", "sw", "te")  # MGSM's average in the papers: all but Thai


def language(code: str) -> Language:
    """The language of a code. ISO 639's private-use codes, qaa to qtz, are constructed: Qaa is qaa everywhere.

    Raises PipelineError, naming near ones, for an unknown code.
    """
    if code in LANGUAGES:
        return LANGUAGES[code]
    if re.fullmatch("q[a-t][a-z]", code):
        return Language(code, code.capitalize(), code, code.capitalize(), (code,), constructed=True)
    spellings = {known.code: known for known in _TABLE}
    for known in _TABLE:
        for spelling in (known.name, known.aya, known.flores, *known.aya_codes):
            spellings[spelling.lower()] = known
    near = difflib.get_close_matches(code.lower(), spellings, n=3, cutoff=0.6)
    hint = ", ".join(dict.fromkeys(f"{spellings[word].code} ({spellings[word].name})" for word in near))
    raise PipelineError(
        f"unknown language {code!r}: "
        + (f"did you mean {hint}? " if hint else "")
        + f"Known are {' '.join(LANGUAGES)} "
        "and the constructed qaa to qtz"
    )
