"""Equal scores, scores that are not finite, and a language with fewer questions."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_up_runs import finish, lines_of
from scipy import stats

from pipeline.config.compose import compose
from pipeline.files import fingerprints
from pipeline.report.collect import gather_results
from pipeline.report.load.contents import Results
from pipeline.report.write import write_report
from pipeline.runs.graph import order_runs
from pipeline.runs.manifest import read_manifest
from pipeline.stats.ranks import holm
from pipeline.stats.statistics import largest, resampled_means
from pipeline.tables.planned_runs import Planning


def planned(text: str, folder: Path) -> Planning:
    """Write a table's text to a folder, with its runs there."""
    (folder / "t.yaml").write_text(text)
    words = [
        "stage=table",
        f"table={folder}/t.yaml",
        f"runs_dir={folder}/runs",
        "tracking.mode=disabled",
    ]
    return Planning.of(compose(words))  # type: ignore[arg-type]


def gathered(text: str, folder: Path) -> Results:
    return gather_results(planned(text, folder), {})


# --- equal scores ---

TIES = """
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


# right of ten answers with each seed, with one bottom layer and with three; which of these is
# chosen
RIGHT = [((3, 0), (1, 2), 1), ((1, 2), (3, 0), 1), ((3, 0), (2, 2), 3), ((7, 1), (6, 2), 1)]


@pytest.mark.parametrize(("one", "three", "chosen"), RIGHT)
def test_of_equal_candidates_the_first_counts(
    one: Any, three: Any, chosen: int, tmp_path: Path
) -> None:
    """Whatever the rounding of their means."""
    right = {1: one, 3: three}
    runs: list[Any] = order_runs(planned(TIES, tmp_path).targets())
    rates = {}
    for run in runs:
        if run.config.stage == "eval":
            seed = max(
                parent.config.seed
                for parent in run.parents.values()
                if parent.config.stage == "sft"
            )
            rates[run.hash] = right[run.config.merge.bottom_layers][seed] / 10
    finish(runs, 10, rates)
    assert len(rates) == 4
    (choice,) = gathered(TIES, tmp_path).choices.values()
    assert choice["chosen"] == {"bottom": chosen}


def test_draws_that_tie_choose_the_first() -> None:
    """Draws of 50 questions, counted in whole numbers."""
    right = np.random.default_rng(0).random((4, 50)) < 0.4
    means = resampled_means(right.astype(float))
    counts = np.rint(50 * means)
    first = [
        next(at for at, count in enumerate(row) if count == max(row)) for row in counts.tolist()
    ]
    assert largest(list(means.T)).tolist() == first


# --- not finite ---

OVERFLOW = """
name: overflow
axes: {bottom: [1, 3]}
every: {model: sandbox, data_root: world}
runs:
  world: {stage: data, expert: sandbox}
  base: {}
  math: {stage: sft, expert: math, recipe: sandbox_math}
  language: {stage: sft, expert: qac, recipe: sandbox_language}
  swap: {merge: layer_swap, merge.math: math, merge.language: language, merge.bottom_layers: "{bottom}"}
score: {eval: held_out_0shot, in: qac}
columns: {bits: {}}
rows:
  base: {run: base}
  math: {run: math}
  language: {run: language}
  swap: {run: swap, bottom: 1}
  best swap: {run: swap, best: [bottom]}
