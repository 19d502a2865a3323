"""Detection of answers that are not in the language of the question, which can still be right.

Reads stored answers. The result does not change whether an answer counts as right.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from pipeline.evaluate.metrics import share_in
from pipeline.languages import MGSM, language


@lru_cache(maxsize=1)
def language_identifier() -> Any:
    """Load py3langid's model (4 MB, in its package), restricted to the languages of MGSM."""
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    loaded = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
    loaded.set_languages(list(MGSM))
    return loaded


def told_by(code: str) -> str:
    """Return the name of the detector for a language, "script" or "py3langid".

    py3langid separates the languages of MGSM that share a script. The script decides for all other
    languages.
    """
    if code not in MGSM:
        return "script"
    scripts = set(language(code).scripts)
    for other in MGSM:
        if other != code and scripts & set(language(other).scripts):
            return "py3langid"
    return "script"


def in_language(text: str, code: str) -> bool | None:
    """Return True if an answer is in this language, or None if it has too few letters."""
    share = share_in(language(code).scripts, text)
    if share is None:
        return None
    if share < 0.5 or told_by(code) == "script":
        return share >= 0.5
    without_numbers = re.sub(r"[\W\d_]*\d[\W\d_]*", " ", text)
    detected, _ = language_identifier().classify(without_numbers)
    return detected == code
