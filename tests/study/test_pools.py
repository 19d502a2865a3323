"""Axes that name runs and steps, and subsets that are drawn from a pool of runs."""

import csv
from pathlib import Path
from typing import Any

import pytest
from fixture_types import Call
from statsmodels.stats.proportion import proportion_confint

from pipeline.config.compose import compose
from pipeline.errors import PipelineError
from pipeline.runs.graph import order_runs
from pipeline.tables.planned_runs import Planning
from pipeline.tables.subsets import draw_subsets

HEAD = """
name: pool
title: A pool
every: {model: sandbox, threads: 1, data_root: world}
runs:
  world: {stage: data, expert: sandbox}
  base: {}
  math: {stage: sft, expert: math, recipe: sandbox_math, sft.snapshot_every: 50}
  qac: {stage: sft, expert: qac, recipe: sandbox_language, sft.snapshot_every: 50}
  qaa: {stage: sft, expert: qaa, recipe: sandbox_language, sft.snapshot_every: 50}
"""
SCORE = "score: {eval: mgsm_0shot, in: qac}\n"


def hashes(text: str, folder: Path) -> set[str]:
    file = folder / "pool.yaml"
    file.write_text(HEAD + text)
    planning = Planning.of(compose(["stage=table", f"table={file}", f"runs_dir={folder}/runs"]))  # type: ignore[arg-type]
    runs = order_runs(planning.targets())
    assert not planning.problems, planning.problems
    return {run.hash for run in runs}


BY_HAND = (
    """
  ta a: {merge: task_arithmetic, merge.experts: [math, qac]}
  ta b: {merge: task_arithmetic, merge.experts: [math, qaa]}
  ta c: {merge: task_arithmetic, merge.experts: [qac, qaa]}
columns: {mgsm: {}}
rows: {a: {run: ta a}, b: {run: ta b}, c: {run: ta c}}
"""
    + SCORE
)
PAIRS = (
    """
  ta: {merge: task_arithmetic, merge.experts: ["{duo.x}", "{duo.y}"]}
axes: {duo: {a: {x: math, y: qac}, b: {x: math, y: qaa}, c: {x: qac, y: qaa}}}
columns: {mgsm: {}}
rows: {"{duo}": {run: ta}}
"""
    + SCORE
)
DRAWN = (
    """
  ta: {merge: task_arithmetic, merge.experts: "{subset}"}
axes: {subset: {of: [math, qac, qaa], size: 2}}
columns: {mgsm: {}}
rows: {"{subset}": {run: ta}}
"""
    + SCORE
)


def test_axes_over_runs_and_all_subsets_are_the_table_that_is_written_by_hand(
    tmp_path: Path,
) -> None:
    by_hand = hashes(BY_HAND, tmp_path)
    assert len(by_hand) == 10
    assert hashes(PAIRS, tmp_path) == by_hand
    assert hashes(DRAWN, tmp_path) == by_hand


def test_an_axis_of_steps_names_snapshots(tmp_path: Path) -> None:
    counts = "merge.bottom_layers: 3, merge.top_layers: 1"
    swap = "{{merge: layer_swap, merge.math: math@{0}, merge.language: qac@{0}, " + counts + "}}"
    tail = "columns: {mgsm: {}}\n" + SCORE
    by_hand = f"  a: {swap.format(50)}\n  b: {swap.format(100)}\nrows: {{a: a, b: b}}\n{tail}"
    of_axis = (
        f'  swap: {swap.format("{step}")}\naxes: {{step: [50, 100]}}\nrows: {{"{{step}}":'
        f" swap}}\n{tail}"
    )
    of_axis = of_axis.replace("math@{step}", '"math@{step}"').replace("qac@{step}", '"qac@{step}"')
    assert hashes(of_axis, tmp_path) == hashes(by_hand, tmp_path)


