"""The base and its tokenizer, loaded or made from nothing; and what training leaves, saved with its digests."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from pipeline.data.sources import Example
from pipeline.knobs import PipelineError
from pipeline.models.checkpoint import Checkpoint, digest_tensors, digests_in, weights_root
from pipeline.models.hub import local
from pipeline.models.skeleton import skeleton

if TYPE_CHECKING:
    from pipeline.runs import Run


def base_of(run: Run) -> Path | None:
    """The folder of the base, fetched where it is the hub's; None for a model that is made from nothing."""
    if "model" not in run.parents:
        return None
    return local(run.parents["model"].folder, run.config.model.revision)  # type: ignore[attr-defined]


def load_tokenizer(run: Run, examples: list[Example], base: Path | None) -> Any:
    """The tokenizer beside the weights, that of data_root, or a byte-level BPE made from the training text."""
    model = run.config.model  # type: ignore[attr-defined]
    if model.tokenizer == "bpe":
        return make_bpe(examples, model.vocab_size)
    of_root = model.tokenizer == "data_root"
    folder: Any = run.parents["data_root"].folder / "tokenizer" if of_root else base
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise PipelineError(
            f"{folder} has no tokenizer: put tokenizer.json and tokenizer_config.json beside the weights"
        ) from error
    if tokenizer.eos_token is None:
        raise PipelineError(
            f"the tokenizer of {folder} has no end-of-sequence token: set eos_token in tokenizer_config.json"
        )
    return tokenizer


def check_base(base: Path, tokenizer: Any) -> None:
    """Refuse a base, by its headers, that lacks tensors or has others than its config, or fewer rows than tokens."""
    model = skeleton(base, "model.path")
    if getattr(model.config, "quantization_config", None):
        raise PipelineError(
            f"model.path={base} is quantized, as its config.json says: give the model that it was made of"
        )
    rows = model.get_input_embeddings().weight.shape[0]
    beyond = {index: token for token, index in tokenizer.get_vocab().items() if index >= rows}
    if beyond:
        first = min(beyond)
        raise PipelineError(
            f"the tokenizer of {tokenizer.name_or_path or base} has {len(beyond)} tokens beyond the {rows} rows of the "
            f"embedding of {base}, the first {beyond[first]!r} (id {first}): use the model's own tokenizer, or resize "
            "the embedding"
        )


def make_bpe(examples: list[Example], vocab_size: int) -> Any:
    """A byte-level BPE of `vocab_size` pieces, three of them special, from the training text in its order."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=["<s>", "</s>", "<pad>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator((value for example in examples for value in example.values()), trainer)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


def load_model(run: Run, tokenizer: Any, base: Path | None) -> Any:
    """The base's weights in sft.weights (fp32 master weights by default), or drawn from the seed (init=random)."""
    weights = run.config.sft.weights  # type: ignore[attr-defined]
    model = run.config.model  # type: ignore[attr-defined]
    attention = {"attn_implementation": model.attn_implementation}
    if model.init == "random":
        fields = dict(model.architecture)
        ids = {f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id") for kind in ("bos", "eos", "pad")}
        config = AutoConfig.for_model(fields.pop("model_type"), vocab_size=len(tokenizer), **ids, **fields)
        return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, weights), **attention)
    assert base is not None
    try:
        return AutoModelForCausalLM.from_pretrained(
            base, dtype=getattr(torch, weights), use_safetensors=True, **attention
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise PipelineError(f"model.path={base} could not be loaded: {error}") from error


def save(
    model: Any, tokenizer: Any, folder: Path, dtype: str | None, whole: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Weights (of adapters: theirs alone), tokenizer and configs, and the digests of the weights.

    dtype None keeps what was trained. A cast is stated with its relative error. `whole`: the weights by name, where
    the model holds shards of them. The model stays as it is, so that it can be saved while it trains.
    """
    adapters, trained = hasattr(model, "peft_config"), model.dtype
    there = whole or dict(model.named_parameters())
    kept = {name: p for name, p in there.items() if not adapters or ".lora_" in name}
    with cast(kept, getattr(torch, dtype) if dtype and dtype not in _dtypes(kept) else None) as facts:
        if adapters:
            model.peft_config["default"].base_model_name_or_path = None  # the manifest names the base
            model.save_pretrained(folder, state_dict=whole)
            (folder / "README.md").unlink(missing_ok=True)  # PEFT's model card, unfilled
            model.generation_config.save_pretrained(folder)
        else:
            model.config.dtype = next(iter(kept.values())).dtype
            model.save_pretrained(folder, state_dict=whole)
            model.config.dtype = trained
    tokenizer.save_pretrained(folder)
    for path in folder.iterdir():
        if path.is_file():
            path.chmod(0o644)  # shards are written for their owner alone, and clusters share folders
    digests = adapter_digests(folder) if adapters else digest_tensors(folder)
    return {"root": weights_root(digests), "digests": digests, **facts}


def _dtypes(named: dict[str, Any]) -> set[str]:
    return {str(p.dtype).removeprefix("torch.") for p in named.values()}


@contextmanager
def cast(named: dict[str, Any], dtype: torch.dtype | None) -> Iterator[dict[str, Any]]:
    """Inside, the parameters are cast, on the CPU. Gives the dtype and the relative error of the whole."""
    if dtype is None:
        yield {}
        return
    error = size = 0.0
    before = {name: parameter.data for name, parameter in named.items()}
    try:
        for name, parameter in named.items():
            parameter.data = before[name].to("cpu", dtype)
            was = before[name].float().cpu()
            error += float(((parameter.data.float() - was) ** 2).sum())
            size += float((was**2).sum())
        yield {"cast": {"to": str(dtype).removeprefix("torch."), "relative_error": math.sqrt(error / size)}}
    finally:
        for name, parameter in named.items():
            parameter.data = before[name]


def left_of_training(named: dict[str, Any], base: Path, dtype: torch.dtype) -> dict[str, float]:
    """What of the task vector outlives a cast: its projection on what was trained (1: all of it in the mean), and the
    share of entries that moved in training and would not be told from the base's any more.

    `named`: trained parameters, `base`: the folder of the base's weights, cast alike.
    """
    start = Checkpoint.open(base)
    dot = size = moved = same = 0.0
    for name, parameter in named.items():
        was, now = start.tensor(name).float(), parameter.detach().float().cpu()
        kept = now.to(dtype).float()
        dot += float(((kept - was) * (now - was)).sum(dtype=torch.float64))
        size += float(((now - was) ** 2).sum(dtype=torch.float64))
        moved += int((now != was).sum())
        same += int(((now != was) & (kept == was.to(dtype).float())).sum())
    return {"task_vector_projection": dot / size, "moved_entries_lost": same / moved} if moved else {}


def adapter_digests(folder: Path) -> dict[str, str]:
    """The digest of every tensor of a LoRA adapter, by name. Refuses NaN and infinite values."""
    return digests_in(folder / "adapter_model.safetensors")
