"""Every dense decoder that transformers builds small: layers of one model in another, and loaded by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.errors import PipelineError
from pipeline.merge.live import Live, name_in_memory
from pipeline.merge.merge import open_merge
from pipeline.merge.methods.layer_swap import LayerSwap
from pipeline.merge.methods.soup import Soup
from pipeline.merge.methods.task_arithmetic import TaskArithmetic
from pipeline.models.anatomy import anatomy, num_layers, towers
from pipeline.models.checkpoint import Checkpoint

LAYERS = 4
SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 64,
}  # fmt: skip
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LINEAR = {"layer_types": ["linear_attention", "full_attention"] * 2}
HEADS = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
SEES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
PER_LAYER = {
    "head_dim": 8, "vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip
DECODERS: dict[str, dict[str, Any]] = {  # model_type -> what it needs beside the sizes that all have
    **dict.fromkeys(("llama", "mistral", "ministral3", "qwen2", "cohere", "cohere2", "olmo", "olmo2", "olmo3"), {}),
    **dict.fromkeys(("phi", "phi3", "granite", "smollm3", "apertus", "exaone4", "nemotron", "glm", "glm4"), {}),
    **dict.fromkeys(("seed_oss", "ernie4_5", "starcoder2", "stablelm", "arcee", "helium", "diffllama"), {}),
    **dict.fromkeys(("jais2", "nanochat", "minicpm3", "falcon_h1"), {}),
    **dict.fromkeys(("gpt2", "xglm", "bloom", "gpt_neox", "mpt", "falcon"), {}),
    **dict.fromkeys(("ministral", "hunyuan_v1_dense", "qwen3", "gemma", "gemma2", "vaultgemma"), {"head_dim": 8}),
    "gemma3_text": {"head_dim": 8},
    "opt": {"word_embed_proj_dim": 32, "ffn_dim": 48},
    "youtu": {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
    "qwen3_5_text": {**LINEAR, **HEADS, "head_dim": 8},
    "olmo_hybrid": {**LINEAR, **HEADS},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "gemma3n_text": {**PER_LAYER, "laurel_rank": 8},
    "gemma4_text": {**PER_LAYER, "global_head_dim": 8},
    "gemma3": {"head_dim": 8},
    "gemma4": {**PER_LAYER, "global_head_dim": 8},
}
NOT_IN_MEMORY = ("olmo_hybrid",)  # its files have other names than its modules: its merges are written to be scored
WITH_TOWERS = {"gemma3": {**SEES, "image_size": 28, "patch_size": 14}, "gemma4": {**SEES, "head_dim": 8}}


def config_of(kind: str) -> Any:
    from transformers import AutoConfig

    sizes = {**SIZES, **TOKENS, **DECODERS[kind]}
    if kind not in WITH_TOWERS:
        return AutoConfig.for_model(kind, **sizes)
    return AutoConfig.for_model(kind, text_config=sizes, vision_config=WITH_TOWERS[kind], audio_config=None, **TOKENS)


def network(kind: str, seed: int) -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    made = AutoModelForCausalLM.from_config(config_of(kind))
    with torch.no_grad():
        for parameter in made.parameters():  # norms too, which begin as ones
            parameter.add_(0.1 * torch.randn_like(parameter))
    return made.eval()


@pytest.mark.parametrize("kind", DECODERS)
def test_a_swap_is_loaded_and_its_layers_are_where_they_belong(tmp_path: Path, kind: str) -> None:
    from transformers import AutoModelForCausalLM

    for seed, name in enumerate(("math", "language")):
        network(kind, seed).save_pretrained(tmp_path / name)
    opened = {name: Checkpoint.open(tmp_path / name) for name in ("math", "language")}
    outside = {"embeddings": "math", "final_norm": "math", "head": "math"}
    merge = open_merge(LayerSwap(math="m", language="l", bottom_layers=1, top_layers=1, **outside), opened)
    (tmp_path / "out").mkdir()
    merge.write(tmp_path / "out")
    found, math, language = (
        dict(AutoModelForCausalLM.from_pretrained(tmp_path / name).named_parameters())
        for name in ("out", "math", "language")
    )
    sites = anatomy(found)
    assert num_layers(sites) == LAYERS
    for name, parameter in found.items():
        owner = language if sites[name].layer in (0, LAYERS - 1) else math
        assert torch.equal(parameter, owner[name]), name
    live = Live(AutoModelForCausalLM.from_pretrained(tmp_path / "math"), None)
    if kind in NOT_IN_MEMORY:
        with pytest.raises(PipelineError, match="the model in memory has other parameters"):
            live.apply(merge)
        return
    live.apply(merge)
    written = {name_in_memory(name): merge.merged(name) for name in merge.names}
    for name, parameter in live.model.named_parameters():
        assert torch.equal(parameter, written[name_in_memory(name)]), name


@pytest.mark.parametrize("kind", WITH_TOWERS)
def test_towers_come_from_one_source_whatever_the_method(tmp_path: Path, kind: str) -> None:
    for seed, name in enumerate(("base", "0", "1")):
        made = network(kind, 0)
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.add_(0.01 * seed * torch.randn_like(parameter))
        made.save_pretrained(tmp_path / name)
    base, *experts = (Checkpoint.open(tmp_path / name) for name in ("base", "0", "1"))
    for config in (Soup(experts=["a", "b"], files_from="1"), TaskArithmetic(experts=["a", "b"], files_from="1")):
        merge = open_merge(config, dict(zip("01", experts, strict=True)), base if config.needs_base() else None)
        beside = towers(merge.names)
        assert beside and all(torch.equal(merge.merged(name), experts[1].tensor(name)) for name in beside)
        assert {"where": "tower", "what": "all", "weights": {"1": 1.0}} in merge.plan_rows()
        inside = next(
            name for name in merge.names if name.endswith("layers.0.mlp.up_proj.weight") and name not in beside
        )
        assert not torch.equal(merge.merged(inside), experts[1].tensor(inside))


def test_a_mixture_of_experts_stays_refused(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model("qwen3_moe", **SIZES, **TOKENS, num_experts=2, moe_intermediate_size=8, head_dim=8)
    for name in ("math", "language"):
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / name)
    opened = {name: Checkpoint.open(tmp_path / name) for name in ("math", "language")}
    with pytest.raises(PipelineError, match="belongs to a mixture of experts"):
        open_merge(LayerSwap(math="m", language="l", bottom_layers=1, top_layers=1), opened)
