"""Maps drawn from a CSV, and the published maps drawn by the same code."""

from __future__ import annotations

import pytest

from pipeline.analyze.heatmaps import Map, png_of_maps, published_maps, svg_of_maps
from pipeline.errors import PipelineError

HAND_MADE = "figure,expert,layer,attention.wq,feed_forward.w2\n9,x,0,0.25,0\n9,x,1,1,0.5\n4,math expert #1,0,0.1,0.2\n"


def test_a_csv_of_maps_is_drawn_from_the_top_layer_down(tmp_path):
    file = tmp_path / "maps.csv"
    file.write_text(HAND_MADE)
    first, second = published_maps(file)
    assert (first.title, first.rows, first.columns) == ("Figure 9: x", ["1", "0"], ["attention.wq", "feed_forward.w2"])
    assert first.values == [[1.0, 0.5], [0.25, 0.0]] and second.values == [[0.1, 0.2]]
    drawn = svg_of_maps([first, second], "a", "what changed")
    assert drawn == svg_of_maps([first, second], "a", "what changed")  # bytes depend on the data alone
    assert "math expert #1" in drawn and 'aria-label="what changed"' in drawn
    holes = svg_of_maps([Map("t", ["a"], ["b", "c"], [[None, 3.0]])], "a", "x", None)
    assert "–" in holes
    for text, words in ((HAND_MADE.replace("0.25", "1.25"), "not a share"), ("a,b\n1,2\n", "it must have figure")):
        file.write_text(text)
        with pytest.raises(PipelineError, match=words):
            published_maps(file)


def test_the_papers_maps_are_drawn():
    """Figures 4 to 9 of the first paper: six maps of 32 layers by seven parameters, on one scale."""
    maps = published_maps()
    assert [one.title.partition(":")[0] for one in maps] == [f"Figure {number}" for number in range(4, 10)]
    assert all(one.rows == [str(layer) for layer in range(31, -1, -1)] and len(one.columns) == 7 for one in maps)
    assert maps[0].values[0][:3] == [0.411865, 0.680908, 0.840820]
    drawn = svg_of_maps(maps, "published", "the published maps")
    assert drawn.count("0.932") >= 1 and all(one.title in drawn for one in maps)
    assert png_of_maps(maps[:1]).startswith(b"\x89PNG")
    columns = [[sum(row[i] for row in one.values) for i in range(7)] for one in maps]
    assert all(
        max(sums[:4]) > max(sums[4:]) for sums in columns
    )  # attention changes more than feed-forward, section 3.2
