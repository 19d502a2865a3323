"""A checkpoint whose tensors are not those of its config.

Refused by the name of a tensor, from headers alone.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_world.tokenizer import make_tokenizer as sandbox_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline.errors import PipelineError
from pipeline.models.skeleton import build_skeleton
from pipeline.train.load import check_base

KINDS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "tied": {"model_type": "llama", "tie_word_embeddings": True},  # no lm_head in the file
    "falcon3": {"model_type": "llama", "head_dim": 12},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 8},
    "cohere": {
        "model_type": "cohere",
        "logit_scale": 0.125,
    },  # tied by its class, config.json does not say so
    "cohere2": {"model_type": "cohere2"},
    "mistral": {"model_type": "mistral"},
}


def stored(folder: Path, kind: str = "llama", **more: Any) -> Path:
    fields = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = AutoConfig.for_model(**fields | heads | KINDS[kind] | {"pad_token_id": 0})
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder, **more)
    return folder


def reconfigure(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))


def rewrite(
    folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
) -> None:
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


@pytest.mark.parametrize("kind", KINDS)
def test_what_transformers_saved_is_whole(kind: str, tmp_path: Path) -> None:
    made = build_skeleton(stored(tmp_path / "one", kind), "model.path")
    assert made.get_input_embeddings().weight.shape == (32, 16)
    assert all(parameter.device.type == "meta" for parameter in made.parameters())
    build_skeleton(stored(tmp_path / "shards", kind, max_shard_size="8KB"), "model.path")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2


WRONG: dict[str, tuple[Callable[[Path], None], str]] = {
    "a layer's MLP is gone": (
        lambda folder: rewrite(
            folder, lambda was: {n: t for n, t in was.items() if ".layers.2.mlp." not in n}
        ),
        (
            "lacks model.layers.2.mlp.down_proj.weight and 2 more tensors, which its config.json"
            " requires"
        ),
    ),
    "one tensor is gone": (
        lambda folder: rewrite(
            folder, lambda was: {n: t for n, t in was.items() if n != "model.norm.weight"}
        ),
        "lacks model.norm.weight, which its config.json requires",
    ),
    "deeper": (
        lambda folder: reconfigure(folder, num_hidden_layers=6),
        "lacks model.layers.4.input_layernorm.weight and 17 more tensors",
    ),
    "shallower": (
        lambda folder: reconfigure(folder, num_hidden_layers=2),
        (
            "holds model.layers.2.input_layernorm.weight and 17 more tensors, which transformers"
            " would not load"
        ),
    ),
    "a bias": (
        lambda folder: rewrite(
            folder, lambda was: was | {"model.layers.0.self_attn.q_proj.bias": torch.ones(16)}
        ),
        "holds model.layers.0.self_attn.q_proj.bias, which transformers would not load",
    ),
    "another shape": (
        lambda folder: reconfigure(folder, intermediate_size=48),
        (
            r"holds model.layers.\d.mlp.\w+.weight of shape \[\d+, \d+\], but its config.json requires"
            r" \[\d+, \d+\]"
        ),
    ),
    "no head": (
        lambda folder: rewrite(
            folder, lambda was: {n: t for n, t in was.items() if n != "lm_head.weight"}
        ),
        "has no lm_head.weight, but tie_word_embeddings is false",
    ),
    "no such architecture": (
        lambda folder: reconfigure(folder, model_type="poem", architectures=["Poem"]),
        "transformers cannot build a model from its config.json",
    ),
    "a field of another type": (
        lambda folder: reconfigure(folder, hidden_size="wide"),
        "config.json: hidden_size has the value 'wide'",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_does_not_fit_its_config_is_refused(
    what: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    change, told = WRONG[what]
    change(stored(tmp_path / "model"))
    capfd.readouterr()
    with pytest.raises(PipelineError, match=told) as refused:
        build_skeleton(tmp_path / "model", "model.path")
    assert "\n" not in str(refused.value) and str(tmp_path / "model") in str(refused.value)
    said = capfd.readouterr()
    assert said.out == said.err == ""  # no report of the library beside our sentence


def test_what_others_store_besides_is_harmless(tmp_path: Path) -> None:
    """Old buffers, a copy of a tied head, and names without their prefix are accepted."""
    folder = stored(tmp_path / "model")
    rewrite(
        folder,
        lambda was: (
            was
            | {
                "model.rotary_emb.inv_freq": torch.ones(4),
                **{
                    f"model.layers.{n}.self_attn.rotary_emb.inv_freq": torch.ones(4)
                    for n in range(4)
                },
                "model.layers.0.self_attn.rotary_emb.cos_cached": torch.ones(1, 1, 8, 4),
            }
        ),
    )
    build_skeleton(folder, "model.path")
    tied = stored(tmp_path / "tied", "tied")
    rewrite(tied, lambda was: was | {"lm_head.weight": was["model.embed_tokens.weight"].clone()})
    build_skeleton(tied, "model.path")
    bare = stored(tmp_path / "bare")
    rewrite(bare, lambda was: {name.removeprefix("model."): tensor for name, tensor in was.items()})
    build_skeleton(bare, "model.path")


def test_a_quantized_model_is_not_compared_and_not_trained(tmp_path: Path) -> None:
    folder = stored(tmp_path / "model")
    reconfigure(folder, quantization_config={"quant_method": "gptq", "bits": 4})
    rewrite(
        folder,
        lambda was: (
            was | {"model.layers.0.mlp.up_proj.qweight": torch.ones(2, 2, dtype=torch.int32)}
        ),
    )
    assert build_skeleton(folder, "checkpoint").config.num_hidden_layers == 4
    with pytest.raises(
        PipelineError, match=f"model.path={folder} is quantized, according to its config.json"
    ):
        check_base(folder, sandbox_tokenizer())


def test_only_headers_are_read(tmp_path: Path) -> None:
    """A file of a hundred gigabytes that holds nothing but a header is answered for at once."""
    folder = stored(tmp_path / "model")
    reconfigure(folder, vocab_size=2**30, tie_word_embeddings=True)
    from pipeline.models.checkpoint import header_bytes, read_header

    infos = read_header(folder / "model.safetensors")
    shapes = {
        name: (info.dtype, info.shape) for name, info in infos.items() if name != "lm_head.weight"
    }
    shapes["model.embed_tokens.weight"] = ("BF16", (2**30, 16))
    header = header_bytes(shapes)
    sizes = sum(
        info.nbytes
        for name, info in infos.items()
        if name not in ("lm_head.weight", "model.embed_tokens.weight")
    )
    with open(folder / "model.safetensors", "wb") as file:
        file.write(header)
        file.truncate(len(header) + sizes + 2**35)
    assert build_skeleton(folder, "model.path").get_input_embeddings().weight.shape == (2**30, 16)
