"""Small definitions by hand, at the places where they change."""

import pytest

from pipeline.config.data import Source
from pipeline.data.sources import nllb


@pytest.mark.parametrize(
    ("margin", "kept"), [("1.06", True), ("1.0599", False), ("nan", False), ("1.2", True)]
)
def test_a_pair_at_the_least_margin_is_kept(margin: str, kept: bool) -> None:
    source = Source(file="x", rows="nllb", language="sw", min_score=1.06)
    found = nllb({"text": f"{margin}\tOne.\tMoja."}, source)
    assert (found != "low_score") == kept
