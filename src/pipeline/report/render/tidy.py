"""results.csv: one tidy row per run, task, language and metric, with its table cells and run
settings.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pipeline.config.stages import TrainStage
from pipeline.evaluate.metrics import finite_or_none
from pipeline.evaluate.records import ScoreRow
from pipeline.evaluate.shown_scores import percent_factor, score_interval
from pipeline.report.load.contents import Results, RunResult
from pipeline.report.render.sheets import comma_separated
from pipeline.tables.schema import TRAININGS

COLUMNS = (
    "table run row column role seed task language pair subject metric filter num_fewshot split"
    " dtype value stderr low high n reason model knobs weights_root device threads torch"
    " transformers lm_eval attempt started seconds stale"
).split()
NOT_KNOBS = (
    "languages",
    "seed",
    "stage",
    "eval.name",
    "eval.tasks",
    "eval.split",
    "eval.dtype",
)  # other columns


def tidy_rows(results: Results) -> str:
    """Return the text of results.csv, sorted by run, task and language.

    Values are in percent; BLEU, chrF++ and bits on their own scale. low and high: `score_interval`.
    A run that is used in several rows, columns or seeds of the table lists them all.
    """
    runs = {run.name: run for run in results.runs}
    places = places_of_runs(results)
    shared = shared_settings([runs[name] for name in results.evaluations])
    lines = []
    for name, evaluation in sorted(results.evaluations.items()):
        run = runs[name]
        knobs = {}
        for key, value in run.config.items():
            if key not in shared and not key.startswith(NOT_KNOBS):
                knobs[key] = value
        about_run = {
            **vars(run),
            **run.machine,
            **run.versions,
            "seed": joined(training_seeds(run, runs)),
            **{key: joined(values) for key, values in places.get(name, {}).items()},
            "lm_eval": run.versions.get("lm-eval"),
            "table": results.table,
            "run": name,
            "split": run.config.get("eval.split", "test"),
            "dtype": evaluation.settings.get("dtype"),
            "knobs": joined(f"{key}={value}" for key, value in knobs.items()),
        }
        for row in sorted(evaluation.rows, key=sort_key):
            line = about_run | in_percent(row)
            lines.append([line.get(column) for column in COLUMNS])
    return comma_separated([list(COLUMNS), *lines])


def places_of_runs(results: Results) -> dict[str, dict[str, list[Any]]]:
    """Return run -> the rows, columns, roles and seeds of the cells that show it."""
    places: dict[str, dict[str, list[Any]]] = {}
    for cell in results.cells:
        for score in cell.scores:
            of_run = places.setdefault(score.run, {})
            of_run.setdefault("row", []).append(cell.row)
            of_run.setdefault("column", []).append(f"{cell.row} | {cell.column}")
            of_run.setdefault("role", []).append(cell.role)
            if "seed" in score.at:
                of_run.setdefault("seed", []).append(score.at["seed"])
    return places


def shared_settings(runs: Sequence[RunResult]) -> set[str]:
    """Return the settings of evaluations that have one value in all of these runs."""
    keys = set()
    for run in runs:
        for key in run.config:
            if key.startswith("eval."):
                keys.add(key)
    found = set()
    for key in keys:
        if len({str(run.config.get(key)) for run in runs}) == 1:
            found.add(key)
    return found


def joined(values: Iterable[Any]) -> str:
    """Return distinct values as one text."""
    return "; ".join(dict.fromkeys(map(str, values)))


def training_seeds(run: RunResult, runs: Mapping[str, RunResult]) -> list[Any]:
    """Return the seeds of the trainings that a run's model is made of."""
    if run.stage in TRAININGS:
        return [run.config.get("seed", TrainStage.seed)]
    parents = (name.partition("@")[0] for name in run.parents.values())
    found = []
    for name in parents:
        if name in runs:
            for seed in training_seeds(runs[name], runs):
                found.append(seed)
    return found


def in_percent(row: ScoreRow) -> dict[str, Any]:
    """Return a score with its interval, in percent; BLEU, chrF++ and bits on their own scale."""
    low, high = score_interval(row) or (None, None)
    numbers = {"value": row.value, "stderr": row.stderr, "low": low, "high": high}
    return vars(row) | {
        key: scale_number(number, percent_factor(row.metric)) for key, number in numbers.items()
    }


def sort_key(score: ScoreRow) -> tuple[str, ...]:
    return score.task, score.where, score.subject or "", score.metric, score.filter


def scale_number(number: Any, scale: int) -> float | None:
    """Return the scaled number rounded to ten digits, so that 100 * 0.07 is 7;

    None if it is not finite.
    """
    finite = finite_or_none(number)
    if finite is None:
        return None
    return float(f"{scale * finite:.10g}")
