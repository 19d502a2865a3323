"""Claims on recorded facts, on gains and on translations, in the shipped tables.

Facts are maps of changes and validation losses. Answers are made up so that each claim is accepted,
contradicted and undecided.
"""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from planned import plan, plan_of
from published_maps import published_maps
from scipy import stats
from test_verdicts import Alike, Made

from pipeline.analyze.changes import COLUMNS
from pipeline.report.claims import Verdict
from pipeline.report.placed_claims import PlacedClaim, claims_of
from pipeline.report.stored import percent_rows_changed
from pipeline.report.verdicts import JUDGES, judge_claims
from pipeline.stats.contrast import contrast, contrast_of_trainings
from pipeline.stats.ranks import profile_likeness
from pipeline.tables.plan import Cell, TablePlan

MAPS = [
    "ls_maps_of_a_kind_are_alike",
    "ls_math_lower_half_unchanged",
    "ls_math_changes_feed_forward",
    "ls_language_changes_attention",
    "ls_language_changes_outer_attention",
    "ls_language_spares_feed_forward",
]


ZONES = "t: {0: {bottom: 0, top: 0}, 1: {bottom: 1, top: 1}}"
FEWER = {
    "layer_swapping_claims": "{threshold: [3.0e-5]}",
    "layer_swapping_table1": f"{{b: [5], u: [2], {ZONES}}}",
}


class Recorded(Made):
    """Facts of runs: what `number` makes of a fact's name and a run's values of axes."""

    def __init__(self, of: TablePlan, number: Callable[[str, dict[str, Any]], float]) -> None:
        super().__init__(of, {})
        self.fact_of = number

    def fact(self, cell: Cell, key: Any) -> float:
        return self.fact_of(
            cell.fact or "", {"run": self.plan.specs[key].run, **self.plan.specs[key].at}
        )


def verdicts(there: TablePlan, answers: Any, *names: str) -> dict[str, Verdict]:
    claims = [claim for claim in claims_of(there.table.name) if claim.id in names]
    return {claim.id: JUDGES[claim.test](PlacedClaim.of(claim, there), answers) for claim in claims}


# --- maps ---


def write_map(folder: Path, number: int) -> SimpleNamespace:
    """Write delta.csv of a published map (0: figure 4) as an analysis does.

    It has rows that no map shows.
    """
    one = published_maps()[number]
    names = dict(zip(COLUMNS.values(), COLUMNS, strict=True))
    rows = [
        f"math,{layer},{column},model.layers.{layer}.{names[column.removesuffix('.weight')]},{share}"
        for layer, values in zip(one.rows, one.values, strict=True)
        for column, share in zip(one.columns, values, strict=True)
    ]
    rows += [
        "math,,model.embed_tokens.weight,model.embed_tokens.weight,1",
        "math,3,input_layernorm.weight,x,1",
    ]
    folder.mkdir()
    (folder / "delta.csv").write_text(
        "\n".join(["expert,layer,column,parameter,share", *rows]) + "\n"
    )
    return SimpleNamespace(folder=folder)


def test_rows_changed_are_those_of_the_published_maps(tmp_path: Path) -> None:
    """Figure 4: 0.7 % of the rows of the lower half, 29.0 % of the upper.

    And by hand from the published numbers.
    """
    run: Any = write_map(tmp_path / "map", 0)
    assert percent_rows_changed(run, "rows_changed.all.0-15") == pytest.approx(0.70, abs=0.005)
    assert percent_rows_changed(run, "rows_changed.all.16-31") == pytest.approx(29.0, abs=0.05)
    values = np.array(published_maps()[0].values)[::-1]  # from layer 0
    assert percent_rows_changed(run, "rows_changed.attention.0-1,30-31") == pytest.approx(
        100 * values[[0, 1, 30, 31], :4].mean()
    )
    assert percent_rows_changed(run, "rows_changed.feed_forward.28-31") == pytest.approx(
        100 * values[28:, 4:].mean()
    )
    assert percent_rows_changed(run, "rows_changed.all.30-32") is None  # there is no layer 32


