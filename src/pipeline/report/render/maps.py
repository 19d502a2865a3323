"""Maps of the changes by training, drawn in the page's style from the files of an analysis."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

from pipeline.analyze.heatmaps import map_of, svg_of_maps
from pipeline.errors import PipelineError


def changes_of(name: str, folder: Path, number: int) -> tuple[str, str]:
    """Return a map of the rows that training changed, as SVG, and its caption.

    It shows the share of rows with a change above the published threshold.

    `number` distinguishes the maps of a page.

    Raises:
        PipelineError: If the files of the analysis cannot be read.
    """
    rows: list[dict[str, Any]] = []
    try:
        with open(folder / "delta.csv", encoding="utf-8", newline="") as stream:
            for row in csv.DictReader(stream):
                layer = row["layer"]
                rows.append({**row, "layer": int(layer) if layer else ""})
        facts = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
        maps = [map_of(fact, rows) for fact in facts.values()]
        svg = svg_of_maps(maps, f"share{number}", f"share of rows that training changed, {name}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PipelineError(
            f"delta.csv of {name} cannot be read. Rerun it with redo=true."
        ) from error
    return svg, f"{name}: share of rows above the published threshold."
