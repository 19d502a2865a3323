"""What stage=check trains on: made-up rows, and random weights at a model's true shape."""

from __future__ import annotations

import json
import random
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipeline.config.training import Model
from pipeline.errors import PipelineError
from pipeline.models.files import HUB_PATTERNS
from pipeline.models.shape import SHAPES, Shape
from pipeline.runs.find import find_run

QUESTIONS = 8


def write_rows(folder: Path, rows: int, length: int) -> None:
    """Rows of made-up words for a math and a language expert, each at least `length` tokens of any tokenizer, and
    questions as MGSM's, with two exemplars: each file's readers find their columns in rows of one kind."""
    generator = random.Random(0)
    vocabulary = ["".join(generator.choices("aeioklmnprst", k=5)) for _ in range(400)]
    sizes = {"orca_math/train": (2 * rows, length), "aya/train": (2 * rows, length)}
    sizes |= {"mgsm/en/test": (QUESTIONS, 9), "mgsm/en/train": (2, 9)}
    for name, (count, longest) in sizes.items():
        lines = []
        for number in range(count):
            question, answer = (" ".join(generator.choices(vocabulary, k=k)) for k in (4, longest))
            worked = None if name == "mgsm/en/test" else f"Step-by-Step Answer: {answer}. The answer is {number}."
            row = {"question": f"Question: {question}?", "answer": worked, "answer_number": number}
            row |= {"inputs": question, "targets": answer, "language": "qac", "language_code": "qac"}
            lines.append(json.dumps(row) + "\n")
        file = folder / f"{name}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(lines), encoding="utf-8")


def here(model: Model, runs_dir: Path) -> Path | None:
    """The absolute folder of a model that is on this disk, in the Hub's cache too; None where there is none.

    Raises:
        PipelineError: a model whose shape is not known before it is here.
    """
    if model.init == "random":
        return None
    name = str(model.path)
    if not name.startswith("hub:"):
        return find_run(name, runs_dir, "model").folder.absolute()  # model=folder would be an option
    from huggingface_hub import snapshot_download

    with suppress(Exception):  # not in the cache, or a part of it
        repository, _, revision = name.removeprefix("hub:").partition("@")
        how: Any = {"revision": model.revision or revision or None, "allow_patterns": HUB_PATTERNS}
        cached = Path(snapshot_download(repository, local_files_only=True, **how))
        if any(cached.glob("*.safetensors")):
            return cached
    if model.name not in SHAPES:
        raise PipelineError(
            f"model={name} is not on this disk, and its shape is not known: fetch it with stage=prefetch, or give "
            f"one of {', '.join(SHAPES)}"
        )
    return None


def fields_of(model: Model) -> dict[str, Any]:
    """Fields of transformers' config at the shape of a model whose weights are not here."""
    if model.init == "random":
        return {"vocab_size": model.vocab_size, **model.architecture}
    shape: Shape = SHAPES[model.name]
    kind = "cohere" if shape.norms == 1 else "qwen2" if shape.qkv_bias else "llama"
    return {
        "model_type": kind, "hidden_size": shape.width, "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_width, "vocab_size": shape.vocabulary, "tie_word_embeddings": shape.tied,
        "max_position_embeddings": 8192,
    }  # fmt: skip


def write_base(folder: Path, fields: dict[str, Any], data: Path) -> None:
    """A checkpoint of random bfloat16 weights with a small tokenizer. Numbers repeat after 2**20: drawing 8e9 takes
    minutes on a CPU."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from pipeline.train.load import make_bpe

    lines = (data / "orca_math/train.jsonl").read_text(encoding="utf-8").splitlines()
    rows: list[Any] = [{"prompt": row["question"], "completion": row["answer"]} for row in map(json.loads, lines)]
    tokenizer = make_bpe(rows, 512)
    ids = {f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id") for kind in ("bos", "eos", "pad")}
    settings = {key: value for key, value in fields.items() if key != "model_type"}
    config = AutoConfig.for_model(fields["model_type"], **{**settings, **ids})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.to_empty(device="cpu")
    model.tie_weights()
    block = torch.randn(2**20, generator=torch.Generator().manual_seed(0)).mul(0.02).to(torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0 if name.endswith("weight") else 0.0)
            else:
                size = parameter.numel()
                parameter.copy_(block.repeat(size // len(block) + 1)[:size].view_as(parameter))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