def published(there: TablePlan, noise: float, folder: Path) -> Recorded:
    """Return published maps as truth; other maps differ from them by `noise`.

    There are two math experts, and one expert of each language.
    """
    at = {("math", 1): 0, ("math", 2): 1, "sw": 2, "ja": 3, "te": 4, "bn": 5}
    runs: dict[Any, Any] = {
        key: write_map(folder / str(number), number) for key, number in at.items()
    }

    def number(fact: str, of: dict[str, Any]) -> float:
        key = ("math", min(of["m"], 2)) if of["run"] == "map of math" else of["language"]
        rng = np.random.default_rng([len(fact), *str(of).encode()])
        return (percent_rows_changed(runs[key], fact) or 0) + rng.normal(0, noise)

    return Recorded(there, number)


def test_the_published_maps_show_section_3_2(tmp_path: Path) -> None:
    there = plan_of("layer_swapping_claims")
    found = verdicts(there, published(there, 0.5, tmp_path), *MAPS)
    assert [found[name].verdict for name in MAPS] == ["shown"] * 6, found
    one = found["ls_math_lower_half_unchanged"]
    assert one.n == 3 and "3 of m:" in one.detail
    assert found[MAPS[2]].n == 12 and "12 of m x language: +" in found[MAPS[2]].detail
    assert found[MAPS[0]].n == 7 and found[MAPS[0]].p == pytest.approx(1 / 35)


# --- losses ---


SEEDS = "defaults: [unreasonable_table_a3]\nname: unreasonable_table_a3\naxes: {seed: [0, 1, 2]}\n"


@pytest.mark.parametrize(
    "apart, spread, word",
    [
        (0.0, 0.003, "shown"),
        (0.05, 0.003, "contradicted"),
        (0.0, 0.03, "undecided"),
        (0.0, 0.0, "cannot be tested"),
    ],
)
def test_flat_validation_losses(apart: float, spread: float, word: str) -> None:
    there, rng = plan(SEEDS), np.random.default_rng(0)
    answers = Recorded(
        there, lambda _, of: 1.1 + apart * (of["steps"] == 1000) + rng.normal(0, spread)
    )
    (found,) = verdicts(there, answers, "ue_validation_loss_is_flat").values()
    assert found.verdict == word and found.claim.threshold == 0.02
    if spread:
        assert found.left_value == pytest.approx(1.1 + apart, abs=4 * spread) and found.n == 3
        assert found.difference == pytest.approx(apart, abs=4 * spread)  # in the loss's own unit


@pytest.mark.parametrize("n, right", [(1, 1.0), (10, 0.0), (10, 1.0)])
@pytest.mark.parametrize(
    "table", ["layer_swapping_claims", "layer_swapping_table1", "unreasonable_table_a3"]
)
def test_trainings_and_answers_that_are_all_alike_decide_nothing(
    table: str, n: int, right: float
) -> None:
    there = plan(f"defaults: [{table}]\nname: {table}\naxes: {FEWER.get(table, '{}')}\n")
    answers: Any = Alike(there, {"all": right}, n=n)
    answers.fact = lambda cell, key: 50.0
    found = judge_claims(there, answers)
    assert {one.verdict for one in found} <= {"not made", "undecided", "cannot be tested"}, found
    assert all(
        one.high - one.low > 20 for one in found if one.low is not None and one.high is not None
    )


# --- statistics ---


def test_contrasts_of_trainings_are_students_and_welchs_tests() -> None:
    rng = np.random.default_rng(0)
    one, left, right = rng.normal(0.3, 1, 5), rng.normal(1, 1, 3), rng.normal(0, 2, 4)
    found, student = contrast_of_trainings(one), stats.ttest_1samp(one, 0)
    assert (found.p, found.test.df) == pytest.approx((student.pvalue, 4))
    assert (found.low, found.high) == pytest.approx(student.confidence_interval())
    found, welch = (
        contrast_of_trainings(left[:, None] - right),
        stats.ttest_ind(left, right, equal_var=False),
    )
    assert (found.p, found.test.df) == pytest.approx((welch.pvalue, welch.df))
    assert (found.low, found.high) == pytest.approx(welch.confidence_interval())
    for shape in ((1,), (3, 1), ()):
        with pytest.raises(ValueError, match="show no variance"):
            contrast_of_trainings(np.zeros(shape))


