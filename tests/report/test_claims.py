"""Claims as files, and what numbers make of them, on results made by hand."""

import csv
import io
import math
from statistics import NormalDist

import numpy as np
import pytest

from pipeline.errors import PipelineError
from pipeline.report import claims, judgements
from pipeline.report.claims import Claim, read_claims
from pipeline.report.judgements import Unit, judge_difference, judge_wilcoxon, word_of
from pipeline.report.render.sheets import lines_csv
from pipeline.stats.contrast import contrast
from pipeline.stats.ranks import Alike, compare_correlations, friedman

WORDS = {
    "id": "one",
    "text": "Left is better.",
    "section": "1",
    "left": "a",
    "right": "b",
    "metric": "exact_match",
    "over": ["row"],
    "test": "difference",
    "threshold": 2,
    "direction": "higher",
}


def claim(**words: object) -> Claim:
    lines = "\n".join(f"    {key}: {value!r}" for key, value in {**WORDS, **words}.items())
    (found,) = read_claims(f"table:\n  -\n{lines}".replace("None", "null"), "mine.yaml")
    return found


# --- files ---


def test_a_claim_is_read():
    found = claim(left=["a", "c"], threshold="10%")
    assert (found.table, found.left, found.right) == ("table", ("a", "c"), ("b",))
    assert found.threshold == 10 and found.relative
    assert claim().margin == 0.02 and claim(direction="lower").margin == -0.02 and found.margin == 0


@pytest.mark.parametrize(
    "words, told",
    [
        ({"treshold": 1}, "claim one: treshold=1: Unexpected keyword argument"),
        ({"test": "wilcoxn", "threshold": 0}, "test=wilcoxn: Input should be 'difference'"),
        ({"direction": "up"}, "direction=up: Input should be 'higher', 'lower', 'within' or"),
        ({"threshold": "much"}, "threshold=much: Input should be a valid number"),
        ({"left": []}, "a side is empty"),
        ({"family": "x"}, "test difference does not read family"),
        ({"test": "friedman"}, "test friedman does not read right"),
        ({"right": None}, "a side is empty"),
        ({"test": "friedman", "right": None}, "friedman needs direction differ"),
        ({"units": "all"}, "units=all"),
        (
            {"test": "wilcoxon", "threshold": 0, "units": "each"},
            "test wilcoxon does not read units",
        ),
        ({"direction": "within", "threshold": "3%"}, "within needs a threshold above 0, in points"),
        ({"test": "alike", "metric": "fact", "threshold": 1}, "alike needs threshold 0"),
        ({"than": ["row"], "left": ["a", "c"]}, "than and metric fact need one left"),
    ],
)
def test_what_is_no_claim_is_refused_in_one_sentence(words, told):
    with pytest.raises(PipelineError, match="mine.yaml, claim one") as error:
        claim(**words)
    assert told in str(error.value) and "\n" not in str(error.value)


# --- verdicts ---


@pytest.mark.parametrize(
    "words, low, high, told",
    [
        ({}, 0.021, 0.05, "shown"),
        ({}, 0.01, 0.05, "undecided"),
        ({}, 0.01, 0.019, "contradicted"),
        ({"direction": "lower"}, -0.05, -0.021, "shown"),
        ({"direction": "lower"}, -0.01, 0.03, "contradicted"),
        ({"direction": "within"}, -0.019, 0.019, "shown"),
        ({"direction": "within"}, -0.03, 0.019, "undecided"),
        ({"direction": "within"}, 0.021, 0.04, "contradicted"),
        ({"threshold": "10%"}, 0.001, 0.04, "shown"),  # the interval is of left less 110 % of right
        ({"threshold": -1}, -0.009, 0.04, "shown"),
    ],
)
def test_where_an_interval_lies_decides(words, low, high, told):
    assert word_of(claim(**words), low, high) == told


def won(wins: int, losses: int, ties: int) -> np.ndarray:
    return np.array([1] * wins + [-1] * losses + [0] * ties)


def test_a_difference_is_told_in_points_with_what_could_have_been_seen():
    shown = judge_difference(claim(), contrast(won(60, 20, 170)), 0.5, 0.34)
    assert (shown.verdict, shown.n) == ("shown", 250)
    assert (
        shown.difference == pytest.approx(16)
        and shown.low > 2
        and (shown.left_value, shown.right_value) == (50, 34)
    )
    open_ = judge_difference(claim(), contrast(won(30, 20, 200)), 0.5, 0.46)
    assert open_.verdict == "undecided"
    assert open_.detectable == pytest.approx(7.92, abs=0.01)  # 2.8016 sqrt(0.2 / 250)
    assert (
        judge_difference(claim(), contrast(won(20, 60, 170)), 0.3, 0.46).verdict == "contradicted"
    )


