"""Branches that only CUDA takes, with a stand-in GPU, as scripts/cuda_branches.py lists."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fixture_types import Patch
from script_modules import load_script

from pipeline.config.data import Data, Expert
from pipeline.config.evaluation import Eval
from pipeline.config.explain import validated
from pipeline.config.stages import TrainStage
from pipeline.config.training import ATTENTIONS, Model, Sft
from pipeline.errors import PipelineError
from pipeline.evaluate import score, torch_backend
from pipeline.evaluate.shared_cache import ATTENTION as PREFIX_READ_ONCE
from pipeline.evaluate.shared_cache import FORCE_GROUPED, heads_as_they_are
from pipeline.launch import local
from pipeline.launch.in_process import error_sentence
from pipeline.runs.provenance import machine_facts
from pipeline.train import load, processes, trainer

CARD = "NVIDIA A100-SXM4-80GB"


@pytest.fixture
def cuda(monkeypatch: Patch) -> list[str]:
    """Two cards of 80 GB, visible as 4 and 6; what was asked of them."""
    asked: list[str] = []
    properties = SimpleNamespace(total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: CARD)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: properties)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: asked.append("empty_cache"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    return asked


def test_every_branch_is_listed(monkeypatch: Patch, tmp_path: Path) -> None:
    """With a test and a line that are there.

    A new branch, one more in a function, and one that is gone, are named.
    """
    script = load_script("cuda_branches")
    assert script.problems() == []
    monkeypatch.setattr(script, "LINES", {**script.LINES, "train/processes.py::join_processes": 2})
    [more] = script.problems()
    assert more.startswith("train/processes.py::join_processes: CUDA decides in lines [")
    (tmp_path / "new.py").write_text(
        '"""cuda"""\ndef pick():\n    return "cuda" if torch.cuda.is_available() else "cpu"\n'
    )
    monkeypatch.setattr(script, "SRC", tmp_path)
    assert list(script.places()) == ["new.py::pick"]
    new, *gone = script.problems()
    assert new.startswith("new.py::pick has a branch for CUDA") and new.endswith(
        "is in neither list"
    )
    assert len([line for line in gone if line.endswith("no branch for CUDA")]) == len(
        script.STAND_INS | script.NEVER
    )


# --- training ---


def stage_of(**knobs: Any) -> TrainStage:
    sft = Sft(name="full", batch_size=8, **knobs)
    model, expert = Model(name="m", path="hub:org/m"), Expert(name="e", side="math")
    return TrainStage(stage="sft", model=model, expert=expert, data=Data(), sft=sft, partition=None)


def test_the_trainer_is_on_the_gpu_and_shards(
    cuda: list[str], monkeypatch: Patch, tmp_path: Path
) -> None:
    """SFTConfig itself would ask the driver."""
    monkeypatch.setattr(trainer, "SFTConfig", lambda **given: given)
    shared: Any = {"precision": "bf16", "processes": 2}
    given: Any = trainer.trainer_arguments(
        stage_of(parallel="fsdp2", **shared), False, False, tmp_path
    )
    assert (
        given["use_cpu"] is False
        and given["bf16"] is True
        and given["per_device_train_batch_size"] == 4
    )
    assert given["fsdp"] is True and given["fsdp_config"] == {"version": 2}
    given = trainer.trainer_arguments(stage_of(**shared), False, False, tmp_path)
    assert given["use_cpu"] is False and given["fsdp"] is False
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    given = trainer.trainer_arguments(stage_of(**shared), False, False, tmp_path)
    assert given["use_cpu"] is True


def refused(sentence: str, **knobs: Any) -> None:
    """Check that a training with these kernels ends with this sentence."""
    with pytest.raises(PipelineError, match=sentence):
        load.check_kernels(stage_of(**knobs))


def test_kernels_that_a_gpu_lacks(cuda: list[str], monkeypatch: Patch) -> None:
    """Liger, and TF32 before the A100."""
    capability, there = [(8, 0)], set[str]()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability[0])
    monkeypatch.setattr(load, "find_spec", lambda name: name in there)
    load.check_kernels(stage_of(precision="tf32"))
    refused("sft.liger=true needs a GPU and Liger. Run pip install 'cross-lingual-m", liger=True)
    there.add("liger_kernel")
    load.check_kernels(stage_of(liger=True))
    capability[0] = (7, 5)
    refused(
        "sft.precision=tf32 needs a GPU from the A100 on. Give sft.precision=fp32", precision="tf32"
    )


def test_kernels_that_a_cpu_lacks(monkeypatch: Patch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refused("sft.precision=tf32 needs a GPU from the A100 on", precision="tf32")
    refused(
        "sft.parallel=fsdp2 needs GPUs. On a CPU, give sft.parallel=ddp",
        parallel="fsdp2",
        processes=2,
    )
    monkeypatch.setattr(load, "find_spec", lambda name: True)
    refused("sft.liger=true needs a GPU and Liger. Run pip install", liger=True)


@pytest.mark.parametrize(
    "attention", ["flash_attention_2", f"kernels-community/flash-attn2@{'a' * 40}"]
)
def test_an_attention_that_is_not_installed_is_named(
    attention: str, models: dict[str, list[Path]]
) -> None:
    config = stage_of()
    model = replace(config.model, attn_implementation=attention)
    run = SimpleNamespace(config=replace(config, model=model))
    with pytest.raises(PipelineError, match=f"could not be loaded with .*{attention}: .*install"):
        load.load_model(run, None, models["llama"][0])  # type: ignore[arg-type]


def test_attentions_are_those_of_transformers() -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    theirs = {
        name for name in ALL_ATTENTION_FUNCTIONS.valid_keys() if "|" not in name and "/" not in name
    }
    assert set(ATTENTIONS) == theirs - {PREFIX_READ_ONCE} | {
        "eager"
    }  # what decoding may have registered here
    with pytest.raises(
        PipelineError, match="attn_implementation=flash is not of the form sdpa, eager, flash_at"
    ):
        validated(Model, {"attn_implementation": "flash"}, "model.")


def test_torchao_compiles_its_step_on_a_gpu(
    cuda: list[str], monkeypatch: Patch, tmp_path: Path
) -> None:
    stances: list[str] = []
    monkeypatch.setattr(torch.compiler, "set_stance", stances.append)
    monkeypatch.setattr(trainer, "SFTConfig", lambda **given: given)
    config = stage_of(weights="bfloat16", optimizer="adamw_8bit")
    given: Any = trainer.trainer_arguments(config, False, False, tmp_path)
    assert (given["optim"], given["optim_args"]) == (
        "adamw_torch_8bit",
        "bf16_stochastic_round=True",
    )
    assert stances == ["default"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    trainer.trainer_arguments(config, False, False, tmp_path)
    assert stances == ["default", "force_eager"]


def test_processes_meet_as_gpus(cuda: list[str], monkeypatch: Patch) -> None:
    """accelerate takes NCCL where it is not told to be on a CPU."""
    met: list[bool] = []
    monkeypatch.setattr("accelerate.PartialState", lambda cpu, timeout: met.append(cpu))
    monkeypatch.setattr("accelerate.utils.broadcast_object_list", lambda of_this: ["of the first"])
    run: Any = SimpleNamespace(lease=None)
    processes.join_processes(run)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    processes.join_processes(run)
    assert met == [False, True] and run.lease == "of the first"


# --- scoring ---


class Moved(torch.nn.Linear):
    """A model that records where it was moved."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.moved: list[str] = []

    def to(self, device: str) -> Moved:  # type: ignore[override]
        self.moved.append(device)
        return self


