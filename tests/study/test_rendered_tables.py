"""Each shipped table's report on answers with the published numbers as truth.

Further reports have no effect, one question, all right, all wrong, or half of the runs.
"""

import csv
import io
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import made_up_runs
import pytest
from fixture_types import Patch
from planned import TABLES
from published_rates import RATE, published_rates, settle_choices

from pipeline.commands.report import write_results
from pipeline.config.compose import compose
from pipeline.papers.published import published_value
from pipeline.report.placed_claims import RANKED
from pipeline.report.report_state import Reported
from pipeline.runs.graph import order_runs
from pipeline.runs.run import Run
from pipeline.tables.plan import ScoreRef, TablePlan
from pipeline.tables.planned_runs import Planning

NAMES = sorted(path.stem for path in TABLES.glob("*.yaml"))
QUESTIONS = 6
ZONES = "t: {0: {bottom: 0, top: 0}, 1: {bottom: 1, top: 1}}"
PAIRS = "m: [1, 2], l: [1, 2]"  # four of nine
SMALLER = {  # the longest tables with fewer values of their longest axes, for time
    "layer_swapping_claims": f"{{{PAIRS}, threshold: [1.0e-5, 3.0e-5]}}",
    "layer_swapping_table1": f"{{{PAIRS}, b: [3, 5], u: [2], {ZONES}}}",
    "layer_swapping_table2": f"{{b: [5], u: [2], {ZONES}, density: [0.2, 0.8], scale: [1.0]}}",
    "sandbox_layer_swapping": f"{{b: [2, 3], u: [1], {ZONES}}}",
    "unreasonable_correlations": (
        "{model: [llama3.1_8b_instruct, aya_expanse_8b], partition: [A, B]}"
    ),
    **dict.fromkeys(
        ("unreasonable_bars", "unreasonable_friedman"),
        "{model: [llama3.1_8b_instruct, aya_expanse_8b]}",
    ),
    **{
        f"unreasonable_table{name}": "{model: [llama3.1_8b_instruct]}" for name in ("1", "3", "_a1")
    },
}
FACTS = {
    "rows_kept": 70.0,
    "parameters_kept": 75.0,
    "step_tokens_per_second": 1000.0,
    "peak_gigabytes": 10.0,
    "weight_bits": 32,
    "moment_bits": 32,
}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: Patch) -> None:
    """Nothing is flushed to disk, and folders are listed once: 10,000 runs would wait.

    Nobody else writes.
    """
    monkeypatch.setattr("pipeline.files.os.fsync", lambda _: None)
    for module in ("folders", "manifest"):
        monkeypatch.setattr(f"pipeline.runs.{module}.SETTLED_NS", 2 * 10**7)


def planned(name: str, runs_dir: Path) -> Planning:
    return Planning.of(
        compose(["stage=report", f"table={name}", f"runs_dir={runs_dir}", "tracking.mode=disabled"])
    )  # type: ignore[arg-type]


def truth_of(plan: TablePlan) -> dict[ScoreRef, float]:
    """Return the published rates; a candidate has its own number if it is printed.

    Otherwise it has the number of its choice.
    """
    one_each, _ = settle_choices(plan)
    told = published_rates(one_each)
    found = dict(told)
    for place, cell in plan.cells.items():
        for item, of in zip(cell.items, one_each.cells[place].items, strict=True):
            for reading, (winner,) in zip(
                item.readings, (one.values() for one in of.readings), strict=True
            ):
                for score in reading.values():
                    found.setdefault(score, told.get(winner, RATE))
    return found


def finish(
    planning: Planning,
    rates: Mapping[ScoreRef, float],
    questions: int = QUESTIONS,
    wanted: Callable[[Run], bool] = lambda _: True,
) -> None:
    """Write the wanted runs among those that the table's cells and choices need.

    The evaluations that rank candidates are left out, because no cell shows them.
    """
    choices = planning.plan.choices.values()
    candidates = {
        score for choice in choices for scores in choice.candidates.values() for score in scores
    }
    done: set[str] = set()
    while left := [run for run in needed(planning) if run.hash not in done and wanted(run)]:
        at: dict[str, float] = {}
        for score in sorted(
            planning.plan.scores, key=candidates.__contains__
        ):  # what a cell prints itself comes first
            if run := planning.evaluation_of(score):
                at.setdefault(run.hash, rates.get(score, RATE))
        made_up_runs.finish(
            left, questions, {run.hash: RATE for run in left} | at, steps=2, facts=FACTS
        )
        done |= {run.hash for run in left}


def needed(planning: Planning) -> list[Run]:
    targets = planning.targets()
    shown = {run.hash for run in targets}
    return [run for run in order_runs(targets) if run.hash in shown or run.config.stage != "eval"]


