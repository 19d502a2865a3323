"""Killed at any step, a training ends with the bits and the log that it would have had; and what stops it early."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

from pipeline import resume, runs
from pipeline.compose import compose
from pipeline.runs import Run, read_manifest, sha256
from pipeline.study.build import build
from pipeline.study.execute import stage_function
from pipeline.train import life

STEPS = 6
SMALL = [
    *("sft.seq_length=96", "sft.batch_size=4", f"sft.steps={STEPS}", "sft.warmup_steps=2", "sft.resume_minutes=0"),
    *("sft.learning_rate=1e-3", "tracking.mode=disabled", "threads=1"),
]


class Killed(Exception):
    """What a test kills a training with."""


class KillAt(TrainerCallback):
    """Raises at the end of a step, before the resume point of that step is written."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            raise Killed


@pytest.fixture
def killed_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], None]:
    """Have the next trainings killed at the end of this step; None: no more."""
    real = life.Life

    def at(step: int | None) -> None:
        class Killing(real):  # type: ignore[misc,valid-type]
            def __init__(self, trainer: Any, *rest: Any) -> None:
                super().__init__(trainer, *rest)
                trainer.add_callback(KillAt(step or 0))

        monkeypatch.setattr(life, "Life", Killing)

    return at


@pytest.fixture
def words(base: Path, world: Path) -> Callable[..., list[str]]:
    """The command line of a small training."""

    def command(runs_dir: Path, *more: str) -> list[str]:
        start = ["stage=sft", "expert=math", "model=trained", f"model.path={base}", f"data_root={world}"]
        return [*start, *SMALL, f"runs_dir={runs_dir}", *more]

    return command


def made(command: list[str]) -> Path:
    run = build(compose(command))  # type: ignore[arg-type]
    for parent in run.parents.values():
        if isinstance(parent, Run):
            runs.make(parent, stage_function(parent))
    return runs.make(run, stage_function(run))


def results(folder: Path) -> dict[str, str]:
    """The digests of the weights, of each snapshot and of the log."""
    manifest = read_manifest(folder)
    assert manifest is not None
    facts = manifest["facts"]
    found = {"weights": facts["weights"]["root"], "log": sha256(folder / "log.jsonl"), "loss": facts["loss"]}
    return found | {step: (one["root"], one["validation_loss"]) for step, one in facts.get("snapshots", {}).items()}


JOINT = ["expert=math_qac", "data.size=60", "data.validation=8", "sft.snapshot_every=9", "sft.snapshot_keep=1"]
WAYS = {
    "full": ["data.size=28", "data.validation=8", "sft.snapshot_every=9"],
    "accumulated over a short epoch": ["data.size=14", "sft.epochs=2", "sft.micro_batch_size=2"],
    "muon": ["sft.optimizer=muon_adamw"],
    "rare log": ["sft.schedule=wsd"],
    "partial": ["sft=partial", "partition=B"],
    "lora": ["sft=lora", "sft.lora_dropout=0.1"],
    "partial_lora": ["sft=partial_lora", "partition=C"],
    "mixed": ["sft=mixed", *JOINT],
    "mixed_lora": ["sft=mixed_lora", *JOINT],
    "simultaneous": ["sft=simultaneous", "partition=own", "partition.bottom_layers=2", "partition.top_layers=1", *JOINT],
    "simultaneous_lora": ["sft=simultaneous_lora", "partition=A", "sft.steps_per_switch=2", *JOINT],
}
KILLED = {"full": range(1, STEPS + 1), "rare log": (3, 6), "simultaneous": (2, 5)}  # of the others, one step


@pytest.mark.parametrize("way", WAYS)
def test_killed_at_any_step_it_ends_with_the_same_bits_and_log(
    way: str, words: Callable[..., list[str]], killed_at: Callable[[int | None], None], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if way in ("rare log", "simultaneous"):  # sums behind the mean loss are held over steps
        from pipeline.train import sft

        plan = sft.plan_steps

        def rarely(args: Any, *rest: Any) -> None:
            plan(args, *rest)
            args.logging_steps = 4

        monkeypatch.setattr(sft, "plan_steps", rarely)
    expected = results(made(words(tmp_path / "whole", *WAYS[way])))
    for step in KILLED.get(way, (4,)):
        killed_at(step)
        command = words(tmp_path / f"killed-{step}", *WAYS[way])
        with pytest.raises(Killed):
            made(command)
        record = resume.read(build(compose(command)).work)  # type: ignore[arg-type]
        assert (record["step"] if record else 0) == step - 1
        killed_at(None)
        folder = made(command)
        assert results(folder) == expected, step
        assert not {"resume", "resume.json", "trainer", "check"} & {path.name for path in folder.iterdir()}
        taken_up = read_manifest(folder)["facts"].get("resumed", [])  # type: ignore[index]
        assert [one["step"] for one in taken_up] == ([step - 1] if step > 1 else [])
        shutil.rmtree(tmp_path / f"killed-{step}")
