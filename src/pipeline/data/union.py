"""A joint set (Layer Swapping 5.2, Unreasonable Effectiveness 4.2): the union of what two experts'
data runs give.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.benchmarks.local_files import write_rows
from pipeline.data.rows import read_jsonl
from pipeline.errors import PipelineError
from pipeline.text import markdown_table

Row = dict[str, str]


def unite_sets(
    sets: Mapping[str, Path], sides: Mapping[str, str], seed: int | None
) -> tuple[dict[str, Any], dict[str, int]]:
    """train and validation of a joint set, and source -> the rows dropped from it.

    `sets`: expert -> the folder of its data run; `sides`: expert -> the side that its rows are
    given.

    Training rows are those of both, shuffled once by `seed` (None: one set after the other).
    Neither's validation rows are among them: one that the other expert trains on is dropped. The
    validation rows are those of both.

    Raises:
        PipelineError: one set is plain text and the other is not.
    """
    rows = {
        part: [
            row | {"side": sides[expert]}
            for expert, folder in sets.items()
            for row in read_jsonl(folder / f"{part}.jsonl")
        ]
        for part in PARTS
    }
    if len({"text" in row for row in rows["train"]}) > 1:
        raise PipelineError(
            f"{' and '.join(sets)} are plain text and prompts with completions: join sets of one"
            " kind"
        )
    held_out = set(map(row_content, rows["validation"]))
    left_out = Counter(row["side"] for row in rows["train"] if row_content(row) in held_out)
    rows["train"] = [row for row in rows["train"] if row_content(row) not in held_out]
    if seed is not None:
        random.Random(seed).shuffle(rows["train"])
    return rows, {expert: left_out[sides[expert]] for expert in sets}


PARTS = ("train", "validation")


def row_content(row: Row) -> tuple[str, ...]:
    """Return what a row says, whoever wrote it."""
    if "text" in row:
        return (row["text"],)
    return (row["prompt"], row["completion"])


def write_union(
    work: Path, sets: Mapping[str, Path], sides: Mapping[str, str], seed: int | None
) -> dict[str, Any]:
    """train.jsonl, validation.jsonl and the card of a joint set.

    Gives the counts that the card states.
    """
    united, left_out = unite_sets(sets, sides, seed)
    counts: dict[str, Any] = {part: len(rows) for part, rows in united.items()}
    table = []
    for expert, side in sides.items():
        taken = [sum(row["side"] == side for row in rows) for rows in united.values()]
        counts[expert] = {"taken": sum(taken), "left_out": left_out[expert]}
        table.append([expert, sets[expert].name, side, *map(str, (*taken, left_out[expert]))])
    head = (
        "expert",
        "data run",
        "side",
        "training rows",
        "for validation",
        "dropped: the other's validation rows",
    )
    lines = [
        "# Joint training set",
        "",
        f"{counts['train']} training rows, {counts['validation']} for validation: the union of the"
        " sets below, "
        + ("one after the other" if seed is None else f"shuffled once (seed {seed})")
        + ". Their own cards say what they are made of.",
        "",
        *markdown_table(head, table),
    ]
    for part, rows in united.items():
        write_rows(work / f"{part}.jsonl", rows)
    (work / "data_card.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return counts
