"""Rows as JSON lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pipeline.errors import PipelineError


def read_jsonl(path: Path) -> list[Any]:
    """Every line of a JSONL file. PipelineError names the file and line that is not JSON."""
    rows = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                place = f"{path.parent.name}/{path.name}, line {number}"
                raise PipelineError(f"{place} is not JSON: make the run again with redo=true") from None
    return rows
