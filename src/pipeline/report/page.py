"""The report as one page: everything index.html shows, gathered, and the template filled; nothing is written here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.evaluate.records import CHOICES
from pipeline.report import plots, samples
from pipeline.report.answers import Answers, Place
from pipeline.report.beside import SHARES, beside
from pipeline.report.cells import BEST_NOTE, chosen_text, difference, outside
from pipeline.report.claims import CONTRADICTED, NOT_MADE, NOT_TESTABLE, SHOWN, UNDECIDED, decimals
from pipeline.report.compare import declared
from pipeline.report.contents import Results, RunResult, Score, TableCell
from pipeline.report.grid import ScoreTable, column_of
from pipeline.report.maps import Changes, changes_of
from pipeline.report.runs import all_runs, curves_of, described, duration, lines
from pipeline.report.tables import roles

GROUPS = {"base": "base", "expert": "experts", "merge": "merges"}
MOST_BARS = 60  # rows of a chart; a longer table has none


@dataclass(frozen=True)
class Chart:
    """The bar chart of a target language."""

    target: str
    svg: str


@dataclass(frozen=True)
class Curves:
    """Training curves, and the trainings that logged nothing."""

    svg: str
    silent: list[str]


@dataclass(frozen=True)
class MarkGroup:
    """Sanity marks of the same kind on the same row."""

    mark: str
    row: str
    details: list[str]


@dataclass(frozen=True)
class OwnTable:
    """The table as its YAML defines it, with the reasons of what is missing and suspect, and what was chosen."""

    cells: Mapping[tuple[str, str], TableCell]
    published: bool
    missing: list[str]
    suspect: list[str]
    chosen: list[str]


def page(
    results: Results, table: ScoreTable, scores: Sequence[Score], answers: Mapping[Place, Answers], folder: Path
) -> tuple[str, dict[str, str]]:
    """index.html of a report in `folder`, and its plots as SVG by name. The page asks nothing of any network."""
    primary = in_order(table, scores)
    charts = _charts(table)
    logs = curves_of(results.trainings)
    curves = _curves(results, logs)
    role = roles(table.rows, results.roles)
    groups = [(title, [row for row in table.rows if role[row] == name]) for name, title in GROUPS.items()]
    runs = all_runs(results)

    def flags(names: Sequence[str]) -> list[tuple[str, str]]:
        """The marks of what these runs made, each with its reason."""
        stale = [f"{name}: {runs[name].stale}" for name in names if name in runs and runs[name].stale]
        unlike = [f"{name}: {', '.join(runs[name].unlike)}" for name in names if name in runs and runs[name].unlike]
        return [(sign, "; ".join(why)) for sign, why in (("⟲ stale", stale), ("≠", unlike)) if why]

    finished = sum(run.finished for run in runs.values())
    flagged = any(run.stale or run.unlike for run in runs.values())
    html = (
        environment(flags)
        .get_template("page.html.j2")
        .render(
            results=results,
            table=table,
            several=len(results.languages) > 1,
            groups=[(title, rows) for title, rows in groups if rows],
            own=own_table(results),
            far=lambda cell: outside(cell, results.base_tolerance),
            difference=difference,
            best_note=BEST_NOTE if any(one.maximum is not None for one in results.table_cells) else "",
            beside=beside(table, scores),
            shares=list(SHARES.values()),
            verdicts=tally(results),
            sure=beyond(results),
            charts=charts,
            curves=curves,
            maps=maps_of(results),
            marks=_grouped(samples.sanity(primary, answers)),
            data=samples.browser(primary, answers) | {"runs": described(results, folder, logs)},
            keep=max((len(one.first) for one in answers.values()), default=0),
            differences=_differences(results),
            warnings=by_message(results, lambda run: run.warnings),
            runs=lines(results, folder),
            counts={"finished": finished, "flagged": flagged},
        )
    )
    drawn = {f"scores_{chart.target}": chart.svg for chart in charts} | (
        {"trainings": curves.svg} if curves.svg else {}
    )
    return html, {f"{name}.svg": plots.standalone(svg) for name, svg in drawn.items()}


def environment(flags: Callable[[Sequence[str]], Any] | None = None) -> Any:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    made = Environment(
        loader=PackageLoader("pipeline.report", "."),
        autoescape=lambda name: name is None or not name.endswith((".css", ".js")),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"duration": duration, "signed": signed, "decimals": decimals, "chance": chance}
    made.globals["flags_of"] = flags
    return made


def in_order(table: ScoreTable, scores: Sequence[Score]) -> list[Score]:
    """The primary scores in the order of the table, each with the title of its column there."""
    order = {replace(column, label=""): index for index, column in enumerate(table.columns)}
    rows = {row: index for index, row in enumerate(table.rows)}
    placed = [(order[replace(column_of(score), label="")], score) for score in scores if score.primary]
    placed.sort(key=lambda at: (rows[at[1].row], at[0], at[1].seed))
    return [replace(score, label=table.columns[index].label) for index, score in placed]


def signed(value: float) -> str:
    return decimals(value, "+").replace("-", "−")


def chance(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def own_table(results: Results) -> OwnTable | None:
    """The table's own cells where they say more than the scores: published numbers, intervals, facts of trainings."""
    published = any(one.published is not None for one in results.table_cells)
    same = len(results.rows) == len(results.table_rows) and not published
    same &= not any(one.maximum is not None for one in results.table_cells)
    if not results.table_cells or (same and all(map(str.startswith, results.rows, results.table_rows))):
        return None  # its rows are models: the scores say it all
    cells = {(one.row, one.column): one for one in results.table_cells}
    missing = dict.fromkeys(f"{one.row}, {one.column}: {one.missing}" for one in results.table_cells if one.missing)
    suspect = dict.fromkeys(f"{one.row}, {one.column}: {one.suspect}" for one in results.table_cells if one.suspect)
    chosen = [f"{key}: {chosen_text(choice)}." for key, choice in results.choices.items()]
    return OwnTable(cells, published, shortened(missing), shortened(suspect), shortened(chosen))


