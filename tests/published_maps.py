"""The maps of the first paper, figures 4 to 9, as they are printed."""

import csv
import itertools

from pipeline.analyze.heatmaps import Map
from pipeline.papers.published import HEATMAPS


def published_maps() -> list[Map]:
    """Return a map for each figure, with layers from the top."""
    with open(HEATMAPS, newline="", encoding="utf-8") as stream:
        rows = sorted(
            csv.DictReader(stream), key=lambda row: (int(row["figure"]), -int(row["layer"]))
        )
    maps = []
    for figure, group in itertools.groupby(rows, key=lambda row: row["figure"]):
        of_figure = list(group)
        columns = list(of_figure[0])[3:]
        values = [[float(row[column]) for column in columns] for row in of_figure]
        assert all(0 <= value <= 1 for row in values for value in row)
        title = f"Figure {figure}: {of_figure[0]['expert']}"
        maps.append(Map(title, [row["layer"] for row in of_figure], columns, values))
    return maps
