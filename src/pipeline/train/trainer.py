"""TRL's SFTTrainer for a recipe: its arguments, the order of rows, turns of sides, and FSDP2.

Loss and labels are TRL's.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from itertools import chain, islice
from pathlib import Path
from statistics import fmean
from typing import Any, cast

import torch
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.utils.data import DataLoader
from transformers import PrinterCallback, TrainingArguments
from trl import SFTConfig, SFTTrainer

from pipeline.config.stages import TrainStage
from pipeline.config.training import Sft
from pipeline.errors import PipelineError
from pipeline.progress import warn
from pipeline.train import examples, memory, steps
from pipeline.train.load import Parts
from pipeline.train.steps import side_of_step

# Below this rate adapters hardly move, and bfloat16 weights lose most updates in rounding
LOW_RATE = 1e-5


def trainer_of(
    config: TrainStage,
    model: Any,
    parts: Parts,
    tokenizer: Any,
    rows: Any,
    validation: Any,
    output: Path,
) -> tuple[Trainer, dict[str, Any]]:
    """Build the trainer of a recipe with planned steps, and return it with facts about its rows."""
    sft = config.sft
    args = trainer_arguments(config, "text" in rows[0], bool(validation), output)
    if getattr(model.config, "num_local_experts", None) == 0:
        # Granite 4 H has no router, but TRL would add its loss
        args.router_aux_loss_coef = 0.0
    held_out = {}
    if validation:
        is_joint = sft.method in ("mixed", "simultaneous")
        held_out = examples.datasets_of(validation, sft, steps.SIDES if is_joint else ["all"])
    trainer: Any = Trainer(
        model=model,
        args=args,
        train_dataset=examples.datasets_of(rows, sft, list(parts)),
        sft=sft,
        parts=parts,
        eval_dataset=held_out.get("all", held_out or None),
        processing_class=tokenizer,
    )
    # For sft.compile, transformers and accelerate have set products of fp32 to TF32
    torch.set_float32_matmul_precision("high" if sft.precision == "tf32" else "highest")
    if (trainer.is_fsdp_enabled and sft.parallel != "fsdp2") or trainer.is_deepspeed_enabled:
        raise PipelineError(
            "accelerate's configuration enables FSDP or DeepSpeed. Remove it there, and set"
            " sft.parallel=fsdp2."
        )
    trainer.remove_callback(PrinterCallback)
    counts = {part: len(lengths) for part, lengths in trainer.lengths.items()}
    turns, unused = steps.steps_of(sft, counts)
    plan_steps(trainer.args, sft, sum(turns.values()))
    dropped = 0
    if not sft.packing:  # TRL drops rows without a loss
        dropped = len(rows) - sum(counts.values())
    return trainer, {
        "dataset_tokens": sum(map(sum, trainer.lengths.values())),
        "dropped": dropped,
        "steps_a_side": turns,
        "rows_left_out": unused,
    }


class Trainer(SFTTrainer):
    """A trainer that trains the parts of a model in turns, each on the rows of its own set.

    A single part is trained in all steps. With two parts (simultaneous training: unreasonable,
    section 4.5) a step on a batch of a side's set trains that side. One AdamW has the moments of
    both sides. The moments of the inactive side do not change, because its gradients are None. With
    zeros, AdamW would move it by momentum and decay. One schedule counts all steps.

    `train_dataset` maps a part to its examples, which stay separate when rows are packed.
    """

    def __init__(
        self, *, sft: Sft, parts: Parts, train_dataset: dict[str, Any], **keywords: Any
    ) -> None:
        self.sft, self.parts, self.turn = sft, parts, ""
        first, *others = train_dataset
        super().__init__(train_dataset=train_dataset[first], **keywords)
        # TRL averages the loss over all tokens of a step, which not all models could do themselves
        self.model_accepts_loss_kwargs = True
        args, tokenizer = cast(Any, self.args), cast(Any, self.processing_class)
        self.sets: dict[str, Any] = {first: self.train_dataset}
        for side in others:
            self.sets[side] = self._prepare_dataset(
                train_dataset[side], tokenizer, args, args.packing, None, side
            )
        self.lengths: dict[str, list[int]] = {}
        for side, rows in self.sets.items():
            self.lengths[side] = [len(ids) for ids in rows["input_ids"]]

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return a loader of all passes in sequence.

        A step may span two passes, and no step is short. A process takes every n-th micro-batch, so
        a step has the same rows for any number of processes.
        """
        from datasets import concatenate_datasets

        order = order_of_turns(self.lengths, self.sft, self.args.max_steps, self.args.seed)
        self.train_dataset = concatenate_datasets([*self.sets.values()]).select(order)
        return super().get_train_dataloader()

    def evaluate(self, eval_dataset: Any = None, *args: Any, **keywords: Any) -> dict[str, float]:
        """Return the metrics; for a joint set, each side's loss and their mean."""
        metrics = super().evaluate(eval_dataset, *args, **keywords)
        for module in cast(Any, self.model).modules():
            if isinstance(module, FSDPModule):  # no backward pass frees the gathered weights
                module.reshard()
        if eval_dataset is None and isinstance(self.eval_dataset, dict):
            losses = [metrics[f"eval_{side}_loss"] for side in self.eval_dataset]
            metrics["eval_loss"] = fmean(losses)
            self.log({name: value for name, value in metrics.items() if name.endswith("_loss")})
        return metrics

    def training_step(self, *args: Any, **keywords: Any) -> torch.Tensor:
        """Train the part whose turn the step is, on a micro-batch."""
        model: Any = self.model
        turn = side_of_step(self.state.global_step, self.sft.steps_per_switch, [*self.parts])
        if turn != self.turn:
            if self.is_fsdp_enabled:
                # Settles the dtype of a shard's gradients, so it must see both sides as trained
                model._get_fsdp_state()._lazy_init()
            self.turn = turn
            for side, names in self.parts.items():
                for name in names:
                    model.get_parameter(name).requires_grad_(side == turn)
        return super().training_step(*args, **keywords)

    def _build_accelerator_args(self, **given: Any) -> dict[str, Any]:
        """Return accelerate's settings, with the recipe's dtypes for shards.

        If accelerate knew of bf16, it would upcast trained weights to float32 and reduce gradients
        in bf16. Shards are computed as under DDP, and gradients are reduced in float32. The
        residual stream of layers has the dtype of the weights: their input is not cast, and their
        output is float32 if the weights are. Each gradient exists once: shards are reduced after
        every micro-batch, and the gradients of whole copies are views of DDP's buckets.
        """
        settings, sft = super()._build_accelerator_args(**given), self.sft
        plugin = given["fsdp_plugin"]
        if plugin is not None:
            computed = torch.bfloat16 if sft.precision == "bf16" else None
            reduced = torch.float32 if computed or sft.weights == "bfloat16" else None
            output = torch.float32 if computed and sft.weights == "float32" else None
            plugin.mixed_precision_policy = MixedPrecisionPolicy(
                computed, reduced, output, cast_forward_inputs=False
            )
            settings["mixed_precision"] = "no"
            settings["gradient_accumulation_plugin"].sync_each_batch = True
        for handler in settings["kwargs_handlers"]:
            handler.gradient_as_bucket_view = True
        return settings

    def autocast_smart_context_manager(
        self, cache_enabled: bool | None = True
    ) -> AbstractContextManager[Any]:
        """Return autocast also under FSDP2, where accelerate does not know of bf16."""
        if self.is_fsdp_enabled and self.args.bf16:
            return torch.autocast(self.args.device.type, torch.bfloat16)
        return super().autocast_smart_context_manager(cache_enabled)


