"""What stands beside a math score: do its answers compute, hold, plan rightly; are they in the language asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.errors import PipelineError
from pipeline.evaluate.metrics import mean
from pipeline.evaluate.reasoning import alike
from pipeline.evaluate.records import MGSM
from pipeline.report.contents import Score
from pipeline.report.grid import ScoreTable

SHARES = {
    "no_equation": "no equation",
    "equations_true": "equations that hold",
    "plan": "right plans",
    "other_language": "in another language",
    "cut_off": "cut off",
    "unparsed": "unparsed",
}


@dataclass(frozen=True)
class Beside:
    """One column of the table: rows -> the shares of its answers in percent, None where there is none.

    told_by: what told the language (evaluate/reasoning.py).
    """

    title: str
    told_by: str
    rows: dict[str, list[float | None]]


def beside(table: ScoreTable, scores: Sequence[Score]) -> list[Beside]:
    """A block for each math column that has such shares, means over seeds."""
    found = []
    for column in table.columns:
        if column.task not in MGSM:
            continue
        place = (column.target, column.task, column.where)
        mine = [one for one in scores if (one.target, one.task, one.where) == place]
        if not any(one.metric in ("no_equation", "equations_true") for one in mine):
            continue
        told = {one.filter for one in mine if one.metric == "other_language"}
        unseen = told == {"script"} and shares_script(column.where)
        rows = {row: [share(mine, row, metric) for metric in SHARES] for row in table.rows}
        if unseen:  # English answers to Nyankole questions: no other script is no evidence of the right language
            at = list(SHARES).index("other_language")
            rows = {row: [*each[:at], each[at] or None, *each[at + 1 :]] for row, each in rows.items()}
        found.append(Beside(column.label, " or ".join(sorted(told)), rows))
    return found


def shares_script(where: str) -> bool:
    """Whether MGSM has another language of this script; also of a language that is not known here, of an archive."""
    try:
        return bool(alike(where))
    except PipelineError:
        return True


def share(scores: Sequence[Score], row: str, metric: str) -> float | None:
    values = [100 * s.value for s in scores if s.row == row and s.metric == metric and s.value is not None
              and s.filter != "last-number"]  # fmt: skip
    return mean(values) if values else None
