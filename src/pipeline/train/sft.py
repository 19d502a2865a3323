"""Stages sft and cpt: load a base (or make one from nothing), train on the data run, save, take the digests.

Both go through TRL's SFTTrainer: prompts and completions with the loss on the completion, or plain text with the loss
on all of it, strung together with an end of sequence between documents and cut into rows of seq_length tokens
(sft.packing, cpt's default).
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PrinterCallback, set_seed
from trl import SFTConfig, SFTTrainer

from pipeline.config import Sft, TrainStage
from pipeline.data.mixture import read_jsonl
from pipeline.data.sources import Example
from pipeline.knobs import PipelineError
from pipeline.train.base import load_model, load_tokenizer, save
from pipeline.train.life import alive
from pipeline.train.optim import MuonWithAdamW, schedule
from pipeline.train.progress import Progress

if TYPE_CHECKING:
    from pipeline.runs import Run
    from pipeline.tracking import Tracker


def make(run: Run, work: Path, tracker: Tracker) -> dict[str, Any]:
    """The sft or cpt stage. Gives weights, token and step counts, what was truncated, and the losses."""
    config = run.config
    assert isinstance(config, TrainStage)
    quiet()
    torch.use_deterministic_algorithms(config.deterministic)
    set_seed(config.seed)

    data = run.parents["data"].folder
    examples, validation = read_jsonl(data / "train.jsonl"), read_jsonl(data / "validation.jsonl")
    tokenizer = load_tokenizer(run, examples)
    model = load_model(run, tokenizer)
    lengths = measure(examples, tokenizer, config.sft)

    args = arguments(config, text="text" in examples[0], validated=bool(validation), output=work / "trainer")
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=dataset(examples, config.sft),
        eval_dataset=dataset(validation, config.sft) if validation else None,
        processing_class=tokenizer,
    )
    steps = steps_of(config.sft, rows=len(trainer.train_dataset))  # type: ignore[arg-type]
    plan_steps(trainer.args, config.sft, steps)  # type: ignore[arg-type]
    progress = Progress(work / "log.jsonl", tracker, run.name, steps, config.sft)
    trainer.add_callback(progress)
    trainer.remove_callback(PrinterCallback)
    trainer.sft = config.sft
    with alive(trainer, run, tracker, lambda folder: save(model, tokenizer, folder, config.sft.save_dtype)) as life:
        result = trainer.train(resume_from_checkpoint=life.resume_from)

    shutil.rmtree(work / "trainer", ignore_errors=True)
    weights = save(model, tokenizer, work, config.sft.save_dtype)
    return {
        "weights": weights, "steps": steps, "loss": result.training_loss, "tokens": progress.tokens,
        "tokens_per_second": round(progress.tokens / life.seconds, 1), **lengths, **life.facts,
    }  # fmt: skip


def quiet() -> None:
    """One bar of ours in place of a dozen of the libraries'."""
    import datasets
    from transformers.utils import logging

    datasets.disable_progress_bars()
    logging.disable_progress_bar()


class Trainer(SFTTrainer):
    """SFTTrainer with the one optimizer that it does not know by name."""

    sft: Sft

    def create_optimizer(self, model: Any = None) -> Any:
        if self.sft.optimizer == "muon":
            sft = self.sft
            betas = (sft.adam_beta1, sft.adam_beta2)
            assert self.model is not None
            self.optimizer = MuonWithAdamW(self.model, sft.learning_rate, sft.weight_decay, betas)
            return self.optimizer
        return super().create_optimizer(model)


