"""The report as one page: index.html, from the results of a table, rendered by templates. It works offline
and, but for the table of answers, without JavaScript."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.analyze.drawing import draw_svg
from pipeline.errors import PipelineError
from pipeline.evaluate.shown_scores import percent_factor
from pipeline.report import figures
from pipeline.report.claims import VERDICTS
from pipeline.report.detectable import measured_detectable
from pipeline.report.load.answers import Answers, Place
from pipeline.report.load.contents import CellResult, Results, score_rows_of
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
KINDS = {"sft": "training", "cpt": "training", "eval": "evaluation", "select": "selection", "analyze": "analysis"}
PAPER = "Paper: the published number, and the difference of the measured one from it; both use the same questions."
INTERVAL = "Below a number: its 95 % confidence interval over questions."
STALE = "⟲ stale: its files, or those of a parent, have changed since it was computed."
ANSWERS = "<!--answers-->"  # where their JSON goes; other text of the page has no unescaped <
MOST_BARS, MOST_PANELS = 60, 24  # rows and columns of a figure; larger tables have none


Line = tuple[str, str, str]  # that a click on a cell shows: text, the run that it leads to, and the link's text


def page(results: Results, headline: Sequence[str], notes: Sequence[str], marks: Marks) -> tuple[str, str]:
    """(index.html of a report, its figure of scores as SVG; "" if there is none)."""
    lines, answers = chart_lines(results), results.answers
    is_small = len(results.rows) <= MOST_BARS and len({line["column"] for line in lines}) <= MOST_PANELS
    text = "Scores by row: the numbers are in the table above"
    chart = draw_svg(lambda: figures.scores(lines), "scores", text) if lines and is_small else ""
    columns = [*results.primary[2:], *(line["column"] for line in lines)]
    column = next((name for name in columns if name in results.columns), "")
    of_place = [line for line in lines if line["column"] == column]
    first = draw_svg(lambda: figures.scores(of_place), "first", f"Scores in {column}") if of_place and is_small else ""
    detectable = measured_detectable(results.contrasts, results.seeds)
    maps = maps_of(results)
    shown = browsed(results.cells)
    answered = any(evaluation in answers and answers[evaluation].n for evaluation in shown.values())
    stale = by_message((run.stale, run.name) for run in results.runs if run.stale)
    warnings = by_message((warning, run.name) for run in results.runs for warning in run.warnings)
    verdicts = [verdict.verdict for verdict in results.verdicts]
    html = render(
        "page.html.j2", results=results, headline=headline, notes=notes,
        legend=[INTERVAL] * any(cell.low is not None for cell in results.cells) + legend(results, PAPER)
        + [STALE] * any(run.stale for run in results.runs),
        bold=BOLD, lines_of=lines_of, difference_of=cell_difference,
        choices=choice_lines(results),
        reasons={title: group_reasons(results, name)
                 for title, name in (("Suspect published numbers.", "suspect"), ("Missing.", "missing"))},
        stopped=[
            (name, len(stopped), by_message((reason, run) for run, reason in stopped.items()))
            for name, stopped in (("failed", results.failed), ("not started", results.missing))
        ],
        limits={limit for run in results.runs if (limit := run.config.get("eval.limit"))},
        counts=", ".join(f"{verdicts.count(word)} {word}" for word in VERDICTS if word in verdicts),
        run_of={run.name: run for run in results.runs}, marks=marks, stale=stale, warnings=warnings,
        chart=chart, first=first, detectable=detectable, lines=lines, maps=maps,
        answered=answered, bundle=data_tables() if answered else {},
        facts={"Versions": results.versions, "Machine": results.machine, "Git": results.git}, **runs_table(results),
    )  # fmt: skip
    data = answer_data(shown, answers, MOST_BYTES - len(html.encode())) if answered else {}
    html = html.replace(ANSWERS, environment().from_string("{{ data|tojson }}").render(data=data))
    return html, re.sub(r"var\(--\w+, ([^()]*)\)", r"\1", chart) + "\n" if chart else ""


def data_tables() -> dict[str, str]:
    """DataTables as itables packs it, without any address on the network."""
    import itables.options

    bundle = Path(itables.options.dt_bundle)
    return {"js": bundle.read_text(encoding="utf-8"), "css": bundle.with_suffix(".css").read_text(encoding="utf-8")}


# ---------------------------------------------------------------------------------------------------- tables


def lines_of(cell: CellResult) -> list[Line]:
    """What a click on a cell shows: why it has no number, the scores behind it, and its runs that have none, such as
    unfinished ones and trainings."""
    sources = score_rows_of([cell])
    lines, languages = [(cell.missing, "", "")] * bool(cell.missing), [row.where for _, _, row in sources]
    for _, score, row in sorted(sources, key=lambda source: languages.index(source.row.where)):
        axes = ", ".join([row.where, *(f"{axis} {value}" for axis, value in score.at.items() if value != row.where)])
        value = None if row.value is None else percent_factor(row.metric) * row.value
        lines.append((axes, score.run, cell.decimal(value) or score.run))
    places, shown = {score.run: score.at for score in cell.scores}, {score.run for _, score, _ in sources}
    rest = {run: places.get(run, {}) for run in cell.runs if run not in shown}
    return lines + [(", ".join(f"{axis} {value}" for axis, value in at.items()), run, run) for run, at in rest.items()]


def runs_table(results: Results) -> dict[str, Any]:
    """All runs behind the table: trainings, then evaluations, then the rest; of each the cells that it scores, or its
    label."""
    used: dict[str, dict[str, None]] = {}
    for cell in results.cells:
        for score in cell.scores:
            used.setdefault(score.run, {})[f"{cell.row}, {cell.column}"] = None
    return {
        "runs": sorted(results.runs, key=lambda run: (run.stage not in TRAININGS, run.stage != "eval")),
        "kinds": KINDS,
        "used": {run.name: "; ".join(used.get(run.name, {})) or (run.label if run.stage in TRAININGS else "")
                 for run in results.runs},
    }  # fmt: skip


# ---------------------------------------------------------------------------------------------------- figures


def chart_lines(results: Results) -> list[dict[str, Any]]:
    """The lines of cells.csv that are scores, with the score of guessing and the best ones."""
    lines = []
    for cell, line in zip(results.cells, cell_lines(results), strict=True):
        if cell.task and cell.value is not None:
            chance = chance_in(cell, results.answers)
            lines.append({**line, "best": cell.best, "chance": 100 * chance if chance else None})
    return lines


def maps_of(results: Results) -> list[tuple[str, str]]:
    """(SVG, caption) of the analyses that are figures of the table, without those that cells show numbers of."""
    shown_runs = {name for cell in results.cells if cell.value is not None for name in cell.runs}
    analyses = [run for run in results.runs if run.stage == "analyze" and run.finished and run.name not in shown_runs]
    return [changes_of(run.name, run.folder, number) for number, run in enumerate(analyses)]


def write_figures(results: Results, folder: Path) -> list[str]:
    """Write each figure that there are numbers for, as NAME.svg and NAME.pdf; gives the reasons why others were not
    drawn."""
    missing = []
    drawn = ("scores", figures.scores, cell_lines(results)), ("contrasts", figures.contrasts, results.contrasts)
    for name, draw, lines in drawn:
        try:
            figure = draw(lines)
        except PipelineError as error:
            missing.append(f"{name}: {error}")
            continue
        for form in "svg", "pdf":
            figures.save(figure, folder / f"{name}.{form}")
    return missing


# ---------------------------------------------------------------------------------------------------- answers


def answer_data(
    shown: Mapping[tuple[str, str, str], Place], answers: Mapping[Place, Answers], most_bytes: int
) -> dict[str, Any]:
    """The first questions of each evaluation that is `browsed`, as JSON: {"strings": [...], "models": {row: [[column,
    language, question, prompt, expected, right or wrong, extracted, response, scores]]}}. Items are indices into
    `strings`, as rows share their questions, and often their answers. All evaluations show the same number of
    questions: as many as `most_bytes` allow, but at least one."""
    from jinja2.utils import htmlsafe_json_dumps

    items = {at: answers[place].first for at, place in shown.items() if place in answers}
    number = max(map(len, items.values()), default=0)
    while True:
        strings: dict[str, int] = {}
        models: dict[str, list[list[int]]] = {}
        for question in range(number):
            for (row, column, language), first in items.items():
                for doc, correct, prompt, target, response, extracted, scores in first[question : question + 1]:
                    right = "" if correct is None else "✓ right" if correct else "✗ wrong"
                    texts = [column, language, str(doc), prompt, target, right, extracted, response, scores]
                    models.setdefault(row, []).append([strings.setdefault(text, len(strings)) for text in texts])
        data = {"strings": list(strings), "models": models}
        size = len(htmlsafe_json_dumps(data, **JSON_STYLE).encode())
        if number < 2 or size <= most_bytes:
            return data
        number = max(1, min(number - 1, int(number * most_bytes / size)))