# --- order of rows ---


def pass_order(rows: int, sft: Sft, seed: int) -> list[int]:
    """Return the row numbers of sft.epochs passes, shuffled by consecutive draws of the seed."""
    generator = torch.Generator().manual_seed(seed)
    order: list[int] = []
    for _ in range(sft.epochs):
        if sft.shuffle:
            order += torch.randperm(rows, generator=generator).tolist()
        else:
            order += range(rows)
    return order


def order_of_turns(lengths: dict[str, list[int]], sft: Sft, steps: int, seed: int) -> list[int]:
    """Return the row numbers of all steps, which count the rows of the sets in sequence.

    Each set is shuffled by the seed, anew for each pass. The rows of a step are all from one side's
    set, sorted by length, so micro-batches need hardly any padding. A step's rows, and so its loss,
    do not depend on the sorting.

    `lengths` has, for each side, the tokens of each row of its set.
    """
    all_lengths = [*chain.from_iterable(lengths.values())]
    passes, first = {}, 0
    for number, (side, rows) in enumerate(lengths.items()):
        order_in_set = pass_order(len(rows), sft, seed * len(lengths) + number)
        passes[side] = iter([first + row for row in order_in_set])
        first += len(rows)
    order: list[int] = []
    for step in range(steps):
        side = side_of_step(step, sft.steps_per_switch, [*lengths])
        order += sorted(islice(passes[side], sft.batch_size), key=all_lengths.__getitem__)
    return order


# --- the recipe ---


