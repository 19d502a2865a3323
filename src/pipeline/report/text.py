"""Tables as text: columns side by side for a terminal, Markdown and CSV for a report."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from pipeline.report.sheets import comma_separated

if TYPE_CHECKING:
    from pipeline.report.contents import Results
    from pipeline.report.grid import ScoreTable


MOST = 30  # runs that are named one by one


def some(count: int, what: str) -> str:
    """1 run, 2 runs."""
    return f"{count} {what}{'' if count == 1 else 's'}"


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
    """A table a language, averages first, with the notes; bold is significantly above every other row."""
    from pipeline.report.scores import AVERAGE

    lines = [f"# {plain(results.title)}", ""]
    lines += [plain(results.note), ""] if results.note else []
    lines += [plain(table.headline), ""] if table.headline else []
    groups = table.groups()
    for target, columns in groups:
        lines += [f"## {'Average over languages' if target == AVERAGE else target}", ""] if len(groups) > 1 else []
        lines += [markdown_line(["", *(column.label for column in columns)]), "|---|" + "---:|" * len(columns)]
        for row in table.rows:
            entries = [table.entries[row, column] for column in columns]
            lines.append(markdown_line([row, *(f"**{one.text}**" if one.best else one.text for one in entries)]))
        lines += [""]
    for paragraph in table.notes:
        lines += [plain(paragraph), ""]
    lines += ["Missing:", "", *(f"- {plain(reason)}" for reason in table.missing), ""] if table.missing else []
    for title, runs in (("Failed runs:", results.failed), ("Not made:", results.missing)):
        lines += [title, "", *(f"- {run.name}: {plain(run.reason)}" for run in runs[:MOST]), ""] if runs else []
        lines += [f"- and {len(runs) - MOST} more", ""] if len(runs) > MOST else []
    return "\n".join(lines).rstrip("\n") + "\n"


def markdown_line(parts: Sequence[str]) -> str:
    return "| " + " | ".join(plain(part).replace("|", "\\|") for part in parts) + " |"


def plain(text: str) -> str:
    """On one line: a line of Markdown that somebody wrote into a title ends there."""
    return " ".join(text.split())


def table_csv(table: ScoreTable) -> str:
    """The same cells as CSV, without marks for the best."""
    head = ["row", *(column.label for column in table.columns)]
    rows = [[row, *(table.entries[row, column].text for column in table.columns)] for row in table.rows]
    return comma_separated([head, *rows])
