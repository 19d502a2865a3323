"""Reports of tables, and what a notebook reads of them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.errors import PipelineError

if TYPE_CHECKING:
    from pandas import DataFrame


def results(report: str | Path, runs_dir: str | Path = "runs") -> tuple[DataFrame, DataFrame]:
    """(scores, answers) of a report, a table's name or the folder of its page: a row a run, task, language and metric,
    and a row an answer; `run`, `task` and `language` (of a translation its pair) join them. `row`, `column`: the cells.

        from pipeline.report import results
        scores, answers = results("sandbox")
        scores[scores.metric == "exact_match"].pivot_table(index="row", columns="language", values="value")

    Raises PipelineError where there is no report.
    """
    import pandas as pd

    named = isinstance(report, str) and "/" not in report and not report.startswith(".")
    folder = Path(runs_dir) / "reports" / report if named else Path(report)
    files = [folder / "results.csv", folder / "answers.parquet"]
    if missing := [path for path in files if not path.is_file()]:
        raise PipelineError(f"{missing[0]} is not there: make the report with stage=report table=...")
    return pd.read_csv(files[0]), pd.read_parquet(files[1])
