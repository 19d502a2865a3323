"""The report as one page: everything index.html shows, gathered, and the template filled; nothing is written here."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import quote

from pipeline.data.rows import read_jsonl
from pipeline.evaluate.records import CHOICES
from pipeline.report import plots, samples
from pipeline.report.results import CellResult, Results, Score, TrainingResult
from pipeline.report.scores import AVERAGE
from pipeline.report.tables import ScoreTable, column_of


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
class RunLine:
    """A run behind the table, with links relative to the page. `of`: what it serves; `model`: what it scored."""

    kind: str
    name: str
    href: str
    of: list[str]
    model: str = ""
    model_href: str = ""
    seconds: float | None = None
    finished: bool = True


def page(results: Results, table: ScoreTable, scores: Sequence[Score], folder: Path) -> tuple[str, dict[str, bytes]]:
    """index.html of a report in `folder`, and its plots as PNG by name. The page asks nothing of any network."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    folders = {cell.name: cell.folder for cell in results.cells}
    primary = in_order(table, scores)
    charts, pictures = _charts(table)
    curves, drawn = _curves(results.trainings)
    environment = Environment(
        loader=PackageLoader("pipeline.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["duration"] = duration
    environment.filters["signed"] = signed
    html = environment.get_template("page.html.j2").render(
        results=results,
        table=table,
        several=len(results.languages) > 1,
        charts=charts,
        curves=curves,
        comparisons=samples.comparisons(primary, folders, roles(table.rows, results.roles), _targets(table)),
        marks=_grouped(samples.sanity(primary, folders)),
        browser=samples.generations(primary, folders),
        differences=_differences(results.cells),
        runs=_runs(results, folder),
    )
    return html, pictures | drawn


def in_order(table: ScoreTable, scores: Sequence[Score]) -> list[Score]:
    """The primary scores in the order of the table, each with the title of its column there."""
    order = {replace(column, label=""): index for index, column in enumerate(table.columns)}
    placed = [(order[replace(column_of(score), label="")], score) for score in scores if score.primary]
    placed.sort(key=lambda at: (table.rows.index(at[1].row), at[0], at[1].seed))
    return [replace(score, label=table.columns[index].label) for index, score in placed]


def roles(rows: Sequence[str], given: Mapping[str, str]) -> dict[str, str]:
    """row -> base, expert or merge: as given, else by its name. Trained mixtures count as merges: they are compared."""
    named = {
        row: "base" if row == "base" or row.startswith("base ") else "expert" if "expert" in row else "merge"
        for row in rows
    }
    return {row: given.get(row, named[row]) for row in rows}


def duration(seconds: float) -> str:
    """42 -> 42 s, 412 -> 6 min 52 s, 7260 -> 2 h 1 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def signed(value: float) -> str:
    return f"{value:+.1f}".replace("-", "−")


def _targets(table: ScoreTable) -> list[str]:
    return [target for target, _ in table.groups() if target != AVERAGE]


def _charts(table: ScoreTable) -> tuple[list[Chart], dict[str, bytes]]:
    """A bar chart a language, of the primary scores, and the same as PNG."""
    charts, pictures = [], {}
    for number, (target, columns) in enumerate(table.groups()):
        panels = [
            plots.Panel(
                title=column.label,
                values=[table.entries[row, column].value for row in table.rows],
                spreads=[table.entries[row, column].spread for row in table.rows],
                chance=100 * samples.CHANCE if column.task in CHOICES else None,
            )
            for column in columns
        ]
        label = f"Scores by row, {target}: the numbers stand in the table above"
        charts.append(Chart(target, plots.svg_of_scores(table.rows, panels, f"scores{number}", label)))
        pictures[f"scores_{target}.png"] = plots.png_of_scores(table.rows, panels)
    return charts, pictures


def _curves(trainings: Sequence[TrainingResult]) -> tuple[Curves, dict[str, bytes]]:
    """Training curves and the trainings that have none, and the same as PNG."""
    by_label: dict[str, list[plots.Curve]] = {}
    silent = []
    for training in trainings:
        path = training.folder / "log.jsonl"
        rows = read_jsonl(path) if path.is_file() else []
        curve = plots.Curve(
            loss=[(row["step"], row["loss"]) for row in rows if "loss" in row],
            validation=[(row["step"], row["validation_loss"]) for row in rows if "validation_loss" in row],
        )
        if not (curve.loss or curve.validation):
            silent.append(f"{training.label} ({training.name})")
        by_label.setdefault(training.label, []).append(curve)
    if not by_label:
        return Curves("", silent), {}
    svg = plots.svg_of_trainings(by_label, "trainings", "Training loss over steps, a panel for each training")
    return Curves(svg, silent), {"trainings.png": plots.png_of_trainings(by_label)}


def _grouped(marks: Sequence[samples.Mark]) -> list[MarkGroup]:
    """Marks of the same kind on the same row together, in the order found."""
    groups: dict[tuple[str, str], list[str]] = {}
    for one in marks:
        groups.setdefault((one.mark, one.row), []).append(f"{one.label}, seed {one.seed}: {one.detail}")
    return [MarkGroup(mark, row, details) for (mark, row), details in groups.items()]


def _differences(cells: Sequence[CellResult]) -> list[tuple[str, list[str]]]:
    """Each warning of the manifests with the evaluations that carry it."""
    named: dict[str, dict[str, None]] = {}
    for cell in cells:
        for warning in cell.manifest_warnings:
            named.setdefault(warning, {})[cell.name] = None
    return [(warning, list(names)) for warning, names in named.items()]


def _runs(results: Results, folder: Path) -> list[RunLine]:
    """Every run behind the table once; links work until the folders move."""
    runs: dict[str, RunLine] = {}
    for one in results.trainings:
        runs.setdefault(one.name, RunLine("training", one.name, _link(one.folder, folder), [one.label]))
    for cell in results.cells:
        model = cell.checkpoint
        line = RunLine(
            "evaluation",
            cell.name,
            _link(cell.folder, folder),
            [],
            model.name if model else "",
            _link(model, folder),
            cell.seconds,
            (cell.folder / "scores.json").is_file(),
        )
        runs.setdefault(cell.name, line).of.append(f"{cell.row}, {cell.language}, seed {cell.seed}")
    return list(runs.values())


def _link(target: Path | None, folder: Path) -> str:
    """The address of a folder as seen from the page's; empty where there is none."""
    return quote(Path(os.path.relpath(target, folder)).as_posix()) + "/" if target and target.is_dir() else ""
