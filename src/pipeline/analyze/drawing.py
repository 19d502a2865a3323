"""Figures as SVG, in the colours of the report. The bytes depend on the data only."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# Names are the page's CSS variables. Values must differ, because the SVG is rewritten by value.
COLOURS = {
    "ink": "#1f2328",
    "muted": "#656d77",
    "line": "#d5d9df",
    "accent": "#2f6b9a",
    "soft": "#a9c3d8",
}

SVG: dict[str, Any] = {
    "format": "svg",
    "transparent": True,
    "metadata": dict.fromkeys(("Date", "Creator", "Format", "Type")),
}

STYLE: dict[Any, Any] = {
    "svg.hashsalt": "pipeline",
    "svg.fonttype": "none",  # text: small, searchable, in the page's font
    "text.parse_math": False,  # a $ in a row's name is a $
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "text.color": COLOURS["ink"],
    "axes.labelcolor": COLOURS["muted"],
    "axes.edgecolor": COLOURS["line"],
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": COLOURS["line"],
    "ytick.color": COLOURS["line"],
    "xtick.labelcolor": COLOURS["muted"],
    "ytick.labelcolor": COLOURS["ink"],
    "grid.color": COLOURS["line"],
    "grid.linewidth": 0.6,
    "lines.solid_capstyle": "round",
    "axes.facecolor": "none",
}


def draw_svg(draw: Callable[[], Figure], name: str, label: str) -> str:
    """Return the drawing as SVG for a page, with the page's CSS variables for colours.

    Args:
        draw: Draws the figure.
        name: The prefix of its ids.
        label: The text for screen readers.
    """
    import matplotlib

    stream = io.BytesIO()
    with matplotlib.rc_context(), warnings.catch_warnings():
        matplotlib.rcdefaults()  # whatever a user's matplotlibrc says
        matplotlib.rcParams.update(STYLE)
        warnings.filterwarnings("ignore", "Glyph .* missing")  # the page has more fonts
        draw().savefig(stream, **SVG)
    text = stream.getvalue().decode()
    text = text[text.index("<svg") :].strip()
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'(url\(#|href="#)', rf"\g<1>{name}-", text)
    for variable, value in COLOURS.items():
        text = text.replace(value, f"var(--{variable}, {value})")
    text = re.sub(r"(font: [\d.]+px) '[^;\"]*", r"\1 var(--sans, sans-serif)", text)
    return text.replace("<svg ", f'<svg role="img" aria-label="{escape(label)}" ', 1)
