"""The tensors of a model's folder, by name.

What transformers loads from the same files is the independent answer.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_decoders import network

from pipeline.errors import PipelineError
from pipeline.merge.adapters import open_source
from pipeline.merge.methods.soup import Soup
from pipeline.merge.open_merge import open_merge
from pipeline.models.arrays import matrix
from pipeline.models.checkpoint import Checkpoint
from pipeline.models.load import load_model
from pipeline.models.names import tensor_names

Tensors = dict[str, torch.Tensor]


def in_layers(tensors: Tensors) -> Tensors:
    """As FSDP names what it wraps by layer, with checkpoints of activations."""
    wrapped = r"\1\2._fsdp_wrapped_module._checkpoint_wrapped_module."
    return {
        re.sub(r"\b(layers\.|h\.)(\d+)\.", wrapped, name): tensor
        for name, tensor in tensors.items()
    }


def bare(tensors: Tensors) -> Tensors:
    """As save_pretrained of the inner model, without an output head: BLOOM and GPT-2 on the Hub."""
    return {
        re.sub(r"^(model|transformer|gpt_neox)\.", "", name): tensor
        for name, tensor in tensors.items()
    }


def head_alone(tensors: Tensors) -> Tensors:
    """As safetensors.torch.save_model stores a tied pair."""
    (embedding,) = (
        n for n in tensors if re.search(r"(embed_tokens|wte|word_embeddings|embed_in)\.weight$", n)
    )
    return {
        "lm_head.weight" if name == embedding else name: tensor for name, tensor in tensors.items()
    }


def with_buffers(tensors: Tensors) -> Tensors:
    """As transformers 2 to 4.30 stored what is computed."""
    stem = next(match[0] for name in tensors if (match := re.match(r".*?\b(layers|h)\.0\.", name)))
    attention = "attn" if "h." in stem else "attention" if "gpt_neox" in stem else "self_attn"
    mask = (
        {}
        if attention == "self_attn"
        else {f"{stem}{attention}.bias": torch.ones(1, 1, 8, 8, dtype=torch.bool)}
    )
    past = (
        {} if attention == "self_attn" else {f"{stem}{attention}.masked_bias": torch.tensor(-1e9)}
    )
    return tensors | mask | past | {f"{stem}{attention}.rotary_emb.inv_freq": torch.ones(4)}


def in_memory(tensors: Tensors) -> Tensors:
    """Rename tensors as in a state_dict of transformers 5, where files have older names."""
    moved = {
        re.sub(r"^language_model\.model\.", "model.language_model.", name): t
        for name, t in tensors.items()
    }
    return {
        re.sub(r"^(vision_tower|multi_modal)", r"model.\1", name): tensor
        for name, tensor in moved.items()
    }


def behind(*prefixes: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {"".join(prefixes) + name: tensor for name, tensor in tensors.items()}


def stored(
    kind: str, folder: Path, form: Callable[[Tensors], Tensors], seed: int = 0
) -> torch.nn.Module:
    """Write a small model in files of this form, and return the model."""
    model = network(kind, seed)
    model.save_pretrained(folder)
    save_file(
        form(load_file(folder / "model.safetensors")),
        folder / "model.safetensors",
        {"format": "pt"},
    )
    return model


FORMS = [
    *(
        ("bloom", bare),
        ("gpt2", bare),
        ("gpt_neox", bare),
        ("opt", bare),
        ("llama", bare),
        ("falcon", bare),
    ),
    *(
        ("llama", behind("_orig_mod.")),
        ("gpt2", behind("module.")),
        ("gemma3", behind("module.", "_orig_mod.")),
    ),
    *(
        ("llama", behind("base_model.model.")),
        ("gemma3", in_layers),
        ("gpt_neox", behind("_orig_mod.")),
    ),
    ("llama", lambda tensors: behind("_orig_mod.", "module.")(in_layers(tensors))),
    *(
        ("gemma", head_alone),
        ("gpt2", head_alone),
        ("bloom", head_alone),
        ("opt", head_alone),
        ("gemma3", head_alone),
    ),
    *(
        ("llama", with_buffers),
        ("gpt2", with_buffers),
        ("gpt_neox", with_buffers),
        ("gemma3", in_memory),
    ),
    ("gpt2", lambda tensors: behind("_orig_mod.")(bare(with_buffers(tensors)))),
]


@pytest.mark.parametrize(("kind", "form"), FORMS)
def test_the_tensors_are_those_that_transformers_loads(
    kind: str, form: Callable[[Tensors], Tensors], tmp_path: Path
) -> None:
    saved = stored(kind, tmp_path, form)
    checkpoint = Checkpoint.open(tmp_path)
    loaded = load_model(tmp_path)
    parameters = dict(loaded.named_parameters())
    for name, parameter in saved.named_parameters():
        assert torch.equal(parameter, parameters[name]), name
    own = tensor_names([*parameters, *dict(loaded.named_buffers())])
    assert set(tensor_names(parameters).values()) <= checkpoint.infos.keys() <= set(own.values())
    for in_module, name in tensor_names(parameters).items():
        rows = checkpoint.rows(name, 0, matrix(checkpoint.info(name).shape)[0])
        assert torch.equal(
            torch.from_numpy(rows).reshape(parameters[in_module].shape), parameters[in_module].data
        )


@pytest.mark.parametrize(
    ("kind", "one", "other"),
    [
        ("gpt2", bare, behind("")),
        ("gpt2", with_buffers, bare),
        ("gemma3", behind(""), in_memory),
        ("gemma3", in_memory, behind("module.")),
        ("gemma", behind("_orig_mod."), head_alone),  # written without what wraps the names
    ],
)
def test_models_in_different_forms_are_merged(
    kind: str,
    one: Callable[[Tensors], Tensors],
    other: Callable[[Tensors], Tensors],
    tmp_path: Path,
) -> None:
    first, second = stored(kind, tmp_path / "a", one), stored(kind, tmp_path / "b", other, seed=1)
    sources = {"0": open_source(tmp_path / "a"), "1": open_source(tmp_path / "b")}
    merge = open_merge(Soup(experts=["a", "b"]), sources)
    (tmp_path / "out").mkdir()
    merge.write(tmp_path / "out")
    merged = dict(
        type(first).from_pretrained(tmp_path / "out").named_parameters()
    )  # no help by load_model
    others = dict(second.named_parameters())
    for name, parameter in first.named_parameters():
        if "vision" not in name and "multi_modal" not in name:
            assert torch.equal(merged[name], (parameter + others[name]) / 2), name


@pytest.mark.parametrize("sharded", [False, True])
def test_a_folder_with_a_model_and_an_adapter_is_refused(sharded: bool, tmp_path: Path) -> None:
    model = network("llama", 0)
    model.save_pretrained(tmp_path, max_shard_size="20KB" if sharded else "1GB")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    for reads in (open_source, Checkpoint.open):
        with pytest.raises(
            PipelineError, match=r"holds two models, model\.safetensors.* and adapter_config\.json"
        ):
            reads(tmp_path)


def test_a_tensor_under_two_names_is_refused(tmp_path: Path) -> None:
    stored(
        "llama",
        tmp_path,
        lambda tensors: tensors | behind("_orig_mod.")({"lm_head.weight": torch.ones(2, 2)}),
    )
    with pytest.raises(
        PipelineError, match=r"stores lm_head\.weight twice, as .*_orig_mod\.lm_head\.weight"
    ):
        Checkpoint.open(tmp_path)
