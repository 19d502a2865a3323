"""Ways to train through the whole stage, on the tiny base of all tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_words import FEW

from pipeline.knobs import PipelineError
from pipeline.runs import read_manifest

B = ["partition=B", "partition.scale_to_depth=true"]  # of 14 layers: the first three and the last


def facts(folder: Path) -> dict:
    manifest = read_manifest(folder)
    assert manifest is not None
    return manifest["facts"]


def layers_moved(base: Path, expert: Path) -> set[str]:
    was, now = load_file(base / "model.safetensors"), load_file(expert / "model.safetensors")
    names = {name for name in was if not torch.equal(was[name], now[name])}
    return {name.split(".")[2] if ".layers." in name else name for name in names}


@pytest.fixture(scope="module")
def start(world: Path, base: Path) -> list[str]:
    return ["model=trained", f"model.path={base}", f"data_root={world}", *FEW, "sft.learning_rate=1e-3"]


def test_partial_expert(make_run: Callable[..., Path], start: list[str], base: Path) -> None:
    expert = make_run("stage=sft", *start, "expert=qac", "sft=partial", *B)
    assert layers_moved(base, expert) == {"0", "1", "2", "13"}
    told = facts(expert)
    assert told["trained_parameters"] < told["parameters"]
    assert told["training_bytes"] == 12 * told["trained_parameters"] + 4 * told["parameters"]


def test_one_process_and_two_are_the_same_within_rounding(
    make_run: Callable[..., Path], start: list[str], base: Path
) -> None:
    words = ["stage=sft", *start, "expert=math_qac", "sft=simultaneous", *B, "sft.steps=4", "data.validation=8"]
    one = make_run(*words, "sft.micro_batch_size=2")
    two = make_run(*words, "sft.micro_batch_size=2", "sft.processes=2")
    assert layers_moved(base, one) == {str(layer) for layer in range(14)}  # all layers, nothing outside
    before, first, second = (load_file(folder / "model.safetensors") for folder in (base, one, two))
    apart = sum(float((first[name] - second[name]).square().sum()) for name in first) ** 0.5
    moved = sum(float((first[name] - before[name]).square().sum()) for name in first) ** 0.5
    assert apart < 1e-3 * moved
    logs = [[json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()] for folder in (one, two)]
    assert [row.keys() for row in logs[0]] == [row.keys() for row in logs[1]]
    for row, other in zip(*logs, strict=True):
        for key, value in row.items():
            assert other[key] == pytest.approx(value, rel=1e-3), key
    told = [row for row in logs[0] if "validation_loss" in row]
    assert all({"validation_loss_math", "validation_loss_language"} <= row.keys() for row in told)
    assert facts(one)["steps_a_side"] == {"math": 2, "language": 2}


@pytest.mark.parametrize("way", ["simultaneous_lora", "mixed"])
def test_continual_pretraining_takes_the_same_ways(make_run: Callable[..., Path], start: list[str], way: str) -> None:
    """Rows are packed, as cpt does by default."""
    cut = B if way.startswith("simultaneous") else []
    expert = make_run("stage=cpt", *start, "expert=math_qac", f"sft={way}", *cut, "sft.seq_length=64")
    told = facts(expert)
    assert told["steps"] == 2 and told["dataset_tokens"] > 0
    assert (expert / "adapter_model.safetensors").is_file() == way.endswith("lora")


def test_no_response_left_after_truncation(make_run: Callable[..., Path], start: list[str]) -> None:
    with pytest.raises(PipelineError, match="sft.seq_length=8 leaves no row with a loss"):
        make_run("stage=sft", *start, "expert=math", "sft.seq_length=8")


def test_a_gpu_that_is_too_small_is_told_before_training(
    make_run: Callable[..., Path], start: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.train.sft.gpu_memory", lambda: 10**6)
    with pytest.raises(PipelineError, match="sft.optimizer=adamw takes .* GB of weights"):
        make_run("stage=sft", *start, "expert=math")


def test_rows_that_do_not_say_their_side(make_run: Callable[..., Path], start: list[str]) -> None:
    sources = ["expert.sources.orca_math.side=null", "expert.sources.aya.side=null"]
    with pytest.raises(PipelineError, match="needs rows that say their side"):
        make_run("stage=sft", *start, "expert=math_qac", "sft=simultaneous", *B, *sources)