def test_profiles_of_two_kinds_by_hand_and_without_an_effect() -> None:
    """Two kinds of 3 and 4 that are each their own, mixed, and drawn alike.

    At most one labelling in 35 is accepted.
    """
    rng = np.random.default_rng(0)
    kinds, noise = rng.normal(0, 1, (2, 9)), rng.normal(0, 0.2, (7, 9))
    apart = profile_likeness(kinds[0] + noise[:3], kinds[1] + noise[3:])
    profiles = np.concatenate([kinds[0] + noise[:3], kinds[1] + noise[3:]])
    r = np.corrcoef(profiles)
    assert apart.within == pytest.approx((r[:3, :3].sum() - 3 + r[3:, 3:].sum() - 4) / 2 / 9)
    assert apart.between == pytest.approx(r[:3, 3:].mean())
    assert (apart.p, apart.opposed, apart.least_p, apart.labellings) == pytest.approx(
        (1 / 35, 1, 1 / 35, 35)
    )
    assert profile_likeness(profiles[[0, 3, 4]], profiles[[1, 2, 5, 6]]).p > 0.5  # kinds mixed up
    assert np.isnan(profile_likeness(np.ones((3, 9)), profiles[3:]).least_p)
    found = [profile_likeness(one[:3], one[3:]) for one in rng.normal(0, 1, (300, 7, 9))]
    assert np.mean([one.p < 0.05 for one in found]) <= 0.05 + 2 * (0.05 * 0.95 / 300) ** 0.5
    assert np.mean([one.opposed < 0.05 for one in found]) <= 0.05 + 2 * (0.05 * 0.95 / 300) ** 0.5


# --- gains ---


def gains(**rates: float) -> Verdict:
    """Logits of swaps by language."""
    there = plan_of("layer_swapping_table1")

    class ByLanguage(Made):
        def scores_by_question(self, score: Any, metric: str, pair: str | None) -> dict[int, float]:
            self.rates = {"swap": rates.get(score.language, 0.0)}
            return super().scores_by_question(score, metric, pair)

    (found,) = verdicts(
        there, ByLanguage(there, {}, experts=0.1), "ls_low_resource_gain_most"
    ).values()
    return found


def test_low_resource_languages_gain_most() -> None:
    """Swaps beat the math experts in Swahili and Telugu by 20 points and elsewhere not.

    The other way round; alike.
    """
    found = gains(sw=1.2, te=1.2)
    assert found.verdict == "shown" and found.left_value > 15 and abs(found.right_value or 99) < 4
    assert found.difference == pytest.approx((found.left_value or 0) - (found.right_value or 0))
    assert gains(bn=1.2, ja=1.2).verdict == "contradicted"
    assert gains(sw=1.2, te=1.2, bn=1.2, ja=1.2).verdict == "undecided"


def test_a_gain_by_hand() -> None:
    """Of each question.

    The pairs' swaps less the math experts', mean of two languages less that of the other two.
    """
    there = plan_of("layer_swapping_table1")
    made: Any = Made(there, {"swap": 0.4}, experts=0.2, n=60)
    (claim,) = [one for one in claims_of("layer_swapping_table1") if one.than]

    def answers(place: str, column: str) -> np.ndarray:
        found = np.zeros((3, 3, 60))
        for item in there.cells[place, column].items:
            (score,) = item.readings[0].values()
            ls = [item.at["l"] - 1] if "l" in item.at else range(3)
            found[item.at["m"] - 1, ls] = list(made.scores_by_question(score, "", None).values())
        return found

    def apart(place: str) -> np.ndarray:
        return answers(place, "layer_swap_default") - answers(place, "math_expert")

    wanted = (apart("sw.avg") + apart("te.avg") - apart("bn.avg") - apart("ja.avg")) / 2
    found = JUDGES["difference"](PlacedClaim.of(claim, there), made)
    by_hand = contrast(wanted, bound=2)
    assert [found.difference, found.low, found.high] == pytest.approx(
        [100 * one for one in (by_hand.difference, by_hand.low, by_hand.high)]
    )


# --- translations ---


@pytest.mark.parametrize("rate, word", [(2.0, "shown"), (-1.5, "contradicted"), (0.0, "undecided")])
def test_flores_on_par(rate: float, word: str) -> None:
    """BLEU of both directions; a tenth of the words is missing from sentences that are wrong."""
    there = plan_of("layer_swapping_claims")
    made = Made(there, {"swap": rate}, experts=0.05, n=50)
    (found,) = verdicts(there, made, "ls_flores_on_par").values()
    assert found.verdict == word and found.n == 50, found
    assert found.left_value is not None and 10 < found.left_value < 100
