from __future__ import annotations

import pytest

from pipeline.errors import PipelineError
from pipeline.languages import LANGUAGES, language


def test_the_codes_of_one_language() -> None:
    swahili = language("sw")
    assert (swahili.name, swahili.flores, swahili.aya, swahili.stock) == (
        "Swahili",
        "swh_Latn",
        "Swahili",
        "sw",
    )
    assert len({one.flores for one in LANGUAGES.values()}) == len(LANGUAGES) == 11


@pytest.mark.parametrize("code", ["qaa", "qac", "qtz"])
def test_private_use_codes_are_constructed_languages(code: str) -> None:
    made = language(code)
    assert (made.code, made.name, made.flores, made.constructed, made.stock) == (
        code,
        code.title(),
        code,
        True,
        "en",
    )


@pytest.mark.parametrize(
    ("code", "near"),
    [("swa", "sw (Swahili)"), ("Telugu", "te (Telugu)"), ("qua", ""), ("tel_telu", "te"), ("", "Known")],
)
def test_an_unknown_language_is_refused_with_near_ones(code: str, near: str) -> None:
    with pytest.raises(PipelineError, match=f"unknown language '{code}'") as caught:
        language(code)
    assert near in str(caught.value)
