"""Stage export: writes a table's results to one file or folder.

See export_model.py for the export of a checkpoint.
"""

from __future__ import annotations

from pathlib import Path

from pipeline.commands.export_model import check_place, export_model
from pipeline.config import conf
from pipeline.config.stages import Export, ExportStage
from pipeline.errors import PipelineError
from pipeline.files import write_atomically
from pipeline.progress import say
from pipeline.report.archive import write_archive
from pipeline.report.collect import gather_results
from pipeline.report.render.latex import cells_latex
from pipeline.report.report_state import Reported
from pipeline.tables.planned_runs import Planning


def export(config: ExportStage) -> str:
    """Pack a table's results into the file export.to, or export a checkpoint."""
    settings = config.export
    if settings.to is None:
        suffixes = {"archive": "zip", "latex": "tex"}
        suffix = suffixes.get(settings.format, "d")
        if config.checkpoint:
            address = "./DIR"
        else:
            address = f"./{Path(config.table).stem}.{suffix}"
        raise PipelineError(f"stage=export needs export.to. Set export.to={address}.")
    if config.checkpoint is not None:
        if config.every or config.data_root or config.free_snapshots is not None:
            raise PipelineError(
                "every, data_root and table.free_snapshots apply to table=T only. Remove them."
            )
        if settings.format != Export().format:
            raise PipelineError(
                f"export.format={settings.format} applies to table=T only. Remove it."
            )
        if settings.adapter and settings.dtype:
            raise PipelineError(
                f"export.dtype={settings.dtype} would round the float32 values that"
                " export.adapter=true writes exactly. Remove one of the two."
            )
        return export_model(config)
    if settings != Export(to=settings.to, format=settings.format):
        raise PipelineError(
            "export.dtype, export.adapter and export.licence apply to checkpoint=RUN only. Remove"
            " them."
        )
    return str(export_table(config, settings.to))


def export_table(config: ExportStage, to: str) -> Path:
    file, form = Path(to), config.export.format
    check_place(file, "file")
    if form == "archive" and file.suffix != ".zip":
        raise PipelineError(
            f"export.to={file} is not the name of an archive. Set"
            f" export.to={file.with_suffix('.zip')}."
        )
    if file.is_file():
        say(f"export.to={file} exists and is replaced.")
    remembered = Reported.of(config)
    planning = Planning.of(remembered.asked_again(config))
    results = gather_results(planning, remembered.failed)
    if not results.evaluations:
        raise PipelineError(
            f"table={config.table} has no finished evaluation in {config.runs_dir}, so the export"
            " would be empty. Run stage=table first."
        )
    if form == "latex":
        write_atomically(file, cells_latex(results))
        return file
    return write_archive(results, conf.table_file(config.table).read_text(encoding="utf-8"), file)
