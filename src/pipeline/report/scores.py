"""The scores of a table's evaluations, read and named: nothing is computed here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.errors import PipelineError
from pipeline.evaluate.metrics import PRIMARY
from pipeline.evaluate.records import ScoreRow, read_scores
from pipeline.report.contents import CellResult, Results, Score
from pipeline.report.statistics import wilson

TITLES = {  # of tasks, in the order of the columns; mgsm_en_cot and its like follow mgsm
    "mgsm": "MGSM",
    "belebele": "Belebele",
    "global_mmlu": "Global MMLU",
    "flores": "FLORES",
    "mbpp": "MBPP",
}
AVERAGE = "average"


Written = Mapping[
    str, tuple[list[ScoreRow], dict[str, Any]]
]  # name of an evaluation -> its rows, and how they were made


def read_all(results: Results) -> dict[str, tuple[list[ScoreRow], dict[str, Any]]]:
    """The scores.json of each finished evaluation, read once."""
    found = {}
    for name, run in results.evaluations.items():
        try:
            found[name] = read_scores(run.folder / "scores.json")
        except (OSError, ValueError, KeyError, TypeError):
            raise PipelineError(f"scores.json of {name} cannot be read: make it again with redo=true") from None
    return found


def load(results: Results, read: Written) -> tuple[list[Score], dict[tuple[str, str], list[str]]]:
    """All scores of the table's cells, sorted, and (row, language) -> reasons where an evaluation has none.

    An evaluation of several target languages gives each target its own scores, and English to all. Raises PipelineError
    where the evaluations were not scored alike: by one backend in one dtype; of a row, with a chat template or without.
    """
    scores: list[Score] = []
    problems: dict[tuple[str, str], list[str]] = {}
    ways: dict[tuple[str, ...], dict[tuple[str, str], str]] = {}  # what is compared -> how it was scored -> by which
    absent = {run.name: f": {run.reason}" for run in (*results.missing, *results.failed)}
    several = len(results.languages) > 1
    for cell in results.cells:
        if cell.name not in read:
            reason = cell.name + absent.get(cell.name, " is not made")
            problems.setdefault((cell.row, cell.language), []).append(reason)
            continue
        rows, how = read[cell.name]
        ways.setdefault(("backend",), {}).setdefault(("eval.backend", how.get("backend", "hf")), cell.name)
        ways.setdefault(("dtype",), {}).setdefault(("eval.dtype", how.get("dtype", "auto")), cell.name)
        template = ("eval.chat_template", how.get("chat_template", False))
        ways.setdefault(("row", cell.row), {}).setdefault(template, cell.name)
        others = set(results.languages) - {cell.language}
        mine = [row for row in rows if not others & set(row.where.split("-"))]
        chief = {id(row) for row in primary_of(mine)}
        scores += [placed(row, cell, several, id(row) in chief) for row in mine]
    for found in ways.values():
        if len(found) > 1:
            told = ", ".join(f"{name} ({key}={value})" for (key, value), name in found.items())
            remedy = "score all one way, every.eval.dtype=float32 for instance"
            raise PipelineError(f"{told} were not scored alike, so that no table compares them: {remedy}")
    keys = ("row", "language", "target", "seed", "task", "where", "subject", "num_fewshot", "metric", "filter", "eval")
    scores.sort(key=lambda score: [str(getattr(score, key) or "") for key in keys])
    return scores, problems


def scored_in(read: Written) -> list[str]:
    """The note on the dtype in which all evaluations were scored; none where nothing was."""
    dtypes = sorted({how["dtype"] for _, how in read.values() if "dtype" in how})
    return [f"Scored in {' and '.join(dtypes)}."] if dtypes else []


def placed(row: ScoreRow, cell: CellResult, several: bool, primary: bool) -> Score:
    """A score in its place of the table. `several`: the table has several target languages."""
    own = vars(row) | {"value": _finite(row.value), "stderr": _finite(row.stderr)}
    title = label(row.task, row.where, cell.language, several)
    return Score(
        **own, row=cell.row, target=cell.language, seed=cell.seed, eval=cell.name, label=title, primary=primary
    )


def _finite(value: Any) -> float | None:
    """The harness writes "N/A" or nan where it has no number."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def primary_of(rows: Sequence[ScoreRow]) -> list[ScoreRow]:
    """The score of each task and language that a table shows: the task's primary metric, else the first one written."""
    found: dict[tuple[str, str, int], ScoreRow] = {}
    for row in rows:
        if row.subject:
            continue
        place = row.task, row.where, row.num_fewshot
        if place not in found or (row.metric, row.filter) == PRIMARY.get(family(row.task)):
            found[place] = row
    return list(found.values())


def interval(row: ScoreRow) -> tuple[float, float] | None:
    """95 % of a score, in its own unit: Wilson's interval of a share of right answers, else 1.96 standard errors;
    None where the harness gives no error, as of corpus scores."""
    value, error = _finite(row.value), _finite(row.stderr)
    if value is None or error is None or not row.n:
        return None
    return wilson(value, row.n) if 0 <= value <= 1 else (value - 1.96 * error, value + 1.96 * error)


def family(task: str) -> str:
    """mgsm of mgsm_en_cot; an unknown task is its own."""
    return next((known for known in TITLES if task == known or task.startswith(known + "_")), task)


def label(task: str, where: str, target: str, several: bool) -> str:
    """A column's title: MGSM qac; with several target languages, MGSM en (qac) for English of qac's models."""
    known = family(task)
    title = TITLES.get(known, task) + task.removeprefix(known).replace("_", " ")
    if target == AVERAGE:
        return f"{title} {AVERAGE}" if where == AVERAGE else f"{title} {where.replace(AVERAGE, 'xx')} {AVERAGE}"
    return f"{title} {where}" + (f" ({target})" if several and target not in where.split("-") else "")