def test_models_are_scored_on_the_gpu(cuda: list[str], monkeypatch: Patch, tmp_path: Path) -> None:
    """A folder's, and a merge, which is put together there."""
    merges: list[str] = []
    live = SimpleNamespace(model=Moved(), tokenizer="t")
    monkeypatch.setattr(
        "pipeline.merge.live.model_of",
        lambda merge, dtype, device, products: merges.append(device) or live,
    )
    monkeypatch.setattr(torch_backend.load, "load_model", lambda folder, dtype: Moved())
    assert torch_backend.TorchBackend(8, weights=tmp_path).load().moved == ["cuda"]
    merge: Any = SimpleNamespace(layout=SimpleNamespace(folder=tmp_path))
    assert torch_backend.TorchBackend(8, weights=merge).load() is live.model and merges == ["cuda"]


def test_memory_is_given_back_before_a_smaller_batch(cuda: list[str]) -> None:
    backend, tried = torch_backend.TorchBackend(8), []

    def work() -> str:
        tried.append((backend.batch_size, len(cuda)))
        if backend.batch_size > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7 GiB.")
        return "done"

    assert backend.halving(work) == "done"
    assert tried == [(8, 0), (4, 1), (2, 2)]


def test_a_full_gpu_is_one_sentence() -> None:
    told = error_sentence(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7 GiB."))
    assert told is not None and told.startswith(
        "out of memory: lower sft.micro_batch_size, sft.seq_length or eval."
    )
    assert error_sentence(RuntimeError("CUDA error: device-side assert triggered")) is None


def test_heads_are_copied_on_a_gpu(monkeypatch: Patch) -> None:
    monkeypatch.delenv(FORCE_GROUPED, raising=False)
    for device, forced in (("cuda", None), ("cpu", "1")):
        with heads_as_they_are(torch.device(device)):
            assert os.environ.get(FORCE_GROUPED) == forced
        assert FORCE_GROUPED not in os.environ


def test_scores_name_the_card(cuda: list[str], monkeypatch: Patch) -> None:
    """Scores below float32 are found again on the same card only."""
    settings = Eval(name="mgsm_2shot", dtype="bfloat16")
    there = score.rounding_settings(settings)
    assert there["processor"] == CARD and there["batch_size"] is None  # as many as its memory holds
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    here = score.rounding_settings(settings)
    assert here["processor"] != CARD and {**here, "processor": CARD, "batch_size": None} == there
    assert (
        here["batch_size"] == 32
        and score.rounding_settings(replace(settings, batch_size=32)) == here
    )


def test_a_worker_sees_its_gpu_alone(monkeypatch: Patch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    started: list[dict[str, str]] = []
    monkeypatch.setattr(subprocess, "Popen", lambda command, env, **_: started.append(env))
    for gpus in (["4", "6"], []):
        with local.Local(2, gpus) as workers:
            workers.start(0), workers.start(1)
            workers.workers.clear()
    assert [env["CUDA_VISIBLE_DEVICES"] for env in started] == ["4", "6", "4,6", "4,6"]


def test_manifests_name_the_card(cuda: list[str]) -> None:
    assert machine_facts()["device"] == CARD
