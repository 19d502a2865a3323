"""Tables as text: columns side by side for a terminal, Markdown and CSV for a report."""

from __future__ import annotations

import csv
import io
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeline.report.results import Results
    from pipeline.report.tables import ScoreTable


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Lines of equally wide columns, two spaces between them; those in `right` are flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if place in right else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def markdown(results: Results, table: ScoreTable) -> str:
    """The table with its notes; the best cell of each column is bold."""
    lines = [f"# {results.title}", ""]
    lines += [results.note, ""] if results.note else []
    lines += [_markdown_line(["", *(column.label for column in table.columns)]), "|---|" + "---:|" * len(table.columns)]
    for row in table.rows:
        entries = [table.entries[row, column] for column in table.columns]
        lines.append(_markdown_line([row, *(f"**{one.text}**" if one.best else one.text for one in entries)]))
    for paragraph in table.notes:
        lines += ["", paragraph]
    lines += ["", "Missing:", "", *(f"- {reason}" for reason in table.missing)] if table.missing else []
    failed = [f"- {run.name}: {run.reason}" for run in results.failed]
    lines += ["", "Failed runs:", "", *failed] if failed else []
    return "\n".join(lines) + "\n"


def _markdown_line(parts: Sequence[str]) -> str:
    return "| " + " | ".join(part.replace("|", "\\|") for part in parts) + " |"


def comma_separated(table: ScoreTable) -> str:
    """The same cells as CSV, without marks for the best."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(["row", *(column.label for column in table.columns)])
    for row in table.rows:
        writer.writerow([row, *(table.entries[row, column].text for column in table.columns)])
    return buffer.getvalue()
