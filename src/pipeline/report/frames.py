"""The tables of the page as frames: each cell with its text, marks, and the lines that a click shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.evaluate.shown_scores import percent_factor
from pipeline.report.claims import CONTRADICTED, NOT_MADE, NOT_TESTABLE, SHOWN, UNDECIDED, Verdict, format_points
from pipeline.report.compare import is_significant
from pipeline.report.load.contents import TRAININGS, CellResult, Results, RunResult, ScoreBehind
from pipeline.report.render.cells import cell_difference, legend

KINDS = {"sft": "training", "cpt": "training", "eval": "evaluation", "select": "selection", "analyze": "analysis"}


@dataclass(frozen=True)
class Line:
    """A line that a click on a cell shows; run: the run that it leads to, by the text `shown`."""

    text: str = ""
    run: str = ""
    shown: str = ""


@dataclass(frozen=True)
class Small:
    """A small line below a cell's text."""

    text: str
    title: str = ""


@dataclass(frozen=True)
class Td:
    """A cell of a frame. value: what it is sorted by; missing: why it is empty; count: of the values that it is a mean
    of; place: (row, column) whose answers its lines lead to."""

    text: str = ""
    value: float | None = None
    best: bool = False
    bold: bool = False
    missing: str = ""
    count: int = 0
    place: tuple[str, str] | None = None
    small: Sequence[Small] = ()
    more: Sequence[Line] = ()
    flags: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True)
class Frame:
    """A table of a page: each row is its name and its cells. texts: the columns of text."""

    label: str
    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str | Td]]
    texts: Sequence[int] = (0,)

    @property
    def cells(self) -> list[list[Td]]:
        return [[cell if isinstance(cell, Td) else Td(cell) for cell in row] for row in self.rows]


# ---------------------------------------------------------------------------------------------------- the table


INTERVALS = "Below a number: its 95 % interval over draws of problems, with choices repeated in each draw."
PAPER = "Paper: the published number, and the difference of the measured one from it; both use the same questions."
FLAGS = (
    "≠: computed on another device, or with another thread count or other versions than most; ⟲ stale: its files, or "
    "those of a parent, have changed since it was computed."
)


def cells_note(results: Results) -> str:
    """What the marks in the table mean, those that it has."""
    notes = [INTERVALS] if any(cell.low is not None for cell in results.cells) else []
    notes += legend(results.cells, PAPER)
    return " ".join(notes + ([FLAGS] if any(run.stale or run.unlike for run in results.runs) else []))


def cells_frame(results: Results) -> Frame:
    flags = flags_of(results)
    behind: dict[tuple[str, str], list[ScoreBehind]] = {}
    for source in results.behind:
        behind.setdefault((source.cell.row, source.cell.column), []).append(source)
    tds = {place: cell_td(cell, behind.get(place, []), flags)
           for place, cell in results.by_place.items()}  # fmt: skip
    rows = [[Td(row), *(tds.get((row, column), Td()) for column in results.columns)] for row in results.rows]
    bold = " Bold: significantly above every other model in its place, after Holm’s correction over them."
    end = "" if results.title.endswith((".", "?", "!")) else "."
    caption = (
        f"{results.title}{end}{bold if results.finished else ''} Click a number for its languages, seeds, runs and "
    )
    return Frame("The table", f"{caption}answers, and a dash for its reason.", ["", *results.columns], rows)


def flags_of(results: Results) -> Callable[[Iterable[str]], list[tuple[str, str]]]:
    """Function from names of runs to their flags (stale, different environment), each with its reason."""
    runs = {run.name: run for run in results.runs}

    def flags(names: Iterable[str]) -> list[tuple[str, str]]:
        named_runs = [runs[name] for name in names if name in runs]
        stale = [f"{run.name}: {run.stale}" for run in named_runs if run.stale]
        unlike = [f"{run.name}: {', '.join(run.unlike)}" for run in named_runs if run.unlike]
        return [(sign, "; ".join(why)) for sign, why in (("⟲ stale", stale), ("≠", unlike)) if why]

    return flags


def cell_td(cell: CellResult, behind: Sequence[ScoreBehind], flags: Any) -> Td:
    small = []
    if cell.published is not None:
        gap = cell_difference(cell)
        text = f"paper {cell.published:g}" + (f", {signed(gap)}" if gap is not None else "")
        small.append(Small(text + (" (suspect)" if cell.suspect else ""), cell.suspect or ""))
    if cell.maximum is not None:
        how = "chosen and scored on the same questions, the papers’ method"
        small.append(Small(f"max {cell.maximum:.{cell.digits}f}", how))
    if cell.low is not None:
        small.append(Small(f"{cell.low:.1f} to {cell.high:.1f}"))
    return Td(
        "" if cell.value is None else f"{cell.value:.{cell.digits}f}", cell.value, cell.best, cell.best,
        "" if cell.value is not None else cell.missing or "no number", cell.n if cell.n > 1 else 0,
        place=(cell.row, cell.column) if cell.scores else None, small=small,
        more=[*([Line(cell.missing)] if cell.missing else []), *lines_behind(cell, behind)], flags=flags(cell.runs),
    )  # fmt: skip


