"""What the page shows of single answers: marks of scores that deserve a look, and answers to browse."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.evaluate.records import CHOICES
from pipeline.report.answers import Answers, Place
from pipeline.report.contents import Score
from pipeline.report.statistics import standard_error

CHANCE = 0.25  # of four choices


@dataclass(frozen=True)
class Mark:
    """A score that deserves a look: `mark` names what is odd, `label` its column."""

    mark: str
    row: str
    label: str
    seed: int
    detail: str


def sanity(primary: Sequence[Score], answers: Mapping[Place, Answers]) -> list[Mark]:
    """Scores that deserve a look.

    Exactly 0, at chance, mostly unparsed, cut off, in the wrong script, identical to another row's.
    """
    marks = []
    alike: dict[tuple, dict[str, list[Score]]] = {}
    seen: dict[tuple, Score] = {}  # the base serves every seed, its English every language: one mark
    for score in primary:
        seen.setdefault((score.row, score.eval, score.task, score.where, score.num_fewshot), score)
    for score in seen.values():
        found = answers.get((score.eval, score.task, score.where), Answers())
        marks += [Mark(mark, score.row, score.label, score.seed, detail) for mark, detail in _marks(score, found)]
        if found.text:
            place = (score.task, score.where, score.num_fewshot, score.target, found.text)
            alike.setdefault(place, {}).setdefault(score.row, []).append(score)
    for same in alike.values():
        for row, scores in same.items():
            others = ", ".join(other for other in same if other != row)
            detail = f"every response is the same as of: {others}"
            marks += [Mark("identical", row, one.label, one.seed, detail) for one in scores if others]
    return marks


def _marks(score: Score, found: Answers) -> Iterator[tuple[str, str]]:
    value, n = score.value, score.n
    if score.reason:
        return  # never asked: the table says why
    if value is None:
        yield "no number", "the score is not a finite number"
    elif value == 0:
        yield "exactly 0", "not one answer counted"
    elif score.task in CHOICES and n:
        error = standard_error(CHANCE, n)
        if value <= CHANCE + 2 * error:
            place = "below chance" if value < CHANCE - 2 * error else "at chance"
            yield (
                place,
                f"{100 * value:.1f} of 100, where guessing gives {100 * CHANCE:.0f} ± {100 * 2 * error:.1f}",
            )
    if found.n and found.unparsed / found.n > 0.5:
        yield "mostly unparsed", f"nothing extracted from {found.unparsed} of {found.n} answers"
    if found.cut_off:
        yield "cut off", f"{found.cut_off} of {found.n} answers ran out of tokens (eval.max_gen_toks)"
    if found.strange:
        yield "wrong script", f"{found.strange} of {found.n} answers are mostly in letters of another script"


# -------------------------------------------------------------------------------------------------- to browse


def browser(primary: Sequence[Score], answers: Mapping[Place, Answers]) -> dict[str, Any]:
    """The first questions of each cell.

    {"strings": [...], "cells": [{row, language, task, seed, run, total, items: [[doc_id, prompt, target, response,
    extracted, correct, scores]]}]}; prompt, target and response are places in `strings`, since rows share their
    questions, and often their answers. A row's first seed is shown.
    """
    strings: dict[str, int] = {}
    cells: dict[tuple, dict[str, Any]] = {}
    for score in primary:
        place = (score.row, score.target, score.label)
        if place in cells:
            continue
        found = answers.get((score.eval, score.task, score.where), Answers())
        items = [
            [doc, *(strings.setdefault(text, len(strings)) for text in (prompt, target, response)), *rest]
            for doc, prompt, target, response, *rest in found.first
        ]
        cells[place] = {
            "row": score.row,
            "language": score.target,
            "task": score.label,
            "seed": score.seed,
            "run": score.eval,
            "total": found.n,
            "items": items,
        }
    return {"strings": list(strings), "cells": list(cells.values())}