@pytest.mark.parametrize("wins, losses", [(60, 20), (34, 20), (30, 25), (20, 60), (2, 1), (0, 0)])
@pytest.mark.parametrize(
    "words", [{}, {"direction": "lower"}, {"direction": "within"}, {"threshold": -1}]
)
def test_p_tests_the_claims_own_threshold(words, wins, losses):
    """Where the verdict is made its p is below 5 %, and where it is not, above.

    60 to 20 is not 16 points for sure.
    """
    found = judge_difference(
        claim(**words), contrast(won(wins, losses, 250 - wins - losses)), 0.5, 0.4
    )
    assert (found.verdict != "undecided") == (found.p < 0.05)
    assert judge_difference(claim(threshold=16), contrast(won(60, 20, 170)), 0.5, 0.4).p > 0.9


def test_ten_questions_all_wrong_show_no_equivalence():
    found = judge_difference(claim(direction="within", threshold=1), contrast(np.zeros(10)), 0, 0)
    assert found.verdict == "undecided" and found.detectable == pytest.approx(
        56.7, abs=0.1
    )  # (1.96 + 0.842 / 2)^2 wins, of 10
    assert found.low < -20 and found.high > 20


def test_every_place_has_to_hold():
    def judged(*wins: int) -> str:
        held = [contrast(won(one, 20, 170)) for one in wins]
        units = [Unit(f"place {at}", one, 0.5, 0.4) for at, one in enumerate(held)]
        return judgements.judge_every(claim(units="each", threshold=0), units).verdict

    assert [judged(60, 60), judged(60, 24), judged(60, 2)] == ["shown", "undecided", "contradicted"]


def mcnemar(wins: int, losses: int) -> float:
    return 2 * NormalDist().cdf(-abs(wins - losses) / math.sqrt(wins + losses))


def test_all_of_several_units_have_the_largest_p():
    """A is +7.2 points with p 0.029, B +3.2 with p 0.0008, and "all" is tested at 0.029.

    B's p is nearer to the threshold.
    """
    units = [
        Unit(*unit, 0.5, 0.4)
        for unit in (("A", contrast(won(43, 25, 182))), ("B", contrast(won(14, 1, 385))))
    ]
    every = judgements.judge_every(claim(units="each", threshold=0), units)
    assert (every.verdict, every.p) == ("shown", pytest.approx(mcnemar(43, 25)))
    assert every.difference == pytest.approx(7.2) and "from A" in every.detail


def test_a_contradiction_by_one_of_ten_units_is_corrected():
    """One of ten units contradicts the claim with p 0.0047, which is 0.047 by Holm over the ten."""
    units = [Unit(f"u{at}", contrast(won(12, 10, 228)), 0.5, 0.4) for at in range(9)]
    units.append(Unit("bad", contrast(won(3, 15, 232)), 0.4, 0.5))
    every = judgements.judge_every(claim(units="each", threshold=0), units)
    assert (every.verdict, every.p) == ("contradicted", pytest.approx(10 * mcnemar(3, 15)))
    assert every.difference == pytest.approx(-4.8) and "from bad" in every.detail
    counted = claim(units="count", threshold=0)
    overall = judge_difference(counted, contrast(won(123, 105, 2272)), 0.5, 0.4)
    wins = judgements.judge_wins(counted, units, overall, experts=False)
    assert (overall.verdict, wins.verdict, wins.p) == (
        "undecided",
        "contradicted",
        pytest.approx(10 * mcnemar(3, 15)),
    )


@pytest.mark.parametrize(
    "counts", [((60, 20), (34, 20)), ((60, 20), (20, 60)), ((12, 10), (10, 12)), ((24, 20),) * 9]
)
@pytest.mark.parametrize("direction", ["higher", "lower", "within"])
def test_p_of_several_units_agrees_with_their_verdict(counts, direction):
    units = [Unit(str(at), contrast(won(*of, 170)), 0.5, 0.4) for at, of in enumerate(counts)]
    found = judgements.judge_every(claim(units="each", threshold=1, direction=direction), units)
    assert (found.verdict != "undecided") == (found.p < 0.05)


