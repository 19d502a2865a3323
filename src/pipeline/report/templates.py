"""The report's templates: index.html, cells.md and summary.txt."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from pipeline.progress import format_duration
from pipeline.report.claims import format_points
from pipeline.report.compare import is_significant, p_text
from pipeline.text import markdown_line, markdown_text, one_line

if TYPE_CHECKING:
    from jinja2 import Environment

JSON_STYLE: dict[str, Any] = {"ensure_ascii": False, "separators": (",", ":")}

TEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "†": r"$^\dagger$",
    "‡": r"$^\ddagger$",
    "<": "$<$",
    ">": "$>$",
}


def latex_text(text: str) -> str:
    """Return a text with escapes for the characters that LaTeX reads as commands."""
    escaped = r"[\\~^†‡<>&%$#_{}]"
    return re.sub(escaped, lambda sign: TEX.get(sign[0], f"\\{sign[0]}"), one_line(text))


@lru_cache(maxsize=1)
def environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    templates = Environment(
        loader=PackageLoader("pipeline.report", "."),
        autoescape=lambda name: name is None or name.endswith(".html.j2"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.do"],
    )
    templates.policies["json.dumps_kwargs"] = JSON_STYLE
    templates.filters |= {
        "points": format_points,
        "signed": signed_points,
        "p_text": p_text,
        "duration": format_duration,
        "line": one_line,
        "markdown_line": markdown_line,
        "markdown": markdown_text,
        "csp_hash": csp_hash,
        "latex": latex_text,
    }
    templates.tests["significant"] = is_significant
    return templates


def signed_points(value: float) -> str:
    return format_points(value, "+").replace("-", "−")


def csp_hash(script: str) -> str:
    """Return the hash that names an inline script in a Content-Security-Policy."""
    digest = hashlib.sha256(script.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


def render(name: str, **context: Any) -> str:
    return environment().get_template(name).render(**context)
