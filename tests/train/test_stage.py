"""Ways to train through the whole stage, on the tiny base of all tests."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from fixture_types import Make
from safetensors.torch import load_file
from tiny_words import FEW
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline.config.compose import compose
from pipeline.data.rows import read_jsonl
from pipeline.errors import PipelineError
from pipeline.launch import in_process, preflight
from pipeline.runs.manifest import read_manifest
from pipeline.stages.rows import build
from pipeline.train import load
from pipeline.train.examples import datasets_of

B = ["partition=B", "partition.scale_to_depth=true"]  # of 14 layers: the first three and the last


def facts(folder: Path) -> dict:
    manifest = read_manifest(folder)
    assert manifest is not None
    return manifest.facts


def layers_moved(base: Path, expert: Path) -> set[str]:
    was, now = load_file(base / "model.safetensors"), load_file(expert / "model.safetensors")
    names = {name for name in was if not torch.equal(was[name], now[name])}
    return {name.split(".")[2] if ".layers." in name else name for name in names}


@pytest.fixture(scope="module")
def start(world: Path, base: Path) -> list[str]:
    return [
        "model=trained",
        f"model.path={base}",
        f"data_root={world}",
        *FEW,
        "sft.learning_rate=1e-3",
    ]


def test_simultaneous_expert(make_run: Make, start: list[str], base: Path) -> None:
    words = [
        "stage=sft",
        *start,
        "expert=math_qac",
        "sft=simultaneous",
        *B,
        "sft.steps=4",
        "data.validation=8",
    ]
    expert = make_run(*words, "sft.micro_batch_size=2")
    assert layers_moved(base, expert) == {
        str(layer) for layer in range(14)
    }  # all layers, nothing outside
    log = [json.loads(line) for line in (expert / "log.jsonl").read_text().splitlines()]
    assert [row["side"] for row in log if "loss" in row] == ["math", "language", "math", "language"]
    told = [row for row in log if "validation_loss" in row]
    assert told and all(
        {"validation_loss_math", "validation_loss_language"} <= row.keys() for row in told
    )
    weights = load_file(expert / "model.safetensors")
    assert facts(expert)["steps_a_side"] == {"math": 2, "language": 2}
    assert facts(expert)["trained_parameters"] == sum(
        p.numel() for name, p in weights.items() if ".layers." in name
    )


@pytest.mark.parametrize("way", ["simultaneous_lora", "mixed"])
def test_continual_pretraining_takes_the_same_ways(
    make_run: Make, start: list[str], way: str
) -> None:
    """Rows are packed, as cpt does by default."""
    cut = B if way.startswith("simultaneous") else []
    expert = make_run(
        "stage=cpt", *start, "expert=math_qac", f"sft={way}", *cut, "sft.seq_length=64"
    )
    told = facts(expert)
    assert told["steps"] == 2 and told["dataset_tokens"] > 0
    assert (expert / "adapter_model.safetensors").is_file() == way.endswith("lora")


def test_rows_that_do_not_say_their_side() -> None:
    rows = [{"prompt": "p", "completion": "c", "side": "math"}, {"prompt": "p", "completion": "c"}]
    with pytest.raises(
        PipelineError,
        match="rows of both sides, but the rows are of math and none. Create the data with",
    ):
        datasets_of(rows, tiny.recipe(), ["math", "language"])


def test_the_validation_loss_before_the_first_step(
    make_run: Make, start: list[str], base: Path, world: Path
) -> None:
    """That of the base: cross-entropy over the completions' tokens, by plain transformers."""
    words = [
        "expert=math",
        "data.size=20",
        "data.validation=4",
        "sft.template=plain",
        "sft.precision=fp32",
    ]
    trained = make_run("stage=sft", *start, *words, "sft.validate_at_start=true")
    plain = make_run("stage=sft", *start, *words)
    ours, without = (
        [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
        for run in (trained, plain)
    )
    (first,) = [row for row in ours if row["step"] == 0]
    assert [row for row in ours if row["step"]] == without  # all else is as it was
    data = trained.parent / read_manifest(trained).parents["data"].name  # type: ignore[union-attr]
    tokenizer, model = (
        AutoTokenizer.from_pretrained(base),
        AutoModelForCausalLM.from_pretrained(base),
    )
    total, count = 0.0, 0
    for row in read_jsonl(data / "validation.jsonl"):
        prompt = tokenizer(row["prompt"]).input_ids
        ids = torch.tensor(
            [
                [
                    *tokenizer(f"{row['prompt']}\n{row['completion']}").input_ids,
                    tokenizer.eos_token_id,
                ]
            ]
        )
        ids = ids[:, :96]
        with torch.no_grad():
            likelihoods = (
                model(ids)
                .logits.log_softmax(-1)[0, :-1]
                .gather(1, ids[0, 1:, None])[len(prompt) - 1 :]
            )
        total, count = total - float(likelihoods.sum()), count + len(likelihoods)
    assert first["validation_loss"] == pytest.approx(total / count, rel=1e-4)
    with pytest.raises(
        PipelineError,
        match="sft.validate_at_start=true needs validation rows. Set data.validation",
    ):
        make_run("stage=sft", *start, "expert=math", "sft.validate_at_start=true")


def test_what_does_not_fit_is_refused_before_the_base_is_loaded(
    world: Path, base: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By each process that makes runs, a job's too."""
    monkeypatch.setattr(preflight, "visible_gpus", lambda: ["0"])
    monkeypatch.setattr(preflight, "gpu_memory", lambda: 1000)
    monkeypatch.setattr(load, "load_model", lambda *_: pytest.fail("the base was loaded"))
    words = [
        "stage=sft",
        "expert=math",
        "model=trained",
        f"model.path={base}",
        f"data_root={world}",
        *FEW,
        "seed=77",
    ]
    for way in (["recipe=sandbox_math"], ["sft=lora", "recipe=sandbox_lora"]):
        run: Any = build(compose([*words, *way, f"runs_dir={tmp_path}"]))  # type: ignore[arg-type]
        with pytest.raises(
            PipelineError, match=r"GB of memory on each GPU, and these have 0. Set hardware="
        ):
            in_process.make_run(run)


def test_a_low_rate_with_adapters_is_warned_of_and_determinism_reaches_cublas(
    make_run: Make, world: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    words = [
        "stage=sft",
        "expert=math",
        "model=trained",
        f"model.path={base}",
        f"data_root={world}",
        *FEW,
    ]
    lora = [*words, "sft=lora", "recipe=sandbox_lora", "deterministic=true"]
    slow = facts(make_run(*lora, "sft.learning_rate=1e-6"))
    assert [
        text
        for text in slow["warnings"]
        if text.startswith("sft.learning_rate=1e-06 is below 1e-05, where adapters")
    ]
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    assert "learning_rate" not in str(
        facts(make_run(*lora, "sft.learning_rate=1e-4")).get("warnings")
    )
    torch.use_deterministic_algorithms(False)
