#!/usr/bin/env python
"""Write the items of eval=mgsm_steps_4shot below a data_root.

    python scripts/make_mgsm_steps.py DATA_ROOT [LANGUAGE ...]

It reads mgsm/LANGUAGE/{test,train}.jsonl and gsm8k/test.jsonl of the data_root; rows with their own
solutions, as in the small world, need no GSM8K. It writes mgsm_steps/LANGUAGE/*.jsonl and
card.json, which lists what is left out and why. Without LANGUAGE it covers all languages there.
"""

from __future__ import annotations

import sys
from pathlib import Path

from mgsm_steps.items import write_items

from pipeline.errors import PipelineError


def main(data_root: Path, *languages: str) -> None:
    there = sorted(file.parent.name for file in data_root.glob("mgsm/*/test.jsonl"))
    if not languages and not there:
        raise PipelineError(f"{data_root} has no mgsm/LANGUAGE/test.jsonl: put MGSM's files there")
    for code in languages or there:
        card = write_items(data_root, code)
        counts = f"{card['steps']} steps of {card['questions']} questions"
        print(f"{data_root}/mgsm_steps/{code}: {counts}")


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    try:
        main(Path(sys.argv[1]), *sys.argv[2:])
    except PipelineError as error:
        sys.exit(str(error))
