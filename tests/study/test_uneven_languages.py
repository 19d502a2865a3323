"""A mean over languages of which one has fewer questions, against the formula of a mean over clusters by hand."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_up_runs import finish
from scipy import stats

from pipeline.config.compose import compose
from pipeline.report.collect import gather_results
from pipeline.runs.graph import order_runs
from pipeline.tables.planned_runs import Planning

QUESTIONS = {"en": 200, "qac": 40}


def test_a_comparison_is_of_numbers_that_cells_show(world: Path, models: dict[str, list[Path]], tmp_path: Path) -> None:
    _, left, right = models["llama"]
    (tmp_path / "uneven.yaml").write_text(
        f"name: uneven\nevery: {{data_root: {world}}}\nscore: {{eval: mgsm_0shot, in: [en, qac]}}\n"
        "columns: {mean: {}}\n"
        f"runs: {{left: {{checkpoint: {left}}}, right: {{checkpoint: {right}}}}}\n"
        "rows: {left: {run: left}, right: {run: right}}\ncompare: {left: [right]}\n"
    )
    words = ["stage=table", f"table={tmp_path}/uneven.yaml", f"runs_dir={tmp_path}/runs", "tracking.mode=disabled"]
    for run in order_runs(Planning.of(compose(words)).targets()):  # type: ignore[arg-type]
        finish([run], QUESTIONS[run.config.languages[0]])
    planning = Planning.of(compose(words))  # type: ignore[arg-type]
    results = gather_results(planning, {})
    cells, (line,) = results.cells, results.contrasts

    right_ones: dict[tuple[str, str], Any] = {}
    for score in planning.plan.scores:
        run = planning.evaluation_of(score)
        assert run is not None
        samples = (run.folder / f"samples/mgsm.{score.language}.jsonl").read_text().splitlines()
        right_ones[score.model, score.language] = np.array(
            [json.loads(one)["scores"]["exact_match"] for one in samples]
        )

    def mean_and_error(answers: dict[str, Any]) -> tuple[float, float]:
        """Of a mean of two means whose questions are the same as far as there are some in both."""
        residuals = np.zeros(max(QUESTIONS.values()))
        for of_language in answers.values():
            residuals[: len(of_language)] += (of_language - of_language.mean()) / len(of_language) / 2
        return float(np.mean([one.mean() for one in answers.values()])), float(np.sqrt((residuals**2).sum()))

    for cell in cells:
        value, error = mean_and_error({code: right_ones[cell.row, code] for code in QUESTIONS})
        assert cell.value == pytest.approx(100 * value)
        assert (cell.low, cell.high) == pytest.approx(
            (100 * (value - 1.96 * error), 100 * (value + 1.96 * error)), abs=1.5
        )
    value, error = mean_and_error({code: right_ones["left", code] - right_ones["right", code] for code in QUESTIONS})
    assert line["difference"] == pytest.approx(cells[0].value - cells[1].value) == pytest.approx(100 * value)  # type: ignore[operator]
    assert (line["low"], line["high"]) == pytest.approx(
        (100 * (value - 1.96 * error), 100 * (value + 1.96 * error)), abs=0.5
    )
    assert line["p"] == pytest.approx(2 * stats.norm.sf(abs(value) / error), abs=0.01)
