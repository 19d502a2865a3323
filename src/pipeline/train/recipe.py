"""The trainer of a recipe: TRL's arguments, the steps, and what is known of the rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import PrinterCallback
from trl import SFTConfig

from pipeline.config.stages import TrainStage
from pipeline.config.training import Sft
from pipeline.errors import PipelineError
from pipeline.progress import warn
from pipeline.train import examples, memory, steps
from pipeline.train.trainable import Parts
from pipeline.train.trainer import Trainer

LOW_RATE = 1e-5  # below which adapters hardly move, and most updates of weights that are rounded to bfloat16 are lost


def trainer_of(
    config: TrainStage, model: Any, parts: Parts, tokenizer: Any, rows: Any, validation: Any, output: Path
) -> tuple[Trainer, dict[str, Any]]:
    """The trainer of this method, its steps planned, and facts about its rows."""
    sft, joint = config.sft, config.sft.method in ("mixed", "simultaneous")
    held_out = examples.datasets_of(validation, sft, steps.SIDES if joint else ["all"]) if validation else {}
    with examples.naming_the_template(tokenizer):
        trainer: Any = Trainer(
            model=model, args=trainer_arguments(config, "text" in rows[0], bool(validation), output),
            train_dataset=examples.datasets_of(rows, sft, list(parts)), sft=sft, parts=parts,
            eval_dataset=held_out.get("all", held_out or None), processing_class=tokenizer,
            optimizer_cls_and_kwargs=None if sft.optimizer == "adamw" else torchao_optimizer(sft),
        )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    trainer.data_collator.padding_free = sft.padding_free  # TRL's own argument would leave rows uncut
    if config.partition is not None:
        refuse_flat_shards(trainer)
    lengths = {part: len(rows) for part, rows in trainer.sets.items()}
    turns, unused = steps.steps_of(sft, lengths)
    plan_steps(trainer.args, sft, sum(turns.values()))
    tokens = sum(len(ids) for rows in trainer.sets.values() for ids in rows["input_ids"])
    dropped = 0 if sft.packing else len(rows) - sum(lengths.values())  # by TRL, as sft.seq_length leaves no loss
    return trainer, {"dataset_tokens": tokens, "dropped": dropped, "steps_a_side": turns, "rows_left_out": unused}


def refuse_flat_shards(trainer: Trainer) -> None:
    """Raise PipelineError for FSDP1, which an accelerate configuration may set, with a partition."""
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if trainer.is_fsdp_enabled and getattr(plugin, "fsdp_version", 2) == 1:
        raise PipelineError(
            "FSDP1 concatenates the parameters of a layer, so that a part of them cannot be frozen: with a "
            "partition use sft.parallel=fsdp2 or ddp, and no FSDP1 in accelerate's configuration"
        )


def trainer_arguments(config: TrainStage, text: bool, validated: bool, output: Path) -> SFTConfig:
    """Our recipe as arguments of the trainer. All differences between its defaults and ours are set here."""
    sft, seed = config.sft, config.seed
    assert sft.learning_rate is not None
    micro, passes = memory.micro_batches(sft)
    return SFTConfig(
        output_dir=str(output), seed=seed, data_seed=seed, save_strategy="no", report_to="none", logging_steps=1,
        per_device_train_batch_size=micro, per_device_eval_batch_size=micro,
        gradient_accumulation_steps=passes,
        learning_rate=sft.learning_rate, warmup_steps=sft.warmup_steps, weight_decay=sft.weight_decay,
        adam_beta1=sft.adam_beta1, adam_beta2=sft.adam_beta2, max_grad_norm=sft.max_grad_norm,
        max_length=sft.seq_length, packing=sft.packing, packing_strategy="wrapped",
        assistant_only_loss=sft.loss_on == "assistant_turns" and not text,
        completion_only_loss=None if text else sft.loss_on == "response",
        bf16=sft.precision == "bf16", tf32=True if sft.precision == "tf32" else None,
        torch_compile=sft.compile, use_liger_kernel=sft.liger, use_cpu=not torch.cuda.is_available(),
        activation_checkpointing=sft.gradient_checkpointing,
        train_sampling_strategy="random" if sft.shuffle else "sequential",
        eval_strategy="steps" if validated else "no", logging_nan_inf_filter=False, disable_tqdm=True,
        ddp_find_unused_parameters=sft.method == "simultaneous", **fsdp_arguments(sft),
    )  # fmt: skip


def fsdp_arguments(sft: Sft) -> dict[str, Any]:
    """FSDP2 as arguments of the trainer. Raises PipelineError where accelerate would silently use DDP instead."""
    if sft.parallel != "fsdp2" or sft.processes == 1:
        return {}
    if not torch.cuda.is_available():
        raise PipelineError("sft.parallel=fsdp2 needs GPUs: on a CPU accelerate falls back to sft.parallel=ddp")
    # not FSDP's own checkpointing, which renames the parameters
    return {"fsdp": True, "fsdp_config": {"version": 2, "reshard_after_forward": True}}


def torchao_optimizer(sft: Sft) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """torchao's AdamW with moments of 8 bits (Dettmers et al. 2022), or of bfloat16, and its settings.

    Its steps are compiled, a kernel per shape; on a CPU they run uncompiled, as compiling costs more than it saves.
    """
    from torchao.optim import AdamW8bit
    from torchao.optim.adam import _AdamW  # the same step with moments in the weights' dtype

    if not torch.cuda.is_available():
        torch.compiler.set_stance("force_eager")
    kind = AdamW8bit if sft.optimizer == "adamw_8bit" else _AdamW
    return kind, {
        "lr": sft.learning_rate, "betas": (sft.adam_beta1, sft.adam_beta2), "eps": 1e-8,
        "bf16_stochastic_round": memory.rounds_stochastically(sft),
    }  # fmt: skip


def trainer_schedule(name: str, steps: int, decay_share: float) -> tuple[str, dict[str, Any]]:
    """The trainer's name and keywords of our schedule `name`. wsd decays linearly over the last share of steps."""
    if name == "wsd":
        return "warmup_stable_decay", {"num_decay_steps": max(1, round(steps * decay_share)), "decay_type": "linear"}
    return {"linear": "linear", "constant": "constant_with_warmup"}[name], {}


