"""Reports of tables, and `results`, which loads a report in a notebook."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.errors import PipelineError

if TYPE_CHECKING:
    from pandas import DataFrame


def results(report: str | Path, runs_dir: str | Path = "runs") -> tuple[DataFrame, DataFrame]:
    """Return a report's scores and answers as two data frames.

    The first has a row per run, task, language and metric, the second a row per answer. Join them
    on `run`, `task` and `language` (the pair, for translations). `row`, `column` and `seed` name
    the cells in both.

        from pipeline.report import results
        scores, answers = results("sandbox")
        shown = scores.query("metric == 'exact_match' and filter == 'flexible-extract'")
        shown.pivot_table(index="row", columns="language", values="value")

    Args:
        report: A table's name, or the folder of its page.
        runs_dir: The folder of runs, if `report` is a name.

    Raises:
        PipelineError: If there is no report.
    """
    import pandas as pd

    is_name = isinstance(report, str) and "/" not in report and not report.startswith(".")
    if is_name:
        folder = Path(runs_dir) / "reports" / report
    else:
        folder = Path(report)
    scores_file, answers_file = folder / "results.csv", folder / "answers.parquet"
    for file in (scores_file, answers_file):
        if not file.is_file():
            raise PipelineError(
                f"{file} does not exist. Create the report with stage=report table=..."
            )
    # "nan" is a language, and "None" may name a row
    scores = pd.read_csv(scores_file, keep_default_na=False, na_values=[""])
    places = scores[["run", "row", "column", "seed"]].drop_duplicates("run")
    return scores, pd.read_parquet(answers_file).merge(places, on="run", how="left")