def cells_of(page: Path) -> list[dict[str, str]]:
    with open(page.parent / "cells.csv", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def render(planning: Planning) -> Path:
    return write_results(planning, Reported())


@pytest.mark.parametrize("name", NAMES)
def test_the_report_of_a_shipped_table(name: str, tmp_path: Path, monkeypatch: Patch) -> None:
    """Without its figures, which are drawn of unfinished tables below."""
    monkeypatch.setattr("pipeline.report.page.draw_svg", lambda *_, **__: "<svg></svg>")
    asked = name
    if name in SMALLER:
        asked = f"{tmp_path}/{name}.yaml"
        Path(asked).write_text(f"defaults: [{name}]\nname: {name}\naxes: {SMALLER[name]}\n")
    planning = planned(asked, tmp_path)
    plan = planning.plan
    finish(planning, truth_of(plan) if any(cell.published for cell in plan.cells.values()) else {})
    page = render(planning)
    assert not planning.problems and page.read_text(encoding="utf-8").startswith("<!doctype html>")
    cells = cells_of(page)
    figures = {
        place
        for place, cell in plan.cells.items()
        if any(item.model for item in cell.items) and not cell.fact
    }
    missing = {(one["row"], one["column"]) for one in cells if one["missing"]}
    assert len(cells) == len(plan.cells) and missing == figures, cells
    for one in cells:
        cell = plan.cells[one["row"], one["column"]]
        assert one["published"] == (
            "" if cell.published is None else str(published_value(*cell.published) or "")
        )
        if one["published"] and not one["suspect"] and not cell.metric:
            assert abs(float(one["difference"])) < 0.06, one  # as printed, to a tenth


# --- bad input ---


SOME = [(1, 1.0), (1, 0.0), (QUESTIONS, 1.0), (QUESTIONS, 0.0), (2, 0.5)]


@pytest.mark.parametrize(
    "name, questions, rate",
    [*(("calibrate", *some) for some in SOME), ("sandbox_layer_swapping", 2, 0.5)],
)
def test_few_questions_all_right_and_all_wrong(
    name: str, questions: int, rate: float, tmp_path: Path
) -> None:
    planning = planned(name, tmp_path)
    finish(planning, dict.fromkeys(planning.plan.scores, rate), questions)
    page = render(planning)
    cells = cells_of(page)  # what is chosen is estimated on halves, next to the plain maximum
    assert {one["maximum"] or one["value"] for one in cells} == {str(100 * rate)}


def half(run: Run) -> bool:
    """Every second run by its hash, of whatever stage: a merge may be there without its parents."""
    return int(run.hash[0], 16) % 2 == 0


def of_seed_1(run: Run) -> bool:
    return getattr(run.config, "seed", 0) == 1 or any(
        of_seed_1(one) for one in run.parents.values() if isinstance(one, Run)
    )


NO_TRANSITION = "t: {0: {bottom: 0, top: 0}}"
COUNTS = "counts: {1+0: {bottom: 1, top: 0}, 2+0: {bottom: 2, top: 0}}"
UNFINISHED = [  # table, its axes, the runs that are missing, questions, the rate of all scores
    ("sandbox_full", f"{{language: [qac], {COUNTS}, density: [0.2]}}", of_seed_1, QUESTIONS, 1.0),
    ("sandbox_full", f"{{language: [qac], {COUNTS}, density: [0.2]}}", half, 1, 0.0),
    ("unreasonable_table_a3", "{seed: [0, 1, 2]}", of_seed_1, QUESTIONS, 0.0),
    (
        "layer_swapping_table1",
        f"{{{PAIRS}, language: [sw, te, bn, ja], b: [3], u: [2], {NO_TRANSITION}}}",
        half,
        2,
        1,
    ),
    (
        "unreasonable_friedman",
        "{model: [llama3.1_8b_instruct, aya_expanse_8b], partition: [A, B]}",
        half,
        QUESTIONS,
        1,
    ),
    ("calibrate", "{}", half, 1, 1.0),
]


@pytest.mark.parametrize("name, axes, missing, questions, rate", UNFINISHED)
def test_half_of_a_table(
    name: str, axes: str, missing: Callable, questions: int, rate: float, tmp_path: Path
) -> None:
    """Half of the runs or one of three seeds is missing, all else is alike.

    What is not there is missing with its reason, and nothing is bold, significant, accepted or
    contradicted.
    """
    file = tmp_path / "t.yaml"
    file.write_text(f"defaults: [{name}]\nname: {name}\naxes: {axes}\n")
    planning = planned(str(file), tmp_path)
    finish(
        planning, dict.fromkeys(planning.plan.scores, rate), questions, lambda run: not missing(run)
    )
    page = render(planning)
    cells, folder = cells_of(page), page.parent
    assert (missing is of_seed_1 or any(one["value"] for one in cells)) and any(
        one["missing"] for one in cells
    )
    assert all(bool(one["value"]) != bool(one["missing"]) for one in cells)
    assert all(not one["low"] and not one["difference"] for one in cells if one["missing"])
    assert 'class="best"' not in page.read_text(encoding="utf-8")
    for text in (
        path.read_text(encoding="utf-8")
        for kind in ("csv", "md")
        for path in folder.glob(f"*.{kind}")
    ):
        assert not re.search(r"\b(nan|None(?! of the)|inf|[1-9]\d* of \d+ differences)\b", text), (
            text
        )
    for file in filter(Path.is_file, (folder / "claims.csv", folder / "contrasts.csv")):
        for line in csv.DictReader(io.StringIO(file.read_text(encoding="utf-8"))):
            not_there = line.get("missing") or line.get("verdict") in (
                "not made",
                "cannot be tested",
            )
            assert bool(not_there) != bool(line["p"]) or line.get("test") in RANKED, line
            assert line.get("verdict", "undecided") in (
                "undecided",
                "not made",
                "cannot be tested",
            ), line
