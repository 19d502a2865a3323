"""A table's rows as runs: each row is a command line, composed once an option, and its RUNs may name other rows."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from pipeline.config.stages import RunStage, Table, TableStage, TrainStage
from pipeline.config.words import stage_of
from pipeline.errors import PipelineError
from pipeline.runs.run import Parent, Run
from pipeline.study.build.resolver import Resolver
from pipeline.study.stages import build


@dataclass
class Cell:
    """One row of a table for one language and seed: the model, and the run that scores it."""

    row: str
    language: str
    seed: int
    model: Parent
    eval: Run


@dataclass
class Study:
    """A table as runs. `rows` keeps the table's order."""

    config: TableStage
    cells: list[Cell] = field(default_factory=list)

    @property
    def targets(self) -> list[Run]:
        return [cell.eval for cell in self.cells]


def study(config: TableStage) -> Study:
    """Each row for each language and seed. Rows that do not speak of the language are one run for all of them."""
    table, found = config.table, Study(config)
    shared: dict[str, Any] = {
        "runs_dir": config.runs_dir, "tracking": config.tracking, "threads": config.threads, "group": table.name,
    }  # fmt: skip
    known: dict[str, Parent] = {}
    data_root = config.data_root
    if table.data_root is not None:
        known["data_root"] = build(row_config(table.data_root, shared))
        data_root = "data_root"
    for language in table.languages:
        for seed in table.seeds:
            named = dict(known)
            for row, words in table.rows.items():
                filled = fill(words, language, seed)
                if filled:
                    named[row] = build(row_config(filled, shared, data_root=data_root), named)
                else:
                    named[row] = base_model(table, shared, named)
                scored = row_config(fill(table.eval, language, seed), shared, data_root=data_root, checkpoint=row)
                found.cells.append(Cell(row, language, seed, named[row], build(scored, named)))
    return found


def base_model(table: Table, shared: dict[str, Any], known: dict[str, Parent]) -> Parent:
    """The model that an empty row scores: what an sft run of the words in `base` would start from."""
    if not table.base:
        raise PipelineError(f"table={table.name} has an empty row and no table.base: give table.base={{model: ...}}")
    config = row_config({"stage": "sft", "expert": "math", **table.base}, shared)
    assert isinstance(config, TrainStage)
    if config.model.path is None:
        raise PipelineError(f"table.base of table={table.name} is a model with no path: make it in a row of its own")
    resolver = Resolver(Path(config.runs_dir), build, known)
    return resolver.model(config.model.path, "model.path", config.model.revision)


def fill(words: Any, language: str, seed: int) -> Any:
    if isinstance(words, dict):
        return {key: fill(value, language, seed) for key, value in words.items()}
    if isinstance(words, list | tuple):
        return [fill(value, language, seed) for value in words]
    return words.replace("{language}", language).replace("{seed}", str(seed)) if isinstance(words, str) else words


def row_config(words: dict[str, Any], shared: dict[str, Any], **later: Any) -> RunStage:
    """The stage of one row: composed once for its options, then given the shared and later fields it leaves out."""
    default = {"stage": "eval", "checkpoint": "row"} if "eval" in words else {}
    config = stage_of({**default, **words})
    assert isinstance(config, RunStage)
    names = {item.name for item in fields(config)}
    return replace(config, **{key: value for key, value in {**shared, **later}.items() if key in names - words.keys()})
