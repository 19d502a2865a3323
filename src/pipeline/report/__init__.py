"""Reports of tables, and `results`, which loads one in a notebook."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.errors import PipelineError

if TYPE_CHECKING:
    from pandas import DataFrame


def results(report: str | Path, runs_dir: str | Path = "runs") -> tuple[DataFrame, DataFrame]:
    """(scores, answers) of a report, given a table's name or the folder of its page: one row per
    run, task, language and metric, and one row per answer. Join on `run`, `task`, `language` (the
    pair, for translations). `row`, `column` and `seed` name the cells in both.

        from pipeline.report import results scores, answers = results("sandbox") shown =
        scores.query("metric == 'exact_match' and filter == 'flexible-extract'")  # of acc there is
        one filter shown.pivot_table(index="row", columns="language", values="value")

    Raises PipelineError if there is no report.
    """
    import pandas as pd

    is_name = isinstance(report, str) and "/" not in report and not report.startswith(".")
    if is_name:
        folder = Path(runs_dir) / "reports" / report
    else:
        folder = Path(report)
    files = [folder / "results.csv", folder / "answers.parquet"]
    missing = [path for path in files if not path.is_file()]
    if missing:
        raise PipelineError(
            f"{missing[0]} does not exist: create the report with stage=report table=..."
        )
    scores = pd.read_csv(
        files[0], keep_default_na=False, na_values=[""]
    )  # nan is a language, None a name of a row
    places = scores[["run", "row", "column", "seed"]].drop_duplicates("run")
    return scores, pd.read_parquet(files[1]).merge(places, on="run", how="left")
