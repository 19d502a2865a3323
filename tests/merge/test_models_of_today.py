"""Models as they are published today.

Other numbers of positions, Granite 4 H without experts, Qwen 3.5 that sees.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from fixture_types import Call, Patch
from safetensors.torch import load_file, save_file
from small_world.tokenizer import make_tokenizer
from tiny_words import FEW

QUIET = ("runs_dir=runs", "tracking.mode=disabled", "threads=1")
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
GRANITE = {
    "num_local_experts": 0,
    "layer_types": ["mamba", "attention"],
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_chunk_size": 16,
    "shared_intermediate_size": 48,
}
OWN = "expert.sources.own={url: ./rows.jsonl, prompt: '{q}', completion: '{a}'}"


@pytest.fixture(autouse=True)
def rows(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps({"q": f"{number} + 1?", "a": f" {number + 1}"}) for number in range(8)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n")


def write(folder: str, kind: str, seed: int = 0, **fields: Any) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = make_tokenizer()
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, vocab_size=len(tokenizer), **{**SIZES, **fields})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def train(call: Call, base: str) -> Path:
    words = [
        "expert=own",
        "model=trained",
        f"model.path=./{base}",
        OWN,
        "data.benchmarks=none",
        *FEW,
        *QUIET,
    ]
    return Path(call("stage=sft", *words, status=0).out.strip())


@pytest.mark.parametrize(("base", "kept"), [("base", 512), ("", 64)])
def test_experts_that_differ_in_positions_alone_are_merged(
    base: str, kept: int, call: Call
) -> None:
    """With the base's number; without a base with that which all experts were made for."""
    write("math", "qwen2", 0, max_position_embeddings=64)
    write("sw", "qwen2", 1, max_position_embeddings=512)
    shutil.copytree("math", "base")
    weights = load_file("base/model.safetensors")
    save_file(
        {name: value * 1.01 for name, value in weights.items()},
        "base/model.safetensors",
        {"format": "pt"},
    )
    config = json.loads(Path("base/config.json").read_text())
    Path("base/config.json").write_text(json.dumps(config | {"max_position_embeddings": 512}))
    words = ["merge=soup", "merge.experts=[./math,./sw]"]
    if base:
        words = ["merge=soup", "merge.experts=[./math,./math2]", "merge.base=./base"]
        shutil.copytree("math", "math2")
        save_file(
            {name: value * 1.02 for name, value in weights.items()},
            "math2/model.safetensors",
            {"format": "pt"},
        )
    done = call("stage=merge", *words, *QUIET, status=0)
    merged = Path(done.out.strip())
    assert json.loads((merged / "config.json").read_text())["max_position_embeddings"] == kept
    assert f"max_position_embeddings={kept}: the sources have 0 64, 1" in done.err
    manifest = json.loads((merged / "manifest.json").read_text())
    assert f"max_position_embeddings={kept}" in manifest["facts"]["note"]


def test_rotary_embeddings_that_depend_on_positions_must_be_alike(call: Call) -> None:
    scaled = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}}
    write("math", "llama", 0, max_position_embeddings=64, **scaled)
    write("sw", "llama", 1, max_position_embeddings=128, **scaled)
    told = call("stage=merge", "merge=soup", "merge.experts=[./math,./sw]", *QUIET, status=1).err
    assert "max_position_embeddings 128" in told and "Give models of one architecture" in told


def test_granite_without_experts_is_trained_and_swapped(call: Call) -> None:
    write("granite", "granitemoehybrid", **GRANITE)
    trained = train(call, "granite")
    words = [
        "merge=layer_swap",
        f"merge.language={trained}",
        "merge.math=./granite",
        "merge.bottom_layers=1",
    ]
    merged = Path(call("stage=merge", *words, "merge.top_layers=0", *QUIET, status=0).out.strip())
    found, experts = (
        load_file(merged / "model.safetensors"),
        load_file(trained / "model.safetensors"),
    )
    base = load_file("granite/model.safetensors")
    name = "model.layers.{}.shared_mlp.input_linear.weight"
    assert torch.equal(found[name.format(0)], experts[name.format(0)])
    assert torch.equal(found[name.format(1)], base[name.format(1)])
    assert not torch.equal(found[name.format(0)], base[name.format(0)])


def test_qwen_3_5_with_its_tower_and_heads_of_later_tokens_is_trained(call: Call) -> None:
    """As the Hub has it.

    The loss of the first step is that of the model as transformers loads it.
    """
    from transformers import AutoModelForCausalLM, Qwen3_5Config, Qwen3_5ForConditionalGeneration

    tokenizer = make_tokenizer()
    text = {
        **SIZES,
        "vocab_size": len(tokenizer),
        "head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
        "mtp_num_hidden_layers": 1,
    }
    sees = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": 32,
        "num_position_embeddings": 16,
    }
    torch.manual_seed(0)
    config = Qwen3_5Config(text_config=text, vision_config=sees)
    Qwen3_5ForConditionalGeneration(config).save_pretrained("vl")
    tokenizer.save_pretrained("vl")
    weights = load_file("vl/model.safetensors")
    weights |= {"mtp.fc.weight": torch.zeros(32, 64), "mtp.norm.weight": torch.zeros(32)}
    save_file(weights, "vl/model.safetensors", {"format": "pt"})
    trained = train(call, "vl")
    model = AutoModelForCausalLM.from_pretrained("vl", dtype=torch.float32)
    rows = [json.loads(line) for line in (trained / "rows.jsonl").read_text().splitlines()]
    first = json.loads((trained / "log.jsonl").read_text().splitlines()[0])
    with torch.no_grad():
        losses = [
            model(torch.tensor([row["input_ids"]])).logits[0, :-1].log_softmax(-1) for row in rows
        ]
    taken = [
        -table[torch.arange(len(table)), row["input_ids"][1:]]
        for table, row in zip(losses, rows, strict=True)
    ]
    kept = [[at for at, label in enumerate(row["labels"][1:]) if label != -100] for row in rows]
    mean = (
        torch.cat([values[places] for values, places in zip(taken, kept, strict=True)])
        .mean()
        .item()
    )
    assert first["loss"] == pytest.approx(mean, rel=0.05)  # of four of the eight rows
    names = load_file(trained / "model.safetensors")
    assert not any("visual" in name or "mtp" in name for name in names)
    words = [
        "merge=task_arithmetic",
        f"merge.experts=[{trained}]",
        "merge.base=./vl",
        "merge.scale=2",
    ]
    merged = Path(call("stage=merge", *words, *QUIET, status=0).out.strip())
    found, base = load_file(merged / "model.safetensors"), weights
    assert found.keys() == names.keys()
    for name, value in found.items():
        assert torch.allclose(value, base[name] + 2 * (names[name] - base[name]), atol=1e-6), name
    loaded = AutoModelForCausalLM.from_pretrained(merged)
    assert loaded.config.model_type == "qwen3_5_text"
