"""The base and its tokenizer, loaded or made from nothing; and what training leaves, saved with its digests."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from pipeline.data.sources import Example
from pipeline.knobs import PipelineError
from pipeline.models.checkpoint import digest_tensors, weights_root

if TYPE_CHECKING:
    from pipeline.runs import Run


def load_tokenizer(run: Run, examples: list[Example]) -> Any:
    """The tokenizer beside the weights, that of data_root, or a byte-level BPE made from the training text."""
    model = run.config.model  # type: ignore[attr-defined]
    if model.tokenizer == "bpe":
        return make_bpe(examples, model.vocab_size)
    folder = (
        run.parents["data_root"].folder / "tokenizer" if model.tokenizer == "data_root" else run.parents["model"].folder
    )
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, revision=model.revision or "main")
    except (OSError, ValueError) as error:
        raise PipelineError(
            f"{folder} has no tokenizer: put tokenizer.json and tokenizer_config.json beside the weights"
        ) from error
    if tokenizer.eos_token is None:
        raise PipelineError(
            f"the tokenizer of {folder} has no end-of-sequence token: set eos_token in tokenizer_config.json"
        )
    return tokenizer


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


def load_model(run: Run, tokenizer: Any) -> Any:
    """fp32 master weights: the parent's, or drawn anew from the seed (model.init=random)."""
    model = run.config.model  # type: ignore[attr-defined]
    attention = {"attn_implementation": model.attn_implementation}
    if model.init == "random":
        fields = dict(model.architecture)
        ids = {f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id") for kind in ("bos", "eos", "pad")}
        config = AutoConfig.for_model(fields.pop("model_type"), vocab_size=len(tokenizer), **ids, **fields)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32, **attention)
    folder = run.parents["model"].folder
    try:
        return AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, use_safetensors=True, revision=model.revision or "main", **attention
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise PipelineError(f"model.path={folder} could not be loaded: {error}") from error


def save(model: Any, tokenizer: Any, folder: Path, dtype: str | None) -> dict[str, Any]:
    """Weights, tokenizer and configs, and the digests of the weights. A cast is stated with its relative error.

    The model stays as it is, so that it can be saved while it trains.
    """
    facts: dict[str, Any] = {}
    state, trained = model.state_dict(), model.dtype
    if dtype not in (None, "float32"):
        cast = {tensor.data_ptr(): tensor.to(getattr(torch, dtype)) for tensor in state.values()}  # a tied head once
        changes = [(p.detach(), cast[p.data_ptr()].float()) for p in model.parameters()]
        error = sum(float(((now - was) ** 2).sum()) for was, now in changes)
        relative = math.sqrt(error / sum(float((was**2).sum()) for was, _ in changes))
        facts["cast"] = {"to": dtype, "relative_error": relative}
        state = {name: cast[tensor.data_ptr()] for name, tensor in state.items()}
    model.config.dtype = next(iter(state.values())).dtype
    model.save_pretrained(folder, state_dict=state)
    model.config.dtype = trained
    tokenizer.save_pretrained(folder)
    for path in folder.iterdir():
        if path.is_file():
            path.chmod(0o644)  # shards are written for their owner alone, and clusters share folders
    digests = digest_tensors(folder)
    return {"root": weights_root(digests), "digests": digests, **facts}
