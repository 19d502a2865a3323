"""The report as one page, index.html, from the results of a table.

It works offline, and without JavaScript except for the table of answers.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.analyze.drawing import draw_svg
from pipeline.report.claims import VERDICTS
from pipeline.report.figures import draw_scores
from pipeline.report.load.answers import Answers, Place
from pipeline.report.load.contents import CellResult, Results
from pipeline.report.marks import Marks, Shown, browsed
from pipeline.report.render.cells import (
    BOLD,
    by_message,
    cell_difference,
    choice_lines,
    group_reasons,
    legend,
)
from pipeline.report.templates import JSON_STYLE, environment, render
from pipeline.tables.schema import TRAININGS

MOST_BYTES = 5_400_000  # the size of the page, with its answers
KINDS = {
    "sft": "training",
    "cpt": "training",
    "eval": "evaluation",
    "select": "selection",
    "analyze": "analysis",
}
PAPER = (
    "Paper: the published number, and the difference of the measured number from it; both use the"
    " same questions."
)
INTERVAL = "Below a number: its 95 % confidence interval over questions."
STALE = "⟲ stale: its files, or those of a parent, have changed since it was computed."
ANSWERS = "<!--answers-->"  # replaced by JSON; other text of the page has no unescaped <
MOST_BARS, MOST_PANELS = 60, 24  # rows and columns of a figure; larger tables have no figure


def page(
    results: Results, headline: Sequence[str], notes: Sequence[str], marks: Marks
) -> tuple[str, str]:
    """Return index.html of a report, and its figure of scores as SVG, or ""."""
    bars = [cell for cell in results.cells if cell.task and cell.value is not None]
    chart = draw_chart(results, bars)
    shown = browsed(results.cells)
    answers = [results.answers.get(place, Answers()) for place in shown.values()]
    answered = any(of_place.n for of_place in answers)
    html = render(
        "page.html.j2",
        results=results,
        headline=headline,
        notes=notes,
        marks=marks,
        chart=chart,
        bars=bars,
        answered=answered,
        bundle=data_tables() if answered else {},
        difference_of=cell_difference,
        group_reasons=group_reasons,
        bold=BOLD,
        verdicts=VERDICTS,
        kinds=KINDS,
        legend=page_legend(results),
        choices=choice_lines(results),
        maps=maps_of(results),
        **context_of_runs(results),
    )
    data = {}
    if answered:
        data = answer_data(shown, results.answers, MOST_BYTES - len(html.encode()))
    html = html.replace(ANSWERS, environment().from_string("{{ data|tojson }}").render(data=data))
    picture = ""
    if chart:
        picture = re.sub(r"var\(--\w+, ([^()]*)\)", r"\1", chart) + "\n"
    return html, picture


def context_of_runs(results: Results) -> dict[str, Any]:
    """Return the variables of the page's template that are about runs."""
    stale, warnings, stopped = [], [], []
    for title, reasons in (("failed", results.failed), ("not started", results.missing)):
        messages = [(reason, run) for run, reason in reasons.items()]
        stopped.append((title, len(reasons), by_message(messages)))
    for run in results.runs:
        if run.stale:
            stale.append((run.stale, run.name))
        for warning in run.warnings:
            warnings.append((warning, run.name))
    return {
        # trainings first, then evaluations
        "runs": sorted(
            results.runs, key=lambda run: (run.stage not in TRAININGS, run.stage != "eval")
        ),
        "run_of": {run.name: run for run in results.runs},
        "stale": by_message(stale),
        "warnings": by_message(warnings),
        "stopped": stopped,
    }


def page_legend(results: Results) -> list[str]:
    """Return what the marks of the table's cells mean."""
    notes = legend(results, PAPER)
    if any(cell.low is not None for cell in results.cells):
        notes.insert(0, INTERVAL)
    if any(run.stale for run in results.runs):
        notes.append(STALE)
    return notes


def data_tables() -> dict[str, str]:
    """Return the files of DataTables, as itables packs it, without network addresses."""
    import itables.options

    bundle = Path(itables.options.dt_bundle)
    return {
        "js": bundle.read_text(encoding="utf-8"),
        "css": bundle.with_suffix(".css").read_text(encoding="utf-8"),
    }


# --- figures ---


def draw_chart(results: Results, cells: Sequence[CellResult]) -> str:
    """Return the chart of some scores as SVG, or "" if the table is too large."""
    columns = {cell.column for cell in cells}
    if not cells or len(results.rows) > MOST_BARS or len(columns) > MOST_PANELS:
        return ""
    title = "Scores by row: the numbers are in the table above"
    return draw_svg(lambda: draw_scores(cells), "scores", title)


def maps_of(results: Results) -> list[tuple[str, str]]:
    """Return the address and the caption of the map of each analysis that is a figure of the table.

    An analysis is left out if a cell shows its number. The map is an image and not a part of the
    page, because a file of a run may hold scripts.
    """
    shown: set[str] = set()
    for cell in results.cells:
        if cell.value is not None:
            shown.update(cell.runs)
    maps: list[tuple[str, str]] = []
    for run in results.runs:
        if run.stage == "analyze" and run.finished and run.name not in shown:
            content = base64.b64encode((run.folder / "map.svg").read_bytes()).decode()
            caption = f"{run.name}: share of rows above the published threshold."
            maps.append((f"data:image/svg+xml;base64,{content}", caption))
    return maps


# --- answers ---


def answer_data(
    shown: Mapping[Shown, Place], answers: Mapping[Place, Answers], most_bytes: int
) -> dict[str, Any]:
    """Return the first questions of each evaluation that is `browsed`, as JSON.

    {"strings": [...], "models": {row: [[column, language, question, prompt, expected, right or
    wrong, extracted, response, scores]]}}. Items are indices into `strings`, because rows share
    their questions, and often their answers. All evaluations show the same number of questions: as
    many as `most_bytes` allow, but at least one.
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


def first_answers(items: Mapping[Shown, list[list[str]]], number: int) -> dict[str, Any]:
    """Return `answer_data` of the first questions, by question.

    `items` maps (row, column, language) to the results of `page_item`.
    """
    index_of: dict[str, int] = {}
    models: dict[str, list[list[int]]] = {}
    for question in range(number):
        for (row, column, language), first in items.items():
            if question >= len(first):
                continue
            texts = [column, language, *first[question]]
            indices = [index_of.setdefault(text, len(index_of)) for text in texts]
            models.setdefault(row, []).append(indices)
    return {"strings": list(index_of), "models": models}
