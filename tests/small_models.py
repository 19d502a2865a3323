"""Checkpoints small enough to work out by hand, and random ones of few layers."""

import json
from pathlib import Path

import torch
from as_torch import as_torch
from safetensors.torch import save_file

from pipeline.merge.methods.layer_swap import LayerSwap
from pipeline.models.checkpoint import Checkpoint

LAYERS = 14
SIZES = {
    "hidden_size": 4,
    "intermediate_size": 5,
    "vocab_size": 6,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "attention_bias": True,
}
TWO_LAYERS = [
    "model.embed_tokens.weight",
    *(
        f"model.layers.{i}.{part}.weight"
        for i in (0, 1)
        for part in ("self_attn.q_proj", "mlp.up_proj")
    ),
    *(
        f"model.layers.{i}.{part}.weight"
        for i in (0, 1)
        for part in ("input_layernorm", "post_attention_layernorm")
    ),
    "model.norm.weight",
    "lm_head.weight",
]


def by_hand(
    folder: Path, values: dict[str, list[float]] | float, dtype=torch.float32, **config
) -> Checkpoint:
    """Write a two-layer checkpoint of two-number tensors; a number stands for all of them."""
    folder.mkdir()
    if not isinstance(values, dict):
        values = {name: [values, values] for name in TWO_LAYERS}
    tensors = {name: torch.tensor(value, dtype=dtype) for name, value in values.items()}
    save_file(tensors, folder / "model.safetensors")
    facts = {"model_type": "llama", "num_hidden_layers": 2, "tie_word_embeddings": False, **config}
    (folder / "config.json").write_text(json.dumps(facts))
    return Checkpoint.open(folder)


def swap(**settings) -> LayerSwap:
    return LayerSwap(math="m", language="l", **settings)


def lora_expert(
    base: Path, folder: Path, seed: int, scale: float = 0.2, **settings
) -> dict[str, torch.Tensor]:
    """Save a random LoRA expert as PEFT does. The tensors of the model that PEFT merges it into."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    wrapped = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings))
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, scale)
    wrapped.save_pretrained(folder)
    return {
        name: tensor.contiguous()
        for name, tensor in wrapped.merge_and_unload().state_dict().items()
    }


def stacked(
    folder: Path,
    layers: int,
    seed: int,
    base: Path | None = None,
    dtype=torch.bfloat16,
    tied=False,
    **config,
):
    """Write a random Llama of width 4 and `layers` layers, and return its folder.

    It is near `base` if that is given.
    """
    torch.manual_seed(seed)
    shapes = {"model.embed_tokens.weight": (6, 4), "model.norm.weight": (4,)}
    shapes |= {} if tied else {"lm_head.weight": (6, 4)}
    for i in range(layers):
        at = f"model.layers.{i}."
        shapes |= {f"{at}self_attn.{part}_proj.weight": (4, 4) for part in "qkvo"}
        shapes |= {f"{at}mlp.{part}_proj.weight": (5, 4) for part in ("gate", "up")}
        shapes |= {f"{at}mlp.down_proj.weight": (4, 5)}
        shapes |= {
            f"{at}{part}.weight": (4,) for part in ("input_layernorm", "post_attention_layernorm")
        }
        shapes |= {f"{at}self_attn.{part}_proj.bias": (4,) for part in "qkvo"}
    start = Checkpoint.open(base) if base else None
    tensors = {
        name: (
            (
                (as_torch(start, name).float() if start else 0)
                + torch.randn(shape) * (0.05 if start else 0.1)
            ).to(dtype)
        )
        for name, shape in shapes.items()
    }
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    facts = {
        "model_type": "llama",
        "num_hidden_layers": layers,
        "tie_word_embeddings": tied,
        **SIZES,
        **config,
    }
    (folder / "config.json").write_text(json.dumps(facts))
    return folder
