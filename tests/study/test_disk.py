"""What a run will write, against a count by hand."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fixture_types import Patch
from safetensors.torch import save_file

from pipeline.config.compose import compose
from pipeline.errors import PipelineError
from pipeline.estimate.gpu_budget import bytes_of_training
from pipeline.models.shape import SHAPES
from pipeline.runs.disk import check_disk
from pipeline.runs.manifest import Manifest
from pipeline.runs.run import External, Run
from pipeline.stages.rows import bytes_of_merge

LAYERS, WIDTH, INNER, WORDS = 4, 4, 6, 10
LAYER = 4 * WIDTH * WIDTH + 3 * WIDTH * INNER + 2 * WIDTH  # attention of four matrices, an MLP of three, two norms
PARAMETERS = WORDS * WIDTH + LAYERS * LAYER + WIDTH
CONFIG = {
    "model_type": "llama", "hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": LAYERS,
    "num_attention_heads": 1, "num_key_value_heads": 1, "vocab_size": WORDS, "tie_word_embeddings": True,
    "max_position_embeddings": 4096,
}  # fmt: skip


@pytest.fixture
def parents(tmp_path: Path) -> dict[str, Any]:
    """A base, and a data run of 40 rows."""
    model, data = tmp_path / "model", tmp_path / "data"
    model.mkdir(), data.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    (data / "manifest.json").write_text(Manifest("data", "d", {"stage": "data"}, {"counts": {"train": 40}}).as_json())
    return {"model": External("model", "m", model), "data": External("data", "d", data)}


def training(tmp_path: Path, parents: dict[str, Any], *words: str) -> Run:
    config: Any = compose(["stage=sft", "expert=math", "sft.batch_size=4", f"runs_dir={tmp_path}", *words])
    return Run(config, "math", parents, version=1)


def test_weights_in_fp32_and_two_resume_points_with_both_moments(tmp_path: Path, parents: dict[str, Any]) -> None:
    needs = bytes_of_training(training(tmp_path, parents))
    assert needs == {"weights": 4 * PARAMETERS, "resume points": 2 * 12 * PARAMETERS, "snapshots": 0}
    only_when_stopped = bytes_of_training(training(tmp_path, parents, "sft.resume_minutes=null"))
    assert only_when_stopped["resume points"] == 12 * PARAMETERS


def test_of_a_side_only_its_moments_and_of_adapters_only_they(tmp_path: Path, parents: dict[str, Any]) -> None:
    own = "sft.side=math partition=own partition.bottom_layers=1 partition.top_layers=0".split()
    side = (LAYERS - 1) * LAYER  # all layers but the first
    needs = bytes_of_training(training(tmp_path, parents, "sft=partial", *own))
    assert needs["weights"] == 4 * PARAMETERS and needs["resume points"] == 2 * (4 * PARAMETERS + 8 * side)
    adapters = LAYERS * 2 * (4 * (WIDTH + WIDTH) + 3 * (WIDTH + INNER))  # two factors of rank 2 at each matrix
    needs = bytes_of_training(training(tmp_path, parents, "sft=lora", "sft.lora_rank=2"))
    assert needs == {"weights": 4 * adapters, "resume points": 2 * 12 * adapters, "snapshots": 0}


@pytest.mark.parametrize(
    ("words", "count"),
    [
        ("sft.snapshot_every=8 sft.steps=10", 5),  # 40 rows
        ("sft.snapshot_every=8 sft.steps=4", 2),  # 16 rows
        ("sft.snapshot_every=8 sft.steps=10 sft.snapshot_keep=2", 2),
    ],
)
def test_snapshots(words: str, count: int, tmp_path: Path, parents: dict[str, Any]) -> None:
    assert bytes_of_training(training(tmp_path, parents, *words.split()))["snapshots"] == count * 4 * PARAMETERS
    halved = training(tmp_path, parents, *words.split(), "sft.save_dtype=bfloat16")
    assert bytes_of_training(halved)["snapshots"] == count * 2 * PARAMETERS


def test_what_does_not_fit_says_what_it_is_for(tmp_path: Path, parents: dict[str, Any], monkeypatch: Patch) -> None:
    monkeypatch.setattr("pipeline.estimate.gpu_budget.shape_for", lambda run: SHAPES["llama3.1_8b"])
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=100 * 2**30))
    with pytest.raises(PipelineError, match=r"100.0 GB free, about 209.5 GB needed \(29.9 weights, 179.5 resume poi"):
        run = training(tmp_path, parents)
        check_disk(run, bytes_of_training(run))


def test_a_merge_in_float32_of_bfloat16_takes_twice_as_much(tmp_path: Path) -> None:
    experts: dict[str, Any] = {}
    for role, rows in (("0", 3), ("1", 5)):
        folder = tmp_path / role
        folder.mkdir()
        save_file({"model.norm.weight": torch.zeros(rows, 4, dtype=torch.bfloat16)}, folder / "model.safetensors")
        experts[role] = External(role, role, folder)
    larger = (tmp_path / "1/model.safetensors").stat().st_size
    for dtype, times in (("null", 1), ("bfloat16", 1), ("float32", 2)):
        words = ["stage=merge", "merge=soup", "merge.experts=[./a,./b]", f"merge.dtype={dtype}", f"runs_dir={tmp_path}"]
        run = Run(compose(words), "soup", experts, version=1)  # type: ignore[type-var]
        assert bytes_of_merge(run) == {"weights": times * larger}
