"""Of candidates with equally many right answers the first is chosen, whatever the rounding of their means."""

from pathlib import Path
from typing import Any

import pytest
from made_up_runs import finish

from pipeline.config.compose import compose
from pipeline.report.collect import gather_results
from pipeline.runs.graph import order_runs
from pipeline.stats.statistics import largest, resampled_means
from pipeline.tables.planned_runs import Planning

TABLE = """
name: ties
axes: {seed: [0, 1], bottom: [1, 3]}
every: {model: sandbox, data_root: world}
runs:
  world: {stage: data, expert: sandbox}
  math: {stage: sft, expert: math, recipe: sandbox_math, seed: "{seed}"}
  language: {stage: sft, expert: qac, recipe: sandbox_language, seed: 0}
  swap: {merge: layer_swap, merge.math: math, merge.language: language, merge.bottom_layers: "{bottom}"}
score: {eval: mgsm_0shot, in: qac, eval.max_gen_toks: 40, mean: [seed]}
columns: {low: {}}
rows: {swap: {run: swap, best: [bottom]}}
"""


# right of ten answers with each seed, with one bottom layer and with three; which of these is chosen
RIGHT = [((3, 0), (1, 2), 1), ((1, 2), (3, 0), 1), ((3, 0), (2, 2), 3), ((7, 1), (6, 2), 1)]


@pytest.mark.parametrize(("one", "three", "chosen"), RIGHT)
def test_of_equal_candidates_the_first_counts(one: Any, three: Any, chosen: int, tmp_path: Path) -> None:
    right = {1: one, 3: three}
    (tmp_path / "ties.yaml").write_text(TABLE)
    words = ["stage=table", f"table={tmp_path}/ties.yaml", f"runs_dir={tmp_path}/runs", "tracking.mode=disabled"]
    planning = Planning.of(compose(words))  # type: ignore[arg-type]
    runs: list[Any] = order_runs(planning.targets())
    merges = [run for run in runs if run.config.stage == "eval"]
    rates = {run.hash: right[run.config.merge.bottom_layers][seed_of(run)] / 10 for run in merges}
    finish(runs, 10, rates)
    assert len(rates) == 4
    (choice,) = gather_results(Planning.of(compose(words)), {}).choices.values()  # type: ignore[arg-type]
    assert choice["chosen"] == {"bottom": chosen}


def seed_of(run: Any) -> int:
    return max(parent.config.seed for parent in run.parents.values() if parent.config.stage == "sft")


def test_draws_that_tie_choose_the_first() -> None:
    """Draws of 50 questions, counted in whole numbers."""
    import numpy as np

    right = np.random.default_rng(0).random((4, 50)) < 0.4
    means = resampled_means(right.astype(float))
    counts = np.rint(50 * means)
    first = [next(at for at, count in enumerate(row) if count == max(row)) for row in counts.tolist()]
    assert largest(list(means.T)).tolist() == first
