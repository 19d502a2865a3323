"""The base and its tokenizer, loaded or made from random weights and the training text; and which
of its parameters a training method trains: freezing, and LoRA adapters, by the sides of a
partition.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D
from transformers.utils import import_utils

from pipeline.config.stages import TrainStage
from pipeline.config.training import LLAMA_MATRICES, Partition, Sft, refuse_unknown_targets
from pipeline.data.sources import Example
from pipeline.errors import PipelineError
from pipeline.hub.lock import cached_snapshot
from pipeline.hub.models import local_folder
from pipeline.models import load
from pipeline.models.anatomy import anatomy, plain_name, towers
from pipeline.models.partition import sides_of_all
from pipeline.models.skeleton import build_skeleton
from pipeline.runs.run import Run
from pipeline.text import one_line
from pipeline.train.memory import is_sharded
from pipeline.train.steps import SIDES

Parts = dict[str, list[str]]  # part -> names of the parameters trained in its steps


def local_base(run: Run[TrainStage]) -> Path | None:
    """Return the folder of the base, fetched if it is on the Hub, or None for a randomly
    initialised model.
    """
    if "model" not in run.parents:
        return None
    return local_folder(run.parents["model"].folder, run.config.model.revision)


def load_tokenizer(run: Run[TrainStage], examples: list[Example], base: Path | None) -> Any:
    """Load the tokenizer next to the weights or that of data_root, or train a byte-level BPE on the
    training text.
    """
    model = run.config.model
    if model.tokenizer == "bpe":
        return make_bpe(examples, model.vocab_size)
    of_root = model.tokenizer == "data_root"
    if of_root:
        folder: Any = run.parents["data_root"].folder / "tokenizer"
    else:
        folder = base
    tokenizer = load.with_end_token(load.load_tokenizer(folder), run.config.sft.eos_token)
    if tokenizer.eos_token is None:
        raise PipelineError(
            f"the tokenizer of {folder} has no end-of-sequence token: give sft.eos_token"
        )
    sft = run.config.sft
    if sft.template != "chat":
        return tokenizer
    return load.with_template_variables(tokenizer, sft.template_date, sft.chat_template_args)


def check_base(base: Path, tokenizer: Any, rows: Sequence[Example] = ()) -> None:
    """Raise PipelineError, by its headers, for a base whose tensors do not fit its config, or its
    tokenizer.

    A class of tokenizers may add a token of its own to those of the files (Qwen's: <|endoftext|>).
    Without a row in the embedding it must not be in the training rows.
    """
    model = build_skeleton(base, "model.path")
    if getattr(model.config, "quantization_config", None):
        raise PipelineError(
            f"model.path={base} is quantized, as its config.json says: give the model that it was"
            " quantized from"
        )
    size = model.get_input_embeddings().weight.shape[0]
    beyond = {}
    for token, index in tokenizer.get_vocab().items():
        if index >= size:
            beyond[index] = token
    if beyond:
        folder = Path(tokenizer.name_or_path or base)
        files = []
        for path in folder.glob("*"):
            if path.suffix in (".json", ".jinja", ".txt"):
                files.append(path)
        texts = [
            *(path.read_text(errors="replace") for path in files),
            *(json.dumps(row) for row in rows),
        ]
        beyond = {
            index: token for index, token in beyond.items() if any(token in text for text in texts)
        }
    if beyond:
        first = min(beyond)
        raise PipelineError(
            f"the tokenizer of {tokenizer.name_or_path or base} has {len(beyond)} tokens beyond the"
            f" {size} rows of the embedding of {base}, the first {beyond[first]!r} (id {first}):"
            " use the model's own tokenizer, or resize the embedding"
        )


def check_kernels(config: TrainStage) -> None:
    """Raise PipelineError for kernels that are not installed here, or that this machine cannot run,
    and for shards.
    """
    sft, attention, cuda = config.sft, config.model.attn_implementation, torch.cuda.is_available()
    given = f"model.attn_implementation={attention}"
    of_hub, flash = (
        attention.startswith("kernels-community/"),
        attention.startswith("flash_attention_"),
    )
    if (flash or of_hub) and not cuda:
        raise PipelineError(f"{given} needs a GPU: give model.attn_implementation=sdpa")
    if flash and not getattr(import_utils, f"is_flash_attn_{attention[-1]}_available")():
        raise PipelineError(
            f"{given}: that FlashAttention is not installed: pip install flash-attn, give "
            "model.attn_implementation=sdpa, or name a kernel, kernels-community/flash-attn2@COMMIT"
        )
    repository, _, commit = attention.partition("@")
    if of_hub and not (
        find_spec("kernels") and cached_snapshot("model", repository, commit).is_dir()
    ):
        raise PipelineError(  # a job may have no network, and what runs is what the hash names
            f"{given} needs the package kernels (pip install kernels), and that commit in the Hub's"
            f" cache: fetch it on a node that reaches the Hub, hf download {repository} --revision"
            f" {commit}"
        )
    in_bfloat16 = sft.precision == "bf16" or sft.weights == "bfloat16"
    if sft.padding_free and cuda and not (in_bfloat16 and (flash or of_hub or attention == "sdpa")):
        raise PipelineError(
            f"sft.padding_free=true with {given} and sft.precision={sft.precision} would attend"
            " through a mask over all rows: give model.attn_implementation=sdpa and"
            " sft.precision=bf16, or leave it out"
        )
    if is_sharded(sft) and not cuda:
        raise PipelineError(
            "sft.parallel=fsdp2 needs GPUs: on a CPU accelerate falls back to sft.parallel=ddp"
        )
    if sft.precision == "tf32" and not (cuda and torch.cuda.get_device_capability() >= (8, 0)):
        raise PipelineError(
            "sft.precision=tf32 needs a GPU from the A100 on: give sft.precision=fp32"
        )
    if sft.liger and not (cuda and find_spec("liger_kernel")):
        raise PipelineError(
            "sft.liger=true needs a GPU and Liger: pip install 'cross-lingual-merging[liger]'"
        )
    if sft.compile and not (
        find_spec("triton") if cuda else which("c++") or which("g++") or which("clang++")
    ):
        needed = "a C++ compiler (apt-get install g++)"
        if cuda:
            needed = "Triton (pip install triton)"
        raise PipelineError(
            f"sft.compile=true needs {needed}: install it, or leave sft.compile out"
        )


def make_bpe(examples: list[Example], vocab_size: int) -> Any:
    """Train a byte-level BPE of `vocab_size` pieces, three of them special, on the training text in
    its order.
    """
    from tokenizers import ByteLevelBPETokenizer, processors
    from transformers import PreTrainedTokenizerFast

    made, special = ByteLevelBPETokenizer(), ["<s>", "</s>", "<pad>"]
    texts = (  # the turns of a conversation, else the prompt and completion of a row, or its text
        str(text)
        for row in examples
        for text in [turn["content"] for turn in row.get("messages", ())]
        or [row[key] for key in ("prompt", "completion", "text") if key in row]
    )
    made.train_from_iterator(
        texts, vocab_size, min_frequency=0, show_progress=False, special_tokens=special
    )
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made._tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )


def load_model(run: Run[TrainStage], tokenizer: Any, base: Path | None) -> Any:
    """Load the base's weights in sft.weights (fp32 master weights by default), or draw them from
    the seed (init=random).
    """
    model, dtype = run.config.model, getattr(torch, run.config.sft.weights)
    attention = {"attn_implementation": model.attn_implementation}
    if model.init == "random":
        ids = {
            name: getattr(tokenizer, name)
            for name in ("bos_token_id", "eos_token_id", "pad_token_id")
        }
        settings = {"vocab_size": len(tokenizer), **ids, **model.architecture}
        config = AutoConfig.for_model(**settings)
        return AutoModelForCausalLM.from_config(config, dtype=dtype, **attention)
    assert base is not None
    try:
        loaded = load.load_model(base, dtype=dtype, **attention)
        if run.config.sft.eos_token is not None:
            for settings in (loaded.config, loaded.generation_config):
                settings.eos_token_id = tokenizer.eos_token_id
        return loaded
    except (
        OSError,
        ValueError,
        RuntimeError,
    ) as error:  # Gemma 2 and others with capped scores have eager alone
        raise PipelineError(
            f"model.path={base} could not be loaded with"
            f" model.attn_implementation={model.attn_implementation}: {one_line(str(error))}; where"
            " that is missing, give model.attn_implementation=eager"
        ) from error


# --- what is trained ---


def choose_parameters(model: Any, sft: Sft, partition: Partition | None) -> tuple[Any, Parts]:
    """Return the model, with all but the trained parameters frozen, and their names by part.

    full and mixed have one part, `all`; partial has its side; simultaneous has math and language,
    in the order of their turns. With LoRA the model has adapters, rank-stabilised (Kalajdzievski
    2023: scaled by alpha / sqrt(rank)).

    Raises: PipelineError: a partition does not split this model, a LoRA target matches no module,
    or nothing is left to train.
    """
    # today's checkpointing needs no gradient of the embeddings' output: the backward pass ends at
    # the lowest trained
    model.enable_input_require_grads = lambda: (
        None
    )  # layer, where TRL and transformers would have it go on
    names = [name for name, _ in model.named_parameters()]
    side_of: dict[str, Any] = dict.fromkeys(names, "all")
    if partition:
        side_of |= sides_of_all(partition, anatomy(names))
    side_of |= dict.fromkeys(towers(names), "frozen")
    trained_parts = {"partial": (sft.side,), "simultaneous": SIDES}.get(sft.method, ("all",))
    if sft.adapter == "lora":
        model = add_adapters(model, sft, {name for name in names if side_of[name] in trained_parts})
    parameters = dict(model.named_parameters())
    moves = []
    for name in parameters:
        if sft.adapter == "none" or ".lora_" in name:
            moves.append(name)
    parts = {
        str(part): [name for name in moves if side_of[plain_name(name)] == part]
        for part in trained_parts
    }
    trained = set()
    for part in parts.values():
        for name in part:
            trained.add(name)
    for name, parameter in parameters.items():
        parameter.requires_grad_(name in trained)
    empty = [part for part, members in parts.items() if not members]
    if empty:
        raise PipelineError(
            f"sft={sft.name} has nothing to train on side {empty[0]}: change sft.lora_targets or"
            " the partition"
        )
    if sft.precision == "bf16" and not is_sharded(sft):  # whose groups have one dtype
        narrow_frozen(model, sft)
    return model, parts


def narrow_frozen(model: Any, sft: Sft) -> None:
    """Hold frozen matrices of linear layers in bfloat16 where that loses nothing, as autocast would
    cast them in every product, under adapters the embeddings too, which are cast back as they are
    looked up, and have PEFT leave inputs of adapters to autocast. The bits are the same; dropout
    would draw its mask on another dtype. The output head, and embeddings that are tied to it, stay
    as they are: TRL's loss reads it without autocast.
    """
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    untied = type(embedding) is torch.nn.Embedding and embedding.weight is not head.weight
    for module in model.modules():
        if sft.lora_dropout == 0 and hasattr(module, "cast_input_dtype_enabled"):
            module.cast_input_dtype_enabled = False
        is_linear = type(module) is torch.nn.Linear and module is not head
        is_looked_up = module is embedding and untied and sft.adapter == "lora"
        if (
            not (is_linear or is_looked_up)
            or module.weight.requires_grad
            or module.weight.dtype != torch.float32
        ):
            continue
        weight, narrow = module.weight.data, module.weight.data.bfloat16()
        if (narrow == weight).all():
            module.weight.data = narrow
            if is_looked_up:
                module.register_forward_hook(lambda _, inputs, found: found.float())


def add_adapters(model: Any, sft: Sft, names: set[str]) -> Any:
    """Add an adapter to each matrix among the parameters `names` that sft.lora_targets selects."""
    from peft import LoraConfig, get_peft_model

    trained = adapted_modules(model, sft.lora_targets, names)
    if not trained:
        raise PipelineError(
            f"sft.lora_targets={sft.lora_targets} match nothing that is trained: name others"
        )
    config = LoraConfig(
        r=sft.lora_rank,
        lora_alpha=sft.lora_alpha,  # type: ignore[arg-type]
        lora_dropout=sft.lora_dropout,
        use_rslora=True,
        task_type="CAUSAL_LM",
        target_modules="|".join(map(re.escape, trained)),  # a list would become a set, unordered
        fan_in_fan_out=any(isinstance(model.get_submodule(name), Conv1D) for name in trained),
    )
    return get_peft_model(model, config)


def adapted_modules(model: Any, targets: list[str] | None, names: set[str]) -> list[str]:
    """Return the modules that get an adapter, in the model's order: those whose weights are in
    `names`.

    Raises: PipelineError: no layer has a target, or `anatomy` raises.
    """
    matrices = (
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear | Conv1D)
    )
    # -> its own name
    layers = {}
    for name in matrices:
        if re.search(r"\.\d+\.", name):
            layers[name] = name.rpartition(".")[2]
    if targets is None:
        kinds = {name.removesuffix(".weight"): site.kind for name, site in anatomy(names).items()}
        found = []
        for name, own in layers.items():
            if kinds.get(name) in ("attention", "mlp") or (name in kinds and own in LLAMA_MATRICES):
                found.append(name)
        return found
    refuse_unknown_targets(targets, layers.values())
    found = []
    for name, own in layers.items():
        if own in targets and f"{name}.weight" in names:
            found.append(name)
    return found
