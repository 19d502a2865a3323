"""The small world: a synthetic world with known truth, as files in the schemas and the layout of
the real data.

scripts/make_small_world.py generates it (scripts/small_world documents the files); the package
ships its files in one archive, below a folder each: `dev` and `test`, of which the first items are
written, `exemplars`, and `world`, which a folder with items alone lacks.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import IO, Literal, cast

ARCHIVE = Path(__file__).with_name("small_world.tar.xz")
LARGEST = 500  # items per benchmark, split and language
TRAINING = {
    "orca_math/train.jsonl": 6000,
    "aya/train.jsonl": 16000,
    "text/train.jsonl": 2000,
}  # rows of a language


def write(
    folder: Path, holds: Literal["training sets and items", "items"], dev: int, test: int
) -> dict[str, int]:
    """Write the files below `folder`, with `dev` development and `test` test items.

    Return the rows of each.
    """
    counts: dict[str, int] = {}
    with tarfile.open(ARCHIVE) as archive:
        for member in archive:
            part, _, name = member.name.partition("/")
            if part == "world" and holds == "items" and name != "world.json":
                continue
            path, file = folder / name, cast(IO[bytes], archive.extractfile(member))
            path.parent.mkdir(parents=True, exist_ok=True)
            lines = file.readlines()[: {"dev": dev, "test": test}.get(part)]
            path.write_bytes(b"".join(lines))
            if path.suffix == ".jsonl":
                counts[name] = len(lines)
    record = json.loads((folder / "world.json").read_text(encoding="utf-8"))
    (folder / "world.json").write_text(
        json.dumps(record | {"holds": holds}) + "\n", encoding="utf-8"
    )
    if holds != "items":
        with open(folder / "data_card.md", "a", encoding="utf-8") as card:
            card.writelines(f"- {name}: {size}\n" for name, size in counts.items())
    return counts
