"""The places of a table of scores: its columns, and what stands where a row and a column meet."""

from __future__ import annotations

from dataclasses import dataclass, field

from pipeline.report.compare import Comparison
from pipeline.report.contents import Score

OUT_OF_100 = ("bleu", "spbleu", "chrf")  # metrics that come on the scale 0-100
MISSING = "—"


def percent(metric: str) -> int:
    """What makes percent of a metric's value: 100 of parts of one, 1 of what comes on the scale 0-100."""
    return 1 if metric.lower().startswith(OUT_OF_100) else 100


@dataclass(frozen=True)
class Column:
    """One task in one language or pair (`where`), of the models made for the language `target`."""

    target: str
    task: str
    where: str
    num_fewshot: int
    metric: str
    filter: str
    label: str = ""


@dataclass(frozen=True)
class Entry:
    """What one place of the table shows: percent (BLEU and chrF++ as they are), spread, and why anything is missing.

    best: it is above every other row by more than noise; evals: what scored it.
    """

    value: float | None = None
    spread: float | None = None
    mark: str = ""
    reason: str = ""
    best: bool = False
    evals: tuple[str, ...] = ()

    @property
    def number(self) -> str:
        return MISSING if self.value is None else f"{self.value:.1f}"

    @property
    def error(self) -> str:
        return ("" if self.spread is None else f" ± {self.spread:.1f}") + self.mark

    @property
    def text(self) -> str:
        return self.number + self.error


@dataclass(frozen=True)
class ScoreTable:
    """rows x columns -> Entry. groups: (target, its columns), averages first; notes: how to read it; missing: reasons.

    comparisons: differences of rows, a block a language; headline: what of the first block is significant.
    """

    rows: list[str]
    columns: list[Column]
    entries: dict[tuple[str, Column], Entry]
    notes: list[str]
    missing: list[str]
    comparisons: list[Comparison] = field(default_factory=list)
    headline: str = ""

    def groups(self) -> list[tuple[str, list[Column]]]:
        targets = dict.fromkeys(column.target for column in self.columns)
        return [(target, [column for column in self.columns if column.target == target]) for target in targets]


def column_of(score: Score) -> Column:
    """Where a score stands in the table; tabulate may lengthen the label."""
    return Column(score.target, score.task, score.where, score.num_fewshot, score.metric, score.filter, score.label)
