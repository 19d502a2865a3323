"""Numbers and scripts read from answers, against what a person reads."""

from __future__ import annotations

from fractions import Fraction

import pytest

from pipeline.evaluate import metrics
from pipeline.languages import language


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("The answer is 13.0", {"13"}),
        ("So it costs $1,234.", {"1234", "1.234"}),
        ("1.234 Euro", {"1234", "1.234"}),
        ("12,34,567 rupees", {"1234567"}),
        ("1,234.50", {"1234.5"}),
        ("1\u202f234", {"1234"}),
        ("13,5", {"13.5"}),
        ("উত্তর হল ১২৩।", {"123"}),
        ("సమాధానం ౧౨.", {"12"}),
        ("答えは１，２３４円です。", {"1234", "1.234"}),
        ("คำตอบคือ ๑๘", {"18"}),
        ("first 5, then 3.", {"3"}),
        ("10-4=6", {"6"}),
        ("it fell by 5 - 3", {"3"}),
        ("minus: -7", {"-7"}),
        ("\u22127", {"-7"}),
        ("1.2.3", set()),
        ("none", set()),
        ("", set()),
    ],
)
def test_the_last_number(text: str, meant: set[str]) -> None:
    assert metrics.last_number(text) == {Fraction(one) for one in meant}


def test_the_share_of_a_script() -> None:
    telugu, japanese = language("te").scripts, language("ja").scripts
    assert metrics.share_in(telugu, "సమాధానం పదమూడు, అంటే 13") == 1
    assert metrics.share_in(telugu, "The answer is thirteen") == 0
    assert metrics.share_in(telugu, "ఆరు 13") is None  # too few letters to say
    assert metrics.share_in(japanese, "答えはカタカナでも十三です") == 1
    assert metrics.share_in(language("qac").scripts, "ba da ga ka la ma") == 1


def test_spbleu_is_bleu_over_the_pieces_of_a_model(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in cuts each letter off: spBLEU is then BLEU over letters."""
    import sys
    from types import SimpleNamespace

    import sacrebleu

    class Letters:
        def __init__(self, model_file: str) -> None:
            assert model_file == str(tmp_path / "spm.model")

        def encode(self, text: str, out_type: type) -> list[str]:
            return list(text.replace(" ", "_"))

    monkeypatch.setitem(sys.modules, "sentencepiece", SimpleNamespace(SentencePieceProcessor=Letters))
    references, responses = ["the cat sat here", "a dog ran"], ["the cat sits here", "a dog ran"]
    found = metrics.spbleu(references, responses, tmp_path / "spm.model")
    spaced = [[" ".join(text.replace(" ", "_")) for text in side] for side in (responses, references)]
    assert found == pytest.approx(sacrebleu.corpus_bleu(spaced[0], [spaced[1]], tokenize="none", force=True).score)
