"""An evaluation of several tasks or languages is one run, made of shared scoring runs."""

import json
import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fixture_types import Make, Patch

from pipeline.config.compose import compose
from pipeline.config.stages import EvalStage
from pipeline.evaluate import stage
from pipeline.evaluate.bundle import over_languages
from pipeline.evaluate.records import ScoreRow
from pipeline.runs.manifest import read_manifest
from pipeline.runs.run import Run
from pipeline.stages.evaluation import is_bundle, source_models
from pipeline.stages.rows import build

ASKED = ["eval.max_gen_toks=4", "eval.limit=3"]


def built(*words: str) -> Run:
    return build(compose(["stage=eval", "checkpoint=hub:org/x", *words]))  # type: ignore[arg-type]


def rows(folder: Path, side: str = "rows") -> list[dict[str, Any]]:
    return json.loads((folder / "scores.json").read_text())[side]


def test_one_run_of_scoring_runs(
    make_run: Make, world: Path, swap: Path, scored: Path, monkeypatch: Patch
) -> None:
    """`scored` is eval=sandbox in en and qac: four tasks, FLORES between the two.

    2 + 2 + 2 + 1 scoring runs.
    """
    manifest = read_manifest(scored)
    assert manifest is not None
    parents = {
        role: scored.parent / one.name
        for role, one in manifest.parents.items()
        if role != "checkpoint"
    }
    assert sorted(parents) == sorted(
        [
            f"{task}_0shot.{code}"
            for task in ("mgsm", "belebele", "global_mmlu")
            for code in ("en", "qac")
        ]
        + ["flores_0shot.qac"]
    )
    assert rows(scored) == [row for folder in parents.values() for row in rows(folder)]
    samples = {
        path.name: path for folder in parents.values() for path in (folder / "samples").iterdir()
    }
    ours = {path.name: path for path in (scored / "samples").iterdir()}
    assert ours.keys() == samples.keys() and all(
        ours[name].samefile(samples[name]) for name in ours
    )
    by_language = {
        code: row["value"]
        for code in ("en", "qac")
        for row in rows(parents[f"belebele_0shot.{code}"])
        if row["metric"] == "acc"
    }
    assert manifest.facts["scores"]["belebele/mean/acc"] == statistics.fmean(by_language.values())
    # alone, each is the finished run that the bundle made, and nothing is loaded for it
    monkeypatch.setattr(stage, "open_model", None)
    again = make_run(
        "stage=eval",
        f"checkpoint={swap}",
        f"data_root={world}",
        "eval=belebele_0shot",
        "eval.options=text",
        "languages=[qac]",
        *ASKED,
    )
    assert again == parents["belebele_0shot.qac"]


def test_what_decides_a_scoring_run() -> None:
    """Not what it was asked for with.

    Other languages, other tasks, the room of other languages, spBLEU's model.
    """
    alone = built("eval=mgsm_2shot", "languages=[sw]")
    both = built("eval=unreasonable", "languages=[en,sw]")
    assert is_bundle(both) and not is_bundle(alone)
    assert both.parents["mgsm_2shot.sw"].hash == alone.hash
    room = built("eval=mgsm_2shot", "languages=[en,sw,te]", "+eval.max_gen_toks_of={te:1024}")
    assert room.parents["mgsm_2shot.sw"].hash == alone.hash
    one = built("eval=mgsm_2shot", "languages=[te]", "eval.max_gen_toks=1024")
    assert room.parents["mgsm_2shot.te"].hash == one.hash
    assert (
        one.hash
        == built("eval=mgsm_2shot", "languages=[te]", "+eval.max_gen_toks_of={te:1024}").hash
    )


def test_a_sampled_task_beside_another_is_gathered_and_facts_are_of_their_part(
    make_run: Make, world: Path
) -> None:
    sampled = {"temperature": 0.7, "top_p": 1.0, "answers": 2, "sample_seed": 0}
    words = [
        "stage=eval",
        "checkpoint=package:data/sandbox_base",
        f"data_root={world}",
        "languages=[en]",
        *ASKED,
    ]
    for tasks in ("[belebele,mgsm]", "[mgsm,belebele]"):  # the first part is greedy, then sampled
        more = ["eval=sandbox", f"eval.tasks={tasks}", "eval.temperature=0.7", "eval.answers=2"]
        folder = make_run(*words, *more)
        harness = read_manifest(folder).facts["harness"]  # type: ignore[union-attr]
        parts = harness["parts"]
        assert (
            parts["mgsm_0shot.en"]["sampling"] == sampled
            and "sampling" not in parts["belebele_0shot.en"]
        )
        assert parts["belebele_0shot.en"]["task_hashes"].keys() == {"belebele_en_0shot"}
        assert harness["dtype"] == "float32" and "task_hashes" not in harness
        assert {row["task"] for row in rows(folder)} == {"mgsm", "belebele"}


def row(language: str, value: float | None, **more: Any) -> ScoreRow:
    known = {
        "task": "mgsm",
        "pair": None,
        "subject": None,
        "num_fewshot": 2,
        "metric": "exact_match",
        "filter": "f",
    }
    return ScoreRow(
        **{**known, "language": language, "value": value, "stderr": 1.0, "n": 10, **more}
    )


def test_averages_by_hand() -> None:
    made = over_languages(
        [
            row("en", 0.5),
            row("sw", 0.25),
            row("sw", 1.0, metric="unparsed"),
            row("sw", 10.0, pair="en-sw"),
            row("bn", 20.0, pair="en-bn"),
            row("sw", 30.0, pair="sw-en"),
            row("bn", 50.0, pair="bn-en"),
            row("sw", 0.1, task="mbpp"),
            row("te", None, task="mbpp"),
            row("en", 0.1, subject="law"),
            row("sw", 0.3, subject="law"),
        ]
    )
    told = [
        (one.task, one.metric, one.language, one.pair, one.value, one.n, one.stderr) for one in made
    ]
    assert told == [
        ("mgsm", "exact_match", "mean", None, 0.375, 20, None),
        ("mgsm", "exact_match", "mean", "en-mean", 15.0, 20, None),
        ("mgsm", "exact_match", "mean", "mean-en", 40.0, 20, None),
    ]


def test_files_of_an_evaluation_are_no_models_of_it() -> None:
    """Otherwise two tasks of one model have different models, and a worker loads it twice."""
    roles = ("math", "language", "base", "data_root", "benchmarks", "spm_model", "include_path")
    parents = {role: SimpleNamespace(hash=role) for role in (*roles, "language quz")}
    run: Any = SimpleNamespace(config=EvalStage(), parents=parents)
    assert source_models(run) == ("base", "language", "math")
