"""The text of results.csv: one tidy row per run, task, language and metric.

Each row has the run's cells in the table, and its settings.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pipeline.config.stages import TrainStage
from pipeline.evaluate.metrics import finite_or_none
from pipeline.evaluate.records import ScoreRow
from pipeline.evaluate.shown_scores import percent_factor, score_interval
from pipeline.report.load.contents import Results, RunResult
from pipeline.report.render.sheets import comma_separated
from pipeline.tables.schema import TRAININGS

COLUMNS = (
    "table run row column seed task language pair subject metric filter num_fewshot split"
    " dtype value stderr low high n reason model knobs weights_root device threads torch"
    " transformers lm_eval attempt started seconds stale"
).split()
# settings with other columns
NOT_KNOBS = ("languages", "seed", "stage", "eval.name", "eval.tasks", "eval.split", "eval.dtype")


def tidy_rows(results: Results) -> str:
    """Return the text of results.csv, sorted by run, task and language.

    Values are in percent, but BLEU, chrF++ and bits have their usual scale. `low` and `high` come
    from `score_interval`. If a run is in several rows, columns or seeds of the table, its line has
    all of them.
    """
    runs = {run.name: run for run in results.runs}
    places = places_of_runs(results)
    lines = []
    for name, evaluation in sorted(results.evaluations.items()):
        run = runs[name]
        knobs = []
        for key, value in run.config.items():
            if not key.startswith(NOT_KNOBS):
                knobs.append(f"{key}={value}")
        about_run = {
            **vars(run),
            **run.machine,
            **run.versions,
            "table": results.table,
            "run": name,
            "seed": joined(training_seeds(run, runs)),
            "split": run.config.get("eval.split", "test"),
            "dtype": evaluation.settings.get("dtype"),
            "knobs": joined(knobs),
            "lm_eval": run.versions.get("lm-eval"),
        }
        for key, values in places.get(name, {}).items():
            about_run[key] = joined(values)
        for row in sorted(
            evaluation.rows,
            key=lambda row: (row.task, row.where, row.subject or "", row.metric, row.filter),
        ):
            line = about_run | in_percent(row)
            lines.append([line.get(column) for column in COLUMNS])
    return comma_separated([COLUMNS, *lines])


def places_of_runs(results: Results) -> dict[str, dict[str, list[Any]]]:
    """Return run -> the rows, columns and seeds of the cells that show it."""
    places: dict[str, dict[str, list[Any]]] = {}
    for cell in results.cells:
        of_cell = {"row": cell.row, "column": f"{cell.row} | {cell.column}"}
        for score in cell.scores:
            of_run = places.setdefault(score.run, {})
            for name, value in of_cell.items():
                of_run.setdefault(name, []).append(value)
            if "seed" in score.at:
                of_run.setdefault("seed", []).append(score.at["seed"])
    return places


def joined(values: Iterable[Any]) -> str:
    """Return distinct values as one text."""
    return "; ".join(dict.fromkeys(map(str, values)))


def training_seeds(run: RunResult, runs: Mapping[str, RunResult]) -> list[Any]:
    """Return the seeds of the trainings behind a run's model."""
    if run.stage in TRAININGS:
        return [run.config.get("seed", TrainStage.seed)]
    seeds = []
    for parent in run.parents.values():
        name = parent.partition("@")[0]
        if name in runs:
            seeds += training_seeds(runs[name], runs)
    return seeds


def in_percent(row: ScoreRow) -> dict[str, Any]:
    """Return a score with its interval, in percent; BLEU, chrF++ and bits are not scaled."""
    low, high = score_interval(row) or (None, None)
    line = vars(row) | {"low": low, "high": high}
    for key in ("value", "stderr", "low", "high"):
        number = finite_or_none(line[key])
        if number is not None:
            # ten digits, so that 100 * 0.07 is 7
            number = float(f"{percent_factor(row.metric) * number:.10g}")
        line[key] = number
    return line
