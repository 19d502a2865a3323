"""controls in a table.

Each merge again with the base in the language expert's place, chosen and compared as it is.
"""

import csv
from pathlib import Path

import pytest
from planned import plan
from test_rendered_tables import cells_of, finish, planned, render

from pipeline.tables.planned_runs import Planning

TABLE = """
name: mine
axes:
  language: [qac]
  seed: [0, 1]
  counts: {1+0: {bottom: 1, top: 0}, 2+0: {bottom: 2, top: 0}}
every: {model: sandbox, data_root: world}
runs:
  world: {stage: data, expert: sandbox}
  base: {}
  math expert: {stage: sft, expert: math, recipe: sandbox_math, seed: "{seed}"}
  language expert: {stage: sft, expert: "{language}", recipe: sandbox_language, seed: "{seed}"}
  swap: {merge: layer_swap, merge.math: math expert, merge.language: language expert,
    merge.bottom_layers: "{counts.bottom}", merge.top_layers: "{counts.top}"}
  soup: {merge: soup, merge.experts: [math expert, language expert], merge.weights: magnitude}
score: {eval: mgsm_0shot, in: "{language}", mean: [seed]}
columns: {"{language}": {}}
rows:
  base: {run: base}
  math: {run: math expert}
  swap: {run: swap, best: [counts], by: {eval.split: dev}}
  soup: {run: soup}
compare: {swap: [base], soup: [math]}
controls: true
"""


def test_every_merge_has_its_control() -> None:
    made = plan(TABLE)
    assert made.rows == ["base", "math", "swap", "swap, control", "soup", "soup, control"]
    assert made.controls == [("swap", "swap, control"), ("soup", "soup, control")]
    words = {
        spec.run: spec.words["merge.control"]
        for spec in made.specs.values()
        if spec.run.endswith("control")
    }
    assert words == {"swap, control": ["language"], "soup, control": ["1"]}


def test_a_merge_of_language_experts_alone_has_no_control() -> None:
    """With the base in the place of each it would be the base."""
    both = "controls: [language expert, math expert]"
    made = plan(TABLE.replace("controls: true", both))
    assert made.controls == [("swap", "swap, control")]
    assert plan(TABLE.replace("controls: true", "controls: [math expert]")).controls == [
        ("soup", "soup, control")
    ]


def test_a_merge_that_is_written_has_its_control_too() -> None:
    live = plan(TABLE)
    made = plan(TABLE.replace("{merge: ", "{stage: merge, merge: "))
    assert made.rows == live.rows and made.controls == live.controls
    one, other = (
        {key: spec.words["merge.control"] for key, spec in found.specs.items() if "control" in key}
        for found in (made, live)
    )
    assert one == other


def test_a_control_of_the_best_swap_has_the_swaps_counts() -> None:
    """Chosen by the swap's development questions, once.

    Of the control only the chosen one is scored.
    """
    made = plan(TABLE)
    (choice,) = made.choices.values()
    assert choice.run == "swap" and len(choice.candidates) == 2
    ours = [chosen for chosen in made.chosen.values() if "control" in chosen.key]
    assert {chosen.choice for chosen in ours} == {choice.key} and len(ours) == 2  # seeds
    for chosen in ours:
        for (counts,), model in chosen.models.items():
            spec = made.specs[model]
            assert spec.run == "swap, control" and spec.words["merge.bottom_layers"] == int(
                counts[0]
            )


def test_the_report_compares_each_merge_with_its_control(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(TABLE)
    planning: Planning = planned(str(file), tmp_path)
    rates = dict.fromkeys(planning.plan.scores, 0.5)
    finish(planning, rates)
    page = render(planning)
    assert {line["row"] for line in cells_of(page) if line["value"]} == set(planning.plan.rows)
    with open(page.parent / "contrasts.csv", encoding="utf-8", newline="") as lines:
        pairs = {(line["left"], line["right"]) for line in csv.DictReader(lines)}
    assert pairs == {
        ("swap", "swap, control"),
        ("soup", "soup, control"),
        ("swap", "base"),
        ("soup", "math"),
    }


SHIPPED = dict(
    layer_swapping_table1=3, layer_swapping_claims=19, unreasonable_table3=4, sandbox_unreasonable=4
)


@pytest.mark.parametrize(("name", "controls"), SHIPPED.items())
def test_controls_of_a_shipped_table(name: str, controls: int) -> None:
    """Merges are in rows or columns, behind axes in braces, chosen, and in incomplete rows."""
    without, with_controls = (
        plan(f"defaults: [{name}]\nname: mine\ncontrols: {value}\n") for value in ("false", "true")
    )
    assert len(with_controls.controls) == controls and not without.controls
    assert without.cells.keys() < with_controls.cells.keys()
    shown = {part for place in with_controls.cells for part in place}
    assert shown.issuperset(name for pair in with_controls.controls for name in pair)
