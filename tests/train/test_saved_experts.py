"""Every dense decoder that transformers builds small.

A base as the Hub has it, and experts as our training saves them.

config.json and the names of the base's file are those of transformers 4; the experts, full and
LoRA, are loaded from it and saved by `save_model`. What merges must give is computed by torch on
the experts that transformers and PEFT load.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from small_decoders import DECODERS, LAYERS, NOT_IN_MEMORY, network
from small_world.tokenizer import make_tokenizer as sandbox_tokenizer

from pipeline.analyze.changes import tensor_changes
from pipeline.config.merging import Merge
from pipeline.errors import PipelineError
from pipeline.merge.adapters import Source, open_source
from pipeline.merge.live import Live
from pipeline.merge.methods.layer_swap import LayerSwap
from pipeline.merge.methods.soup import Soup
from pipeline.merge.methods.ties import Ties
from pipeline.merge.open_merge import open_merge
from pipeline.models.anatomy import anatomy, towers
from pipeline.models.load import load_model
from pipeline.models.names import is_embedding, tensor_names
from pipeline.models.skeleton import build_skeleton
from pipeline.train.load import choose_parameters
from pipeline.train.save import save_model

BARE = ("bloom", "gpt2", "gpt_neox", "opt")  # whose files on the Hub lack the inner model's prefix


def write_as_on_the_hub(kind: str, folder: Path) -> None:
    network(kind, 0).save_pretrained(folder)
    config = as_transformers_4(json.loads((folder / "config.json").read_text()))
    (folder / "config.json").write_text(json.dumps(config))
    if kind in BARE:
        tensors = load_file(folder / "model.safetensors")
        bare = {
            re.sub(r"^(model|transformer|gpt_neox)\.", "", name): tensor
            for name, tensor in tensors.items()
        }
        save_file(bare, folder / "model.safetensors", {"format": "pt"})


def as_transformers_4(config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings in the keys of transformers 4.

    These are rope_theta, rope_scaling, rope_local_base_freq and torch_dtype.
    """
    old = {
        key: as_transformers_4(value) if key == "text_config" else value
        for key, value in config.items()
    }
    old |= {"torch_dtype": old.pop("dtype")} if "dtype" in old else {}
    rope = old.pop("rope_parameters", None) or {}
    if "full_attention" in rope:  # by the kind of layer
        full, sliding = (
            rope["full_attention"],
            rope.get("sliding_attention", rope["full_attention"]),
        )
        if set(full) - {"rope_theta", "rope_type"} or full["rope_type"] != "default":
            return old | {"rope_parameters": rope}
        return old | {
            "rope_theta": full["rope_theta"],
            "rope_local_base_freq": sliding["rope_theta"],
        }
    scaling = {
        key: value
        for key, value in rope.items()
        if key not in ("rope_theta", "partial_rotary_factor")
    }
    return old | {
        **{key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope},
        **({} if scaling.get("rope_type", "default") == "default" else {"rope_scaling": scaling}),
    }


def train_expert(base: Path, folder: Path, adapter: str, seed: int) -> dict[str, torch.Tensor]:
    """Write an expert of the base, moved at random, and return its parameters.

    It is saved as a training does. PEFT merges adapters.
    """
    model, parts = choose_parameters(
        load_model(base), tiny.recipe(adapter=adapter, lora_rank=2, precision="fp32"), None
    )
    torch.manual_seed(seed)
    parameters = dict(model.named_parameters())
    for name in parts["all"]:
        parameters[name].data.add_(0.02 * torch.randn_like(parameters[name]))
    save_model(model, sandbox_tokenizer(), folder, None)
    merged = model.merge_and_unload() if adapter == "lora" else model
    return without_padding(
        {name: parameter.detach() for name, parameter in merged.named_parameters()}
    )


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    """Return the parameters that transformers loads.

    The embedding lacks the padding row, which some model types set to zero.
    """
    return without_padding(
        {name: parameter.detach() for name, parameter in load_model(folder).named_parameters()}
    )


def without_padding(parameters: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        name: tensor[1:] if is_embedding(name) else tensor for name, tensor in parameters.items()
    }


def merged_parameters(
    merge: Merge, sources: dict[str, Source], base: Path, folder: Path
) -> dict[str, torch.Tensor]:
    """Return the parameters of a written merge, which transformers loads completely."""
    folder.mkdir()
    open_merge(merge, sources, open_source(base)).write(folder)
    build_skeleton(folder, "checkpoint")
    return loaded(folder)


PAIRS = [  # an architecture, and the adapters of the math and of the language expert
    *((kind, ("none", "lora")) for kind in DECODERS),
    *(("llama", ("none", "none")), ("llama", ("lora", "lora")), ("gpt2", ("lora", "lora"))),
]


@pytest.mark.parametrize(("kind", "adapters"), PAIRS)
def test_experts_as_trained_merge_beside_the_base_of_the_hub(
    kind: str, adapters: tuple[str, str], tmp_path: Path
) -> None:
    base = tmp_path / "base"
    write_as_on_the_hub(kind, base)
    start = loaded(base)
    roles = ("math", "language")
    math, language = (
        train_expert(base, tmp_path / role, adapter, seed)
        for seed, (role, adapter) in enumerate(zip(roles, adapters, strict=True))
    )
    opened = [open_source(tmp_path / role, base) for role in roles]
    experts, sides = dict(zip("01", opened, strict=True)), dict(zip(roles, opened, strict=True))
    sites = anatomy(start)
    decoder = start.keys() - set(towers(start))

    soup = merged_parameters(
        Soup(experts=["a", "b"], form="dense"), experts, base, tmp_path / "soup"
    )
    swap = LayerSwap(math="m", language="l", bottom_layers=1, top_layers=1, form="dense")
    swapped = merged_parameters(swap, sides, base, tmp_path / "swap")
    for name in decoder:
        assert torch.allclose(soup[name], (math[name] + language[name]) / 2, atol=1e-5), name
        if sites[name].layer is not None:
            of_language = sites[name].layer in (0, LAYERS - 1)
            owner, adapter = (language, adapters[1]) if of_language else (math, adapters[0])
            assert torch.allclose(
                swapped[name], owner[name], rtol=0, atol=1e-5 if adapter == "lora" else 0
            ), name
    merged_parameters(Ties(experts=["a", "b"]), experts, base, tmp_path / "ties")

    exported = merged_parameters(
        Soup(experts=["a"], form="dense"), {"0": opened[1]}, base, tmp_path / "export"
    )
    assert all(
        torch.allclose(exported[name], parameter, atol=1e-5) for name, parameter in language.items()
    )
    live = Live(load_model(base), None)
    if kind in NOT_IN_MEMORY:
        with pytest.raises(PipelineError, match="model in memory has other parameters"):
            live.apply(open_merge(swap, sides, open_source(base)))
    else:
        live.apply(open_merge(swap, sides, open_source(base)))
        for name, parameter in without_padding(dict(live.model.named_parameters())).items():
            assert torch.equal(parameter, swapped[name]), name

    whole = open_source(base)
    own = tensor_names(start)
    for name in decoder if kind not in NOT_IN_MEMORY else ():
        if is_embedding(name):  # with the padding's row
            continue
        changes = tensor_changes(opened, whole, own[name], [0.0, 0.0], "input")
        for change, expert in zip(changes, (math, language), strict=True):
            assert change.norm == pytest.approx(
                float((expert[name] - start[name]).norm()), rel=1e-3, abs=1e-5
            ), name