def trainer_arguments(config: TrainStage, text: bool, validated: bool, output: Path) -> SFTConfig:
    """Return a recipe as arguments of the trainer.

    All differences between the trainer's defaults and the recipe are set here.
    """
    sft, seed = config.sft, config.seed
    assert sft.learning_rate is not None
    (micro, passes), shards = memory.micro_batches(sft), memory.is_sharded(sft)
    # `accelerate launch` sets these, which are not hashed
    for name in ("ACCELERATE_MIXED_PRECISION", "ACCELERATE_DYNAMO_BACKEND"):
        os.environ.pop(name, None)
    # torchao compiles its steps, which costs a CPU more than it saves. "default" lets the next
    # training of the process compile
    eager = sft.optimizer == "adamw_8bit" and not torch.cuda.is_available()
    torch.compiler.set_stance("force_eager" if eager else "default")
    # The argument's name changed in transformers 5.21
    checkpointing = "gradient_checkpointing"
    if "activation_checkpointing" in TrainingArguments.__dataclass_fields__:
        checkpointing = "activation_checkpointing"
    further: dict[str, Any] = {checkpointing: sft.gradient_checkpointing}
    if shards:  # without FSDP's own checkpointing, which renames the parameters
        further["fsdp_config"] = {"version": 2}
    if sft.optimizer == "adamw_8bit":  # torchao's
        further |= {"optim": "adamw_torch_8bit", "optim_args": "bf16_stochastic_round=True"}
    else:
        further["optim"] = "adamw_torch_fused"
    return SFTConfig(
        output_dir=str(output),
        seed=seed,
        data_seed=seed,
        save_strategy="no",
        report_to="none",
        logging_steps=1,
        per_device_train_batch_size=micro,
        per_device_eval_batch_size=micro,
        gradient_accumulation_steps=passes,
        learning_rate=sft.learning_rate,
        warmup_steps=sft.warmup_steps,
        weight_decay=sft.weight_decay,
        adam_beta1=sft.adam_beta1,
        adam_beta2=sft.adam_beta2,
        max_grad_norm=sft.max_grad_norm,
        train_sampling_strategy="sequential",  # get_train_dataloader orders the rows
        max_length=sft.seq_length,
        packing=sft.packing,
        packing_strategy="wrapped",
        assistant_only_loss=sft.loss_on == "assistant_turns" and not text,
        completion_only_loss=None if text else sft.loss_on == "response",
        bf16=sft.precision == "bf16",
        torch_compile=sft.compile,
        use_liger_kernel=sft.liger,
        use_cpu=not torch.cuda.is_available(),
        eval_strategy="steps" if validated else "no",
        logging_nan_inf_filter=False,
        disable_tqdm=True,
        ddp_find_unused_parameters=sft.method == "simultaneous",
        fsdp=shards,  # type: ignore[arg-type]
        **further,
    )


def plan_steps(args: SFTConfig, sft: Sft, number: int) -> None:
    """Set the schedule and the validation steps for a number of steps, known after packing."""
    args.max_steps = number
    args.eval_steps = max(1, number // 4)
    kinds = {"wsd": "warmup_stable_decay", "constant": "constant_with_warmup", "linear": "linear"}
    args.lr_scheduler_type, args.lr_scheduler_kwargs = kinds[sft.schedule], {}
    warmup, decay = sft.warmup_steps, 1
    remedy = "sft.warmup_steps"
    if sft.schedule == "wsd":
        decay = max(1, round(number * sft.decay_share))
        args.lr_scheduler_kwargs = {"num_decay_steps": decay, "decay_type": "linear"}
    if decay > 1:
        remedy = "sft.warmup_steps or sft.decay_share"
    if warmup > number - decay:
        warmed = (min(warmup, number) - 1) / warmup  # the first step has rate 0
        share = max(warmed, (number - warmup) / decay)
        warn(
            f"sft.warmup_steps={warmup} of {number} steps: the rate is at most {share:.0%} of"
            f" sft.learning_rate={sft.learning_rate}. Lower {remedy}."
        )


def warn_of_rate(sft: Sft) -> None:
    """Warn of a learning rate that hardly changes adapters or bfloat16 weights.

    Adapters need a larger rate, because one of their factors starts from zero. In bfloat16 weights,
    small updates are lost by rounding to nearest.
    """
    rate = sft.learning_rate or LOW_RATE
    if rate >= LOW_RATE:
        return
    low = f"sft.learning_rate={rate:g} is below {LOW_RATE:g}, where"
    if sft.adapter == "lora":
        warn(
            f"{low} adapters hardly move. Set the papers' sft.learning_rate=6e-5"
            " (recipe=unreasonable_lora)."
        )
    elif sft.weights == "bfloat16" and sft.optimizer == "adamw":
        warn(
            f"{low} most updates of bfloat16 weights are lost in rounding (84 % at 1e-05, 98 % at"
            " 1e-06). Set sft.weights=float32 or sft.optimizer=adamw_8bit."
        )
