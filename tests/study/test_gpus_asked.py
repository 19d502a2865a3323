"""More processes than GPUs: refused before anything is made, on a machine whose GPUs are counted by torch."""

from pathlib import Path
from typing import Any

import pytest
import torch
from fixture_types import Call
from tiny_words import FEW, last_of

from pipeline.config.compose import compose
from pipeline.config.stages import Launcher
from pipeline.estimate.durations import History
from pipeline.launch import launchers
from pipeline.launch.in_process import refuse_without_gpus
from pipeline.launch.plan_file import Task
from pipeline.stages.rows import build


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")


def nothing_made(runs_dir: Path) -> bool:
    return not list(runs_dir.glob("*/manifest.json")) and not list(runs_dir.glob(".work/*"))


def test_more_processes_than_gpus(two_gpus: None, world: Path, base: Path, call: Call, tmp_path: Path) -> None:
    few = [word for word in FEW if not word.startswith("sft.micro_batch_size")]
    words = ["stage=sft", "expert=math", "model=trained", f"model.path={base}", f"data_root={world}", *few]
    told = call(*words, "sft.processes=4", "sft.micro_batch_size=1", f"runs_dir={tmp_path}")
    assert told.status == 1 and nothing_made(tmp_path)
    assert "\nerror: sft.processes=4, but 2 GPUs are visible here (math-full-s0-" in told.err
    assert told.err.endswith("): give at most 2\n")
    two = build(compose([*words, "sft.processes=2", "sft.micro_batch_size=1", f"runs_dir={tmp_path}"]))  # type: ignore[arg-type]
    refuse_without_gpus([two])


def training(world: Path, base: Path, tmp_path: Path, processes: int) -> Any:
    few = [word for word in FEW if not word.startswith("sft.micro_batch_size")]
    words = ["stage=sft", "expert=math", "model=trained", f"model.path={base}", f"data_root={world}", *few]
    size = [f"sft.processes={processes}", "sft.micro_batch_size=1", "sft.batch_size=12", f"runs_dir={tmp_path}"]
    return build(compose([*last_of([*words, *size])]))  # type: ignore[arg-type]


def test_without_gpus_processes_share_the_cpu(
    monkeypatch: pytest.MonkeyPatch, world: Path, base: Path, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    refuse_without_gpus([training(world, base, tmp_path, 3)])


def test_workers_are_one_a_gpu_and_trainings_count_theirs(
    monkeypatch: pytest.MonkeyPatch, world: Path, base: Path, tmp_path: Path
) -> None:
    """Eight GPUs: as many workers, whatever runs ask for; tests/study/test_cards.py has them compute."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    run = training(world, base, tmp_path, 4)
    assert Task.of(run).gpus == 4 and launchers.workers_of(Launcher(), [run]) == 8
    assert launchers.workers_of(Launcher(workers=2), [run]) == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert launchers.workers_of(Launcher(), [run]) == 1


def test_the_time_of_trainings_on_several_gpus_is_divided_among_as_many(
    monkeypatch: pytest.MonkeyPatch, world: Path, base: Path, tmp_path: Path
) -> None:
    """Four of 100 s on four of eight GPUs each: two at a time."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    monkeypatch.setattr(History, "predict", lambda self, run: 100.0)
    runs = [training(world, base, tmp_path, 4) for _ in range(4)]
    for seed, run in enumerate(runs):
        run.config.seed = seed
    assert History().sum(runs, workers=8) == ("about 3:20 min", "")