def test_friedman_needs_both_of_its_p():
    names = ["x", "y", "z"]
    kind = claim(test="friedman", left=names, right=None, direction="differ", threshold=0.05)
    apart = np.arange(3) + np.random.default_rng(0).random((12, 3)) / 2
    assert (
        judgements.judge_friedman(kind, friedman(apart, [at // 3 for at in range(12)]), 12).verdict
        == "shown"
    )
    one_model = judgements.judge_friedman(kind, friedman(apart, ["same"] * 12), 12)
    assert one_model.verdict == "undecided"


def pair(difference: float, p: float, clusters: int = 12) -> judgements.Ranked:
    return judgements.Ranked("a", "b", difference, p, 12, clusters)


def test_signed_ranks_are_corrected_within_their_family():
    """0.03 twice in one family is 0.06 by Holm, alone it is shown.

    Sections do not make families.
    """
    once, opposed = [pair(0.02, 0.03)], [pair(-0.02, 0.001), pair(0.1, 0.01)]
    kinds = [
        claim(id=name, family=family, section="5", test="wilcoxon", threshold=0)
        for name, family in (("one", "x"), ("two", "x"), ("three", ""), ("four", "y"))
    ]
    found = judge_wilcoxon(list(zip(kinds, [once, once, once, opposed], strict=True)))
    assert [one.verdict for one in found] == ["undecided", "undecided", "shown", "contradicted"]
    assert [one.p for one in found] == [0.06, 0.06, 0.03, 0.002]
    largest = [pair(0.02, 0.03), pair(0.01, 0.001)]  # all of both pairs
    (all_of,) = judge_wilcoxon([(kinds[2], largest)])
    assert (all_of.verdict, all_of.p, all_of.difference) == ("shown", 0.03, 2)


def test_four_models_cannot_be_tested_by_signs():
    """The least p of four clusters is 2 / 16, of six 2 / 64.

    Enough for one pair, not for two of a family.
    """
    kind = claim(test="wilcoxon", threshold=0)
    assert judge_wilcoxon([(kind, [pair(0.5, 2 / 16, 4)])])[0].verdict == "cannot be tested"
    assert judge_wilcoxon([(kind, [pair(0.5, 2 / 64, 6)])])[0].verdict == "shown"
    (both,) = judge_wilcoxon([(kind, [pair(0.5, 2 / 64, 6), pair(0.5, 2 / 64, 6)])])
    assert both.verdict == "cannot be tested"
    assert both.detail.startswith(
        "the smallest possible p of 6 clusters is 0.0625 by Holm over 2; "
    )


def test_correlations_decide():
    rng = np.random.default_rng(7)
    outcome = rng.normal(0, 1, 72)
    near, far = outcome + rng.normal(0, 0.5, 72), rng.normal(0, 1, 72)

    def judged(left: np.ndarray, right: np.ndarray, n: int = 72) -> claims.Verdict:
        groups, ids = np.arange(n) // 12, np.arange(n)
        found = compare_correlations(left[:n], right[:n], outcome[:n], groups, ids)
        return judgements.judge_spearman(claim(test="spearman", threshold=0), found, n)

    told = [judged(*sides).verdict for sides in ((near, far), (far, near), (far, far))]
    assert told == ["shown", "contradicted", "undecided"]
    few = judged(near, far, 3)
    assert few.verdict == "cannot be tested"
    assert few.detail == "a correlation needs four pairs per group that are not all equal"


def test_maps_of_a_kind_decide():
    def judged(p: float, opposed: float, least: float = 1 / 35, **words: object) -> str:
        kind = claim(test="alike", metric="fact", threshold=0, **words)
        return judgements.judge_alike(kind, Alike(7, 0.9, 0.7, p, opposed, 35, least)).verdict

    assert [judged(0.03, 1), judged(1, 0.03), judged(0.4, 0.6)] == [
        "shown",
        "contradicted",
        "undecided",
    ]
    assert judged(1, 0.03, direction="lower") == "shown"
    assert judged(0.1, 1, 0.1) == judged(0.1, 1, math.nan) == "cannot be tested"


def test_claims_csv_has_a_line_a_claim():
    verdicts = [
        judge_difference(claim(), contrast(won(60, 20, 170)), 0.5, 0.25),
        claims.Verdict(
            claim(id="two", text='With "quotes", commas and more'),
            claims.NOT_MADE,
            detail="run x is not made yet",
        ),
    ]
    shown, open_ = csv.DictReader(io.StringIO(lines_csv([verdict.line for verdict in verdicts], 5)))
    assert [shown["verdict"], open_["verdict"]] == ["shown", "not made"]
    assert open_["detail"] == "run x is not made yet"
    assert (shown["difference"], shown["n"], open_["difference"]) == ("16.0", "250", "")
    assert open_["text"] == 'With "quotes", commas and more'


# --- wins ---


def wins(*units: list[float], **words: object) -> str:
    """Return the verdict on units of N differences each, with the mean of all questions."""
    found = [Unit(f"u{at}", contrast(unit), 0.5, 0.4) for at, unit in enumerate(units)]
    asked = claim(units="count", threshold=0, **words)
    overall = judge_difference(asked, contrast(np.mean(units, axis=0)), 0.5, 0.4)
    return judgements.judge_wins(asked, found, overall, experts=False).verdict


def test_wins_are_counted_and_their_mean_is_tested():
    """200 questions a unit.

    12 for the left alone against 8 is no significant win, three such with one of 50 against 10 have
    a significant mean.
    """
    small, large, lost = won(12, 8, 180), won(50, 10, 140), won(10, 50, 140)
    assert wins(small, large) == "shown" and wins(small, small) == "undecided"
    assert wins(won(8, 12, 180), large) == "undecided"  # one of two
    assert (
        wins(lost, large) == "contradicted" and wins(lost, lost) == "contradicted"
    )  # a significant loss, a mean
    assert wins(lost, lost, direction="lower") == "shown"
