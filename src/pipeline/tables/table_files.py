"""Find and read the file of table=NAME."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import yaml

from pipeline.config import conf
from pipeline.config.stages import TableStage
from pipeline.errors import PipelineError
from pipeline.files import MOST_BYTES, refuse_special
from pipeline.tables.reader import read_table
from pipeline.tables.schema import Table
from pipeline.tables.table_yaml import merge_inherited


def find_table(name: str) -> tuple[str, str]:
    """Return the text of the file of table=NAME, and the file's name for errors."""
    path = conf.table_file(name)
    if path.suffix == ".zip":
        raise PipelineError(
            f"table={name} is a report in one file. Unzip it, and open its index.html."
        )
    try:
        text = refuse_special(path, MOST_BYTES).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise PipelineError(
            f"table={name} is not UTF-8 ({error}). Write it again in UTF-8."
        ) from error
    if "/" in name or name.startswith("."):
        return text, name
    return text, path.name


def expanded_text(name: str) -> str:
    """Return a table with its `defaults`, or a study in the table language, as YAML."""
    text, file = find_table(name)
    settings = merge_inherited(text, file, find_table, ())
    return yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)


def load_table(config: TableStage) -> Table:
    """Load the requested table, with its `every` overridden by the command line."""
    overrides = dict(config.every)
    if config.threads is not None:
        overrides["threads"] = config.threads
    data_root = config.data_root
    if data_root is not None:
        if "/" not in data_root and Path(data_root).is_dir():
            data_root = f"./{data_root}"
        overrides["data_root"] = data_root
    text, file = find_table(config.table)
    table = read_table(text, file, find_table, overrides)
    if config.free_snapshots is None:
        return table
    return replace(table, free_snapshots=config.free_snapshots)
