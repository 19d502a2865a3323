"""Contrasts of translations against sacrebleu's paired tests and published p values."""

import math
import random
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from sacrebleu.metrics import BLEU
from sacrebleu.significance import PairedTest

from pipeline.stats.contrast import Contrast, added_by_experts, contrast, corpus_contrast
from pipeline.stats.statistics import resample_weights
from pipeline.stats.translations import corpus_scores, metric_of, sentence_counts

# WMT17 English-German against LIUM-NMT: p of Moses' bootstrap (mean of 3 runs of 2,000) and of
# multeval's 10,000 approximate randomizations, as sacrebleu 2.6.0 publishes them in
# test/test_significance.py. The sentences' counts in wmt17_en_de_counts.npz are sacrebleu's, of the
# outputs beside that file (Apache 2.0).
PUBLISHED = {
    "C-3MA.4959": (0.0, 0.0001),
    "FBK.4870": (0.01267, 0.0218),
    "KIT.4950": (0.02233, 0.0410),
    "LMU-nmt-reranked.4934": (0.04383, 0.09029),
    "LMU-nmt-single.4893": (0.20783, 0.58494),
    "online-A.0": (0.0, 0.0001),
    "online-B.0": (0.381, 0.94111),
    "online-F.0": (0.0, 0.0001),
    "online-G.0": (0.0, 0.0001),
    "PROMT-Rule-based.4735": (0.0, 0.0001),
    "RWTH-nmt-ensemble.4921": (0.01167, 0.0207),
    "SYSTRAN.4847": (0.20983, 0.59914),
    "TALP-UPC.4834": (0.0, 0.0001),
    "uedin-nmt.4722": (0.0, 0.0001),
    "xmu.4910": (0.25483, 0.71073),
}


@cache
def wmt17() -> dict[str, tuple[float, np.ndarray]]:
    """System -> its BLEU, and that of 2,000 draws of its sentences."""
    kept = np.load(Path(__file__).parent / "wmt17_en_de_counts.npz")
    copies = np.rint(3004 * resample_weights(3004))
    found = {}
    for name, lengths, matches in zip(
        kept["systems"], kept["lengths"], kept["matches"], strict=True
    ):
        totals = [np.maximum(0, lengths.astype(float) - order) for order in range(4)]
        counts = np.column_stack([lengths, kept["reference"], matches, *totals]).astype(float)
        observed = corpus_scores(BLEU(), counts, np.ones((1, 3004)))
        found[str(name)[13:-6]] = float(observed[0]), corpus_scores(BLEU(), counts, copies)
    return found


@pytest.mark.parametrize("system, published", PUBLISHED.items())
def test_against_the_published_p_values_of_sacrebleus_suite(system, published):
    (ours, drawn), (base, of_base) = wmt17()[system], wmt17()["LIUM-NMT.4900"]
    moses, multeval = published
    found = corpus_contrast(ours - base, drawn - of_base, 3004)
    assert found.p == pytest.approx(multeval, abs=0.02)  # two-sided, as ours
    assert (found.p < 0.05) == (not found.low <= 0 <= found.high) == (multeval < 0.05)
    apart = abs(drawn - of_base)
    assert np.mean(apart - apart.mean() > abs(ours - base)) == pytest.approx(
        moses, abs=0.012
    )  # their statistic


@pytest.mark.parametrize("name", ["bleu", "chrf++"])
def test_metrics_of_many_sums_are_sacrebleus(name):
    """Also of sentences of one word, without a match, and of empty answers."""
    references, responses = sentences(0.6, 4, n=40)
    for at in range(10):
        responses[at] = "" if at < 5 else "a"
    for chosen in (slice(None), slice(0, 3), slice(5, 8), slice(0, 12), slice(10, 11)):
        metric = metric_of(name, "en-sw")
        counts = sentence_counts(metric, references[chosen], responses[chosen])
        copies = np.random.default_rng(0).integers(0, 3, (20, len(counts))).astype(float)
        theirs = [
            metric._compute_score_from_stats(list(sums)).score / 100 for sums in copies @ counts
        ]
        assert corpus_scores(metric, counts, copies) == pytest.approx(theirs, abs=1e-12)


def sentences(quality: float, seed: int, n: int = 150) -> tuple[list[str], list[str]]:
    """Return references, and translations whose words are right with this probability."""
    words = random.Random(1)
    references = [
        " ".join(f"w{words.randint(0, 60)}x" for _ in range(words.randint(5, 20))) for _ in range(n)
    ]
    chance = random.Random(seed)
    responses = [
        " ".join(
            word if chance.random() < quality else f"v{chance.randint(0, 60)}y"
            for word in line.split()
        )
        for line in references
    ]
    return references, responses


def compared(name: str, left: list[str], right: list[str], references: list[str]) -> Contrast:
    metric, copies = (
        metric_of(name, "en-sw"),
        np.rint(len(references) * resample_weights(len(references))),
    )
    counts = [sentence_counts(metric, references, side) for side in (left, right)]
    observed = [corpus_scores(metric, one, np.ones((1, len(references))))[0] for one in counts]
    for value, side in zip(observed, (left, right), strict=True):
        assert value == pytest.approx(metric.corpus_score(side, [references]).score / 100)
    drawn = [corpus_scores(metric, one, copies) for one in counts]
    return corpus_contrast(observed[0] - observed[1], drawn[0] - drawn[1], len(references))


@pytest.mark.parametrize("quality", [0.7, 0.73, 0.8])
@pytest.mark.parametrize("name", ["bleu", "chrf++"])
def test_p_is_that_of_sacrebleus_paired_test(name, quality, monkeypatch):
    """Approximate randomization of 1,000 samples, whose standard error is below 0.016."""
    monkeypatch.setenv("SACREBLEU_SEED", "12345")
    references, base = sentences(0.7, 2)
    _, other = sentences(quality, 3)
    test = PairedTest(
        [("base", base), ("other", other)],
        {name: metric_of(name, "en-sw")},
        [references],
        "ar",
        1000,
    )
    (theirs,) = [value[1].p_value for key, value in test()[1].items() if key != "System"]
    assert compared(name, other, base, references).p == pytest.approx(theirs, abs=0.05)


def test_translations_that_are_alike_differ_by_less_than_a_sentence():
    references, base = sentences(0.7, 2, n=20)
    found = compared("chrf++", base, base, references)
    assert (
        found.difference == 0
        and found.p == 1
        and found.high == -found.low == pytest.approx(1.96 / 20, abs=1e-3)
    )
    assert found.detectable() >= 2 / 20


def test_three_trainings_add_their_variance_as_they_do_elsewhere():
    """With metrics that are means over sentences the two ways agree."""
    rng = np.random.default_rng(0)
    each = rng.normal(0, 0.05, (3, 1)) + rng.normal(0.03, 0.2, (3, 400))
    drawn = each @ resample_weights(400).T
    found, plain = corpus_contrast(each.mean(axis=1), drawn, 400), contrast(np.clip(each, -1, 1))
    experts = added_by_experts(plain.parts)
    assert added_by_experts(found.parts) == pytest.approx(experts, rel=0.2)
    assert found.test.df == pytest.approx(plain.test.df, rel=0.3)
    assert math.sqrt(found.free.variance(0.0)) == pytest.approx(
        each.mean(axis=0).std() / 20, rel=0.05
    )
