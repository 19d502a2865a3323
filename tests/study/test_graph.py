"""What a plan says of each run."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from fixture_types import Patch
from small_runs import a_run, writes

from pipeline.commands.plan import show_runs
from pipeline.estimate.durations import History
from pipeline.runs.graph import longest_paths, order_runs, reasons_unfinished
from pipeline.runs.make import make_once, why_not_finished
from pipeline.runs.run import External


def test_the_plan_says_why_a_run_is_not_taken_from_before(tmp_path: Path, monkeypatch: Patch) -> None:
    def shown(run: Any) -> str:
        return "\n".join(show_runs([run], History(), reasons_unfinished([run]), 10))

    run, other_seed = a_run(tmp_path), a_run(tmp_path, seed=3)
    assert "never made" in shown(run)
    make_once(run, writes())
    assert "finished" in shown(run) and not reasons_unfinished([run])
    assert why_not_finished(other_seed) == "changed: seed default -> 3"
    assert why_not_finished(replace(run, version=99)) == f"changed: version {run.version} -> 99"
    parent = a_run(tmp_path, {"data_root": External("w", "abc", tmp_path)})
    assert why_not_finished(parent) == "changed: parents.data_root default -> abc"
    assert "redo=true" in shown(a_run(tmp_path, redo=True))


def test_the_longest_path_from_a_run_to_the_end_by_hand(tmp_path: Path) -> None:
    """Of 5 s of data, trainings of 100 and 60 s, and their merge of 7 s, with an evaluation of the shorter of 50 s."""
    data = a_run(tmp_path, label="data")
    long, short = (a_run(tmp_path, {"data": data}, label=label, seed=len(label)) for label in ("long", "short"))
    merge, scores = a_run(tmp_path, {"0": long, "1": short}, label="merge"), a_run(tmp_path, {"0": short}, label="eval")
    seconds = {"data": 5.0, "long": 100.0, "short": 60.0, "merge": 7.0, "eval": 50.0}
    runs = order_runs([merge, scores])
    paths = longest_paths(runs, {run.hash: seconds[run.label] for run in runs})
    expected = {"merge": 7, "eval": 50, "long": 107, "short": 110, "data": 115}
    assert {run.label: paths[run.hash] for run in runs} == expected
