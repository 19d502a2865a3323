"""The report as one page: collects everything that index.html shows and renders the template, without writing it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.benchmarks import chance_of, is_measure
from pipeline.report.html import samples
from pipeline.report.html.beside import SHARES, answer_checks
from pipeline.report.html.cell_details import cell_details
from pipeline.report.html.runs import curves_of, describe_runs, duration, run_lines
from pipeline.report.load.answers import Answers, Place
from pipeline.report.load.contents import Results, RunResult
from pipeline.report.load.scores import Written
from pipeline.report.render import plots
from pipeline.report.render.cells import BEST_NOTE, cell_difference, chosen_text, group_reasons, is_outside
from pipeline.report.render.maps import Changes, changes_of
from pipeline.report.stats.claims import CONTRADICTED, NOT_MADE, NOT_TESTABLE, SHOWN, UNDECIDED, format_points
from pipeline.report.stats.compare import correct_contrasts

MOST_BYTES = 4_900_000  # of the page: the rest of it leaves this much for answers
ANSWERS = "<!--answers-->"  # where their JSON goes; other text of the page has no unescaped <
MOST_BARS, MOST_PANELS = 60, 24  # rows and columns of a chart; larger tables have no chart


@dataclass(frozen=True)
class Curves:
    """Training curves, and the trainings without a log."""

    svg: str
    silent: list[str]


def page(
    results: Results,
    written: Written,
    answers: Mapping[Place, Answers],
    headline: Sequence[str],
    notes: Sequence[str],
    marks: Sequence[samples.Mark],
    folder: Path,
) -> tuple[str, dict[str, str]]:
    """index.html of a report in `folder`, and its plots as SVG by name. The page works offline."""
    chart = chart_of(results)
    logs = curves_of(results.trainings)
    curves = _curves(results, logs)
    runs = {run.name: run for run in results.runs}
    shown = samples.browsed(results, written)
    contrasts = correct_contrasts(results.contrasts, results.primary)

    def flags(names: Sequence[str]) -> list[tuple[str, str]]:
        """Flags of these runs (stale, different environment), each with its reason."""
        stale = [f"{name}: {runs[name].stale}" for name in names if name in runs and runs[name].stale]
        unlike = [f"{name}: {', '.join(runs[name].unlike)}" for name in names if name in runs and runs[name].unlike]
        return [(sign, "; ".join(why)) for sign, why in (("⟲ stale", stale), ("≠", unlike)) if why]

    html = (
        environment(flags)
        .get_template("page.html.j2")
        .render(
            results=results,
            headline=headline,
            notes=notes,
            cells=results.by_place,
            published=any(item.published is not None for item in results.cells),
            chosen=shortened(f"{key}: {chosen_text(choice)}." for key, choice in results.choices.items()),
            reasons={name: shortened(group_reasons(results, name)) for name in ("suspect", "missing")},
            scores_behind=lambda cell: cell_details(cell, written),
            stopped=[
                (name, len(stopped), by_message((run.reason, run.name) for run in stopped))
                for name, stopped in (("failed", results.failed), ("not started", results.missing))
            ],
            far=lambda cell: is_outside(cell, results.base_tolerance),
            difference=cell_difference,
            best_note=BEST_NOTE if any(item.maximum is not None for item in results.cells) else "",
            checks=answer_checks(results, written),
            shares=list(SHARES.values()),
            verdicts=tally(results),
            contrasts=contrasts,
            chart=chart,
            curves=curves,
            maps=maps_of(results),
            marks=samples.group_marks(marks),
            runs_data=describe_runs(results, folder, logs),
            answered=any(place in answers and answers[place].n for _, place in shown.values()),
            differences=by_message((reason, run.name) for run in results.runs for reason in unusual(run)),
            warnings=by_message((warning, run.name) for run in results.runs for warning in run.warnings),
            runs=run_lines(results, folder),
            counts={
                "finished": sum(run.finished for run in results.runs),
                "flagged": any(run.stale or run.unlike for run in results.runs),
            },
        )
    )
    browser = samples.answer_browser(shown, answers, MOST_BYTES - len(html.encode()))
    html = html.replace(ANSWERS, environment().from_string("{{ answers|tojson }}").render(answers=browser))
    drawn = ({"scores": chart} if chart else {}) | ({"trainings": curves.svg} if curves.svg else {})
    return html, {f"{name}.svg": plots.standalone(svg) for name, svg in drawn.items()}


def environment(flags: Callable[[Sequence[str]], Any] | None = None) -> Any:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    templates = Environment(
        loader=PackageLoader("pipeline.report.html", "."),
        autoescape=lambda name: name is None or not name.endswith((".css", ".js")),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters |= {"duration": duration, "signed": signed, "decimals": format_points, "chance": chance}
    templates.globals["flags_of"] = flags
    templates.policies["json.dumps_kwargs"] = samples.JSON_STYLE
    return templates


def signed(value: float) -> str:
    return format_points(value, "+").replace("-", "−")


def chance(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def shortened(items: Iterable[str], limit: int = 40) -> list[str]:
    lines = list(items)
    return (
        lines
        if len(lines) <= limit
        else [*lines[:limit], f"and {len(lines) - limit} more, in the files next to this page"]
    )


def tally(results: Results) -> str:
    """Counts of verdicts, such as: Of 9: 3 shown, 1 contradicted, 5 undecided."""
    counts = Counter(verdict.verdict for verdict in results.verdicts)
    parts = [
        f"{counts[word]} {word}" for word in (SHOWN, CONTRADICTED, UNDECIDED, NOT_TESTABLE, NOT_MADE) if counts[word]
    ]
    return f"Of {len(results.verdicts)}: {', '.join(parts)}."


def maps_of(results: Results) -> list[Changes]:
    """Maps of the analyses that are figures of the table, without those that cells show numbers of."""
    shown_runs = {name for cell in results.cells if cell.value is not None for name in cell.runs}
    analyses = [run for run in results.runs if run.stage == "analyze" and run.finished and run.name not in shown_runs]
    return [changes_of(run.name, run.folder, number) for number, run in enumerate(analyses)]


def chart_of(results: Results) -> str:
    """SVG bars of the table's scores, a panel per column; empty if there are too many, or none."""
    cells = results.by_place
    panels = []
    for column in results.columns:
        in_column = [cells.get((row, column)) for row in results.rows]
        scored = [cell for cell in in_column if cell is not None and cell.task and cell.value is not None]
        if not scored:
            continue
        chances = {None if is_measure(cell.metric) else chance_of(cell.task) for cell in scored}
        (chance,) = chances if len(chances) == 1 else [None]
        panels.append(
            plots.Panel(
                title=column,
                values=[cell.value if cell else None for cell in in_column],
                intervals=[
                    (cell.low, cell.high) if cell and cell.low is not None and cell.high is not None else None
                    for cell in in_column
                ],
                chance=100 * chance if chance else None,
                best=next((place for place, cell in enumerate(in_column) if cell and cell.best), None),
            )
        )
    if not panels or len(results.rows) > MOST_BARS or len(panels) > MOST_PANELS:
        return ""
    return plots.of_scores(results.rows, panels, "Scores by row: the numbers are in the table above")


def _curves(results: Results, logs: Mapping[str, plots.Curve]) -> Curves:
    """Training curves, and the trainings without any."""
    by_label: dict[str, list[plots.Curve]] = {}
    silent = []
    for training in results.trainings:
        curve = logs[training.name]
        if not (curve.loss or curve.validation):
            silent.append(f"{training.label} ({training.name})")
        by_label.setdefault(training.label, []).append(curve)
    if not by_label or len(by_label) > MOST_BARS:
        return Curves("", silent)
    return Curves(plots.of_trainings(by_label, "Training loss over steps, one panel per training"), silent)


def unusual(run: RunResult) -> list[str]:
    """A run's differences from most runs, and the reason if it is stale."""
    return [*run.unlike, *([f"stale: {run.stale}"] if run.stale else [])]


def by_message(messages: Iterable[tuple[str, str]]) -> list[tuple[str, list[str]]]:
    """Each distinct message, with the names of its runs; messages: (message, run name)."""
    runs_of: dict[str, list[str]] = {}
    for message, name in messages:
        runs_of.setdefault(message, []).append(name)
    return list(runs_of.items())