def shortened(found: Any, most: int = 40) -> list[str]:
    told = list(found)
    return told if len(told) <= most else [*told[:most], f"and {len(told) - most} more, in the files beside this page"]


def tally(results: Results) -> str:
    """3 of 9 claims are shown, 1 contradicted, 5 undecided."""
    counts = Counter(one.verdict for one in results.verdicts)
    told = [
        f"{counts[word]} {word}" for word in (SHOWN, CONTRADICTED, UNDECIDED, NOT_TESTABLE, NOT_MADE) if counts[word]
    ]
    return f"Of {len(results.verdicts)}: {', '.join(told)}."


def beyond(results: Results) -> Callable[[Mapping[str, Any]], bool]:
    """Whether a line of contrasts.csv is significant once all of them are counted."""
    known = [line for line in results.contrasts if line.get("p") is not None]
    sure = {id(line) for line, one in zip(known, declared(known).lines, strict=True) if one.significant}
    return lambda line: id(line) in sure


def maps_of(results: Results) -> list[Changes]:
    """Of the analyses that are figures of the table; not of those that cells show numbers of."""
    read = {name for cell in results.table_cells if cell.value is not None for name in cell.runs}
    found = [run for run in results.runs if run.stage == "analyze" and run.finished and run.name not in read]
    return [changes_of(run.name, run.folder, number) for number, run in enumerate(found)]


def _charts(table: ScoreTable) -> list[Chart]:
    """A bar chart a language, of the primary scores."""
    charts = []
    for target, columns in table.groups() if len(table.rows) <= MOST_BARS else []:
        entries = {column: [table.entries[row, column] for row in table.rows] for column in columns}
        panels = [
            plots.Panel(
                title=column.label,
                values=[entry.value for entry in entries[column]],
                spreads=[entry.spread for entry in entries[column]],
                chance=100 * samples.CHANCE if column.task in CHOICES else None,
                best=next((place for place, entry in enumerate(entries[column]) if entry.best), None),
            )
            for column in columns
        ]
        label = f"Scores by row, {target}: the numbers stand in the table above"
        charts.append(Chart(target, plots.of_scores(table.rows, panels, label)))
    return charts


def _curves(results: Results, logs: Mapping[str, plots.Curve]) -> Curves:
    """Training curves and the trainings that have none."""
    by_label: dict[str, list[plots.Curve]] = {}
    silent = []
    for training in results.trainings:
        curve = logs[training.name]
        if not (curve.loss or curve.validation):
            silent.append(f"{training.label} ({training.name})")
        by_label.setdefault(training.label, []).append(curve)
    if not by_label or len(by_label) > MOST_BARS:
        return Curves("", silent)
    return Curves(plots.of_trainings(by_label, "Training loss over steps, a panel for each training"), silent)


def _grouped(marks: Sequence[samples.Mark]) -> list[MarkGroup]:
    """Marks of the same kind on the same row together, in the order found."""
    groups: dict[tuple[str, str], list[str]] = {}
    for one in marks:
        groups.setdefault((one.mark, one.row), []).append(f"{one.label}, seed {one.seed}: {one.detail}")
    return [MarkGroup(mark, row, details) for (mark, row), details in groups.items()]


def _differences(results: Results) -> list[tuple[str, list[str]]]:
    """Each way in which runs were made unlike most, or are stale, with the runs."""
    return by_message(results, lambda run: [*run.unlike, *([f"stale: {run.stale}"] if run.stale else [])])


def by_message(results: Results, messages: Callable[[RunResult], Sequence[str]]) -> list[tuple[str, list[str]]]:
    """Each message of runs once, with their names."""
    named: dict[str, list[str]] = {}
    for run in results.runs:
        for message in messages(run):
            named.setdefault(message, []).append(run.name)
    return list(named.items())
