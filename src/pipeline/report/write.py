"""The report of a table, from what is on the disk alone: its page, its tables, its answers, and its plots as SVG.

    index.html               one self-contained page
    table.md, table.csv      means over seeds, a table a language
    claims.csv               the verdicts on what is claimed of the table; contrasts.csv: what its `compare` measured
    cells.md, cells.csv      the table's own cells, with what the paper prints; choices.json: what its `best` chose
    results.csv              a row a run, task, language and metric
    answers.parquet          a row an answer
    scores.json              every score in its place

The same results give the same bytes.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from pipeline.files import write_atomically
from pipeline.report.answers import read_answers
from pipeline.report.cells import cells_csv, cells_markdown, choices_json, contrasts_csv
from pipeline.report.claims import claims_csv
from pipeline.report.contents import Results
from pipeline.report.page import page
from pipeline.report.scores import load, read_all, scored_in
from pipeline.report.tables import roles, tabulate
from pipeline.report.text import markdown, table_csv
from pipeline.report.tidy import tidy

MOST_ANSWERS, MOST_QUESTIONS = 6_000, 250  # that the page carries: in all, and of one model in one task and language


def write_report(results: Results, folder: Path) -> Path:
    """Write the report of one table into `folder` and return the path of its index.html.

    Raises PipelineError where two evaluations claim one cell, were not scored alike, or a file is cut off.
    """
    folder.mkdir(parents=True, exist_ok=True)
    read = read_all(results)
    scores, problems = load(results, read)
    primary = {(score.eval, score.task, score.where) for score in scores if score.primary}
    keep = min(MOST_QUESTIONS, max(1, MOST_ANSWERS // max(1, len(primary))))
    evaluations = {name: run.folder for name, run in sorted(results.evaluations.items())}
    answers = read_answers(evaluations, read, primary, keep, folder / "answers.parquet")
    table = tabulate(results, scores, problems, answers)
    table = replace(table, notes=[*table.notes, *scored_in(read)])
    flat = [json.dumps(one.as_json(), ensure_ascii=False, sort_keys=True, allow_nan=False) for one in scores]
    html, pictures = page(results, table, scores, answers, folder)
    written = {
        "scores.json": "[\n" + ",\n".join(flat) + "\n]\n",
        "results.csv": tidy(results, read, roles(table.rows, results.roles)),
        "table.md": markdown(results, table),
        "table.csv": table_csv(table),
        "index.html": html,
    }
    if results.table_cells:
        written["cells.csv"] = cells_csv(results)
        written["cells.md"] = cells_markdown(results)
        written["choices.json"] = choices_json(results)
    if results.verdicts:
        written["claims.csv"] = claims_csv(results.verdicts)
    if results.contrasts:
        written["contrasts.csv"] = contrasts_csv(results.contrasts)
    for name in ("claims.csv", "contrasts.csv"):  # of an earlier build
        if name not in written:
            (folder / name).unlink(missing_ok=True)
    for name, text in written.items():
        write_atomically(folder / name, text)
    (folder / "plots").mkdir(exist_ok=True)
    for old in (folder / "plots").glob("*.*"):
        old.unlink()  # of an earlier build with other languages
    for name, picture in pictures.items():
        (folder / "plots" / name).write_text(picture, encoding="utf-8")
    return folder / "index.html"
