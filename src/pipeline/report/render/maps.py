"""Maps of the changes by training, drawn in the page's style from the files of an analysis."""

from __future__ import annotations

import csv
import json
from pathlib import Path

from pipeline.analyze.heatmaps import map_of, svg_of_maps
from pipeline.errors import PipelineError


def changes_of(name: str, folder: Path, number: int) -> tuple[str, str]:
    """Return (SVG, caption) of the share of rows that training changed by more than the published
    threshold.

    Raises PipelineError if the files of the analysis cannot be read.
    """
    try:
        with open(folder / "delta.csv", encoding="utf-8", newline="") as stream:
            rows = [
                {**row, "layer": int(row["layer"]) if row["layer"] else ""}
                for row in csv.DictReader(stream)
            ]
        facts = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
        maps = [map_of(fact, rows) for fact in facts.values()]
        svg = svg_of_maps(maps, f"share{number}", f"share of rows that training changed, {name}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PipelineError(
            f"delta.csv of {name} cannot be read: rerun it with redo=true"
        ) from error
    return svg, f"{name}: share of rows above the published threshold."
