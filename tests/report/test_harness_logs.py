"""Evaluations as logs of lm_eval.

Written from a run, and read back by what reads the harness' own.
"""

import json
from pathlib import Path

import pytest
from made_up_report import sample, score, write_eval

from pipeline.errors import PipelineError
from pipeline.extras.compare import CompareStage
from pipeline.extras.logs import read_entry, read_models
from pipeline.report.render.harness_logs import write_harness_logs
from pipeline.runs.manifest import Ancestor, Manifest

CHOICE = {
    "loglikelihoods": {"A": -3.5, "B": -0.5, "C": -2.0},
    "filter": "none",
    "scores": {"acc": 1.0},
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Score a checkpoint on MGSM and Belebele in one language."""
    lines = [
        sample(doc, f"It is {doc}", doc == 3, scores={"exact_match": float(doc == 3)})
        for doc in range(4)
    ]
    choices = [sample(doc, "B", True, **CHOICE) for doc in range(2)]
    rows = [score("mgsm", 0.25, 4, "sw"), score("belebele", 1.0, 2, "sw")]
    folder = write_eval(
        tmp_path / "runs/eval-x-sw-0123456789ab", rows, {"mgsm.sw": lines, "belebele.sw": choices}
    )
    config = {"eval": {"name": "x"}, "languages": ["sw"]}
    parents = {"checkpoint": Ancestor("my-model", "0" * 64)}
    Manifest(
        "eval-x-sw-0123456789ab",
        "a" * 64,
        {"stage": "eval", "version": 1},
        {},
        config,
        parents,
        started="2026-11-22T08:48:01+00:00",
    ).write(folder)
    return folder


def test_what_is_written_is_what_the_harness_writes(run: Path, tmp_path: Path) -> None:
    path = write_harness_logs(run, tmp_path / "logs", "swap")
    assert path.name == "results_2026-11-22T08-48-01.json"
    content = json.loads(path.read_text())
    assert content["results"]["mgsm_sw"]["exact_match,flexible-extract"] == 0.25
    assert (
        content["n-samples"]["belebele_sw"] == {"original": 2, "effective": 2}
        and content["model_name"] == "swap"
    )
    first = json.loads(
        (path.parent / "samples_mgsm_sw_2026-11-22T08-48-01.jsonl").read_text().splitlines()[3]
    )
    assert (first["resps"], first["filtered_resps"], first["exact_match"]) == (
        [["It is 3"]],
        ["3"],
        1.0,
    )
    assert (
        first["metrics"] == ["exact_match"]
        and first["arguments"]["gen_args_0"]["arg_0"] == first["doc"]["prompt"]
    )


def test_a_run_and_its_written_logs_are_read_alike(run: Path, tmp_path: Path) -> None:
    write_harness_logs(run, tmp_path / "logs", "my-model")
    written, own = (
        {log.task: log for log in read_entry(place)} for place in (tmp_path / "logs", run)
    )
    assert written.keys() == own.keys() == {"mgsm_sw", "belebele_sw"}
    for task, log in own.items():
        assert (
            log.model == "my-model"
            and log.items == written[task].items
            and log.printed == written[task].printed
        )
    answers = [item["extracted"] for item in own["belebele_sw"].items.values()]
    assert answers == ["B", "B"]  # the most likely option
    assert [*read_models([str(tmp_path / "logs"), str(run)])] == [
        "my-model (logs)",
        f"my-model (runs/{run.name})",
    ]


def test_a_run_is_read_whatever_version_of_lm_eval_scored_it(run: Path) -> None:
    """The logs of lm_eval itself are of 0.4.8 or later.

    A run's answers are stored by this program.
    """
    manifest = run / "manifest.json"
    manifest.write_text(
        json.dumps(json.loads(manifest.read_text()) | {"versions": {"lm-eval": "0.4.5"}})
    )
    assert {log.version for log in read_entry(run)} == {"lm_eval 0.4.5"}


def test_runs_are_compared_by_their_names(run: Path, tmp_path: Path) -> None:
    stage = CompareStage(stage="compare", results=[], runs_dir=str(run.parent))
    assert stage.folder_of(run.name) == stage.folder_of("eval-x") == str(run)
    assert (
        stage.folder_of(str(run)) == str(run) and stage.folder_of("logs") == "logs"
    )  # which read_entry refuses
    second = run.with_name("eval-x-en-0123456789ab")
    second.mkdir()
    (second / "manifest.json").write_bytes((run / "manifest.json").read_bytes())
    with pytest.raises(PipelineError, match="results=eval-x means more than one run: "):
        stage.folder_of("eval-x")


def test_another_folder_is_no_evaluation(tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match="is no finished evaluation. Name a run of stage=eval"):
        write_harness_logs(tmp_path, tmp_path / "logs", "x")