def lines_behind(cell: CellResult, behind: Sequence[ScoreBehind]) -> list[Line]:
    """The scores behind a cell, then its runs that have none, such as unfinished ones and trainings."""
    lines, places = [], [row.where for _, _, row in behind]
    for _, score, row in sorted(behind, key=lambda source: places.index(source.row.where)):
        axes = ", ".join([row.where, *(f"{axis} {value}" for axis, value in score.at.items() if value != row.where)])
        value = None if row.value is None else f"{percent_factor(row.metric) * row.value:.{cell.digits}f}"
        lines.append(Line(axes, score.run, value or score.run))
    scored = {source.score.run for source in behind}
    axes_of = {score.run: ", ".join(f"{axis} {value}" for axis, value in score.at.items()) for score in cell.scores}
    others = [run for run in {**axes_of, **dict.fromkeys(cell.runs)} if run not in scored]
    return lines + [Line(axes_of.get(run, ""), run, run) for run in others]


def next_steps(results: Results) -> list[str]:
    """What would add to these results, or use them."""
    stale = sum(bool(run.stale) for run in results.runs)
    undone = len(results.failed) + len(results.missing)
    steps = [f"Compute what is missing ({undone} runs): the command above; finished runs are not repeated."] * (
        undone > 0
    )
    steps += [f"{stale} runs are stale: the command above recomputes them."] * (stale > 0)
    limits = {run.config["eval.limit"] for run in results.runs if run.config.get("eval.limit")}
    if limits and results.contrasts and not any(map(is_significant, results.contrasts)):
        steps.append(f"No difference is significant, and eval.limit={max(limits)} leaves questions out: "
                     "every.eval.limit=null scores all, so that smaller differences are detectable.")  # fmt: skip
    if "stage=compare" not in results.command:
        if results.trainings and not results.sampled:
            steps.append("One or two trainings of each model do not show how much trainings differ: "
                         "every.seed=[0,1,2] trains each three times; stage=plan prints the cost.")  # fmt: skip
        forms = "archive, latex, markdown, csv or figures"
        steps.append(f"stage=export with this table, export.to=FILE and export.format={forms} takes the results along.")
    return steps or ["In a notebook: from pipeline.report import results."]


# ---------------------------------------------------------------------------------------------------- other tables


def runs_table(results: Results) -> dict[str, Any]:
    """All runs behind the table: trainings, then evaluations, then the rest; of each the cells that it scores, or its
    label, and what a click shows; with the flags of runs."""
    used: dict[str, dict[str, None]] = {}
    for cell in results.cells:
        for score in cell.scores:
            used.setdefault(score.run, {})[f"{cell.row}, {cell.column}"] = None
    order = [*TRAININGS, "eval"]
    return {
        "runs": sorted(results.runs, key=lambda run: order.index(run.stage) if run.stage in order else 9),
        "details": {run.name: details_of(run) for run in results.runs}, "kinds": KINDS, "flags": flags_of(results),
        "used": {run.name: "; ".join(used.get(run.name, {})) or (run.label if run.stage in TRAININGS else "")
                 for run in results.runs},
    }  # fmt: skip


def details_of(run: RunResult) -> list[Line]:
    """A run's reasons, parents and configuration (values other than defaults)."""
    config = "; ".join(f"{key}={'null' if value is None else value}" for key, value in run.config.items())
    notes = [
        run.stale and f"stale: {run.stale}",
        *run.unlike,
        run.reason,
        run.started,
        config and f"configuration: {config}",
    ]
    return [*map(Line, filter(None, notes)), *(Line(role, name, name) for role, name in run.parents.items())]


def signed(value: float) -> str:
    return format_points(value, "+").replace("-", "−")


def tally(verdicts: Sequence[Verdict]) -> str:
    """Counts of verdicts, such as: Of 9: 3 shown, 1 contradicted, 5 undecided."""
    counts = Counter(verdict.verdict for verdict in verdicts)
    words = (SHOWN, CONTRADICTED, UNDECIDED, NOT_TESTABLE, NOT_MADE)
    return f"Of {len(verdicts)}: {', '.join(f'{counts[word]} {word}' for word in words if counts[word])}."
