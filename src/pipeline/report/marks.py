"""Marks on suspicious scores, and which answers the page shows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from pipeline.benchmarks import chance_of, is_measure, primary_metric
from pipeline.evaluate.records import ScoreRow
from pipeline.report.load.answers import Answers, Place
from pipeline.report.load.contents import CellResult, Results, score_rows_of
from pipeline.stats.statistics import standard_error
from pipeline.text import pluralize

MOST_ANSWERS, MOST_QUESTIONS = 10_000, 250  # on the page: in total, and of an evaluation


Marks = dict[
    str, dict[str, list[str]]
]  # problem -> row -> the places and sizes of its suspicious scores


def suspicious_scores(results: Results) -> Marks:
    """Return the marks on suspicious scores: exactly 0, at chance, mostly unparsed, cut off, or in
    the wrong script.
    """
    marks: Marks = {}
    visited: set[tuple[str, str, str, str]] = (
        set()
    )  # one evaluation may be behind several cells of a row
    for source in score_rows_of(results.cells):
        cell, score, row = source
        if (cell.row, *source.place) in visited:
            continue
        visited.add((cell.row, *source.place))
        location = [cell.column]
        if row.where not in cell.column.split():
            location.append(row.where)
        location += [f"{axis} {value}" for axis, value in score.at.items()]
        for problem, detail in _marks(row, results.answers.get(source.place, Answers())):
            marks.setdefault(problem, {}).setdefault(cell.row, []).append(
                f"{', '.join(location)}: {detail}"
            )
    return marks


def mark_lines(marks: Marks) -> list[str]:
    """Return a line for each kind of mark: how many scores have it, and the first of them."""
    lines = []
    for mark, rows in marks.items():
        row, details = next(iter(rows.items()))
        lines.append(
            f"{pluralize(sum(map(len, rows.values())), 'score')} {mark}: {row}, {details[0]}"
        )
    return lines


def chance_in(cell: CellResult, answers: Mapping[Place, Answers]) -> float | None:
    """Return the share of right answers by guessing in a cell; None where nothing can be
    guessed.
    """
    sources = score_rows_of([cell])
    stored = None
    if sources:
        stored = answers.get(sources[0].place)
    return chance_of_score(cell.task, cell.metric, stored or Answers())


def chance_of_score(task: str, metric: str, answers: Answers) -> float | None:
    """Return the share of right answers by guessing: by the options of the stored answers, else of
    the benchmark.
    """
    if not (metric or primary_metric(task)[0]).startswith("acc"):
        return None
    return answers.chance or chance_of(task)


def _marks(score: ScoreRow, answers: Answers) -> Iterator[tuple[str, str]]:
    value, n = score.value, score.n
    if score.reason:
        return  # skipped: the table shows the reason
    if value is None:
        yield "no number", "the score is not a finite number"
    elif is_measure(score.metric):
        return
    elif value == 0:
        yield "exactly 0", "no answer was correct"
    elif n and (chance := chance_of_score(score.task, score.metric, answers)):
        error = standard_error(chance, n)
        if value <= chance + 2 * error:
            level = "at chance"
            if value < chance - 2 * error:
                level = "below chance"
            yield (
                level,
                (
                    f"{100 * value:.1f} of 100, where guessing gives {100 * chance:.0f} ±"
                    f" {100 * 2 * error:.1f}"
                ),
            )
    if answers.n and answers.unparsed / answers.n > 0.5:
        yield "mostly unparsed", f"nothing extracted from {answers.unparsed} of {answers.n} answers"
    if answers.cut_off:
        yield (
            "cut off",
            f"{answers.cut_off} of {answers.n} answers ran out of tokens (eval.max_gen_toks)",
        )
    if answers.strange:
        yield (
            "wrong script",
            f"{answers.strange} of {answers.n} answers are mostly in letters of another script",
        )


# --- to browse ---


def browsed(cells: Iterable[CellResult]) -> dict[tuple[str, str, str], Place]:
    """(row, column, language) -> the evaluation whose answers the page shows there, the first of
    the cell's.
    """
    shown: dict[tuple[str, str, str], Place] = {}
    for source in score_rows_of(cells):
        shown.setdefault((source.cell.row, source.cell.column, source.row.where), source.place)
    return shown


def questions_to_keep(cells: Iterable[CellResult]) -> dict[Place, int]:
    """Return evaluation -> how many of its first questions the page may show, of those that are
    `browsed`.
    """
    places = set(browsed(cells).values())
    return dict.fromkeys(places, min(MOST_QUESTIONS, max(1, MOST_ANSWERS // max(1, len(places)))))
