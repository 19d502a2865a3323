"""The report as one page: everything index.html shows, gathered, and the template filled."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pipeline.report import plots, samples
from pipeline.report.scores import AVERAGE, Record
from pipeline.report.tables import Table, column_of


def write_page(results: Mapping[str, Any], table: Table, scores: Sequence[Record], folder: Path) -> Path:
    """Write folder/index.html and folder/plots/*.png; returns the page's path. The page asks nothing of any network."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    folders = {cell["name"]: Path(cell["eval"]) for cell in results["cells"]}
    place = {row: index for index, row in enumerate(table.rows)}
    order = {replace(column, label=""): (index, column.label) for index, column in enumerate(table.columns)}
    places = [(score, order[replace(column_of(score), label="")]) for score in scores if score["primary"]]
    places.sort(key=lambda at: (place[at[0]["row"]], at[1][0], at[0]["seed"]))
    primary = [score | {"label": label} for score, (_, label) in places]
    environment = Environment(
        loader=PackageLoader("pipeline.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["duration"] = duration
    environment.filters["signed"] = lambda value: f"{value:+.1f}".replace("-", "−")
    pictures = folder / "plots"
    pictures.mkdir(exist_ok=True)
    for old in pictures.glob("*.png"):
        old.unlink()  # of an earlier build with other languages
    html = environment.get_template("page.html.j2").render(
        results=results,
        table=table,
        several=len(results["languages"]) > 1,
        charts=_charts(table, pictures),
        curves=_curves(results.get("trainings") or [], pictures),
        comparisons=samples.comparisons(
            primary, folders, roles(table.rows, results.get("roles") or {}), _targets(table)
        ),
        marks=_grouped(samples.sanity(primary, folders)),
        browser=samples.generations(primary, folders),
        differences=_differences(results["cells"]),
        runs=_runs(results, folder),
    )
    index = folder / "index.html"
    index.write_text(html, encoding="utf-8")
    return index


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


def _targets(table: Table) -> list[str]:
    return [target for target, _ in table.groups() if target != AVERAGE]


def _charts(table: Table, pictures: Path) -> list[dict[str, str]]:
    """A bar chart a language, of the primary scores."""
    charts = []
    for number, (target, columns) in enumerate(table.groups()):
        panels = [
            plots.Panel(
                title=column.label,
                values=[table.cells[row, column].value for row in table.rows],
                spreads=[table.cells[row, column].spread for row in table.rows],
                chance=100 * samples.CHANCE if column.task in samples.FOUR_WAY else None,
            )
            for column in columns
        ]
        label = f"Scores by row, {target}: the numbers stand in the table above"
        charts.append({"target": target, "svg": plots.svg_of_scores(table.rows, panels, f"scores{number}", label)})
        (pictures / f"scores_{target}.png").write_bytes(plots.png_of_scores(table.rows, panels))
    return charts


def _curves(trainings: Sequence[Mapping[str, Any]], pictures: Path) -> dict[str, Any]:
    """Training curves and the trainings that have none."""
    by_label: dict[str, list[plots.Curve]] = {}
    silent = []
    for training in trainings:
        path = Path(training["folder"]) / "log.jsonl"
        rows = samples.read_jsonl(path) if path.is_file() else []
        curve = plots.Curve(
            loss=[(row["step"], row["loss"]) for row in rows if "loss" in row],
            validation=[(row["step"], row["validation_loss"]) for row in rows if "validation_loss" in row],
        )
        if not (curve.loss or curve.validation):
            silent.append(f"{training['label']} ({training['name']})")
        by_label.setdefault(training["label"], []).append(curve)
    if not by_label:
        return {"svg": "", "silent": silent}
    (pictures / "trainings.png").write_bytes(plots.png_of_trainings(by_label))
    svg = plots.svg_of_trainings(by_label, "trainings", "Training loss over steps, a panel for each training")
    return {"svg": svg, "silent": silent}


def _grouped(marks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Marks of the same kind on the same row together, in the order found."""
    groups: dict[tuple[str, str], list[str]] = {}
    for mark in marks:
        groups.setdefault((mark["mark"], mark["row"]), []).append(
            f"{mark['label']}, seed {mark['seed']}: {mark['detail']}"
        )
    return [{"mark": mark, "row": row, "details": details} for (mark, row), details in groups.items()]


def _differences(cells: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """Each warning of the manifests with the evaluations that carry it."""
    named: dict[str, dict[str, None]] = {}
    for cell in cells:
        for warning in cell.get("manifest_warnings") or []:
            named.setdefault(str(warning), {})[cell["name"]] = None
    return [(warning, list(names)) for warning, names in named.items()]


def _runs(results: Mapping[str, Any], folder: Path) -> list[dict[str, Any]]:
    """Every run behind the table once, with links relative to the page (they work until the folders move)."""
    runs: dict[str, dict[str, Any]] = {}

    def link(target: str | None) -> str:
        return quote(Path(os.path.relpath(target, folder)).as_posix()) + "/" if target and Path(target).is_dir() else ""

    for training in results.get("trainings") or []:
        entry = {
            "kind": "training",
            "name": training["name"],
            "href": link(training["folder"]),
            "of": [training["label"]],
        }
        entry |= {"model": "", "model_href": "", "seconds": training.get("seconds"), "finished": True}
        runs.setdefault(training["name"], entry)
    for cell in results["cells"]:
        model = cell.get("checkpoint")
        entry = {"kind": "evaluation", "name": cell["name"], "href": link(cell["eval"]), "of": []}
        entry |= {"model": Path(model).name if model else "", "model_href": link(model), "seconds": cell.get("seconds")}
        entry |= {"finished": (Path(cell["eval"]) / "scores.json").is_file()}
        run = runs.setdefault(cell["name"], entry)
        run["of"].append(f"{cell['row']}, {cell['language']}, seed {cell['seed']}")
    return list(runs.values())
