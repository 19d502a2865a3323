"""The small world: a synthetic world with known truth, as files in the schemas of the real data.

scripts/make_small_world.py generates it (scripts/small_world documents the files). The package has
its files in one archive, in these folders: `dev` and `test`, whose first items are written,
`exemplars`, and `world`, which is left out of folders that have only items.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import IO, Literal, cast

ARCHIVE = Path(__file__).with_name("small_world.tar.xz")
# rows of a language
TRAINING = {"orca_math/train.jsonl": 6000, "aya/train.jsonl": 16000, "text/train.jsonl": 2000}


def write(
    folder: Path, holds: Literal["training sets and items", "items"], dev: int, test: int
) -> dict[str, int]:
    """Write the files of the small world and return the rows of each file.

    Args:
        folder: The folder of the files.
        holds: The files to write.
        dev: The number of development items.
        test: The number of test items.
    """
    counts: dict[str, int] = {}
    limits = {"dev": dev, "test": test}
    with tarfile.open(ARCHIVE) as archive:
        for member in archive:
            part, _, name = member.name.partition("/")
            if part == "world" and holds == "items" and name != "world.json":
                continue
            file = cast(IO[bytes], archive.extractfile(member))
            lines = file.readlines()[: limits.get(part)]
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"".join(lines))
            if path.suffix == ".jsonl":
                counts[name] = len(lines)
    record_file = folder / "world.json"
    record = json.loads(record_file.read_text(encoding="utf-8")) | {"holds": holds}
    record_file.write_text(json.dumps(record) + "\n", encoding="utf-8")
    if holds != "items":
        with open(folder / "data_card.md", "a", encoding="utf-8") as card:
            for name, size in counts.items():
                card.write(f"- {name}: {size}\n")
    return counts
