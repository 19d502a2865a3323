"""Maps of the changes by training, drawn in the page's style from the files of an analysis."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from pathlib import Path

from pipeline.analyze.heatmaps import map_of, svg_of_maps
from pipeline.errors import PipelineError


@dataclass(frozen=True)
class Changes:
    """An analysis: SVG of the relative norm of each change, and of the share of rows above the published threshold."""

    name: str
    relative: str
    share: str


def changes_of(name: str, folder: Path, number: int) -> Changes:
    """The maps of an analysis. Raises PipelineError if its files are unreadable."""
    try:
        with open(folder / "delta.csv", encoding="utf-8", newline="") as stream:
            rows = [{**row, "layer": int(row["layer"]) if row["layer"] else ""} for row in csv.DictReader(stream)]
        facts = json.loads((folder / "facts.json").read_text(encoding="utf-8")).values()
        relative, share = ([map_of(fact, rows, measure) for fact in facts] for measure in ("relative", "share"))
        return Changes(
            name,
            svg_of_maps(relative, f"relative{number}", f"relative change by layer and parameter, {name}", None),
            svg_of_maps(share, f"share{number}", f"share of rows that training changed, {name}"),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PipelineError(f"delta.csv of {name} cannot be read: rerun it with redo=true") from error