def arguments(config: TrainStage, text: bool, validated: bool, output: Path) -> SFTConfig:
    """Our recipe in the trainer's words. All that differs between its defaults and ours is set here."""
    sft, seed = config.sft, config.seed
    micro = sft.micro_batch_size or sft.batch_size
    if sft.batch_size % micro:
        raise PipelineError(f"sft.batch_size={sft.batch_size} is no multiple of sft.micro_batch_size={micro}")
    return SFTConfig(
        output_dir=str(output), seed=seed, data_seed=seed, save_strategy="no", report_to="none",
        per_device_train_batch_size=micro, per_device_eval_batch_size=micro,
        gradient_accumulation_steps=sft.batch_size // micro,
        learning_rate=sft.learning_rate, warmup_steps=sft.warmup_steps, weight_decay=sft.weight_decay,
        adam_beta1=sft.adam_beta1, adam_beta2=sft.adam_beta2, max_grad_norm=sft.max_grad_norm,
        max_length=sft.seq_length, packing=sft.packing, packing_strategy="wrapped",
        completion_only_loss=None if text else sft.loss_on == "response",
        bf16=sft.precision == "bf16", use_cpu=not torch.cuda.is_available(),
        activation_checkpointing=sft.gradient_checkpointing,
        train_sampling_strategy="random" if sft.shuffle else "sequential",
        eval_strategy="steps" if validated else "no", logging_nan_inf_filter=False, disable_tqdm=True,
    )  # fmt: skip


def plan_steps(args: SFTConfig, sft: Sft, steps: int) -> None:
    """What depends on the number of steps, which packing alone decides: the schedule, when to log and to validate."""
    args.max_steps = steps
    args.lr_scheduler_type, args.lr_scheduler_kwargs = schedule(sft.schedule, steps, sft.decay_share)
    args.logging_steps, args.eval_steps = max(1, steps // 200), max(1, steps // 4)


def steps_of(sft: Sft, rows: int) -> int:
    """Optimizer steps over rows as the trainer keeps them, packed or not. None is cycled beyond sft.epochs."""
    there = rows * sft.epochs // sft.batch_size
    if there == 0 or (sft.steps or 0) > there:
        raise PipelineError(
            f"sft.steps={sft.steps or 1} of sft.batch_size={sft.batch_size} need more rows than there are "
            f"({rows} in each of sft.epochs={sft.epochs}): ask for fewer, or raise sft.epochs"
        )
    return sft.steps or there


# ---------------------------------------------------------------------------------------------------- examples


def columns(row: Example, sft: Sft) -> dict[str, Any]:
    """An example in the trainer's columns. The separator belongs to the completion: no token spans the two."""
    if "text" in row:
        return dict(row)
    if sft.template == "plain":
        separator = sft.separator if row["prompt"] else ""
        return {"prompt": row["prompt"], "completion": separator + row["completion"]}
    return {
        "prompt": [{"role": "user", "content": row["prompt"]}],
        "completion": [{"role": "assistant", "content": row["completion"]}],
    }


def dataset(examples: list[Example], sft: Sft) -> Any:
    from datasets import Dataset

    return Dataset.from_list([columns(row, sft) for row in examples])


def measure(examples: list[Example], tokenizer: Any, sft: Sft) -> dict[str, int]:
    """Tokens of the set, and how many rows seq_length cuts (truncated) or leaves without any loss (dropped)."""
    if "text" in examples[0]:
        ids = tokenizer([row["text"] for row in examples]).input_ids
        return {"dataset_tokens": sum(len(row) + 1 for row in ids), "truncated": 0, "dropped": 0}
    if sft.template == "chat" and not tokenizer.chat_template:
        raise PipelineError("sft.template=chat: the model's tokenizer has no chat template; use sft.template=plain")
    rows = [columns(row, sft) for row in examples]
    if sft.template == "chat":
        prompts = [tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True).input_ids for row in rows]
        whole = [tokenizer.apply_chat_template(row["prompt"] + row["completion"]).input_ids for row in rows]
    else:
        prompts = tokenizer([row["prompt"] for row in rows]).input_ids
        joined = tokenizer([row["prompt"] + row["completion"] for row in rows]).input_ids
        whole = [[*ids, tokenizer.eos_token_id] for ids in joined]
    dropped = sum(len(ids) >= sft.seq_length for ids in prompts) if sft.loss_on == "response" else 0
    truncated = sum(len(ids) > sft.seq_length for ids in whole)
    if truncated:
        print(f"sft.seq_length={sft.seq_length} truncates {truncated} of {len(whole)} rows", file=sys.stderr)
    if dropped == len(whole):
        raise PipelineError(f"sft.seq_length={sft.seq_length} leaves no row with a loss: raise it above the prompts")
    tokens = sum(min(len(ids), sft.seq_length) for ids in whole)
    return {"dataset_tokens": tokens, "truncated": truncated, "dropped": dropped}
