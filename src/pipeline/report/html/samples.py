"""What the page shows of single answers: marks of scores that deserve a look, and answers to browse."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.benchmarks import chance_of
from pipeline.evaluate.records import ScoreRow
from pipeline.report.load.answers import Answers, Place
from pipeline.report.load.contents import Results
from pipeline.report.load.scores import Written, primary_rows
from pipeline.report.stats.statistics import standard_error


@dataclass(frozen=True)
class Mark:
    """A score that deserves a look: `mark` names what is odd, `detail` where it is and how much."""

    mark: str
    row: str
    detail: str


def sanity(results: Results, read: Written, answers: Mapping[Place, Answers]) -> list[Mark]:
    """Scores that deserve a look.

    Exactly 0, at chance, mostly unparsed, cut off, in the wrong script, identical to another row's.
    """
    marks = []
    alike: dict[tuple, dict[str, list[str]]] = {}
    seen: set[tuple[str, str, str, str]] = set()  # one evaluation may stand under several cells of a row
    for cell in results.cells:
        for score, row in primary_rows(cell, read):
            if (cell.row, score.run, row.task, row.where) in seen:
                continue
            seen.add((cell.row, score.run, row.task, row.where))
            where = ", ".join([cell.column, row.where, *(f"{axis} {value}" for axis, value in score.at.items())])
            found = answers.get((score.run, row.task, row.where), Answers())
            marks += [Mark(mark, cell.row, f"{where}: {detail}") for mark, detail in _marks(row, found)]
            if found.text:
                place = (row.task, row.where, row.num_fewshot, found.text)
                alike.setdefault(place, {}).setdefault(cell.row, []).append(where)
    for same in alike.values():
        for name, places in same.items():
            others = ", ".join(other for other in same if other != name)
            marks += [Mark("identical", name, f"{one}: identical to {others}") for one in places if others]
    return marks


def _marks(score: ScoreRow, found: Answers) -> Iterator[tuple[str, str]]:
    value, n = score.value, score.n
    if score.reason:
        return  # never asked: the table says why
    if value is None:
        yield "no number", "the score is not a finite number"
    elif value == 0:
        yield "exactly 0", "not one answer counted"
    elif n and (chance := chance_of(score.task)):
        error = standard_error(chance, n)
        if value <= chance + 2 * error:
            place = "below chance" if value < chance - 2 * error else "at chance"
            yield (
                place,
                f"{100 * value:.1f} of 100, where guessing gives {100 * chance:.0f} ± {100 * 2 * error:.1f}",
            )
    if found.n and found.unparsed / found.n > 0.5:
        yield "mostly unparsed", f"nothing extracted from {found.unparsed} of {found.n} answers"
    if found.cut_off:
        yield "cut off", f"{found.cut_off} of {found.n} answers ran out of tokens (eval.max_gen_toks)"
    if found.strange:
        yield "wrong script", f"{found.strange} of {found.n} answers are mostly in letters of another script"


# -------------------------------------------------------------------------------------------------- to browse


def browser(results: Results, read: Written, answers: Mapping[Place, Answers]) -> dict[str, Any]:
    """The first questions of each cell.

    {"strings": [...], "cells": [{row, column, language, run, at, total, items: [[doc_id, prompt, target, response,
    extracted, correct, scores]]}]}; prompt, target and response are places in `strings`, since rows share their
    questions, and often their answers. Of a cell with several evaluations in a language the first is shown.
    """
    strings: dict[str, int] = {}
    cells: dict[tuple[str, str, str], dict[str, Any]] = {}
    for cell in results.cells:
        for score, row in primary_rows(cell, read):
            place = (cell.row, cell.column, row.where)
            if place in cells:
                continue
            found = answers.get((score.run, row.task, row.where), Answers())
            items = [
                [doc, *(strings.setdefault(text, len(strings)) for text in (prompt, target, response)), *rest]
                for doc, prompt, target, response, *rest in found.first
            ]
            cells[place] = {
                "row": cell.row, "column": cell.column, "language": row.where, "run": score.run,
                "at": ", ".join(f"{axis} {value}" for axis, value in score.at.items()),
                "total": found.n, "items": items,
            }  # fmt: skip
    return {"strings": list(strings), "cells": list(cells.values())}