def test_a_draw_is_of_its_seed_and_its_labels_name_the_members() -> None:
    def refuse(problem: str) -> PipelineError:
        return PipelineError(problem)

    draw: dict[str, Any] = {"of": ["a", "b", "c", "d"], "size": [2, 3], "draws": 3, "seed": 1}
    drawn = draw_subsets(draw, refuse)
    assert drawn == draw_subsets(dict(draw), refuse)
    assert len(drawn) == 6 and sorted(map(len, drawn.values())) == [2, 2, 2, 3, 3, 3]
    assert all(label == "+".join(members) for label, members in drawn.items())
    assert all(members == sorted(members) for members in drawn.values())
    many = {"of": [f"m{number}" for number in range(40)], "size": 20, "draws": 50}
    assert len(draw_subsets(many, refuse)) == 50  # of 137,846,528,820


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("size: 2", "size: 4", ["'subset'", "size=4", "1 to 3"]),
        ("size: 2", "size: 2, draws: 9", ["draws=9", "3 subsets of size 2"]),
        ("[math, qac, qaa]", "[math, qac, math]", ["math twice"]),
        ("[math, qac, qaa]", "[mth, qac, qaa]", ["{subset}", "'mth'", "did you mean math"]),
        ("size: 2", "sizes: 2", ["unknown word sizes", "size"]),
    ],
)
def test_a_draw_that_cannot_be_is_one_sentence(
    before: str, after: str, words: list[str], tmp_path: Path, call: Call
) -> None:
    file = tmp_path / "pool.yaml"
    text = HEAD + DRAWN
    assert before in text
    file.write_text(text.replace(before, after, 1))
    told = call("stage=plan", f"table={file}", f"runs_dir={tmp_path}/runs", status=1).err
    assert len(told.strip().splitlines()) == 1
    assert all(word in told for word in words), told


REPORTED = """
name: pool
title: A pool
axes: {{subset: {{of: [m1, m2, m3, m4], size: 2}}}}
every: {{model: trained, model.path: {base}, data_root: {world}, threads: 1, sft.seq_length: 96, sft.batch_size: 4,
  sft.steps: 4, sft.warmup_steps: 0, sft.precision: fp32, sft.learning_rate: 1e-3, eval.limit: 40}}
runs:
  base: {{}}
  m1: {{stage: sft, expert: math, data.size: 20, seed: 1}}
  m2: {{stage: sft, expert: math, data.size: 20, seed: 2}}
  m3: {{stage: sft, expert: qac, data.size: 20, seed: 3}}
  m4: {{stage: sft, expert: qac, data.size: 20, seed: 4}}
  ta: {{merge: task_arithmetic, merge.experts: "{{subset}}"}}
score: {{eval: belebele_0shot, in: en}}
columns: {{belebele: {{}}}}
rows: {{base: base, ta: {{run: ta, mean: [subset]}}, "{{subset}}": ta}}
compare: {{ta: [base]}}
"""


def test_a_report_says_how_many_subsets_beat_the_base(
    base: Path, world: Path, tmp_path: Path, call: Call
) -> None:
    file = tmp_path / "pool.yaml"
    file.write_text(REPORTED.format(base=base, world=world))
    call(
        "stage=table",
        f"table={file}",
        f"runs_dir={tmp_path}/runs",
        "tracking.mode=disabled",
        status=0,
    )
    folder = tmp_path / "runs/reports/pool"
    with open(folder / "cells.csv", encoding="utf-8", newline="") as stream:
        values = {row["row"]: float(row["value"]) for row in csv.DictReader(stream)}
    with open(folder / "contrasts.csv", encoding="utf-8", newline="") as stream:
        (line,) = csv.DictReader(stream)
    of_subsets = [value for name, value in values.items() if "+" in name]
    assert len(of_subsets) == 6
    better = sum(value > values["base"] for value in of_subsets)
    assert float(line["beats"]) == pytest.approx(100 * better / 6, abs=1e-4)
    low, high = proportion_confint(better, 6, method="wilson")
    assert float(line["beats_low"]) == pytest.approx(100 * low, abs=1e-3)
    assert float(line["beats_high"]) == pytest.approx(100 * high, abs=1e-3)
    assert float(line["difference"]) == pytest.approx(
        sum(of_subsets) / 6 - values["base"], abs=1e-3
    )
    assert line["over"] == "problems subset"
    assert "Subsets in which left is better" in (folder / "index.html").read_text(encoding="utf-8")
