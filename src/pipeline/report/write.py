"""The report of a table, from stored results only.

    index.html       one self-contained page
    summary.txt      the summary that stage=table prints
    cells.md, .csv   the table, with the published numbers
    choices.json     the winners of its `best` rules
    claims.csv       the verdicts on the claims about the table
    contrasts.csv    its comparisons
    results.csv      one row per run, task, language and metric
    answers.parquet  one row per answer
    plots/           its figure as SVG

The same results give the same bytes.
"""

from __future__ import annotations

import json
from pathlib import Path

from pipeline.files import write_atomically
from pipeline.report.compare import headline_sentences
from pipeline.report.load.contents import Results
from pipeline.report.load.scores import notes_of
from pipeline.report.marks import mark_lines, suspicious_scores
from pipeline.report.page import page
from pipeline.report.render.cells import cell_lines, cells_markdown, summary_text
from pipeline.report.render.sheets import lines_csv
from pipeline.report.render.tidy import tidy_rows
from pipeline.text import printable


def write_report(results: Results, folder: Path) -> Path:
    """Write the report of one table into `folder` and return the path of its index.html.

    Raises:
        PipelineError: If a file is truncated.
    """
    folder.mkdir(parents=True, exist_ok=True)
    notes = notes_of(results)
    marks = suspicious_scores(results)
    headline = headline_sentences(results.contrasts, results.primary)
    html, picture = page(results, headline, notes, marks)
    written = {
        "results.csv": tidy_rows(results),
        "cells.csv": lines_csv(cell_lines(results)),
        "cells.md": cells_markdown(results, " ".join(headline), notes),
        "choices.json": json.dumps(results.choices, indent=1, ensure_ascii=False) + "\n",
        "summary.txt": summary_text(results, headline, mark_lines(marks)),
        "index.html": html,
    }
    (folder / "plots").mkdir(exist_ok=True)
    if picture:
        written["plots/scores.svg"] = picture
    claims = [verdict.line for verdict in results.verdicts]
    for name, lines in (("claims.csv", claims), ("contrasts.csv", results.contrasts)):
        if lines:
            written[name] = lines_csv(lines, 5)
    for name in ("claims.csv", "contrasts.csv", "plots/scores.svg"):
        if name not in written:
            (folder / name).unlink(missing_ok=True)  # from an earlier report
    (folder / "answers.parquet").write_bytes(results.parquet)
    for name, text in written.items():
        # names and answers may hold escapes of a terminal
        write_atomically(folder / name, text if name == "index.html" else printable(text))
    return folder / "index.html"
