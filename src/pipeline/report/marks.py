"""Marks on suspicious scores, and the selection of the answers that the page shows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from pipeline.benchmarks import is_measure
from pipeline.evaluate.records import ScoreRow
from pipeline.report.load.answers import Answers, Place
from pipeline.report.load.contents import CellResult, Results, score_rows_of
from pipeline.text import pluralize

Marks = dict[str, list[str]]  # problem -> the scores that have it
Shown = tuple[str, str, str]  # a row, a column and a language of the page's answers


def suspicious_scores(results: Results) -> Marks:
    """Return the marks on suspicious scores.

    A score is suspicious if it is exactly 0, at chance, mostly unparsed, or cut off.
    """
    marks: Marks = {}
    visited = set()  # an evaluation may be behind several cells of a row
    for source in score_rows_of(results.cells):
        cell, score, row = source
        if (cell.row, *source.place) in visited:
            continue
        visited.add((cell.row, *source.place))
        location = [cell.row, cell.column]
        if row.where not in cell.column.split():
            location.append(row.where)
        location += [f"{axis} {value}" for axis, value in score.at.items()]
        answers = results.answers.get(source.place, Answers())
        for problem, detail in _marks(row, answers):
            marks.setdefault(problem, []).append(f"{', '.join(location)}: {detail}")
    return marks


def mark_lines(marks: Marks) -> list[str]:
    """Return a line for each kind of mark, with the number of its scores and the first of them."""
    lines = []
    for mark, scores in marks.items():
        lines.append(f"{pluralize(len(scores), 'score')} {mark}: {scores[0]}")
    return lines


def _marks(score: ScoreRow, answers: Answers) -> Iterator[tuple[str, str]]:
    value, n = score.value, answers.n
    if score.reason:
        return  # skipped: the table shows the reason
    if value is None:
        yield "no number", "the score is not a finite number"
    elif is_measure(score.metric):
        return
    elif value == 0:
        yield "exactly 0", "no answer was correct"
    else:
        yield from _chance_marks(score, value, answers)
    if n and answers.unparsed / n > 0.5:
        yield "mostly unparsed", f"nothing extracted from {answers.unparsed} of {n} answers"
    if answers.cut_off:
        ran_out = "answers ran out of tokens (eval.max_gen_toks)"
        yield "cut off", f"{answers.cut_off} of {n} {ran_out}"


def _chance_marks(score: ScoreRow, value: float, answers: Answers) -> Iterator[tuple[str, str]]:
    chance = answers.chance
    if not score.n or not chance or not score.metric.startswith("acc"):
        return
    error = 2 * math.sqrt(chance * (1 - chance) / score.n)  # two standard errors
    if value > chance + error:
        return
    level = "below chance" if value < chance - error else "at chance"
    guessing = f"{100 * chance:.0f} ± {100 * error:.1f}"
    yield level, f"{100 * value:.1f} of 100, where guessing gives {guessing}"


# --- to browse ---


def browsed(cells: Iterable[CellResult]) -> dict[Shown, Place]:
    """Return (row, column, language) -> the evaluation whose answers the page shows there.

    It is the first evaluation of the cell.
    """
    shown: dict[Shown, Place] = {}
    for source in score_rows_of(cells):
        shown.setdefault((source.cell.row, source.cell.column, source.row.where), source.place)
    return shown
