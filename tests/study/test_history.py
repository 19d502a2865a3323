"""How long a run is expected to take: by its work, corrected by what finished runs took."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_words import FEW, TINY, WORLD

from pipeline.config.compose import compose
from pipeline.models.checkpoint import read_json
from pipeline.models.shape import SHAPES, shape_of
from pipeline.runs.manifest import Manifest, read_manifest
from pipeline.runs.run import Run
from pipeline.study import history
from pipeline.study.cost import training_seconds
from pipeline.study.history import CPU, STEP, History, guess, questions
from pipeline.study.stages import RUN_STAGES, build
from pipeline.train.memory import everything


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def of(*words: str) -> Run:
    return build(compose([*words, "tracking.mode=disabled"]))  # type: ignore[arg-type]


@pytest.fixture
def training(world: Path, base: Path, runs_dir: Path) -> Callable[..., Run]:
    start = ["stage=sft", "expert=math", "model=trained", f"model.path={base}", f"data_root={world}", "threads=1"]
    return lambda *words: of(*start, *FEW, f"runs_dir={runs_dir}", *words)


def manifest(stage: str, name: str, seconds: float, guessed: float | None) -> Manifest:
    cost = {"seconds": seconds, "guessed_seconds": guessed}
    return SimpleNamespace(stage=stage, name=name, seconds=seconds, cost=cost)  # type: ignore[return-value]


# ---------------------------------------------------------------------------------------------------- first guesses


def test_a_training_by_its_tokens_and_steps(training: Callable[..., Run], math_expert: Path, base: Path) -> None:
    """Against the formula of study/cost.py by hand, with the rows' mean length by the bytes of their file."""
    shape = shape_of(read_json(base / "config.json"))
    run = training("sft.steps=50")
    file = run.parents["data"].folder / "train.jsonl"
    mean = file.stat().st_size / 4 / len(file.read_text().splitlines())
    by_hand = training_seconds(
        shape, everything(shape), 50 * 4, min(mean, 96), 4, CPU, checkpointing=False, precision="fp32"
    )
    assert guess(run) == pytest.approx(1 + by_hand + 50 * STEP)
    more = guess(training("sft.steps=100")) - guess(training("sft.steps=50"))
    assert more == pytest.approx(guess(training("sft.steps=50")) - 1)  # twice the steps, twice the time
    two = replace(run, config=replace(run.config, threads=2))
    assert 1 + 50 * STEP < guess(two) < guess(run)


def test_what_was_90_seconds_for_two_steps(training: Callable[..., Run], math_expert: Path) -> None:
    made, run = read_manifest(math_expert), training()
    run = replace(run, config=replace(run.config, threads=None))  # as many as there are cores
    assert made is not None and RUN_STAGES["sft"].seconds == 90
    assert made.cost["guessed_seconds"] == guess(run) < 2


def test_an_evaluation_by_its_questions(world: Path, base: Path, runs_dir: Path, tmp_path: Path) -> None:
    start = ["stage=eval", f"checkpoint={base}", "eval=mgsm_2shot", "threads=1", f"runs_dir={runs_dir}"]
    run: Any = of(*start, f"data_root={world}", "languages=[qac]")
    assert questions(run, run.config.eval.tasks[0], "qac") == 4  # as the world holds
    limited: Any = of(*start, f"data_root={world}", "languages=[qac]", "eval.limit=2")
    assert questions(limited, limited.config.eval.tasks[0], "qac") == 2
    hub: Any = of(*start, "languages=[sw]")
    assert questions(hub, hub.config.eval.tasks[0], "sw") == 250
    assert guess(limited) < guess(run) < guess(hub) / 3
    short: Any = of(*start, f"data_root={world}", "languages=[qac]", "eval.max_gen_toks=4")
    assert guess(short) < guess(run)
    assert guess(of(*start, f"data_root={world}", "languages=[en,qac]")) == 0.2  # averages of two runs


def test_questions_of_a_world_that_is_still_to_be_made(world: Path, base: Path, tmp_path: Path) -> None:
    words = [f"checkpoint={base}", "eval=mgsm_0shot", "languages=[qac]", f"runs_dir={tmp_path}", f"data_root={world}"]
    run: Any = of("stage=eval", *words)
    to_come = of("stage=data", *WORLD, f"runs_dir={tmp_path}")
    run = replace(run, parents={**run.parents, "data_root": to_come})
    assert questions(run, run.config.eval.tasks[0], "qac") == 4


def test_a_world_by_its_rows(tmp_path: Path) -> None:
    small, large = of("stage=data", *WORLD, f"runs_dir={tmp_path}"), of("stage=data", "expert=sandbox")
    assert guess(small) == pytest.approx(1.5 + (40 + 3 * 60 + 150) / history.WORLD_ROWS)
    assert guess(large) == pytest.approx(1.5 + 54_000 / history.WORLD_ROWS)


def test_a_model_from_nothing_and_one_that_is_not_here(world: Path, tmp_path: Path) -> None:
    data = ["expert=sandbox_text", f"data_root={world}", "recipe=sandbox_base", f"runs_dir={tmp_path}", "threads=1"]
    few, many = (of("stage=cpt", *TINY, *data, *FEW, f"sft.steps={steps}") for steps in (10, 1000))
    assert guess(few) < guess(many) / 20 and guess(few) < RUN_STAGES["cpt"].seconds
    hub = of("stage=sft", "expert=math", "model=llama3.1_8b", f"runs_dir={tmp_path}", "sft.steps=100", "threads=1")
    shape: Any = SHAPES["llama3.1_8b"]
    flops_alone = 6 * (shape.parameters - shape.embedding) * 100 * hub.config.sft.batch_size * 320  # Kaplan et al.
    assert guess(hub) > flops_alone / CPU.fp32
    assert guess(hub, on_gpu=True) < guess(hub) / 1000


# ---------------------------------------------------------------------------------------------------- corrections


def test_finished_runs_correct_the_guess(training: Callable[..., Run], math_expert: Path) -> None:
    run = training("sft.steps=50")
    assert History().predict(run) == guess(run)
    slower = History([manifest("sft", "qac-full-s0-00000000", 30.0, 10.0)])  # of the stage: three times as slow
    assert slower.predict(run) == pytest.approx(3 * guess(run))
    for seconds in (5.0, 6.0, 100.0):  # of the same kind: their median
        slower.add(manifest("sft", "math-full-s1-00000000", seconds, 4.0))
    assert slower.predict(run) == pytest.approx(1.5 * guess(run))
    assert slower.predict(training("sft.steps=5")) == pytest.approx(1.5 * guess(training("sft.steps=5")))


def test_runs_of_before_that_guessed_nothing_stand_for_themselves(training: Callable[..., Run]) -> None:
    old = History([manifest("sft", "math-full-s1-00000000", 7.0, None), manifest("eval", "eval-x-y-0", 1.0, 1.0)])
    assert old.predict(training()) == 7.0
