"""Small definitions by hand, at the places where they change."""

import pytest

from pipeline.benchmarks.mgsm import QUESTION, STEPS, prompt_words
from pipeline.config.data import Source
from pipeline.data.sources import nllb


@pytest.mark.parametrize(
    ("exemplars", "words"),
    [
        ([("Swali: moja?", "Jibu: 1")] * 2, ("Swali:", "Jibu:")),
        ([("Swali: moja?", "Jibu: 1")], (QUESTION, STEPS)),  # one may begin with a name by chance
        ([("Swali: moja?", "Jibu: 1"), ("Swali: mbili?", "Ana: 2")], ("Swali:", STEPS)),
        ([], (QUESTION, STEPS)),
    ],
)
def test_words_of_a_prompt_are_those_that_two_exemplars_share(exemplars, words) -> None:
    assert (
        prompt_words([{"question": question, "answer": answer} for question, answer in exemplars])
        == words
    )


@pytest.mark.parametrize(
    ("margin", "kept"), [("1.06", True), ("1.0599", False), ("nan", False), ("1.2", True)]
)
def test_a_pair_at_the_least_margin_is_kept(margin: str, kept: bool) -> None:
    source = Source(file="x", rows="nllb", language="sw", min_score=1.06)
    found = nllb({"text": f"{margin}\tOne.\tMoja."}, source)
    assert (found != "low_score") == kept
