"""The report of a table: scores.json, table.md, table.csv, one self-contained index.html, and plots for tracking.

The same results give the same bytes.
"""

from __future__ import annotations

import json
from pathlib import Path

from pipeline.report.page import page
from pipeline.report.results import Results
from pipeline.report.scores import load
from pipeline.report.tables import tabulate
from pipeline.report.text import comma_separated, markdown


def write_report(results: Results, folder: Path) -> Path:
    """Write the report of one table into `folder` and return the path of its index.html.

    Raises PipelineError where two evaluations claim one cell, were not scored alike, or a file is not JSON.
    """
    folder.mkdir(parents=True, exist_ok=True)
    scores, problems = load(results)
    table = tabulate(results, scores, problems)
    flat = [score.as_json() for score in scores]
    text = json.dumps(flat, indent=1, ensure_ascii=False, sort_keys=True, allow_nan=False)
    (folder / "scores.json").write_text(text + "\n", encoding="utf-8")
    (folder / "table.md").write_text(markdown(results, table), encoding="utf-8")
    (folder / "table.csv").write_text(comma_separated(table), encoding="utf-8")
    html, pictures = page(results, table, scores, folder)
    (folder / "plots").mkdir(exist_ok=True)
    for old in (folder / "plots").glob("*.png"):
        old.unlink()  # of an earlier build with other languages
    for name, picture in pictures.items():
        (folder / "plots" / name).write_bytes(picture)
    index = folder / "index.html"
    index.write_text(html, encoding="utf-8")
    return index
