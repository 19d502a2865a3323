"""Checks of the answers behind math scores: in the requested language, complete, with a number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.benchmarks import kind_of
from pipeline.errors import PipelineError
from pipeline.evaluate.answer_language import languages_of_script
from pipeline.evaluate.metrics import mean
from pipeline.evaluate.records import ScoreRow
from pipeline.report.load.contents import Results
from pipeline.report.load.scores import Written

SHARES = {
    "other_language": "in another language",
    "cut_off": "cut off",
    "unparsed": "unparsed",
}


@dataclass(frozen=True)
class AnswerChecks:
    """Checks for one column of the table: rows -> shares of the answers in percent, None if there is none.

    detected_by: the method that detected the language (evaluate/answer_language.py).
    """

    title: str
    detected_by: str
    rows: dict[str, list[float | None]]


def answer_checks(results: Results, written: Written) -> list[AnswerChecks]:
    """Checks for each math column that has such shares, as means over its evaluations."""
    blocks = []
    for column in results.columns:
        rows_of: dict[str, list[ScoreRow]] = {}
        for cell in results.cells:
            if cell.column == column and kind_of(cell.task) == "number":
                scored = [row for score in cell.scores if score.run in written for row in written[score.run][0]]
                rows_of[cell.row] = [row for row in scored if row.task == cell.task and row.metric in SHARES]
        score_rows = [row for rows in rows_of.values() for row in rows]
        if not any(row.filter != "last-number" for row in score_rows):
            continue
        methods = {row.filter for row in score_rows if row.metric == "other_language"}
        unseen = methods == {"script"} and any(shares_script(row.language) for row in score_rows)
        shares = {row: [share(rows_of.get(row, []), metric) for metric in SHARES] for row in results.rows}
        if unseen:  # English answers to Nyankole questions: the same script is not evidence of the right language
            at = list(SHARES).index("other_language")
            shares = {
                row: [*row_shares[:at], row_shares[at] or None, *row_shares[at + 1 :]]
                for row, row_shares in shares.items()
            }
        blocks.append(AnswerChecks(column, " or ".join(sorted(methods)), shares))
    return blocks


def shares_script(language: str) -> bool:
    """Whether MGSM has another language of this script; True for unknown languages, which archives may have."""
    try:
        return bool(languages_of_script(language))
    except PipelineError:
        return True


def share(rows: Sequence[ScoreRow], metric: str) -> float | None:
    values = [100 * row.value for row in rows if row.metric == metric and row.value is not None
              and row.filter != "last-number"]  # fmt: skip
    return mean(values) if values else None
