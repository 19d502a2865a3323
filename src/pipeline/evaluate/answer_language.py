"""Whether an answer is in the language that it was asked for: a score may be high in the wrong one.

From stored answers alone; nothing here decides whether an answer is right.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from pipeline.evaluate.metrics import share_in
from pipeline.languages import MGSM, language


@lru_cache(maxsize=1)
def language_identifier() -> Any:
    """py3langid's model, which its package holds (4 MB, 140 languages), over the languages of
    MGSM.
    """
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    loaded = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
    loaded.set_languages(list(MGSM))
    return loaded


def told_by(code: str) -> str:
    """What tells a language: "script" where no other that MGSM has is written in it, or where
    nothing else can tell (a language that MGSM does not have); "py3langid" among MGSM's of one
    script.
    """
    scripts = set(language(code).scripts)
    is_shared = any(other != code and scripts & set(language(other).scripts) for other in MGSM)
    if code not in MGSM or not is_shared:
        return "script"
    return "py3langid"


def in_language(text: str, code: str) -> bool | None:
    """Whether an answer is in this language; None where it has too few letters to have one."""
    share = share_in(language(code).scripts, text)
    if share is None or share < 0.5 or told_by(code) == "script":
        if share is None:
            return None
        return share >= 0.5
    return language_identifier().classify(re.sub(r"[\W\d_]*\d[\W\d_]*", " ", text))[0] == code


def in_another_language(answers: Sequence[str], code: str) -> list[bool]:
    """Whether each answer that is long enough to tell is in another language."""
    verdicts = (in_language(answer, code) for answer in answers)
    return [not same for same in verdicts if same is not None]
