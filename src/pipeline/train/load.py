"""The base, its tokenizer, and the parameters that a training method trains.

A model and a tokenizer are loaded, or made from random weights and the training text. Freezing and
LoRA adapters follow the sides of a partition.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from pipeline.config.stages import TrainStage
from pipeline.config.training import LLAMA_MATRICES, Partition, Sft, refuse_unknown_targets
from pipeline.data.sources import Example
from pipeline.errors import PipelineError
from pipeline.hub.models import local_folder
from pipeline.models import load
from pipeline.models.anatomy import anatomy, plain_name, towers
from pipeline.models.partition import sides_of_all
from pipeline.models.skeleton import build_skeleton
from pipeline.runs.run import Run
from pipeline.text import one_line
from pipeline.train.memory import is_sharded
from pipeline.train.steps import SIDES

Parts = dict[str, list[str]]  # part -> names of the parameters that its steps train


def local_base(run: Run[TrainStage]) -> Path | None:
    """Return the folder of the base, fetched from the Hub if needed, or None for random weights."""
    if "model" not in run.parents:
        return None
    return local_folder(run.parents["model"].folder, run.config.model.revision)


def load_tokenizer(run: Run[TrainStage], examples: list[Example], base: Path | None) -> Any:
    """Load the tokenizer of the base or of data_root, or train one on the training text."""
    model, sft = run.config.model, run.config.sft
    if model.tokenizer == "bpe":
        return make_bpe(examples, model.vocab_size)
    folder: Any = base
    if model.tokenizer == "data_root":
        folder = run.parents["data_root"].folder / "tokenizer"
    tokenizer = load.with_end_token(load.load_tokenizer(folder), sft.eos_token)
    if tokenizer.eos_token is None:
        raise PipelineError(
            f"The tokenizer of {folder} has no end-of-sequence token. Set sft.eos_token."
        )
    if sft.template != "chat":
        return tokenizer
    return load.with_template_variables(tokenizer, sft.template_date, sft.chat_template_args)


def check_base(base: Path, tokenizer: Any, rows: Sequence[Example] = ()) -> None:
    """Check by headers that a base's tensors fit its config and its tokenizer.

    A class of tokenizers may add a token to the tokens of the files (Qwen's: <|endoftext|>). If the
    embedding has no row for it, it must not occur in the training rows.

    Raises:
        PipelineError: the base is quantized, or its tensors do not fit.
    """
    model = build_skeleton(base, "model.path")
    if getattr(model.config, "quantization_config", None):
        raise PipelineError(
            f"model.path={base} is quantized, according to its config.json. Give the model before"
            " it was quantized."
        )
    size = model.get_input_embeddings().weight.shape[0]
    beyond = {}
    for token, index in tokenizer.get_vocab().items():
        if index >= size:
            beyond[index] = token
    if not beyond:
        return
    folder = Path(tokenizer.name_or_path or base)
    texts = [json.dumps(row) for row in rows]
    for path in folder.glob("*"):
        if path.suffix in (".json", ".jinja", ".txt"):
            texts.append(path.read_text(errors="replace"))
    used = {}
    for index, token in beyond.items():
        if any(token in text for text in texts):
            used[index] = token
    if used:
        first = min(used)
        raise PipelineError(
            f"The tokenizer of {folder} has {len(used)} tokens beyond the {size} rows of the"
            f" embedding of {base}, the first {used[first]!r} (id {first}). Use the model's own"
            " tokenizer, or resize the embedding."
        )


def check_kernels(config: TrainStage) -> None:
    """Check that this machine has what a recipe needs and no library checks.

    Raises:
        PipelineError: shards or products in TF32 without such a GPU, or Liger without a GPU.
    """
    sft, cuda = config.sft, torch.cuda.is_available()
    if is_sharded(sft) and not cuda:
        raise PipelineError("sft.parallel=fsdp2 needs GPUs. On a CPU, give sft.parallel=ddp.")
    has_tf32 = cuda and torch.cuda.get_device_capability() >= (8, 0)
    if sft.precision == "tf32" and not has_tf32:
        raise PipelineError(
            "sft.precision=tf32 needs a GPU from the A100 on. Give sft.precision=fp32."
        )
    if sft.liger and not (cuda and find_spec("liger_kernel")):
        raise PipelineError(
            "sft.liger=true needs a GPU and Liger. Run pip install 'cross-lingual-merging[liger]'."
        )


def make_bpe(examples: list[Example], vocab_size: int) -> Any:
    """Train a byte-level BPE on the training text, in its order.

    The vocabulary includes three special tokens.
    """
    from tokenizers import ByteLevelBPETokenizer, processors
    from transformers import PreTrainedTokenizerFast

    made = ByteLevelBPETokenizer()
    made.train_from_iterator(
        training_texts(examples),
        vocab_size,
        min_frequency=0,
        show_progress=False,
        special_tokens=["<s>", "</s>", "<pad>"],
    )
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made._tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )


def training_texts(examples: list[Example]) -> Iterator[str]:
    """Yield the turns of conversations, or the prompt and completion or the text of other rows."""
    for row in examples:
        turns = row.get("messages")
        if turns:
            yield from (str(turn["content"]) for turn in turns)
            continue
        for key in ("prompt", "completion", "text"):
            if key in row:
                yield str(row[key])


def load_model(run: Run[TrainStage], tokenizer: Any, base: Path | None) -> Any:
    """Load the base's weights in sft.weights, or draw them from the seed (init=random)."""
    model, dtype = run.config.model, getattr(torch, run.config.sft.weights)
    attention = {"attn_implementation": model.attn_implementation}
    if model.init == "random":
        settings: dict[str, Any] = {"vocab_size": len(tokenizer)}
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            settings[name] = getattr(tokenizer, name)
        config = AutoConfig.for_model(**{**settings, **model.architecture})
        return AutoModelForCausalLM.from_config(config, dtype=dtype, **attention)
    assert base is not None
    try:
        loaded = load.load_model(base, dtype=dtype, **attention)
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        # Gemma 2 and other models with capped scores only support eager. A kernel may be missing
        raise PipelineError(
            f"model.path={base} could not be loaded with"
            f" model.attn_implementation={model.attn_implementation}:"
            f" {one_line(str(error)).rstrip('.')}. Set model.attn_implementation=sdpa, or eager if"
            " the model does not support it."
        ) from error
    if run.config.sft.eos_token is not None:
        loaded.config.eos_token_id = tokenizer.eos_token_id
        loaded.generation_config.eos_token_id = tokenizer.eos_token_id
    return loaded


# --- trained parameters ---


def choose_parameters(model: Any, sft: Sft, partition: Partition | None) -> tuple[Any, Parts]:
    """Freeze all but the trained parameters, and return the model and their names by part.

    full and mixed have one part, `all`; partial has its side; simultaneous has math and language,
    in the order of their turns. With LoRA the returned model has adapters, which are
    rank-stabilised (Kalajdzievski 2023: scaled by alpha / sqrt(rank)).

    Raises:
        PipelineError: the partition does not split this model, a LoRA target matches no module, or
            no parameter is left to train.
    """
    # Gradient checkpointing no longer needs gradients of the embeddings' output. Without them the
    # backward pass ends at the lowest trained layer
    model.enable_input_require_grads = lambda: None
    names = [name for name, _ in model.named_parameters()]
    part_of = _part_of_each(names, partition)
    trained_parts: tuple[Any, ...] = ("all",)
    if sft.method == "partial":
        trained_parts = (sft.side,)
    elif sft.method == "simultaneous":
        trained_parts = SIDES
    if sft.adapter == "lora":
        model = add_adapters(model, sft, {name for name in names if part_of[name] in trained_parts})
    parts: Parts = {str(part): [] for part in trained_parts}
    for name, parameter in model.named_parameters():
        is_trainable = sft.adapter == "none" or ".lora_" in name
        is_trained = is_trainable and part_of[plain_name(name)] in trained_parts
        parameter.requires_grad_(is_trained)
        if is_trained:
            parts[str(part_of[plain_name(name)])].append(name)
    for part, members in parts.items():
        if not members:
            raise PipelineError(
                f"sft={sft.name} has nothing to train on side {part}. Change sft.lora_targets or"
                " the partition."
            )
    if sft.precision == "bf16" and not is_sharded(sft):  # FSDP's groups need one dtype
        narrow_frozen(model, sft)
    return model, parts


def _part_of_each(names: Sequence[str], partition: Partition | None) -> dict[str, Any]:
    """Return the part that trains each parameter; towers are always frozen."""
    part_of: dict[str, Any] = dict.fromkeys(names, "all")
    if partition:
        part_of |= sides_of_all(partition, anatomy(names))
    return part_of | dict.fromkeys(towers(names), "frozen")


def narrow_frozen(model: Any, sft: Sft) -> None:
    """Store frozen float32 matrices in bfloat16 if that is exact.

    The training computes the same bits, because autocast would cast the matrices of linear layers
    in every product. Under adapters the embeddings are also stored in bfloat16, and cast back on
    lookup. PEFT leaves the inputs of adapters to autocast, except with dropout, which would draw
    its mask in another dtype. The output head and embeddings tied to it do not change, because
    TRL's loss reads them without autocast.
    """
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    untied = type(embedding) is torch.nn.Embedding and embedding.weight is not head.weight
    for module in model.modules():
        if sft.lora_dropout == 0 and hasattr(module, "cast_input_dtype_enabled"):
            module.cast_input_dtype_enabled = False
        is_linear = type(module) is torch.nn.Linear and module is not head
        is_looked_up = module is embedding and untied and sft.adapter == "lora"
        if not (is_linear or is_looked_up):
            continue
        weight = module.weight
        if weight.requires_grad or weight.dtype != torch.float32:
            continue
        narrow = weight.data.bfloat16()
        if (narrow == weight.data).all():
            weight.data = narrow
            if is_looked_up:
                module.register_forward_hook(lambda _, inputs, found: found.float())


def add_adapters(model: Any, sft: Sft, names: set[str]) -> Any:
    """Add an adapter to each matrix among the parameters `names` that sft.lora_targets selects."""
    from peft import LoraConfig, get_peft_model

    targets = adapted_modules(model, sft.lora_targets, names)
    if not targets:
        raise PipelineError(
            f"sft.lora_targets={sft.lora_targets} match no trained matrix. Name other matrices."
        )
    is_transposed = any(isinstance(model.get_submodule(name), Conv1D) for name in targets)
    config = LoraConfig(
        r=sft.lora_rank,
        lora_alpha=sft.lora_alpha,  # type: ignore[arg-type]
        lora_dropout=sft.lora_dropout,
        use_rslora=True,
        task_type="CAUSAL_LM",
        target_modules="|".join(map(re.escape, targets)),  # a list becomes an unordered set
        fan_in_fan_out=is_transposed,
    )
    return get_peft_model(model, config)


def adapted_modules(model: Any, targets: list[str] | None, names: set[str]) -> list[str]:
    """Return the modules that get an adapter, in the model's order.

    `names` are the parameters that may get an adapter.

    Raises:
        PipelineError: no layer has a target, or `anatomy` raises.
    """
    layers = {}  # module -> the last part of its name
    for name, module in model.named_modules():
        is_matrix = isinstance(module, torch.nn.Linear | Conv1D)
        if is_matrix and re.search(r"\.\d+\.", name):
            layers[name] = name.rpartition(".")[2]
    if targets is not None:
        refuse_unknown_targets(targets, layers.values())
        return [
            name for name, own in layers.items() if own in targets and f"{name}.weight" in names
        ]
    kinds = {name.removesuffix(".weight"): site.kind for name, site in anatomy(names).items()}
    adapted = []
    for name, own in layers.items():
        kind = kinds.get(name)
        if kind in ("attention", "mlp") or (kind is not None and own in LLAMA_MATRICES):
            adapted.append(name)
    return adapted
