"""What a cell of the table expands into: its languages, the evaluations in each (by seed and other axes), its runs."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.evaluate.metrics import mean
from pipeline.report.load.contents import CellResult
from pipeline.report.load.scores import Written, percent_factor, primary_rows


@dataclass(frozen=True)
class Evaluated:
    """An evaluation, or another run, behind a cell. `axes`: its values of the axes, such as "seed 0"; `value`: its
    score in the cell's unit, None if it has none."""

    axes: str
    value: float | None
    run: str


@dataclass(frozen=True)
class LanguageScores:
    """The evaluations behind a cell in a language (or pair). `language`: empty for runs without a score of the cell."""

    language: str
    evaluated: list[Evaluated]

    @property
    def mean(self) -> float | None:
        """The mean of its scores, None if one is missing."""
        values = [item.value for item in self.evaluated if item.value is not None]
        return mean(values) if len(values) == len(self.evaluated) else None


def cell_details(cell: CellResult, written: Written) -> list[LanguageScores]:
    """The scores behind a cell by language, then its runs that have none, such as unfinished ones and trainings."""
    by_language: dict[str, list[Evaluated]] = {}
    for score, row in primary_rows(cell, written):
        axes = ", ".join(f"{axis} {value}" for axis, value in score.at.items() if value != row.where)
        value = None if row.value is None else percent_factor(row.metric) * row.value
        by_language.setdefault(row.where, []).append(Evaluated(axes, value, score.run))
    scored = {item.run for evaluated in by_language.values() for item in evaluated}
    axes_of = {score.run: ", ".join(f"{axis} {value}" for axis, value in score.at.items()) for score in cell.scores}
    others = [Evaluated(axes_of.get(run, ""), None, run) for run in {**axes_of, **dict.fromkeys(cell.runs)}]
    by_language[""] = [item for item in others if item.run not in scored]
    return [LanguageScores(language, evaluated) for language, evaluated in by_language.items() if evaluated]
