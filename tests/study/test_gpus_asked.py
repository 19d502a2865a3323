"""GPUs that a training asks for, on a machine whose GPUs are counted by torch.

Too few, or under a driver that is too old, they are refused before anything is made.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fixture_types import Call, Patch
from tiny_words import FEW, last_of

from pipeline.config.stages import Launcher
from pipeline.estimate import durations
from pipeline.launch import launchers
from pipeline.launch.in_process import refuse_without_gpus
from pipeline.launch.plan_file import Task
from pipeline.stages.rows import build_single

Training = Callable[[int], Any]  # of so many processes


@pytest.fixture
def words(world: Path, base: Path, tmp_path: Path) -> list[str]:
    start = [
        "stage=sft",
        "expert=math",
        "model=trained",
        f"model.path={base}",
        f"data_root={world}",
        *FEW,
    ]
    return [*start, "sft.micro_batch_size=1", "sft.batch_size=12", f"runs_dir={tmp_path}"]


@pytest.fixture
def training(words: list[str]) -> Training:
    return lambda processes: build_single(last_of([*words, f"sft.processes={processes}"]))


@pytest.fixture
def two_gpus(monkeypatch: Patch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")


def test_more_processes_than_gpus(
    two_gpus: None, words: list[str], training: Training, call: Call, tmp_path: Path
) -> None:
    told = call(*words, "sft.processes=4", status=1).err
    assert not list(tmp_path.glob("*/manifest.json")) and not list(tmp_path.glob(".work/*"))
    assert "\nerror: sft.processes=4, but 2 GPUs are visible here (math-full-s0-" in told
    assert told.endswith("). Give at most 2.\n")
    refuse_without_gpus([training(2)])


def test_without_gpus_processes_share_the_cpu(monkeypatch: Patch, training: Training) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    refuse_without_gpus([training(3)])


def test_workers_are_one_a_gpu_and_trainings_count_theirs(
    monkeypatch: Patch, training: Training
) -> None:
    """Eight GPUs: as many workers, whatever runs ask for.

    Tests/study/test_cards.py has them compute.
    """
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    run = training(4)
    assert Task.of(run).gpus == 4 and launchers.workers_of(Launcher(), [run]) == 8
    assert launchers.workers_of(Launcher(workers=2), [run]) == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert launchers.workers_of(Launcher(), [run]) == 1


def test_the_time_of_trainings_on_several_gpus_is_divided_among_as_many(
    monkeypatch: Patch, training: Training
) -> None:
    """Four of 100 s on four of eight GPUs each: two at a time."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    monkeypatch.setattr(durations, "guess", lambda run: 100.0)
    runs = [training(4) for _ in range(4)]
    for seed, run in enumerate(runs):
        run.config.seed = seed
    assert durations.total_seconds(runs, workers=8) == (200, 0)
