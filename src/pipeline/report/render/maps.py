"""Maps of the changes by training, drawn in the page's style from the files of an analysis."""

from __future__ import annotations

import csv
import json
from pathlib import Path

from pipeline.analyze.heatmaps import map_of, svg_of_maps
from pipeline.errors import PipelineError


def changes_of(name: str, folder: Path, number: int) -> list[tuple[str, str]]:
    """(SVG, caption) of the relative norm of each change of an analysis, and of the share of rows above the published
    threshold. Raises PipelineError if its files are unreadable."""
    try:
        with open(folder / "delta.csv", encoding="utf-8", newline="") as stream:
            rows = [{**row, "layer": int(row["layer"]) if row["layer"] else ""} for row in csv.DictReader(stream)]
        facts = json.loads((folder / "facts.json").read_text(encoding="utf-8")).values()
        relative, share = ([map_of(fact, rows, measure) for fact in facts] for measure in ("relative", "share"))
        label = f"relative change by layer and parameter, {name}"
        return [
            (svg_of_maps(relative, f"relative{number}", label, None),
             f"{name}: norm of the change over the norm of the base's parameter; greener is larger."),
            (svg_of_maps(share, f"share{number}", f"share of rows that training changed, {name}"),
             f"{name}: share of rows above the published threshold."),
        ]  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PipelineError(f"delta.csv of {name} cannot be read: rerun it with redo=true") from error
