"""Maps drawn by hand-made values, and the published maps drawn by the same code."""

from published_maps import published_maps

from pipeline.analyze.heatmaps import Map, svg_of_maps


def test_maps_are_drawn_from_their_values_alone():
    first = Map("Figure 9: x", ["1", "0"], ["attention.wq", "feed_forward.w2"], [[1.0, 0.5], [0.25, 0.0]])
    second = Map("math expert #1", ["0"], ["attention.wq", "feed_forward.w2"], [[0.1, 0.2]])
    drawn = svg_of_maps([first, second], "a", "what changed")
    assert drawn == svg_of_maps([first, second], "a", "what changed")
    assert "math expert #1" in drawn and 'aria-label="what changed"' in drawn
    holes = svg_of_maps([Map("t", ["a"], ["b", "c"], [[None, 3.0]])], "a", "x", None)
    assert "–" in holes


def test_the_papers_maps_are_drawn(tmp_path):
    """Figures 4 to 9 of the first paper: six maps of 32 layers by seven parameters, on one scale."""
    maps = published_maps()
    assert [one.title.partition(":")[0] for one in maps] == [f"Figure {number}" for number in range(4, 10)]
    assert all(one.rows == [str(layer) for layer in range(31, -1, -1)] and len(one.columns) == 7 for one in maps)
    assert maps[0].values[0][:3] == [0.411865, 0.680908, 0.840820]
    drawn = svg_of_maps(maps, "published", "the published maps")
    assert drawn.count("0.932") >= 1 and all(one.title in drawn for one in maps)
    svg_of_maps(maps[:1], "a", "x", png=tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    columns = [[sum(row[i] for row in one.values) for i in range(7)] for one in maps]
    assert all(
        max(sums[:4]) > max(sums[4:]) for sums in columns
    )  # attention changes more than feed-forward, section 3.2
