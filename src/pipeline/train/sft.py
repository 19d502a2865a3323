"""Stages sft and cpt: load a base (or make one from nothing), train on the data run, save, take the digests.

Both go through TRL's SFTTrainer: sft on prompts and completions, with the loss on the completion; cpt on plain text,
packed into rows of seq_length tokens with an end-of-sequence token between documents.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback, set_seed
from trl import SFTConfig, SFTTrainer

from pipeline.config import PipelineError, Sft, TrainStage
from pipeline.data.mixture import Example, read_jsonl
from pipeline.models.checkpoint import digest_tensors, weights_root
from pipeline.train.optim import MuonWithAdamW, schedule

if TYPE_CHECKING:
    from pipeline.runs import Run
    from pipeline.tracking import Tracker


def make(run: Run, work: Path, tracker: Tracker) -> dict[str, Any]:
    """The sft or cpt stage. Gives weights, token and step counts, what was truncated, and the losses."""
    config = run.config
    assert isinstance(config, TrainStage)
    torch.use_deterministic_algorithms(config.deterministic)
    set_seed(config.seed)

    data = run.parents["data"].folder
    examples, validation = read_jsonl(data / "train.jsonl"), read_jsonl(data / "validation.jsonl")
    tokenizer = load_tokenizer(run, examples)
    model = load_model(run, tokenizer)
    lengths = measure(examples, tokenizer, config.sft)
    steps = steps_of(config, len(examples), lengths)
    progress = Progress(work / "log.jsonl", tracker, run.name, steps, config.sft)

    trainer = Trainer(
        model=model,
        args=arguments(config.sft, steps, config.seed, bool(validation), packed="text" in examples[0], output=work / "trainer"),
        train_dataset=dataset(examples, config.sft),
        eval_dataset=dataset(validation, config.sft) if validation else None,
        processing_class=tokenizer,
        callbacks=[progress],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.sft = config.sft
    result = trainer.train()

    shutil.rmtree(work / "trainer", ignore_errors=True)
    weights = save(model, tokenizer, work, config.sft.save_dtype)
    return {
        "weights": weights, "steps": steps, "loss": result.training_loss, "tokens": progress.tokens,
        "tokens_per_second": round(progress.tokens / result.metrics["train_runtime"], 1), **lengths,
    }  # fmt: skip


class Trainer(SFTTrainer):
    """SFTTrainer with the one optimizer that it does not know by name."""

    sft: Sft

    def create_optimizer(self, model: Any = None) -> Any:
        if self.sft.optimizer == "muon":
            sft = self.sft
            betas = (sft.adam_beta1, sft.adam_beta2)
            self.optimizer = MuonWithAdamW(self.model, sft.learning_rate, sft.weight_decay, betas)
            return self.optimizer
        return super().create_optimizer(model)


def arguments(sft: Sft, steps: int, seed: int, validated: bool, packed: bool, output: Path) -> SFTConfig:
    """Our recipe in the trainer's words. All that differs between its defaults and ours is set here."""
    micro = sft.micro_batch_size or sft.batch_size
    if sft.batch_size % micro:
        raise PipelineError(f"sft.batch_size={sft.batch_size} is no multiple of sft.micro_batch_size={micro}: choose a divisor")
    scheduler, scheduler_kwargs = schedule(sft.schedule, steps, sft.decay_share)
    return SFTConfig(
        output_dir=str(output), seed=seed, data_seed=seed, max_steps=steps,
        per_device_train_batch_size=micro, gradient_accumulation_steps=sft.batch_size // micro, per_device_eval_batch_size=micro,
        learning_rate=sft.learning_rate, lr_scheduler_type=scheduler, lr_scheduler_kwargs=scheduler_kwargs,
        warmup_steps=sft.warmup_steps, weight_decay=sft.weight_decay, adam_beta1=sft.adam_beta1, adam_beta2=sft.adam_beta2,
        max_grad_norm=sft.max_grad_norm, max_length=sft.seq_length, packing=packed, packing_strategy="wrapped",
        completion_only_loss=None if packed else sft.loss_on == "response",
        bf16=sft.precision == "bf16", use_cpu=not torch.cuda.is_available(), gradient_checkpointing=sft.gradient_checkpointing,
        eval_strategy="steps" if validated else "no", eval_steps=max(1, steps // 4), save_strategy="no",
        logging_steps=max(1, steps // 200), logging_nan_inf_filter=False, report_to="none", disable_tqdm=True,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------- base and tokenizer


def load_tokenizer(run: Run, examples: list[Example]) -> Any:
    """The tokenizer beside the weights, that of data_root, or a byte-level BPE made from the training text."""
    model = run.config.model  # type: ignore[attr-defined]
    if model.tokenizer == "bpe":
        return make_bpe(examples, model.vocab_size)
    folder = run.parents["data_root"].folder / "tokenizer" if model.tokenizer == "data_root" else run.parents["model"].folder
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise PipelineError(f"{folder} has no tokenizer: put tokenizer.json and tokenizer_config.json beside the weights") from error
    if tokenizer.eos_token is None:
        raise PipelineError(f"the tokenizer of {folder} has no end-of-sequence token: set eos_token in tokenizer_config.json")
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
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, use_safetensors=True, **attention)
    except (OSError, ValueError, RuntimeError) as error:
        raise PipelineError(f"model.path={folder} could not be loaded: {error}") from error


def save(model: Any, tokenizer: Any, folder: Path, dtype: str | None) -> dict[str, Any]:
    """Weights, tokenizer and configs, and the digests of the weights. A cast is stated with its relative error."""
    facts: dict[str, Any] = {}
    if dtype not in (None, "float32"):
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        model.to(getattr(torch, dtype))
        error = sum(float(((p.float() - before[name]) ** 2).sum()) for name, p in model.named_parameters())
        facts["cast"] = {"to": dtype, "relative_error": math.sqrt(error / sum(float((p**2).sum()) for p in before.values()))}
    model.config.dtype = model.dtype
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for path in folder.iterdir():
        if path.is_file():
            path.chmod(0o644)  # shards are written for their owner alone, and clusters share folders
    digests = digest_tensors(folder)
    return {"root": weights_root(digests), "digests": digests, **facts}


# ---------------------------------------------------------------------------------------------------- examples


def dataset(examples: list[Example], sft: Sft) -> Any:
    """Examples in the trainer's columns. The separator belongs to the completion, so that no token spans the two."""
    from datasets import Dataset

    if "text" in examples[0]:
        return Dataset.from_list(examples)
    if sft.template == "chat":
        return Dataset.from_list([
            {"prompt": [{"role": "user", "content": row["prompt"]}], "completion": [{"role": "assistant", "content": row["completion"]}]}
            for row in examples
        ])  # fmt: skip
    return Dataset.from_list([{"prompt": row["prompt"], "completion": sft.separator + row["completion"]} for row in examples])


def measure(examples: list[Example], tokenizer: Any, sft: Sft) -> dict[str, int]:
    """Tokens of the set, and how many rows seq_length cuts (truncated) or leaves without any loss (dropped)."""
    if "text" in examples[0]:
        ids = tokenizer([row["text"] for row in examples]).input_ids
        return {"dataset_tokens": sum(len(row) + 1 for row in ids), "truncated": 0, "dropped": 0}
    if sft.template == "chat" and not tokenizer.chat_template:
        raise PipelineError("sft.template=chat: the model's tokenizer has no chat template; use sft.template=plain")
    prompts = tokenizer([row["prompt"] for row in examples]).input_ids
    whole = tokenizer([row["prompt"] + sft.separator + row["completion"] for row in examples]).input_ids
    lengths = [len(row) + 1 for row in whole]
    dropped = sum(len(row) >= sft.seq_length for row in prompts) if sft.loss_on == "response" else 0
    truncated = sum(length > sft.seq_length for length in lengths)
    if dropped or truncated:
        print(f"sft.seq_length={sft.seq_length} truncates {truncated} of {len(lengths)} rows; {dropped} of them keep no loss", file=sys.stderr)
    if dropped == len(lengths):
        raise PipelineError(f"sft.seq_length={sft.seq_length} leaves no row with a loss: the prompts are longer; raise it")
    return {"dataset_tokens": sum(min(length, sft.seq_length) for length in lengths), "truncated": truncated, "dropped": dropped}


def steps_of(config: TrainStage, rows: int, lengths: dict[str, int]) -> int:
    """Optimizer steps. A set is never cycled beyond sft.epochs."""
    sft = config.sft
    unit = "rows"
    rows -= lengths["dropped"]
    if config.stage == "cpt":
        rows, unit = lengths["dataset_tokens"] // sft.seq_length, f"packed rows of {sft.seq_length} tokens"
    there = rows * sft.epochs // sft.batch_size
    if there == 0 or (sft.steps or 0) > there:
        raise PipelineError(
            f"sft.steps={sft.steps or 1} of sft.batch_size={sft.batch_size} need {(sft.steps or 1) * sft.batch_size} {unit}, "
            f"the set gives {rows} in each of sft.epochs={sft.epochs}: ask for fewer, or raise sft.epochs"
        )
    return sft.steps or there


# ---------------------------------------------------------------------------------------------------- progress


class Progress(TrainerCallback):
    """The log file, the tracker, a bar with tokens a second and time left; stops at the first loss that is no number."""

    def __init__(self, log: Path, tracker: Tracker, name: str, steps: int, sft: Sft) -> None:
        from tqdm import tqdm

        self.log_file, self.tracker, self.sft, self.tokens = log, tracker, sft, 0
        self.bar = tqdm(total=steps, desc=name, unit="step", file=sys.stderr, dynamic_ncols=True, mininterval=1.0)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.bar.update(state.global_step - self.bar.n)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        row = {"step": state.global_step}
        names = {"loss": "loss", "learning_rate": "learning_rate", "grad_norm": "grad_norm", "num_tokens": "tokens", "eval_loss": "validation_loss"}
        row |= {ours: (logs or {})[theirs] for theirs, ours in names.items() if theirs in (logs or {})}
        if not {"loss", "validation_loss"} & row.keys():
            return
        for kind in ("loss", "validation_loss", "grad_norm"):
            if not math.isfinite(row.get(kind, 0.0)):
                raise PipelineError(
                    f"{kind} became {row[kind]} at step {state.global_step}: lower sft.learning_rate (now {self.sft.learning_rate}) "
                    f"or sft.max_grad_norm (now {self.sft.max_grad_norm})"
                )
        self.tokens = int(row.get("tokens", self.tokens))
        seconds = max(self.bar.format_dict["elapsed"], 1e-9)
        self.bar.set_postfix_str(f"loss {row.get('loss', math.nan):.3f}, {self.tokens / seconds:,.0f} tokens/s", refresh=False)
        with open(self.log_file, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        self.tracker.log({f"train/{key}": value for key, value in row.items() if key != "step"}, step=state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.bar.close()
