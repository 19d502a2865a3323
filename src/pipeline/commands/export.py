"""Stage export: packs a table's results in one file, and renders the page of such a file; see also export_model."""

from __future__ import annotations

import math
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

from pipeline.benchmarks import find_benchmark, primary_metric
from pipeline.config import conf
from pipeline.config.stages import Export, ExportStage, ReportStage
from pipeline.errors import PipelineError
from pipeline.files import conf_added, write_atomically
from pipeline.progress import say
from pipeline.report.load.archive import read_archive, write_archive
from pipeline.report.load.contents import CellResult, Results
from pipeline.report.load.scores import Written, percent_factor, primary_rows, read_evaluations
from pipeline.report.render.cells import cells_csv
from pipeline.report.render.latex import cells_latex
from pipeline.report.stats.translations import corpus_score
from pipeline.report.write import write_report
from pipeline.results.collect import gather_results
from pipeline.results.questions import answers_of, translations_of
from pipeline.results.report_state import Reported
from pipeline.tables.planned_runs import Planning


def export(config: ExportStage) -> str:
    """Pack the finished results of a table into the file export.to, or write a checkpoint to a folder or the Hub."""
    if config.export.to is None:
        suffix = {"archive": "zip", "latex": "tex", "markdown": "md", "csv": "csv", "figures": "d"}[
            config.export.format
        ]
        place = "./DIR or export.to=hub:org/name" if config.checkpoint else f"./{Path(config.table).stem}.{suffix}"
        raise PipelineError(f"stage=export needs export.to: give export.to={place}")
    if config.checkpoint is not None:
        if config.every or config.data_root or config.free_snapshots is not None:
            raise PipelineError("every, data_root and table.free_snapshots apply to table=T only: remove them")
        if config.export.format != Export().format:
            raise PipelineError("export.format applies to table=T only: remove it")
        if config.export.adapter and config.export.dtype:
            raise PipelineError(
                f"export.dtype={config.export.dtype} rounds what export.adapter=true writes exactly, in float32: "
                "remove one of them"
            )
        from pipeline.commands.export_model import export_model

        return export_model(config)
    if config.export != Export(to=config.export.to, format=config.export.format):
        raise PipelineError(
            "export.dtype, export.adapter, export.licence and export.private apply to checkpoint=RUN only: remove them"
        )
    return str(export_table(config, config.export.to))


def export_table(config: ExportStage, to: str) -> Path:
    file, figures = Path(to), config.export.format == "figures"
    if figures and file.is_dir() and any(file.iterdir()):
        raise PipelineError(f"export.to={file} holds files: name a new or empty folder for export.format=figures")
    if (file.is_file() if figures else file.is_dir()) or not file.parent.is_dir():
        kind = "folder" if figures else "file"
        raise PipelineError(f"export.to={file} is not a place for a {kind}: name one in an existing folder")
    remembered = Reported.of(config)
    planning = Planning.of(remembered.asked_again(config))
    results = gather_results(planning, remembered.failed)
    if not results.evaluations:
        raise PipelineError(f"table={config.table} has no finished evaluation in {config.runs_dir}: nothing to export")
    if figures:
        from pipeline.report.page import write_figures

        file.mkdir(exist_ok=True)
        for reason in write_figures(results, file):
            say(f"not drawn: {reason}")
        return file
    if config.export.format != "archive":
        write_atomically(file, cells_text(results, config.export.format))
        return file
    roots = [str(Path(root).resolve()) for root in (config.runs_dir, planning.config.data_root, ".") if root]
    return write_archive(
        results, conf.table_file(config.table).read_text(encoding="utf-8"), file, [*roots, str(Path.home())]
    )


def cells_text(results: Results, form: str) -> str:
    """The table's cells as text in the form latex, markdown or csv."""
    if form == "latex":
        return cells_latex(results)
    if form == "csv":
        return cells_csv(results)
    with tempfile.TemporaryDirectory() as folder:  # its headline depends on all answers
        return write_report(results, Path(folder)).with_name("cells.md").read_text(encoding="utf-8")


