"""What training will save is looked at after its first step."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import model
from transformers import LlamaForCausalLM

from pipeline.data.sandbox.tokenizer import make_tokenizer as sandbox_tokenizer
from pipeline.errors import PipelineError
from pipeline.train import reload_check
from pipeline.train.checkpoints import same_random_numbers
from pipeline.train.reload_check import SAME, Stored, check_saved, compute_logits, load_saved
from pipeline.train.save import save_model

CPU = torch.device("cpu")
tiny = partial(model, layers=2, tie_word_embeddings=True, attn_implementation="sdpa")


def trainer(model: Any) -> Any:
    tokenizer = sandbox_tokenizer()
    row = {"input_ids": tokenizer("Mia has 3 cups.").input_ids}
    return SimpleNamespace(
        model=model, processing_class=tokenizer, train_dataset=[row],
        args=SimpleNamespace(bf16=False, process_index=0, world_size=1),
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_what_was_saved_answers_as_what_is_trained(dtype: str | None, tmp_path: Path) -> None:
    made = trainer(tiny().train())
    before = {name: p.clone() for name, p in made.model.named_parameters()}
    with same_random_numbers():
        save_model(made.model, made.processing_class, tmp_path, dtype)
        check_saved(made, tmp_path, None)
    assert made.model.training  # left as it was
    for name, parameter in made.model.named_parameters():
        assert parameter.dtype == torch.float32 and torch.equal(parameter, before[name])


def test_an_adapter_is_checked_on_its_base(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    base = tiny()
    save_model(base, sandbox_tokenizer(), tmp_path / "base", None)
    model: Any = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"], use_rslora=True))
    torch.nn.init.normal_(model.base_model.model.model.layers[0].self_attn.q_proj.lora_B["default"].weight)
    save_model(model, sandbox_tokenizer(), tmp_path / "adapter", None)
    check_saved(trainer(model), tmp_path / "adapter", tmp_path / "base")
    torch.nn.init.normal_(model.base_model.model.model.layers[0].self_attn.q_proj.lora_B["default"].weight)
    with pytest.raises(PipelineError, match="its logits differ by"):
        check_saved(trainer(model), tmp_path / "adapter", tmp_path / "base")


@pytest.mark.parametrize("save_dtype", [None, "float32"])
@pytest.mark.parametrize("adapter", [False, True])
def test_weights_in_bfloat16_are_reloaded_as_they_are_trained(
    adapter: bool, save_dtype: str | None, tmp_path: Path
) -> None:
    """In float32 the same weights give logits that differ by far more than what an unlike model would be told by."""
    from peft import LoraConfig, get_peft_model

    of_base: Any = tiny(dtype=torch.bfloat16, attn_implementation="eager", initializer_range=0.3)
    save_model(of_base, sandbox_tokenizer(), tmp_path / "base", None)
    model = get_peft_model(of_base, LoraConfig(r=2, target_modules=["q_proj"])) if adapter else of_base
    save_model(model, sandbox_tokenizer(), tmp_path / "saved", save_dtype)
    made = trainer(model)
    check_saved(made, tmp_path / "saved", tmp_path / "base")
    ids = made.train_dataset[0]["input_ids"]
    ours = compute_logits(model, ids, False, CPU)
    wide = compute_logits(LlamaForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32), ids, False, CPU)
    assert (ours - wide).abs().max() > 2 * SAME * ours.abs().max()


def test_weights_that_were_cast_may_differ_by_the_rounding(tmp_path: Path) -> None:
    made = trainer(tiny(initializer_range=0.3))
    save_model(made.model, made.processing_class, tmp_path, "bfloat16")
    check_saved(made, tmp_path, None)
    reloaded = compute_logits(load_saved(tmp_path, None, made.model), made.train_dataset[0]["input_ids"], False, CPU)
    ours = compute_logits(made.model, made.train_dataset[0]["input_ids"], False, CPU)
    assert SAME * ours.abs().max() < (ours - reloaded).abs().max()


def other_weights(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] * 2
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def other_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages }}")


def other_positions(folder: Path) -> None:
    told = json.loads((folder / "config.json").read_text())
    told["rope_parameters"]["rope_theta"] = 7.0
    (folder / "config.json").write_text(json.dumps(told))


def other_tokens(folder: Path) -> None:
    told = json.loads((folder / "tokenizer.json").read_text())
    told["post_processor"] = None  # no beginning of sequence
    (folder / "tokenizer.json").write_text(json.dumps(told))


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (other_weights, "its logits differ by"),
        (other_positions, "its logits differ by"),
        (other_template, "its tokenizer splits text differently, or has another chat template"),
        (other_tokens, "its tokenizer splits text differently, or has another chat template"),
        (lambda folder: (folder / "generation_config.json").unlink(), "it has no generation_config.json"),
    ],
)
def test_what_is_missing_or_differs_is_refused(spoil: Callable[[Path], None], told: str, tmp_path: Path) -> None:
    made = trainer(tiny(initializer_range=0.3))
    save_model(made.model, made.processing_class, tmp_path, None)
    spoil(tmp_path)
    with pytest.raises(PipelineError, match=told) as refused:
        check_saved(made, tmp_path, None)
    assert "train anyway with sft.check_saved=false" in str(refused.value)


def test_no_second_model_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the reloaded model holds, each time that it reads a weight: one module's at most."""
    held: list[int] = []

    class Watched(Stored):
        def __init__(self, model: Any, *rest: Any) -> None:
            super().__init__(model, *rest)
            self.model = model

        def __getitem__(self, name: str) -> torch.Tensor:
            found = super().__getitem__(name)
            there = sum(p.numel() for p in self.model.parameters() if not p.is_meta)
            held.append(there + found.numel())
            return found

    made = trainer(tiny())
    save_model(made.model, made.processing_class, tmp_path, None)
    monkeypatch.setattr(reload_check, "Stored", Watched)
    check_saved(made, tmp_path, None)
    sizes = [p.numel() for p in made.model.parameters()]
    assert len(held) > len(sizes) and max(held) == max(sizes)


def test_what_is_drawn_on_the_way_is_not_missed() -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    with same_random_numbers():
        torch.rand(7)
    assert torch.equal(torch.rand(3), expected)
