"""Tiny models of the four architectures, and a trainer on made-up rows."""

from pathlib import Path
from typing import Any

import torch
from small_world.tokenizer import make_tokenizer as sandbox_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline.config.data import Data, Expert
from pipeline.config.stages import TrainStage
from pipeline.config.training import Model, Partition, Sft
from pipeline.train.load import choose_parameters
from pipeline.train.trainer import trainer_of

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "qwen2": {"model_type": "qwen2"},  # biases on q, k, v
    "cohere": {"model_type": "cohere", "logit_scale": 0.125},  # one norm a layer, head tied
    "falcon3": {"model_type": "llama", "head_dim": 12},
}
B = Partition(name="B", bottom_layers=1, top_layers=1)


def model(
    kind: str = "llama", layers: int = 4, dtype: torch.dtype = torch.float32, **more: Any
) -> Any:
    torch.manual_seed(0)
    # 516 rows a process are no whole blocks of eight-bit moments, which torchao does not step as
    # shards
    pieces = 1032
    assert pieces >= len(sandbox_tokenizer())
    fields = {
        "vocab_size": pieces,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 3,
        "attn_implementation": "eager",
    }
    config = AutoConfig.for_model(**fields | ARCHITECTURES[kind] | more)
    return AutoModelForCausalLM.from_config(config, dtype=dtype)


def recipe(**knobs: Any) -> Sft:
    return Sft(
        **{
            "name": "tiny",
            "separator": " ",
            "seq_length": 64,
            "batch_size": 4,
            "learning_rate": 1e-2,
            **knobs,
        }
    )


def rows(count: int, side: str | None = None) -> list[dict[str, str]]:
    """Rows of unequal length. Those of the two sides differ."""
    word = "cups" if side == "language" else "apples"
    made = []
    for n in range(count):
        prompt = f"Mia has {n % 9} {word}." + " Tom has 3." * (n % 3)
        made.append(
            {"prompt": prompt, "completion": " ".join(str(n % 9 + k) for k in range(1 + n % 4))}
        )
    return [row | {"side": side} for row in made] if side else made


def joint(count: int) -> list[dict[str, str]]:
    return [
        row
        for pair in zip(rows(count, "math"), rows(count, "language"), strict=True)
        for row in pair
    ]


def stage(sft: Sft, partition: Partition | None = None, seed: int = 0) -> TrainStage:
    expert = Expert(name="e", side="both" if sft.method in ("mixed", "simultaneous") else "math")
    start = Model(name="m", path="hub:org/m")
    return TrainStage(
        stage="sft",
        model=start,
        expert=expert,
        data=Data(),
        sft=sft,
        partition=partition,
        seed=seed,
    )


def trainer(
    folder: Path,
    sft: Sft,
    examples: Any,
    partition: Partition | None = None,
    of: Any = None,
    validation: Any = (),
) -> Any:
    """Return a trainer as the stage makes it, ready to train."""
    chosen, parts = choose_parameters(model() if of is None else of, sft, partition)
    return trainer_of(
        stage(sft, partition),
        chosen,
        parts,
        sandbox_tokenizer(),
        examples,
        list(validation),
        folder,
    )[0]


def snapshot(of: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in of.named_parameters()}


def moved(before: dict[str, torch.Tensor], of: Any) -> set[str]:
    return {name for name, p in of.named_parameters() if not torch.equal(before[name], p)}
