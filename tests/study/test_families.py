"""What a study tests, and what it shows as exploratory."""

from dataclasses import replace
from statistics import NormalDist
from typing import Any

import pytest
import yaml
from planned import plan, plan_of
from test_verdicts import Made, Seeds

from pipeline.errors import PipelineError
from pipeline.report.compare import headline_sentences
from pipeline.report.contrasts import compared_pairs, mark_cells, measure_pairs
from pipeline.report.load.contents import CellResult
from pipeline.stats.ranks import holm
from pipeline.tables.plan import TablePlan
from pipeline.tables.study import expand_study

STUDY: dict[str, Any] = {
    "base": "./base",
    "experts": {"math": "./math", "sw": "./sw"},
    "controls": True,
    "methods": ["layer_swap", "soup", "ties", "task_arithmetic", "slerp"],
    "languages": ["en", "sw", "te"],
    "benchmarks": [
        "mgsm_2shot",
        "belebele_0shot",
        "global_mmlu_0shot",
        {"xnli": {"en": "xnli_en", "sw": "xnli_sw", "te": "xnli_ur"}},
    ],
}


def planned(**changes: Any) -> TablePlan:
    return plan(yaml.safe_dump(expand_study(STUDY | changes, "five.yaml")))


def measured(there: TablePlan, **rates: float) -> list[Any]:
    made: Any = Made(there, rates)
    return measure_pairs(there, made, compared_pairs(there))


def test_the_family_of_a_study_is_its_merges_on_the_primary_benchmark_in_the_target_languages() -> (
    None
):
    """Five methods, each against two experts, the base and its control.

    240 differences in twelve columns, of which those of MGSM in Swahili and Telugu are tested.
    """
    there = planned()
    lines = measured(there, layer_swap=0.6)
    tested = [line for line in lines if line["p_holm"] is not None]
    assert (len(lines), len(tested)) == (240, 40)
    assert {line["place"] for line in tested} == {"mgsm sw", "mgsm te"}
    assert {line["right"] for line in tested if line["left"] == "soup"} == {
        "math",
        "sw",
        "base",
        "soup, control",
    }
    exploratory = [line for line in lines if line["exploratory"]]
    assert len(exploratory) == 200 and all(line["low"] < line["high"] for line in exploratory)
    weights = [39 if line["primary"] else 1 for line in tested]
    assert [line["p_holm"] for line in tested] == pytest.approx(
        holm([line["p"] for line in tested], weights)
    )
    sentences = headline_sentences(lines, there.table.primary)
    assert not any("belebele" in one or "mgsm en" in one for one in sentences)


def test_an_exploratory_difference_takes_nothing_from_what_the_study_was_run_for() -> None:
    """All 240 together would need p below 0.025 / 239 in the second comparison.

    The forty need 0.025 / 39.
    """
    (line,) = [
        line
        for line in measured(planned())
        if (line["left"], line["right"], line["place"]) == SECOND
    ]
    whole = measured(plan(yaml.safe_dump({**expand_study(STUDY, "s"), "family": None})))
    (among_all,) = [
        line for line in whole if (line["left"], line["right"], line["place"]) == SECOND
    ]
    factors = [
        sum(map(NormalDist().inv_cdf, (1 - 0.025 / others / 2, 0.8))) for others in (39, 239)
    ]
    assert line["p"] == among_all["p"]
    assert line["detectable"] / among_all["detectable"] == pytest.approx(
        factors[0] / factors[1], rel=1e-6
    )
    assert not any(line["exploratory"] for line in whole)


SECOND = ("soup", "base", "mgsm te")


@pytest.mark.parametrize(
    ("changes", "family"),
    [
        (
            {"languages": ["en"], "benchmarks": ["mgsm_2shot", "belebele_0shot"]},
            ["mgsm en"],
        ),  # a study in English alone
        (
            {"benchmarks": ["flores_0shot", "mgsm_2shot"]},
            ["flores en-sw", "flores sw-en", "flores en-te", "flores te-en"],
        ),
        ({"benchmarks": ["mgsm_2shot", "mgsm_8shot"]}, ["mgsm_2shot sw", "mgsm_2shot te"]),
    ],
)
def test_what_is_tested_of_other_studies(changes: dict[str, Any], family: list[str]) -> None:
    table = expand_study(STUDY | changes, "s")
    assert table["family"] == family and table["baselines"] == {"math": "†", "base": "‡"}


def test_tables_of_the_papers_test_all_of_their_comparisons() -> None:
    there = plan_of("layer_swapping_table1")
    lines = measured(there)
    assert not there.table.family and all(line["p_holm"] is not None for line in lines)


@pytest.mark.parametrize("key", ["family", "baselines"])
def test_a_name_that_the_table_lacks_is_refused(key: str) -> None:
    given: Any = ["mgsm swa"] if key == "family" else {"mgsm swa": "†"}
    with pytest.raises(
        PipelineError,
        match="family, baselines: 'mgsm swa' is no column or row: did you mean mgsm sw",
    ):
        plan(yaml.safe_dump({**expand_study(STUDY, "s"), key: given}))


def test_no_exploratory_cell_is_bold() -> None:
    there = plan_of("sandbox")
    right = {"layer swap": (90,), "soup": (50,)}
    cells = [
        CellResult(row, place, float(of[0]), task="mgsm")
        for place in ("qac: mgsm", "qac: mgsm en")
        for row, of in right.items()
    ]
    pairs = [("layer swap", "soup", cell.column) for cell in cells]

    def bold(family: tuple[str, ...]) -> list[str]:
        within = replace(there, table=replace(there.table, family=family))
        made: Any = Seeds(within, right)
        marked = mark_cells(cells, measure_pairs(within, made, pairs), {})
        return [cell.column for cell in marked if cell.best]

    assert bold(()) == ["qac: mgsm", "qac: mgsm en"] and bold(("qac: mgsm",)) == ["qac: mgsm"]
