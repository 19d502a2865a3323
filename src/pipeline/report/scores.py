"""The scores of a table's evaluations, read and named: nothing is computed here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from pipeline.errors import PipelineError
from pipeline.evaluate.metrics import PRIMARY
from pipeline.evaluate.records import ScoreRow, read_scores
from pipeline.report.results import CellResult, Results, Score

TITLES = {  # of tasks, in the order of the columns; mgsm_en_cot and its like follow mgsm
    "mgsm": "MGSM",
    "belebele": "Belebele",
    "global_mmlu": "Global MMLU",
    "flores": "FLORES",
    "mbpp": "MBPP",
}
AVERAGE = "average"


def load(results: Results) -> tuple[list[Score], dict[tuple[str, str], list[str]]]:
    """All scores of the table's evaluations, sorted, and (row, language) -> reasons where an evaluation has none.

    An evaluation of several target languages gives each target its own scores, and English to all. Raises PipelineError
    where the evaluations were not scored alike: by one backend in one dtype; of a row, with a chat template or without.
    """
    scores: list[Score] = []
    problems: dict[tuple[str, str], list[str]] = {}
    ways: dict[tuple[str, ...], dict[tuple[str, str], str]] = {}  # what is compared -> how it was scored -> by which
    failed = {run.name: f": {run.reason}" for run in results.failed}
    for cell in results.cells:
        file = cell.folder / "scores.json"
        if not file.is_file():
            reason = cell.name + failed.get(cell.name, " has no scores.json")
            problems.setdefault((cell.row, cell.language), []).append(reason)
            continue
        try:
            written, how = read_scores(file)
        except (ValueError, KeyError, TypeError):
            raise PipelineError(f"scores.json of {cell.name} cannot be read: make it again with redo=true") from None
        ways.setdefault(("backend",), {}).setdefault(("eval.backend", how.get("backend", "hf")), cell.name)
        ways.setdefault(("dtype",), {}).setdefault(("eval.dtype", how.get("dtype", "auto")), cell.name)
        template = ("eval.chat_template", how.get("chat_template", False))
        ways.setdefault(("row", cell.row), {}).setdefault(template, cell.name)
        others = set(results.languages) - {cell.language}
        written = [row for row in written if not others & set(row.where.split("-"))]
        several = len(results.languages) > 1
        scores += [placed(row, cell, several, is_primary(row, written)) for row in written]
    for found in ways.values():
        if len(found) > 1:
            told = ", ".join(f"{name} ({key}={value})" for (key, value), name in found.items())
            raise PipelineError(f"{told} were not scored alike, so that no table compares them: score all one way")
    keys = ("row", "language", "target", "seed", "task", "where", "subject", "num_fewshot", "metric", "filter", "eval")
    scores.sort(key=lambda score: [str(getattr(score, key) or "") for key in keys])
    return scores, problems


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


def is_primary(row: ScoreRow, written: Sequence[ScoreRow]) -> bool:
    """Whether this is the score that the table shows: the task's primary metric, else the first one written."""
    if row.subject:
        return False
    same = [one for one in written if not one.subject and _place(one) == _place(row)]
    wanted = [one for one in same if (one.metric, one.filter) == PRIMARY.get(family(row.task))]
    return (wanted or same)[0] is row


def _place(row: ScoreRow) -> tuple[str, str, int]:
    return row.task, row.where, row.num_fewshot


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
