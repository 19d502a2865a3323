"""The report as one page: index.html, from the results of a table, rendered by templates.

It works offline and, but for the table of answers, without JavaScript.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.analyze.drawing import draw_svg
from pipeline.errors import PipelineError
from pipeline.evaluate.shown_scores import percent_factor
from pipeline.report import figures
from pipeline.report.claims import VERDICTS
from pipeline.report.detectable import measured_detectable
from pipeline.report.load.answers import Answers, Place
from pipeline.report.load.contents import CellResult, Results, RunResult, score_rows_of
from pipeline.report.marks import Marks, browsed, chance_in
from pipeline.report.render.cells import (
    BOLD,
    by_message,
    cell_difference,
    cell_lines,
    choice_lines,
    group_reasons,
    legend,
)
from pipeline.report.render.maps import changes_of
from pipeline.report.templates import JSON_STYLE, environment, render
from pipeline.tables.schema import TRAININGS

MOST_BYTES = 5_400_000  # of the page: the rest of it leaves this much for answers
KINDS = {
    "sft": "training",
    "cpt": "training",
    "eval": "evaluation",
    "select": "selection",
    "analyze": "analysis",
}
PAPER = (
    "Paper: the published number, and the difference of the measured one from it; both use the same"
    " questions."
)
INTERVAL = "Below a number: its 95 % confidence interval over questions."
STALE = "⟲ stale: its files, or those of a parent, have changed since it was computed."
ANSWERS = "<!--answers-->"  # where their JSON goes; other text of the page has no unescaped <
MOST_BARS, MOST_PANELS = 60, 24  # rows and columns of a figure; larger tables have none


class CellLine(NamedTuple):
    """What a click on a cell shows: a text, the run that it leads to, and the link's text."""

    text: str
    run: str = ""
    link: str = ""


def page(
    results: Results, headline: Sequence[str], notes: Sequence[str], marks: Marks
) -> tuple[str, str]:
    """Return (index.html of a report, its figure of scores as SVG; "" if there is none)."""
    charts = draw_charts(results)
    shown = browsed(results.cells)
    answered = any(
        place in results.answers and results.answers[place].n for place in shown.values()
    )
    html = render(
        "page.html.j2",
        results=results,
        headline=headline,
        notes=notes,
        marks=marks,
        legend=page_legend(results),
        bold=BOLD,
        lines_of=lines_of,
        difference_of=cell_difference,
        group_reasons=group_reasons,
        choices=choice_lines(results),
        stale=by_message((run.stale, run.name) for run in results.runs if run.stale),
        stopped=[
            stopped_runs("failed", results.failed),
            stopped_runs("not started", results.missing),
        ],
        warnings=by_message(
            (warning, run.name) for run in results.runs for warning in run.warnings
        ),
        verdicts=VERDICTS,
        charts=charts,
        detectable=measured_detectable(results.contrasts, results.seeds),
        maps=maps_of(results),
        answered=answered,
        bundle=data_tables() if answered else {},
        runs=sorted(results.runs, key=run_order),
        used=cells_by_run(results),
        run_of={run.name: run for run in results.runs},
        limits=[run.config["eval.limit"] for run in results.runs if run.config.get("eval.limit")],
        kinds=KINDS,
    )
    data = {}
    if answered:
        data = answer_data(shown, results.answers, MOST_BYTES - len(html.encode()))
    html = html.replace(ANSWERS, environment().from_string("{{ data|tojson }}").render(data=data))
    picture = ""
    if charts.all:
        picture = re.sub(r"var\(--\w+, ([^()]*)\)", r"\1", charts.all) + "\n"
    return html, picture


def page_legend(results: Results) -> list[str]:
    """Return what the marks of the table's cells mean."""
    notes = legend(results, PAPER)
    if any(cell.low is not None for cell in results.cells):
        notes.insert(0, INTERVAL)
    if any(run.stale for run in results.runs):
        notes.append(STALE)
    return notes


def stopped_runs(
    title: str, reasons: Mapping[str, str]
) -> tuple[str, int, list[tuple[str, list[str]]]]:
    """Return a title, the number of runs, and the runs of each reason."""
    return title, len(reasons), by_message((reason, run) for run, reason in reasons.items())


def run_order(run: RunResult) -> tuple[bool, bool]:
    """Sort trainings first, then evaluations."""
    return run.stage not in TRAININGS, run.stage != "eval"


def data_tables() -> dict[str, str]:
    """DataTables as itables packs it, without any address on the network."""
    import itables.options

    bundle = Path(itables.options.dt_bundle)
    return {
        "js": bundle.read_text(encoding="utf-8"),
        "css": bundle.with_suffix(".css").read_text(encoding="utf-8"),
    }


# --- tables ---


def lines_of(cell: CellResult) -> list[CellLine]:
    """Return what a click on a cell shows.

    These are why it has no number, the scores behind it, and its runs that have none, such as
    unfinished ones and trainings.
    """
    lines = []
    if cell.missing:
        lines = [CellLine(cell.missing)]
    by_language: dict[str, list[CellLine]] = {}
    for _, score, row in score_rows_of([cell]):
        axes = [
            row.where,
            *(f"{axis} {value}" for axis, value in score.at.items() if value != row.where),
        ]
        if row.value is None:
            value = None
        else:
            value = percent_factor(row.metric) * row.value
        line = CellLine(", ".join(axes), score.run, cell.decimal(value) or score.run)
        by_language.setdefault(row.where, []).append(line)
    for of_language in by_language.values():
        lines += of_language
    shown = {line.run for line in lines}
    axes_of = {score.run: score.at for score in cell.scores}
    for run in cell.runs:
        if run not in shown:
            axes = [f"{axis} {value}" for axis, value in axes_of.get(run, {}).items()]
            lines.append(CellLine(", ".join(axes), run, run))
    return lines


