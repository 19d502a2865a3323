"""Experts whose embeddings have different numbers of rows, by hand."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from as_torch import as_torch
from safetensors.torch import load_file, save_file
from small_models import stacked
from torch import Tensor

from pipeline.errors import PipelineError
from pipeline.merge.adapters import open_source
from pipeline.merge.live import Live, model_of
from pipeline.merge.merge import Merging
from pipeline.merge.methods.layer_swap import LayerSwap
from pipeline.merge.methods.soup import Soup
from pipeline.merge.methods.task_arithmetic import TaskArithmetic
from pipeline.merge.methods.ties import Ties
from pipeline.merge.open_merge import open_merge
from pipeline.models.checkpoint import Checkpoint

EMBEDDING, HEAD, LAYER = (
    "model.embed_tokens.weight",
    "lm_head.weight",
    "model.layers.0.mlp.up_proj.weight",
)
TWO = {"experts": ["a", "b"]}


def tokenizer(folder: Path, added: int, vocabulary: int = 4) -> None:
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokens = [
        {"id": vocabulary + n, "content": f"<{n}>", "special": True, **plain} for n in range(added)
    ]
    vocab = {chr(ord("a") + place): place for place in range(vocabulary)}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "a"}
    (folder / "tokenizer.json").write_text(
        json.dumps({"version": "1.0", "added_tokens": tokens, "model": model})
    )


def model(place: Path, seed: int, rows: int, base: Path | None = None, added: int = 0) -> Path:
    """Write a small Llama with `rows` rows of embedding, and `added` further tokens."""
    folder = stacked(place, 2, seed, base, torch.float32, vocab_size=rows)
    tensors, generator = (
        load_file(folder / "model.safetensors"),
        torch.Generator().manual_seed(seed),
    )
    for name in (EMBEDDING, HEAD):
        tensors[name] = torch.cat([tensors[name], torch.randn(10, 4, generator=generator)])[
            :rows
        ].contiguous()
    save_file(tensors, folder / "model.safetensors")
    tokenizer(folder, added)
    return folder


def merged(merge: Merging, folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    folder.mkdir()
    merge.write(folder)
    return load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())


@pytest.fixture
def experts(tmp_path: Path) -> dict[str, Checkpoint]:
    base = model(tmp_path / "base", 0, 6)
    return {
        "base": Checkpoint.open(base),
        "0": Checkpoint.open(model(tmp_path / "a", 1, 6, base)),
        "1": Checkpoint.open(model(tmp_path / "b", 2, 9, base)),
    }


METHODS = {
    "soup": (Soup(**TWO), lambda base, a, b: (a + b) / 2),
    "task arithmetic": (
        TaskArithmetic(**TWO, scale=0.5),
        lambda base, a, b: base + 0.5 * ((a - base) + (b - base)),
    ),
    "ties": (Ties(**TWO, density=1.0), None),
}


@pytest.mark.parametrize("method", METHODS)
def test_common_rows_merge_and_further_ones_come_from_the_source_that_has_them(
    method: str, experts: dict[str, Checkpoint], tmp_path: Path
) -> None:
    config, by_hand = METHODS[method]
    base = experts.pop("base")
    merge = open_merge(config, experts, base if config.needs_base() else None)
    found, settings = merged(merge, tmp_path / "out")
    assert settings["vocab_size"] == 9
    start, a, b = (
        load_file(one.folder / "model.safetensors") for one in (base, experts["0"], experts["1"])
    )
    for name in (EMBEDDING, HEAD):
        assert found[name].shape == (9, 4) and torch.equal(found[name][6:], b[name][6:])
        if by_hand:
            expected = by_hand(start[name], a[name], b[name][:6])
            torch.testing.assert_close(found[name][:6], expected, rtol=1e-6, atol=1e-7)
    if by_hand:
        torch.testing.assert_close(
            found[LAYER], by_hand(start[LAYER], a[LAYER], b[LAYER]), rtol=1e-6, atol=1e-7
        )
    assert merge.notes == ["rows 6-8 of embedding and head: padding of 1"]
    assert all(torch.equal(as_torch(merge, name), tensor) for name, tensor in found.items())


def test_a_swap_in_memory_is_the_written_one(
    experts: dict[str, Checkpoint], tmp_path: Path
) -> None:
    def swap() -> Merging:
        config = LayerSwap(math="a", language="b", bottom_layers=1, top_layers=0)
        return open_merge(config, {"math": experts["0"], "language": experts["1"]})

    found, _ = merged(swap(), tmp_path / "out")
    parameters = {
        name: torch.nn.Parameter(torch.zeros_like(tensor)) for name, tensor in found.items()
    }
    model = SimpleNamespace(
        named_parameters=parameters.items, named_buffers=list, named_modules=list
    )
    Live(model, None).apply(swap())
    assert all(torch.equal(parameter, found[name]) for name, parameter in parameters.items())


def test_a_token_that_one_expert_lacks_is_an_error_though_rows_agree(tmp_path: Path) -> None:
    folders = {"0": model(tmp_path / "a", 1, 6), "1": model(tmp_path / "b", 2, 6, added=2)}
    experts = {role: Checkpoint.open(folder) for role, folder in folders.items()}
    with pytest.raises(
        PipelineError,
        match=r"merge.experts\[1\]: the tokenizers of .* different vocabularies.*tokensurgeon",
    ):
        open_merge(Soup(**TWO), experts)


def test_an_adapter_whose_vocabulary_grew(models: dict[str, list[Path]], tmp_path: Path) -> None:
    """Trained with three tokens more, beside one without.

    As PEFT reads it, written and in memory.
    """
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    dense, sources = [], {}
    for role, further in (("0", 0), ("1", 3)):
        torch.manual_seed(further)
        wrapped = AutoModelForCausalLM.from_pretrained(models["llama"][0], dtype=torch.float32)
        rows = wrapped.config.vocab_size + further
        wrapped.resize_token_embeddings(rows)
        wrapped = get_peft_model(
            wrapped, LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], r=2)
        )
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.data.normal_(0, 0.2)
        wrapped.save_pretrained(tmp_path / role, save_embedding_layers=bool(further))
        sources[role] = open_source(tmp_path / role, models["llama"][0])
        dense.append(wrapped.merge_and_unload().state_dict())
    assert sources["1"].info(HEAD).shape[0] == rows and sources["0"].info(HEAD).shape[0] == rows - 3
    for name, tensor in dense[1].items():
        torch.testing.assert_close(as_torch(sources["1"], name), tensor, rtol=0, atol=1e-6)
    merge = open_merge(Soup(**TWO), sources)
    found, settings = merged(merge, tmp_path / "out")
    assert settings["vocab_size"] == rows
    for name, tensor in found.items():
        expected = (dense[0][name] + dense[1][name][: len(dense[0][name])]) / 2
        expected = torch.cat([expected, dense[1][name][len(expected) :]])
        torch.testing.assert_close(tensor, expected, rtol=0, atol=1e-6)
    model = model_of(open_merge(Soup(**TWO), sources), "auto", "cpu").model
    assert model.config.vocab_size == rows
    assert all(torch.equal(parameter, found[name]) for name, parameter in model.named_parameters())
    file = tmp_path / "1/adapter_model.safetensors"
    narrow = {
        name: one[:, :-1].contiguous() if "embed_tokens" in name else one
        for name, one in load_file(file).items()
    }
    save_file(narrow, file)
    with pytest.raises(
        PipelineError,
        match=r"embed_tokens.weight has shape \[67, .*its base has \[64, .*on another base",
    ):
        open_source(tmp_path / "1", models["llama"][0])
