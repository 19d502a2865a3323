"""From stages asked for to runs in order: parents are the graph, what is finished is skipped, the rest is made here.

A table's rows are command lines; each is composed once an option, and its RUNs may name other rows.
"""

from __future__ import annotations

import re
import statistics
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from graphlib import TopologicalSorter
from typing import Any

from pipeline.config.compose import compose
from pipeline.config.stages import RunStage, Table, TableStage, TrainStage
from pipeline.errors import PipelineError
from pipeline.hub.lock import read_lock
from pipeline.runs.make import why_not_finished
from pipeline.runs.manifest import Manifest, finished, read_manifest
from pipeline.runs.run import Parent, Run, runs_behind
from pipeline.study.build import Known, build, parent
from pipeline.study.prefetch import needs

FIRST_GUESS_SECONDS = {  # until there is a history
    "data": 10.0, "cpt": 1500.0, "sft": 90.0, "merge": 2.0, "eval": 20.0, "select": 2.0, "analyze": 10.0,
}  # fmt: skip


# ---------------------------------------------------------------------------------------------------- tables


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
    known: Known = {}
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


def base_model(table: Table, shared: dict[str, Any], known: Known) -> Parent:
    """The model that an empty row scores: what an sft run of the words in `base` would start from."""
    if not table.base:
        raise PipelineError(f"table={table.name} has an empty row and no table.base: give table.base={{model: ...}}")
    config = row_config({"stage": "sft", "expert": "math", **table.base}, shared)
    assert isinstance(config, TrainStage)
    if config.model.path is None:
        raise PipelineError(f"table.base of table={table.name} is a model with no path: make it in a row of its own")
    return parent(config.model.path, config, "model.path", known, config.model.revision)


def fill(words: Any, language: str, seed: int) -> Any:
    if isinstance(words, dict):
        return {key: fill(value, language, seed) for key, value in words.items()}
    if isinstance(words, list | tuple):
        return [fill(value, language, seed) for value in words]
    return words.replace("{language}", language).replace("{seed}", str(seed)) if isinstance(words, str) else words


def row_config(words: dict[str, Any], shared: dict[str, Any], **later: Any) -> RunStage:
    """The stage of one row: composed once for its options, then given the shared and later fields it leaves out."""
    default = {"stage": "eval", "checkpoint": "row"} if "eval" in words else {}
    config = _composed(tuple(f"{key}={_word(value)}" for key, value in {**default, **words}.items()))
    assert isinstance(config, RunStage)
    names = {item.name for item in fields(config)}
    return replace(config, **{key: value for key, value in {**shared, **later}.items() if key in names - words.keys()})


@lru_cache(maxsize=1024)
def _composed(words: tuple[str, ...]) -> Any:
    return compose(list(words))


def _word(value: Any) -> str:
    """A value as Hydra's grammar reads it."""
    if isinstance(value, list):
        return "[" + ",".join(map(_word, value)) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_word(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, str) and not re.fullmatch(r"[\w./:-]*", value):
        return "'" + value.replace("'", r"\'") + "'"
    return "null" if value is None else str(value)


# ---------------------------------------------------------------------------------------------------- order and cost


def ordered(targets: list[Run]) -> list[Run]:
    """All runs that the targets need, parents first, each once, otherwise in the order asked for."""
    graph: dict[str, list[str]] = {}
    runs: dict[str, Run] = {}

    def add(run: Run) -> None:
        if run.hash not in runs:
            runs[run.hash] = run
            ours = runs_behind(run.parents)
            graph[run.hash] = [parent.hash for parent in ours]
            for one in ours:
                add(one)

    for target in targets:
        add(target)
    return [runs[key] for key in TopologicalSorter(graph).static_order()]


def predict(run: Run, history: list[Manifest]) -> float:
    """Seconds: the median of finished runs like it, else of its stage, else a first guess."""
    same = [one for one in history if one.stage == run.config.stage]
    alike = [one for one in same if one.name.split("-")[:2] == run.label.split("-")[:2]]
    seconds = [one.seconds for one in alike or same]
    return statistics.median(seconds) if seconds else FIRST_GUESS_SECONDS[run.config.stage]


def unfinished(runs: list[Run]) -> dict[str, str]:
    """run hash -> why it has to be made, of runs in order: a run is as unfinished as its parents are."""
    reasons: dict[str, str] = {}
    for run in runs:
        waiting = [one.name for one in runs_behind(run.parents) if one.hash in reasons]
        if reason := why_not_finished(run):
            reasons[run.hash] = reason
        elif waiting or run.config.redo:
            reasons[run.hash] = f"its parent {waiting[0]} is made first" if waiting else "redo=true"
    return reasons


def show(runs: list[Run]) -> str:
    """What would run, what is done, and why not, as a table in text."""
    history = list(finished(runs[0].runs_dir)) if runs else []
    rows, left, reasons = [("run", "stage", "seconds", "state")], 0.0, unfinished(runs)
    for run in runs:
        if run.hash in reasons:
            left += predict(run, history)
            rows.append((run.name, run.config.stage, f"~{predict(run, history):.0f}", reasons[run.hash]))
        else:
            manifest = read_manifest(run.folder)
            assert manifest is not None
            rows.append((run.name, run.config.stage, f"{manifest.seconds:.0f}", "finished"))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = ["  ".join([*map(str.ljust, row[:3], widths), row[3]]) for row in rows]
    if runs:
        wanted = needs(runs)
        missing = wanted.not_pinned(read_lock(runs[0].runs_dir))
        lines += [f"not pinned: {', '.join(missing)}; stage=prefetch locks their revisions"] if missing else []
        lines += wanted.problems
    return "\n".join([*lines, f"{len(reasons)} of {len(runs)} runs to make, about {left:.0f} seconds here"])