def cells_by_run(results: Results) -> dict[str, str]:
    """Return run -> the cells that show its scores, or the label of a training."""
    cells: dict[str, dict[str, None]] = {}
    for cell in results.cells:
        for score in cell.scores:
            cells.setdefault(score.run, {})[f"{cell.row}, {cell.column}"] = None
    used = {}
    for run in results.runs:
        label = run.label if run.stage in TRAININGS else ""
        used[run.name] = "; ".join(cells.get(run.name, {})) or label
    return used


# --- figures ---


@dataclass(frozen=True)
class Charts:
    """The page's charts of scores as SVG, or "": of all columns, and of one column for the first
    screen.

    lines: those of cells.csv that are drawn.
    """

    lines: Sequence[Mapping[str, Any]]
    all: str = ""
    first: str = ""


def draw_charts(results: Results) -> Charts:
    """Draw the charts of a table that is small enough for them."""
    lines = chart_lines(results)
    columns = [line["column"] for line in lines]
    if not lines or len(results.rows) > MOST_BARS or len(set(columns)) > MOST_PANELS:
        return Charts(lines)
    column = next(
        (name for name in [*results.primary[2:], *columns] if name in results.columns), ""
    )
    of_column = [line for line in lines if line["column"] == column]
    everything = draw_svg(
        lambda: figures.scores(lines), "scores", "Scores by row: the numbers are in the table above"
    )
    first = ""
    if of_column:
        first = draw_svg(lambda: figures.scores(of_column), "first", f"Scores in {column}")
    return Charts(lines, everything, first)


def chart_lines(results: Results) -> list[dict[str, Any]]:
    """Return the lines of cells.csv that are scores, with the score of guessing and the best
    ones.
    """
    lines = []
    for cell, line in zip(results.cells, cell_lines(results), strict=True):
        if cell.task and cell.value is not None:
            chance = chance_in(cell, results.answers)
            lines.append({**line, "best": cell.best, "chance": 100 * chance if chance else None})
    return lines


def maps_of(results: Results) -> list[tuple[str, str]]:
    """(SVG, caption) of the analyses that are figures of the table, without those that cells show
    numbers of.
    """
    shown_runs = set()
    for cell in results.cells:
        if cell.value is not None:
            for name in cell.runs:
                shown_runs.add(name)
    analyses = []
    for run in results.runs:
        if run.stage == "analyze" and run.finished and run.name not in shown_runs:
            analyses.append(run)
    return [changes_of(run.name, run.folder, number) for number, run in enumerate(analyses)]


def write_figures(results: Results, folder: Path) -> list[str]:
    """Write each figure that there are numbers for, as NAME.svg and NAME.pdf; gives the reasons why
    others were not drawn.
    """
    missing = []
    drawn = (
        ("scores", figures.scores, cell_lines(results)),
        ("contrasts", figures.contrasts, results.contrasts),
    )
    for name, draw, lines in drawn:
        try:
            figure = draw(lines)
        except PipelineError as error:
            missing.append(f"{name}: {error}")
            continue
        for form in "svg", "pdf":
            figures.save(figure, folder / f"{name}.{form}")
    return missing


# --- answers ---


def answer_data(
    shown: Mapping[tuple[str, str, str], Place], answers: Mapping[Place, Answers], most_bytes: int
) -> dict[str, Any]:
    """Return the first questions of each evaluation that is `browsed`, as JSON.

    {"strings": [...], "models": {row: [[column, language, question, prompt, expected, right or
    wrong, extracted, response, scores]]}}. Items are indices into `strings`, as rows share their
    questions, and often their answers. All evaluations show the same number of questions: as many
    as `most_bytes` allow, but at least one.
    """
    from jinja2.utils import htmlsafe_json_dumps

    items = {}
    for at, place in shown.items():
        if place in answers:
            items[at] = answers[place].first
    number = max(map(len, items.values()), default=0)
    while True:
        data = first_answers(items, number)
        size = len(htmlsafe_json_dumps(data, **JSON_STYLE).encode())
        if number < 2 or size <= most_bytes:
            return data
        number = max(1, min(number - 1, int(number * most_bytes / size)))


def first_answers(
    items: Mapping[tuple[str, str, str], Sequence[Sequence[Any]]], number: int
) -> dict[str, Any]:
    """Return `answer_data` of the first questions, by question.

    items: (row, column, language) -> `page_item`s.
    """
    strings: dict[str, int] = {}
    models: dict[str, list[list[int]]] = {}
    for question in range(number):
        for (row, column, language), first in items.items():
            if question < len(first):
                doc, correct, prompt, target, response, extracted, scores = first[question]
                right = {True: "✓ right", False: "✗ wrong"}.get(correct, "")
                texts = [
                    column,
                    language,
                    str(doc),
                    prompt,
                    target,
                    right,
                    extracted,
                    response,
                    scores,
                ]
                models.setdefault(row, []).append(
                    [strings.setdefault(text, len(strings)) for text in texts]
                )
    return {"strings": list(strings), "models": models}
