"""Stage data: an expert's training set, drawn from its sources, or the small world.

A training set is train.jsonl and validation.jsonl with prompt and completion (or text) a row, and a data card that says
what was taken. Exact duplicates are removed, and validation rows are kept apart.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.config import DataStage, Source
from pipeline.data.sources import Example, read
from pipeline.knobs import PipelineError

if TYPE_CHECKING:
    from pipeline.runs import Run
    from pipeline.tracking import Tracker


def make(run: Run, work: Path, tracker: Tracker) -> dict[str, Any]:
    """The data stage. Gives the counts that the card states."""
    config = run.config
    assert isinstance(config, DataStage)
    if config.expert.world is not None:
        from pipeline.data import sandbox

        counts = sandbox.write(work, config.expert.world)
    else:
        root = run.parents["data_root"].folder if "data_root" in run.parents else None
        counts = build(config, root, work)
    tracker.summary(counts)
    return {"counts": counts}


def build(config: DataStage, data_root: Path | None, work: Path) -> dict[str, Any]:
    """Read, deduplicate, shuffle, split, write. The order is a function of the seed."""
    distinct: dict[tuple[tuple[str, str], ...], Example] = {}
    counts: dict[str, Any] = {}
    for name, source in config.expert.sources.items():
        rows, before = list(read(name, source, data_root)), len(distinct)
        if source.side is not None:
            rows = [row | {"side": source.side} for row in rows]
        usable = [row for row in rows if (row.get("completion") or row.get("text") or "").strip()]
        distinct |= {tuple(row.items()): row for row in usable}
        duplicates = len(usable) - (len(distinct) - before)
        counts[name] = {"rows": len(rows), "duplicates": duplicates, "empty": len(rows) - len(usable)}
    examples = list(distinct.values())
    if len({frozenset(row) for row in examples}) > 1:
        raise PipelineError(
            f"expert={config.expert.name} mixes plain text with prompts and completions: keep one kind an expert"
        )
    wanted = (config.data.size or 1) + config.data.validation
    if len(examples) < wanted:
        raise PipelineError(
            f"data.size={config.data.size} and data.validation={config.data.validation} ask for {wanted} rows, "
            f"expert={config.expert.name} has {len(examples)}: ask for fewer"
        )
    if config.data.shuffle:
        random.Random(config.seed).shuffle(examples)
    validation, train = examples[: config.data.validation], examples[config.data.validation :][: config.data.size]
    write_jsonl(work / "train.jsonl", train)
    write_jsonl(work / "validation.jsonl", validation)
    counts |= {"train": len(train), "validation": len(validation)}
    (work / "data_card.md").write_text(card(config, counts), encoding="utf-8")
    return counts


def card(config: DataStage, counts: dict[str, Any]) -> str:
    """What was taken and from where, as Markdown."""
    lines = [
        f"# Training set of expert {config.expert.name}",
        "",
        f"{counts['train']} training rows, {counts['validation']} for validation.",
    ]
    lines += [
        "",
        "| source | hub id | revision | licence | rows | duplicates dropped | empty dropped |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, source in config.expert.sources.items():
        found = counts[name]
        cells = (
            name,
            source.hub or "local",
            source.revision or "not pinned",
            source.licence,
            found["rows"],
            found["duplicates"],
            found["empty"],
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def write_jsonl(path: Path, rows: list[Any]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def read_jsonl(path: Path) -> list[Any]:
    """Every line of a JSONL file. PipelineError names the file and line that is not JSON."""
    rows = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                where = f"{path.parent.name}/{path.name}, line {number}"
                raise PipelineError(f"{where} is not JSON: make the run again with redo=true") from None
    return rows


def files_read(sources: dict[str, Source], data_root: Path) -> list[Path]:
    """The files below data_root that decide the set, checked to be there."""
    from pipeline.data.sources import local_file

    return [local_file(source, data_root) for source in sources.values()]
