"""Simulated worlds: rates that make the published numbers exactly true, answers of these rates, and how often a claim
is accepted there, against closed formulas."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from planned import TABLES, plan, plan_of

from pipeline.config.compose import compose
from pipeline.papers.published import published_value as printed
from pipeline.report import simulated
from pipeline.report.claims import SHOWN
from pipeline.report.contrasts import DISCORDANT
from pipeline.report.expression import evaluate
from pipeline.report.placed_claims import PlacedClaim, claims_of
from pipeline.report.simulated import World, published_rates, settle_choices, simulate_claims, simulated_verdict
from pipeline.tables.plan import ScoreRef
from pipeline.tables.planned_runs import Planning

PRINTED = [path.stem for path in sorted(TABLES.glob("*.yaml")) if plan_of(path.stem).cells]


def world(rates: dict[ScoreRef, float], seed: int = 0, n: int = 250) -> World:
    return World(SimpleNamespace(), 200, rates=rates, counts=lambda _: n, seed=seed)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", PRINTED)
def test_the_published_cells_are_exactly_true(name: str) -> None:
    there, _ = settle_choices(plan_of(name))
    rates = published_rates(there)
    for cell in there.cells.values():
        if cell.published and not cell.metric and (wanted := printed(*cell.published)) is not None:
            found = evaluate(there, cell, *[lambda _, score: rates[score]] * 2)[1]
            assert 100 * found == pytest.approx(wanted, abs=0.06)  # rounded in print
    assert all(0 <= rate <= 1 for rate in rates.values())


def test_answers_have_their_rates_and_share_what_is_hard() -> None:
    """Two models at 50 %: DISCORDANT of their answers are right for one alone. Different questions: none is shared."""
    scores = [ScoreRef(name, (), "sw") for name in "abc"]
    made = world(dict(zip(scores, (0.5, 0.5, 0.1), strict=True)), n=1000)
    one, other, low = (np.array(list(made.scores_by_question(score, "", None).values())) for score in scores)
    assert [one.mean(), other.mean(), low.mean()] == pytest.approx([0.5, 0.5, 0.1], abs=0.05)
    assert np.mean(one != other) == pytest.approx(DISCORDANT, abs=0.05)
    many = world({scores[0]: 0.3}, n=14042).scores_by_question(scores[0], "", None)
    assert len(many) == 936 and np.mean(list(many.values())) == pytest.approx(0.3, abs=0.02)  # means of 15 questions


@pytest.mark.parametrize("apart", [0.0, 0.06, 0.12])
def test_how_often_a_claim_is_accepted_is_the_power_of_its_test(apart: float) -> None:
    """Two models at 50 % + apart and 50 % on 250 questions: with c the share of answers that both draw alike, those
    are discordant in `apart` of cases, the others where two independent draws differ."""
    there, _ = settle_choices(plan_of("sandbox"))
    (claim,) = [one for one in claims_of("sandbox") if one.id == "sandbox_swap_base"]
    asked = PlacedClaim.of(replace(claim, threshold=0.0), there)
    left, right = (simulated.scores_of(there, side[0][0]) for side in (asked.left, asked.right))
    rates = dict.fromkeys(left, 0.5 + apart) | dict.fromkeys(right, 0.5)
    shared = 1 - 2 * DISCORDANT
    discordant = shared * apart + (1 - shared) * 0.5
    error = math.sqrt((discordant - apart**2) / 250)
    power = 1 - NormalDist().cdf(1.96 - apart / error)
    worlds = 200
    found = sum(simulated_verdict(asked, world(rates, seed)) == SHOWN for seed in range(worlds)) / worlds
    assert abs(found - power) <= 3 * math.sqrt(power * (1 - power) / worlds) + 0.01


def planning_of(table: str, tmp_path: Path) -> Planning:
    asked: Any = compose(["stage=plan", f"table={table}", f"runs_dir={tmp_path}"])
    return Planning.of(asked)


def test_every_claim_of_a_table_has_odds_under_its_published_numbers(tmp_path: Path) -> None:
    """In print the swaps of layer_swapping_table1 are too close to their rivals for 250 questions and three experts."""
    found = simulate_claims(planning_of("layer_swapping_table1", tmp_path), 5)
    assert [one.claim for one in found] == [claim.id for claim in claims_of("layer_swapping_table1")]
    assert {one.basis for one in found} == {"published numbers"}
    assert all(sum(one.shares) == pytest.approx(1) for one in found)
    assert sum(one.shares[2] > 0.5 for one in found) >= 7


def test_without_published_numbers_the_difference_that_a_claim_names_is_true(tmp_path: Path) -> None:
    found = {one.claim: one.basis for one in simulate_claims(planning_of("sandbox", tmp_path), 2)}
    assert found["sandbox_swap_base"] == "a difference of 10 points"
    assert found["sandbox_swap_soup"] == found["sandbox_swap_english"] == "no difference"


def test_claims_on_facts_and_translations_are_not_simulated_and_say_so(tmp_path: Path) -> None:
    found = {one.claim: one for one in simulate_claims(planning_of("layer_swapping_claims", tmp_path), 1)}
    assert set(found) == {claim.id for claim in claims_of("layer_swapping_claims")}
    assert found["ls_flores_on_par"] == simulated.Odds("ls_flores_on_par", (), "not simulated: translations")
    assert found["ls_math_lower_half_unchanged"].basis == "not simulated: what runs record"
    assert sum(not one.shares for one in found.values()) == 7
    told = simulated.describe_odds(planning_of("unreasonable_table_a3", tmp_path), 1)
    assert any(
        line.split() == ["ue_validation_loss_is_flat", *"––––", *"not simulated: what runs record".split()]
        for line in told
    )


@pytest.mark.parametrize("text", ["", "axes: {m: [1], l: [1]}"])
def test_a_table_without_claims_or_with_one_seed_is_planned(text: str, tmp_path: Path) -> None:
    name = "layer_swapping_table1" if text else "nothing"
    file = tmp_path / "t.yaml"
    file.write_text(f"defaults: [layer_swapping_table1]\nname: {name}\n{text}\n")
    assert plan(file.read_text()).cells
    found = simulate_claims(planning_of(str(file), tmp_path), 1)
    assert {one.claim for one in found} == ({"ls_soup_averages_best", "ls_soup_averages_default", "ls_soup_maxima",
                                             "ls_bn_best_model"} if text else set())  # fmt: skip
    assert simulated.describe_odds(planning_of(str(file), tmp_path), 0) == []
