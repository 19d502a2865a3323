"""The report as one page: everything index.html shows, gathered, and the template filled; nothing is written here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.benchmarks import chance_of
from pipeline.report.html import samples
from pipeline.report.html.beside import SHARES, answer_checks
from pipeline.report.html.runs import curves_of, described, duration, lines
from pipeline.report.load.answers import Answers, Place
from pipeline.report.load.contents import Results, RunResult
from pipeline.report.load.scores import Written
from pipeline.report.render import plots
from pipeline.report.render.cells import BEST_NOTE, chosen_text, difference, outside, reasons
from pipeline.report.render.maps import Changes, changes_of
from pipeline.report.stats.claims import CONTRADICTED, NOT_MADE, NOT_TESTABLE, SHOWN, UNDECIDED, decimals
from pipeline.report.stats.compare import corrected, headline

MOST_BARS, MOST_PANELS = 60, 24  # rows and columns of a chart; a larger table has none


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


def page(
    results: Results, read: Written, answers: Mapping[Place, Answers], notes: Sequence[str], folder: Path
) -> tuple[str, dict[str, str]]:
    """index.html of a report in `folder`, and its plots as SVG by name. The page works offline."""
    chart = chart_of(results)
    logs = curves_of(results.trainings)
    curves = _curves(results, logs)
    runs = {run.name: run for run in results.runs}
    contrasts = corrected(results.contrasts)

    def flags(names: Sequence[str]) -> list[tuple[str, str]]:
        """The marks of what these runs made, each with its reason."""
        stale = [f"{name}: {runs[name].stale}" for name in names if name in runs and runs[name].stale]
        unlike = [f"{name}: {', '.join(runs[name].unlike)}" for name in names if name in runs and runs[name].unlike]
        return [(sign, "; ".join(why)) for sign, why in (("⟲ stale", stale), ("≠", unlike)) if why]

    html = (
        environment(flags)
        .get_template("page.html.j2")
        .render(
            results=results,
            headline=headline(contrasts),
            notes=notes,
            cells={(one.row, one.column): one for one in results.cells},
            published=any(one.published is not None for one in results.cells),
            chosen=shortened(f"{key}: {chosen_text(choice)}." for key, choice in results.choices.items()),
            reasons={name: shortened(reasons(results, name)) for name in ("suspect", "missing")},
            far=lambda cell: outside(cell, results.base_tolerance),
            difference=difference,
            best_note=BEST_NOTE if any(one.maximum is not None for one in results.cells) else "",
            checks=answer_checks(results, read),
            shares=list(SHARES.values()),
            verdicts=tally(results),
            contrasts=contrasts,
            chart=chart,
            curves=curves,
            maps=maps_of(results),
            marks=_grouped(samples.sanity(results, read, answers)),
            data=samples.browser(results, read, answers) | {"runs": described(results, folder, logs)},
            keep=max((len(one.first) for one in answers.values()), default=0),
            differences=_differences(results),
            warnings=by_message(results, lambda run: run.warnings),
            runs=lines(results, folder),
            counts={
                "finished": sum(run.finished for run in results.runs),
                "flagged": any(run.stale or run.unlike for run in results.runs),
            },
        )
    )
    drawn = ({"scores": chart} if chart else {}) | ({"trainings": curves.svg} if curves.svg else {})
    return html, {f"{name}.svg": plots.standalone(svg) for name, svg in drawn.items()}


def environment(flags: Callable[[Sequence[str]], Any] | None = None) -> Any:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    made = Environment(
        loader=PackageLoader("pipeline.report.html", "."),
        autoescape=lambda name: name is None or not name.endswith((".css", ".js")),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"duration": duration, "signed": signed, "decimals": decimals, "chance": chance}
    made.globals["flags_of"] = flags
    return made


def signed(value: float) -> str:
    return decimals(value, "+").replace("-", "−")


def chance(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


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


def maps_of(results: Results) -> list[Changes]:
    """Of the analyses that are figures of the table; not of those that cells show numbers of."""
    read = {name for cell in results.cells if cell.value is not None for name in cell.runs}
    found = [run for run in results.runs if run.stage == "analyze" and run.finished and run.name not in read]
    return [changes_of(run.name, run.folder, number) for number, run in enumerate(found)]


def chart_of(results: Results) -> str:
    """Bars of the table's scores, a panel a column; empty where there are too many, or none."""
    cells = {(cell.row, cell.column): cell for cell in results.cells}
    panels = []
    for column in results.columns:
        here = [cells.get((row, column)) for row in results.rows]
        scored = [cell for cell in here if cell is not None and cell.task and cell.value is not None]
        if not scored:
            continue
        chances = {chance_of(cell.task) for cell in scored}
        (chance,) = chances if len(chances) == 1 else [None]
        panels.append(
            plots.Panel(
                title=column,
                values=[cell.value if cell else None for cell in here],
                intervals=[
                    (cell.low, cell.high) if cell and cell.low is not None and cell.high is not None else None
                    for cell in here
                ],
                chance=100 * chance if chance else None,
                best=next((place for place, cell in enumerate(here) if cell and cell.best), None),
            )
        )
    if not panels or len(results.rows) > MOST_BARS or len(panels) > MOST_PANELS:
        return ""
    return plots.of_scores(results.rows, panels, "Scores by row: the numbers are in the table above")


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
        groups.setdefault((one.mark, one.row), []).append(one.detail)
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