compare: {math: [base, swap], language: [base, math, swap]}
"""


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_what_is_not_finite_is_missing(value: float, tmp_path: Path) -> None:
    """As of a model whose logits overflow: not compared, never best."""
    runs: list[Any] = order_runs(planned(OVERFLOW, tmp_path).targets())
    finish(runs, 30)
    before = {line["left"] + line["right"]: line for line in gathered(OVERFLOW, tmp_path).contrasts}
    (run,) = [run for run in runs if run.config.stage == "eval" and "layer_swap-1-" in run.name]
    (file,) = (run.folder / "samples").glob("*.jsonl")
    samples = [json.loads(line) for line in file.read_text().splitlines()]
    samples[7]["scores"]["bits"] = value
    file.write_text(lines_of(samples))
    scores = json.loads((run.folder / "scores.json").read_text())
    for row in scores["rows"]:
        row["value"] = value if row["metric"] == "bits" else row["value"]
    (run.folder / "scores.json").write_text(json.dumps(scores))
    manifest = read_manifest(run.folder)
    assert manifest
    (run.folder / "manifest.json").unlink()
    replace(manifest, files=fingerprints(run.folder)).write(run.folder)

    results = gathered(OVERFLOW, tmp_path)
    cells, lines = (
        results.by_place,
        {line["left"] + line["right"]: line for line in results.contrasts},
    )
    assert cells["swap", "bits"].value is None and cells["best swap", "bits"].value is None
    assert "no finite score" in cells["swap", "bits"].missing
    assert [choice["chosen"] for choice in results.choices.values()] == [None]
    assert all(
        lines[pair]["p"] is None and "finite" in lines[pair]["missing"]
        for pair in ("mathswap", "languageswap")
    )
    finite = ["mathbase", "languagebase", "languagemath"]
    for key in ("difference", "low", "high", "p"):
        assert [lines[pair][key] for pair in finite] == [before[pair][key] for pair in finite]
    assert [lines[pair]["p_holm"] for pair in finite] == holm(
        [before[pair]["p"] for pair in finite]
    )
    page = write_report(results, tmp_path / "report")
    assert not any(
        word in page.with_name("cells.md").read_text() for word in ("nan", "inf,", "-inf")
    )


# --- fewer questions ---

QUESTIONS = {"en": 200, "qac": 40}
RATES = {"left": 0.6, "right": 0.45}
UNEVEN = """
name: uneven
every: {{data_root: {world}}}
score: {{eval: mgsm_0shot, in: [en, qac]}}
columns: {{mean: {{}}}}
runs: {{left: {{checkpoint: {left}}}, right: {{checkpoint: {right}}}}}
rows: {{left: {{run: left}}, right: {{run: right}}}}
compare: {{left: [right]}}
"""


def test_a_comparison_is_of_numbers_that_cells_show(
    world: Path, models: dict[str, list[Path]], tmp_path: Path
) -> None:
    """Against the formula of a mean over clusters by hand."""
    _, left, right = models["llama"]
    text = UNEVEN.format(world=world, left=left, right=right)
    unmade = planned(text, tmp_path)
    for score in unmade.plan.scores:
        run = unmade.evaluation_of(score)
        assert run is not None
        finish([run], QUESTIONS[score.language], {run.hash: RATES[score.model]})
    planning = planned(text, tmp_path)
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
            residuals[: len(of_language)] += (
                (of_language - of_language.mean()) / len(of_language) / 2
            )
        return float(np.mean([one.mean() for one in answers.values()])), float(
            np.sqrt((residuals**2).sum())
        )

    for cell in cells:
        value, error = mean_and_error({code: right_ones[cell.row, code] for code in QUESTIONS})
        assert cell.value == pytest.approx(100 * value)
        assert (cell.low, cell.high) == pytest.approx(
            (100 * (value - 1.96 * error), 100 * (value + 1.96 * error)), abs=1.5
        )
    value, error = mean_and_error(
        {code: right_ones["left", code] - right_ones["right", code] for code in QUESTIONS}
    )
    assert (
        line["difference"]
        == pytest.approx(cells[0].value - cells[1].value)
        == pytest.approx(100 * value)
    )  # type: ignore[operator]
    assert (line["low"], line["high"]) == pytest.approx(
        (100 * (value - 1.96 * error), 100 * (value + 1.96 * error)), abs=0.5
    )
    assert line["p"] == pytest.approx(2 * stats.norm.sf(abs(value) / error), abs=0.01)
