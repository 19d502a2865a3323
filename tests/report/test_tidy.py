"""results.csv: what tells its rows apart."""

import csv
import io
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from made_up_report import results_of, score, write_eval

from pipeline.evaluate.records import ScoreRow
from pipeline.report import results as frames
from pipeline.report.load.contents import CellResult, CellScore, RunResult
from pipeline.report.render.tidy import tidy_rows
from pipeline.report.write import write_report


def told(runs: list[RunResult], evaluations: Iterable[RunResult], column: str) -> dict[str, str]:
    """Run -> this column of results.csv, where these runs scored MGSM."""
    row = ScoreRow("mgsm", "en", None, None, 0, "exact_match", "x", 0.5, None, 10)
    scored = {run.name: SimpleNamespace(settings={}, rows=[row]) for run in evaluations}
    results: Any = SimpleNamespace(cells=[], runs=runs, evaluations=scored, table="t")
    return {line["run"]: line[column] for line in csv.DictReader(io.StringIO(tidy_rows(results)))}


def test_rows_name_the_settings_of_their_scores() -> None:
    """The dtype has a column of its own."""
    configs = {
        "a": {
            "eval.temperature": 0.7,
            "eval.dtype": "float32",
            "merge.name": "soup",
        },
        "b": {"eval.chat_template": True, "eval.dtype": "bfloat16"},
    }
    runs = [
        RunResult(name, "eval", Path(), config=config, model="m", attempt=1, seconds=1)
        for name, config in configs.items()
    ]
    knobs = {"a": "eval.temperature=0.7; merge.name=soup", "b": "eval.chat_template=True"}
    assert told(runs, runs, "knobs") == knobs


def test_the_seeds_of_the_trainings_behind_a_score_are_beside_it() -> None:
    """Also where the table has no axis of seeds: grouping by an empty column would drop every row.

    A snapshot is of its training; a model from elsewhere has no known seed.
    """
    runs = [
        RunResult("math-1", "sft", Path()),
        RunResult("sw-2", "sft", Path(), config={"seed": 3}),
        RunResult("merged-3", "merge", Path(), parents={"math": "math-1", "language": "sw-2"}),
        RunResult("eval-math", "eval", Path(), parents={"checkpoint": "sw-2@40"}),
        RunResult("eval-swap", "eval", Path(), parents={"checkpoint": "merged-3"}),
        RunResult("eval-hub", "eval", Path(), parents={"checkpoint": "llama"}),
    ]
    assert told(runs, runs[3:], "seed") == {"eval-math": "3", "eval-swap": "0; 3", "eval-hub": ""}


def test_names_that_read_like_missing_values_are_names_in_a_notebook(tmp_path: Path) -> None:
    """Southern Min has the code nan; what has no value is missing."""
    folder = write_eval(tmp_path / "runs/e", [score("mgsm", 0.5, 10, "nan")])
    cell = CellResult("None", "NA", 50.0, task="mgsm", runs=["e"], scores=[CellScore("e")])
    write_report(results_of([cell], {"e": folder}), tmp_path / "report")
    (line,) = frames(tmp_path / "report")[0].to_dict("records")
    assert (line["row"], line["column"], line["language"], line["value"]) == (
        "None",
        "None | NA",
        "nan",
        50.0,
    )
    assert line["pair"] != line["pair"] and line["seconds"] != line["seconds"]  # neither has one
