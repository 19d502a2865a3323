"""Download what `table=laptop_real` reads from the Hub into a data_root.

    python scripts/get_laptop_data.py DIR

It writes mgsm/LANGUAGE/{train,test}.jsonl and gsm8k/{train,test}.jsonl, aya/train.jsonl in the
table's languages, and the items of mgsm_steps. Existing files are kept.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from mgsm_steps.items import write_items

from pipeline.config.data import Source
from pipeline.data.load import open_rows
from pipeline.errors import PipelineError
from pipeline.files import write_atomically

LANGUAGES = {"en": "English", "te": "Telugu", "sw": "Swahili", "bn": "Bengali"}
MGSM, GSM8K, AYA = "juletxara/mgsm", "openai/gsm8k", "CohereLabs/aya_dataset"


def sources() -> Iterator[tuple[str, Source]]:
    """Yield the files below data_root, and their sources on the Hub."""
    for split in ("train", "test"):
        source = Source(hub=GSM8K, hub_config="main", split=split, rows="text", file="")
        yield f"gsm8k/{split}.jsonl", source
        for code in LANGUAGES:
            source = Source(hub=MGSM, hub_config=code, split=split, rows="text", file="")
            yield f"mgsm/{code}/{split}.jsonl", source
    yield "aya/train.jsonl", Source(hub=AYA, rows="aya", file="")


def main(folder: Path) -> None:
    for name, source in sources():
        file = folder / name
        if file.is_file():
            continue
        rows = list(open_rows(source, None, 0, None))
        if source.hub == AYA:
            rows = [row for row in rows if row["language"] in LANGUAGES.values()]
        file.parent.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        write_atomically(file, "".join(lines))
        print(file, len(rows), "rows")
    for code in LANGUAGES:
        write_items(folder, code)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    try:
        main(Path(sys.argv[1]))
    except PipelineError as error:
        sys.exit(str(error))
