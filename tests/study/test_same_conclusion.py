"""The same command comes to the same conclusion with 1 thread, 2 threads and in float64.

The demo's pair is trained each way. Its scores, and those of its default swap, agree within two
standard errors. Six trainings take a minute or more, so the test only runs on request:

    PIPELINE_TEST_ROUNDING=1 python -m pytest -s tests/study/test_same_conclusion.py
"""

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fixture_types import Patch
from sacrebleu.metrics.chrf import CHRF

import pipeline.train.load
from pipeline.config.compose import compose
from pipeline.launch.launchers import make_single_run
from pipeline.models.checkpoint import read_header

pytestmark = pytest.mark.rounding

Scores = dict[str, list[float]]  # "language expert: mgsm.qac" -> a score a question, 0 to 1
WAYS = {"1 thread": 1, "2 threads": 2, "float64": 1}


@pytest.fixture(scope="module")
def ways(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Scores]:
    return {way: scores(tmp_path_factory.mktemp("runs"), way) for way in WAYS}


def scores(runs: Path, way: str) -> Scores:
    """Of the demo's experts and its default swap, all that the demo scores.

    In runs of its own: float64 is no knob, and its trainings have the hashes of those in float32.
    """

    def made(*words: str) -> Path:
        return make_single_run(compose([f"runs_dir={runs}", "tracking.mode=disabled", *words]))  # type: ignore[arg-type]

    world = made("stage=data", "expert=sandbox")
    words = [
        "stage=sft",
        "model=sandbox",
        f"data_root={world}",
        f"threads={WAYS[way]}",
        "sft.save_dtype=float32",
    ]
    with pytest.MonkeyPatch.context() as patch:
        if way == "float64":
            in_float64(patch)
        math = made(*words, "expert=math", "recipe=sandbox_math")
        outer = ["sft=partial", "partition=B", "partition.scale_to_depth=true"]
        language = made(*words, "expert=qac", "recipe=sandbox_language", *outer)
    pair = [f"merge.math={math}", f"merge.language={language}"]
    swap = made("stage=merge", "merge=layer_swap", *pair, "merge.scale_to_depth=true")
    asked = ["stage=eval", "eval=sandbox", f"data_root={world}", "languages=[en,qac]", "threads=1"]
    found = {}
    for name, model in {
        "math expert": math,
        "language expert": language,
        "default swap": swap,
    }.items():
        assert {info.dtype for info in read_header(model / "model.safetensors").values()} == {"F32"}
        for file in sorted((made(*asked, f"checkpoint={model}") / "samples").glob("*.jsonl")):
            rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
            found[f"{name}: {file.stem}"] = [score(row) for row in rows]
    return found


def in_float64(patch: Patch) -> None:
    """Compute weights, gradients, moments and products in float64.

    Norms and the angles of positions stay as transformers writes them.
    """
    load: Callable[..., Any] = pipeline.train.load.load_model

    def cast(*asked: Any) -> Any:
        return load(*asked).to(torch.float64)

    patch.setattr(pipeline.train.load, "load_model", cast)


def score(row: dict[str, Any]) -> float:
    """1 if right; of a translation its chrF++."""
    if row["correct"] is None:
        return (
            float(CHRF(word_order=2).sentence_score(row["extracted"], [row["target"]]).score) / 100
        )
    return float(row["correct"])


@pytest.mark.parametrize("way", ["2 threads", "float64"])
def test_no_score_moves_by_more_than_two_standard_errors(ways: dict[str, Scores], way: str) -> None:
    """Of a score: by the mean of both variances over the questions."""
    assert ways[way].keys() == ways["1 thread"].keys() and len(ways[way]) == 3 * 8
    far = []
    for name, ours in ways["1 thread"].items():
        theirs = ways[way][name]
        moved = statistics.fmean(theirs) - statistics.fmean(ours)
        error = ((statistics.pvariance(ours) + statistics.pvariance(theirs)) / 2 / len(ours)) ** 0.5
        was, now = 100 * statistics.fmean(ours), 100 * statistics.fmean(theirs)
        told = f"{name}: {was:.1f} -> {now:.1f} (standard error {100 * error:.1f})"
        print(f"{way}: {told}")
        if abs(moved) > 2 * error:
            far.append(told)
    assert not far, f"{way}: {'; '.join(far)}"
