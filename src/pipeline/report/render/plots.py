"""Bar charts and training curves as SVG: text that depends only on the data, in the colours of the page.

Each colour is a CSS variable of the page with the light theme's value as its fallback, so that one chart serves light,
dark and print; a separate file contains only the values (`standalone`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from pipeline.analyze.drawing import COLOURS

MAX_POINTS = 400  # per curve; more are averaged in blocks
WIDTH, COLUMNS, LETTER = 960, 3, 6.1  # pixels; panels per line; the width of a letter of 11 pixels
HEAD, FOOT, BAR, GAP = 30, 24, 20, 18  # pixels above and below the bars, per bar, and between panels


@dataclass(frozen=True)
class Panel:
    """One column of a bar chart. values and intervals: one per row, in the unit shown, or None. best: the index of a
    row that is significantly better than all others."""

    title: str
    values: Sequence[float | None]
    intervals: Sequence[tuple[float, float] | None]
    chance: float | None = None
    best: int | None = None


@dataclass(frozen=True)
class Curve:
    """The logged (step, loss) and (step, validation loss) points of a training."""

    loss: Sequence[tuple[float, float]]
    validation: Sequence[tuple[float, float]]


def of_scores(rows: Sequence[str], panels: Sequence[Panel], label: str) -> str:
    """SVG of horizontal bars, a panel per task, a bar per row. label: the text for screen readers."""
    names = [row if len(row) <= 34 else f"{row[:33]}…" for row in rows]
    left = 14 + LETTER * max((len(name) for name in names), default=0)
    across = min(COLUMNS, len(panels)) or 1
    width = (WIDTH - left - GAP * (across - 1)) / across
    height = HEAD + BAR * len(rows) + FOOT
    parts = []
    for number, panel in enumerate(panels):
        x, y = left + (number % across) * (width + GAP), (number // across) * height
        if number % across == 0:
            middles = (y + HEAD + BAR * (place + 0.5) + 4 for place in range(len(rows)))
            parts += [text_element(left - 8, at, name, "end") for at, name in zip(middles, names, strict=True)]
        parts += draw_bars(panel, x, y, width, len(rows))
    return svg_document(parts, height * math.ceil(len(panels) / across), label)


def draw_bars(panel: Panel, x: float, y: float, width: float, rows: int) -> list[str]:
    """SVG elements of one panel with its upper left corner at (x, y)."""
    tops = [ends[1] if ends else value or 0 for value, ends in zip(panel.values, panel.intervals, strict=True)]
    bottoms = [ends[0] if ends else value or 0 for value, ends in zip(panel.values, panel.intervals, strict=True)]
    least = min([*bottoms, 0.0])
    reach = max([*tops, panel.chance or 0, 0.0 if least else 1.0])
    ticks = round_steps(least, reach)
    scale = (width - 34) / (max(reach, ticks[-1]) - least)
    top, bottom = y + HEAD, y + HEAD + BAR * rows
    parts = [text_element(x, y + 15, panel.title, size=12)]
    x -= least * scale  # where zero is
    for tick in ticks:
        parts += [line_element(x + tick * scale, top, x + tick * scale, bottom, "line")]
        parts += [text_element(x + tick * scale, bottom + 14, f"{tick:g}", "middle", "muted", 10)]
    for place, (value, interval) in enumerate(zip(panel.values, panel.intervals, strict=True)):
        at = top + BAR * place
        if value is not None:
            colour = "accent" if place == panel.best else "soft"
            start, extent = x + min(0.0, value) * scale, abs(value) * scale
            parts += [f'<rect x="{start:.1f}" y="{at + 3:.1f}" width="{extent:.1f}" height="{BAR - 6}" '
                      f'fill="{paint_of(colour)}"/>']  # fmt: skip
        if value is not None and interval:
            ends = [x + end * scale for end in interval]
            parts += [line_element(ends[0], at + BAR / 2, ends[1], at + BAR / 2, "ink")]
            parts += [line_element(end, at + BAR / 2 - 3, end, at + BAR / 2 + 3, "ink") for end in ends]
        label = "—" if value is None else f"{value:.1f}"
        parts += [text_element(x + max(0.0, tops[place]) * scale + 5, at + BAR / 2 + 4, label, size=10)]
    if panel.chance is not None:
        at = x + panel.chance * scale
        parts += [
            line_element(at, top - 4, at, bottom, "warn", "4 3"),
            text_element(at + 3, top - 3, "chance", colour="warn", size=9),
        ]
    return parts


def of_trainings(trainings: Mapping[str, Sequence[Curve]], label: str) -> str:
    """SVG of loss over steps, a panel per label, a line per training (its seeds); dots are validation losses."""
    across = min(COLUMNS, len(trainings)) or 1
    width, height = WIDTH / across - GAP, 190
    parts = []
    for number, (name, curves) in enumerate(trainings.items()):
        parts += panel_of(name, curves, (number % across) * (width + GAP), (number // across) * height, width, height)
    return svg_document(parts, height * math.ceil(len(trainings) / across), label)


def panel_of(name: str, curves: Sequence[Curve], x: float, y: float, width: float, height: float) -> list[str]:
    parts = [text_element(x + 34, y + 15, name, size=12)]
    lines = [[point for point in thin_points(curve.loss) if finite(point)] for curve in curves]
    dots = [point for curve in curves for point in curve.validation if finite(point)]
    all_points = [point for points in lines for point in points] + dots
    if not all_points:
        return [*parts, text_element(x + width / 2, y + height / 2, "nothing logged", "middle", "muted")]
    low, high = min(point[1] for point in all_points), max(point[1] for point in all_points)
    high = high if high > low else low + 1
    last = max(point[0] for point in all_points) or 1
    left, top, right, bottom = x + 34, y + 26, x + width, y + height - 32

    def place_point(point: tuple[float, float]) -> tuple[float, float]:
        return left + (right - left) * point[0] / last, bottom - (bottom - top) * (point[1] - low) / (high - low)

    for tick in round_steps(low, high):
        _, at = place_point((0, tick))
        parts += [
            line_element(left, at, right, at, "line"),
            text_element(left - 5, at + 3, f"{tick:g}", "end", "muted", 10),
        ]
    for tick in round_steps(0, last):
        parts += [text_element(place_point((tick, 0))[0], bottom + 14, f"{tick:g}", "middle", "muted", 10)]
    parts += [text_element((left + right) / 2, bottom + 27, "step", "middle", "muted", 10)]
    colours = ("accent", "second", "third", "muted")
    for number, points in enumerate(lines):
        points_text = " ".join(f"{px:.1f},{py:.1f}" for px, py in map(place_point, points))
        stroke = paint_of(colours[number % len(colours)])
        parts += (
            [f'<polyline points="{points_text}" fill="none" stroke="{stroke}" stroke-width="1.4"/>']
            if points_text
            else []
        )
    centres = map(place_point, dots)
    return parts + [f'<circle cx="{cx:.1f}" cy="{cy:.1f}" r="2.6" fill="{paint_of("warn")}"/>' for cx, cy in centres]


# ------------------------------------------------------------------------------------------------ marks


def svg_document(parts: Sequence[str], height: float, label: str) -> str:
    font = "var(--sans, system-ui, 'Noto Sans', 'DejaVu Sans', sans-serif)"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{escape(label)}" '
    return "\n".join([f'{head}viewBox="0 0 {WIDTH} {height:.0f}" style="font-family: {font}">', *parts, "</svg>"])


def standalone(text: str) -> str:
    """A chart as a separate file, for programs that do not support CSS variables."""
    return re.sub(r"var\(--\w+, ([^()]*)\)", r"\1", text) + "\n"


def paint_of(colour: str) -> str:
    return f"var(--{colour}, {COLOURS[colour]})"


def text_element(x: float, y: float, content: str, anchor: str = "start", colour: str = "ink", size: int = 11) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"'
    return f'<text {place} fill="{paint_of(colour)}">{escape(content)}</text>'


def line_element(x1: float, y1: float, x2: float, y2: float, colour: str, dashes: str = "") -> str:
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="{paint_of(colour)}" stroke-width="1"{dashed}/>'


def round_steps(low: float, high: float) -> list[float]:
    """Three to six round numbers between `low` and `high`."""
    unit = 10 ** math.floor(math.log10(max(high - low, 1e-12)))
    size = next(size * unit for size in (0.2, 0.25, 0.5, 1.0, 2.0, 2.5, 5.0) if (high - low) / (size * unit) <= 5)
    first, last = math.ceil(low / size - 1e-9), math.floor(high / size + 1e-9)
    return [float(f"{number * size:.6g}") for number in range(first, last + 1)]


def finite(point: tuple[float, float]) -> bool:
    return math.isfinite(point[1])


def thin_points(points: Sequence[tuple[float, float]], limit: int = MAX_POINTS) -> list[tuple[float, float]]:
    """At most `limit` points, each the mean of a block of neighbours."""
    size = math.ceil(len(points) / limit)
    blocks = [points[at : at + size] for at in range(0, len(points), size)] if points else []
    return [(sum(p[0] for p in block) / len(block), sum(p[1] for p in block) / len(block)) for block in blocks]