def report_archive(config: ReportStage) -> Path:
    """Write the page of an archive to runs_dir/reports, like that of a table computed here. Returns its path."""
    with tempfile.TemporaryDirectory() as folder, conf_added(Path(folder) / "conf"):  # its languages
        results = replace(read_archive(Path(config.table), Path(folder)), base_tolerance=config.report.base_tolerance)
        report = Path(config.runs_dir) / "reports" / results.table
        reported = Reported.read_state(report)
        reported.refuse_fewer(report, results, config.report.fewer)
        try:
            refuse_other_numbers(config.table, results)
            page = write_report(results, report)
        except PipelineError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            problem = f"{config.table} holds scores or answers of another kind than this program's"
            raise PipelineError(f"{problem}: give what stage=export wrote") from error
        reported.write_state(report, finished=results.finished)
    return page


SHARES = ("choice", "number", "program")  # kinds whose score is the mean of those of its answers
TOLERANCE = 0.05  # points by which a cell may differ from its answers: half of the last digit shown


def refuse_other_numbers(table: str, results: Results) -> None:
    """Raise PipelineError for a cell of an archive whose number is not that of its answers, or not finite.

    A mean over several scores is between the least and the largest of them, and their mean where they fill a grid.
    """
    written = read_evaluations(results)
    for cell in results.cells:
        place, value = f"{table}: the cell of row {cell.row!r}, column {cell.column!r}", cell.as_published
        shown = (cell.value, cell.low, cell.high, cell.maximum, cell.published, cell.experts)
        if not all(number is None or math.isfinite(number) for number in shown):
            raise PipelineError(f"{place} holds a number that is not finite: give the file that stage=export wrote")
        scores = numbers_of(table, cell, results, written)
        if value is None or not scores:
            continue
        is_mean = cell.maximum is None and is_grid([dict(score.at) for score in cell.scores])
        low, high = (statistics.fmean(scores),) * 2 if is_mean else (min(scores), max(scores))
        if not low - TOLERANCE <= value <= high + TOLERANCE:
            raise PipelineError(
                f"{place} is {value:.1f}, which its answers do not give ({low:.1f}"
                f"{'' if is_mean else f' to {high:.1f}'}): give the file that stage=export wrote"
            )


def is_grid(places: list[dict[str, str]]) -> bool:
    """Whether these are all combinations of the values of their axes, each once: a mean step by step over the axes is
    then the mean over all."""
    distinct = {tuple(sorted(place.items())) for place in places}
    values = [{place.get(axis) for place in places} for axis in sorted({axis for place in places for axis in place})]
    return len(distinct) == len(places) == math.prod(map(len, values))


def numbers_of(table: str, cell: CellResult, results: Results, written: Written) -> list[float]:
    """The score behind each evaluation of a cell, by its answers; by its scores.json for a metric that is not of single
    answers. Empty where one of them is unknown, as for a difference of two tasks."""
    benchmark, metric = find_benchmark(cell.task), cell.metric or primary_metric(cell.task)[0]
    by_run: dict[str, list[float]] = {}
    once = replace(cell, scores=list({score.run: score for score in cell.scores}.values()))
    for score, row in primary_rows(once, written):
        file = results.evaluations[score.run].folder / "samples" / f"{row.task}.{row.where}.jsonl"
        value = math.nan if row.value is None else float(row.value)
        if row.value is not None and benchmark and metric == benchmark.metric and file.is_file():
            if benchmark.kind == "translation":
                value = 100 * corpus_score(metric, row.where, translations_of(file).values())
            elif benchmark.kind in SHARES and not benchmark.of_harness:
                value = statistics.fmean(answers_of(file, metric).values())
            if not percent_factor(metric) * abs(value - row.value) <= TOLERANCE:
                problem = f"{table}: scores.json of {score.run} has {row.value:.4g}, its answers {value:.4g}"
                raise PipelineError(f"{problem}: give the file that stage=export wrote")
        by_run.setdefault(score.run, []).append(percent_factor(metric) * value)
    known = [statistics.fmean(by_run[score.run]) for score in cell.scores if score.run in by_run]
    return known if len(known) == len(cell.scores) and all(map(math.isfinite, known)) else []
