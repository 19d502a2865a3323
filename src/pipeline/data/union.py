"""Joint sets: the union of two experts' training sets.

See Layer Swapping 5.2 and Unreasonable Effectiveness 4.2.
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
    """Return the rows for training and validation, and how many rows of each expert were dropped.

    Both have the rows of both experts; the training rows are shuffled once. A training row that the
    other expert holds out for validation is dropped.

    Args:
        sets: The folder of each expert's data run.
        sides: The side that each expert's rows train.
        seed: The seed of the shuffle. None: one set after the other.

    Raises:
        PipelineError: One set is plain text and the other is not.
    """
    rows: dict[str, list[Row]] = {"train": [], "validation": []}
    for part, united in rows.items():
        for expert, folder in sets.items():
            side = {"side": sides[expert]}
            united += [row | side for row in read_jsonl(folder / f"{part}.jsonl")]
    if len({"text" in row for row in rows["train"]}) > 1:
        raise PipelineError(
            f"{' and '.join(sets)} are plain text and prompts with completions. Join sets of one"
            " kind."
        )
    held_out = set(map(row_content, rows["validation"]))
    left_out, train = Counter[str](), []
    for row in rows["train"]:
        if row_content(row) in held_out:
            left_out[row["side"]] += 1
        else:
            train.append(row)
    rows["train"] = train
    if seed is not None:
        random.Random(seed).shuffle(train)
    return rows, {expert: left_out[sides[expert]] for expert in sets}


def row_content(row: Row) -> tuple[str, ...]:
    """Return the text of a row, whichever expert has it."""
    if "text" in row:
        return (row["text"],)
    return (row["prompt"], row["completion"])


def write_union(
    work: Path, sets: Mapping[str, Path], sides: Mapping[str, str], seed: int | None
) -> dict[str, Any]:
    """Write the files and the card of a joint set, and return the card's counts.

    Args:
        work: The folder of the files.
        sets: The folder of each expert's data run.
        sides: The side that each expert's rows train.
        seed: The seed of the shuffle. None: one set after the other.
    """
    united, left_out = unite_sets(sets, sides, seed)
    counts: dict[str, Any] = {}
    taken = Counter[str]()
    for part, rows in united.items():
        counts[part] = len(rows)
        taken.update(row["side"] for row in rows)
        write_rows(work / f"{part}.jsonl", rows)
    table = []
    for expert, side in sides.items():
        counts[expert] = {"taken": taken[side], "left_out": left_out[expert]}
        table.append([expert, sets[expert].name, side, str(taken[side]), str(left_out[expert])])
    head = ("expert", "data run", "side", "rows", "dropped: the other's validation rows")
    order = "one after the other" if seed is None else f"shuffled once (seed {seed})"
    summary = (
        f"{counts['train']} training rows, {counts['validation']} for validation: the union of the"
        f" sets below, {order}."
    )
    lines = ["# Joint training set", "", summary, "", *markdown_table(head, table)]
    (work / "data_card.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return counts