def plan_steps(args: SFTConfig, sft: Sft, number: int) -> None:
    """Set what depends on the number of steps, known after packing: the schedule, and when to validate."""
    args.max_steps = number
    if sft.warmup_steps >= number:
        share = (number - 1) / sft.warmup_steps  # the first step has rate 0
        warn(
            f"sft.warmup_steps={sft.warmup_steps} of {number} steps: the rate ends at {share:.0%} of "
            f"sft.learning_rate={sft.learning_rate} and is never reached; lower sft.warmup_steps"
        )
    args.lr_scheduler_type, args.lr_scheduler_kwargs = trainer_schedule(sft.schedule, number, sft.decay_share)
    args.eval_steps = max(1, number // 4)


def warn_of_rate(sft: Sft) -> None:
    """Warn of a rate at which what is trained hardly moves: adapters, of which one factor starts from zero, and
    bfloat16 weights that are rounded to nearest."""
    if sft.learning_rate is None or sft.learning_rate >= LOW_RATE:
        return
    if sft.adapter == "lora":
        warn(
            f"sft.learning_rate={sft.learning_rate:g} is a rate of full training: adapters hardly move below "
            f"{LOW_RATE:g}, the papers' have 6e-5 (recipe=unreasonable_lora); give sft.learning_rate=6e-5"
        )
    elif sft.weights == "bfloat16" and not memory.rounds_stochastically(sft):
        warn(
            f"sft.learning_rate={sft.learning_rate:g} with sft.weights=bfloat16 and sft.optimizer={sft.optimizer} "
            f"loses most updates in rounding, 84 % of them at {LOW_RATE:g} and 98 % at 1e-6: use "
            "sft.weights=float32, or sft.optimizer=adamw_bf16 or adamw_8bit"
        )
