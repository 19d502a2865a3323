"""TRL's SFTTrainer for a recipe: its arguments, the order of rows, whose turn each step is, and
FSDP2 in the recipe's dtypes. Loss and labels are TRL's.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, suppress
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
from pipeline.models.shape import shape_of
from pipeline.progress import warn
from pipeline.train import examples, memory, steps, varlen
from pipeline.train.load import Parts
from pipeline.train.steps import side_of_step

# below which adapters hardly move, and most updates of weights that are rounded to bfloat16 are
# lost
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
    """Build the trainer of this method, with its steps planned, and facts about its rows."""
    sft, joint = config.sft, config.sft.method in ("mixed", "simultaneous")
    if (
        sft.padding_free
        and torch.cuda.is_available()
        and config.model.attn_implementation == "sdpa"
    ):
        varlen.attend_within_rows(model)
    args = trainer_arguments(config, "text" in rows[0], bool(validation), output)
    if (
        getattr(model.config, "num_local_experts", None) == 0
    ):  # Granite 4 H: no router, whose loss TRL would add
        args.router_aux_loss_coef = 0.0
    held_out = {}
    if validation:
        held_out = examples.datasets_of(validation, sft, steps.SIDES if joint else ["all"])
    trainer: Any = Trainer(
        model=model,
        args=args,
        train_dataset=examples.datasets_of(rows, sft, list(parts)),
        sft=sft,
        parts=parts,
        eval_dataset=held_out.get("all", held_out or None),
        processing_class=tokenizer,
    )
    # for sft.compile transformers, and accelerate, have put products of fp32 in TF32
    torch.set_float32_matmul_precision("high" if sft.precision == "tf32" else "highest")
    if (trainer.is_fsdp_enabled and sft.parallel != "fsdp2") or trainer.is_deepspeed_enabled:
        raise PipelineError(
            "accelerate's configuration asks for FSDP or DeepSpeed: leave it out there, and give"
            " sft.parallel=fsdp2"
        )
    if memory.is_sharded(sft):
        trainer.accelerator.state.fsdp_plugin.reshard_after_forward = not stays_gathered(
            trainer, config
        )
    trainer.remove_callback(PrinterCallback)
    trainer.data_collator.padding_free = (
        sft.padding_free
    )  # TRL's own argument would leave rows uncut
    counts = {part: len(lengths) for part, lengths in trainer.lengths.items()}
    turns, unused = steps.steps_of(sft, counts)
    plan_steps(trainer.args, sft, sum(turns.values()))
    tokens = sum(map(sum, trainer.lengths.values()))
    # by TRL, as sft.seq_length leaves no loss
    if sft.packing:
        dropped = 0
    else:
        dropped = len(rows) - sum(counts.values())
    return trainer, {
        "dataset_tokens": tokens,
        "dropped": dropped,
        "steps_a_side": turns,
        "rows_left_out": unused,
    }


def stays_gathered(trainer: Any, config: TrainStage) -> bool:
    """Whether the GPUs of all processes hold the weights from the forward pass to the backward
    pass, by the plan's estimate for the longest row; no for a model whose shape it does not know.
    """
    longest = max(chain.from_iterable(trainer.lengths.values()))
    smallest = (
        trainer.accelerator.gather(torch.tensor([card_memory()], device=trainer.args.device))
        .min()
        .item()
    )
    with suppress(PipelineError):
        return memory.stays_gathered(
            config, shape_of(trainer.model.config.to_dict()), longest, smallest
        )
    return False


def card_memory() -> int:
    """Bytes of this process' GPU."""
    return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory


class Trainer(SFTTrainer):
    """Trains the parts of a model in turns, each on the rows of its own set in the order of the
    seed.

    One part is trained in all steps. Of two (simultaneous training: unreasonable, section 4.5) a
    step on a batch of one side's set moves that side. One AdamW holds the moments of both; those of
    the inactive side do not change, because its gradients are None and not zero (with zeros AdamW
    would move it by momentum and decay). One schedule counts all steps.
    """

    def __init__(
        self, *, sft: Sft, parts: Parts, train_dataset: dict[str, Any], **keywords: Any
    ) -> None:
        """`train_dataset`: part -> its examples, kept separate also when rows are packed."""
        self.sft, self.parts, self.turn, self.rows_are_apart = sft, parts, "", False
        first, *others = train_dataset
        super().__init__(train_dataset=train_dataset[first], **keywords)
        # TRL's loss is of the tokens of a step together, also where a model's own (of those that
        # see) could not be
        self.model_accepts_loss_kwargs = True
        args, tokenizer = cast(Any, self.args), cast(Any, self.processing_class)
        self.sets: dict[str, Any] = {first: self.train_dataset}
        for side in others:
            self.sets[side] = self._prepare_dataset(
                train_dataset[side], tokenizer, args, args.packing, None, side
            )
        self.lengths = {
            side: [len(ids) for ids in rows["input_ids"]] for side, rows in self.sets.items()
        }

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return a loader over all passes in sequence.

        A step may span two passes, and none is short, for any number of processes. A process takes
        every n-th micro-batch, so that a step has the same rows however many processes share it.
        """
        from datasets import concatenate_datasets

        order = order_of_turns(self.lengths, self.sft, self.args.max_steps, self.args.seed)
        self.train_dataset = concatenate_datasets([*self.sets.values()]).select(order)
        return super().get_train_dataloader()

    def evaluate(self, eval_dataset: Any = None, *args: Any, **keywords: Any) -> dict[str, float]:
        """Metrics; for a joint set each side's loss, and their mean as the loss of both."""
        self.refuse_mixed_rows()
        metrics = super().evaluate(eval_dataset, *args, **keywords)
        for module in cast(
            Any, self.model
        ).modules():  # no backward pass gives back what was gathered
            if isinstance(module, FSDPModule):
                module.reshard()
        if eval_dataset is None and isinstance(self.eval_dataset, dict):
            metrics["eval_loss"] = fmean(metrics[f"eval_{side}_loss"] for side in self.eval_dataset)
            self.log({name: value for name, value in metrics.items() if name.endswith("_loss")})
        return metrics

    def refuse_mixed_rows(self) -> None:
        """Raise PipelineError, before the first step, if sft.padding_free=true would change what
        the model computes.
        """
        if self.sft.padding_free and not self.rows_are_apart:
            with self.compute_loss_context_manager():
                ids = next(iter(self.sets.values()))[0]["input_ids"]
                varlen.refuse_mixed_rows(self.model, self.data_collator, ids)
            self.rows_are_apart = True

    def training_step(self, *args: Any, **keywords: Any) -> torch.Tensor:
        """Train on a micro-batch of a step.

        Of two parts it trains the one whose turn the step is, by its number alone.
        """
        self.refuse_mixed_rows()
        model: Any = self.model
        turn = side_of_step(self.state.global_step, self.sft.steps_per_switch, [*self.parts])
        if turn != self.turn:
            if (
                self.is_fsdp_enabled
            ):  # before a side is frozen: the dtype of a shard's gradients is settled here, if
                model._get_fsdp_state()._lazy_init()  # it is trained then
            self.turn = turn
            for side, names in self.parts.items():
                for name in names:
                    model.get_parameter(name).requires_grad_(side == turn)
        return super().training_step(*args, **keywords)

    def _build_accelerator_args(self, **given: Any) -> dict[str, Any]:
        """Accelerate's settings.

        Shards get our dtypes: told of bf16, it would upcast trained weights to float32 and reduce
        gradients in bf16. They are computed as under DDP, and gradients reduced in float32. Layers
        keep a residual stream in the dtype of the weights: their input is not cast, their output is
        float32 where the weights are. Each gradient is held once: shards are reduced after every
        micro-batch, and those of whole copies are views of DDP's buckets.
        """
        settings, sft = super()._build_accelerator_args(**given), self.sft
        plugin = given["fsdp_plugin"]
        if plugin is not None:
            computed = None
            if sft.precision == "bf16":
                computed = torch.bfloat16
            reduced = None
            if computed or sft.weights == "bfloat16":
                reduced = torch.float32
            output = None
            if computed and sft.weights == "float32":
                output = torch.float32
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
        """Autocast, which accelerate adds itself but under FSDP2, where it is not told of bf16."""
        if self.is_fsdp_enabled and self.args.bf16:
            return torch.autocast(self.args.device.type, torch.bfloat16)
        return super().autocast_smart_context_manager(cache_enabled)


# --- order of rows ---


def pass_order(rows: int, sft: Sft, seed: int) -> list[int]:
    """Row numbers of sft.epochs passes, one after the other, each shuffled with the next draws of
    the seed.
    """
    generator = torch.Generator().manual_seed(seed)
    order: list[int] = []
    for _ in range(sft.epochs):
        if sft.shuffle:
            order += torch.randperm(rows, generator=generator).tolist()
        else:
            order += range(rows)
    return order


def order_of_turns(lengths: dict[str, list[int]], sft: Sft, steps: int, seed: int) -> list[int]:
    """Row numbers of the steps, which count the sets' rows one set after the other; each set is
    shuffled by the seed, anew for each pass. The rows of a step are all from one side's set, sorted
    by length: micro-batches need hardly any padding, and the step's rows, and so its loss, stay the
    same. lengths: side -> tokens of each row of its set.
    """
    of_all = [*chain.from_iterable(lengths.values())]
    passes, first = {}, 0
    for number, (side, rows) in enumerate(lengths.items()):
        passes[side] = iter(
            [first + row for row in pass_order(len(rows), sft, seed * len(lengths) + number)]
        )
        first += len(rows)
    order: list[int] = []
    for step in range(steps):
        side = side_of_step(step, sft.steps_per_switch, [*lengths])
        order += sorted(islice(passes[side], sft.batch_size), key=of_all.__getitem__)
    return order


# --- the recipe ---


def trainer_arguments(config: TrainStage, text: bool, validated: bool, output: Path) -> SFTConfig:
    """Our recipe as arguments of the trainer.

    All differences between its defaults and ours are set here.
    """
    sft, seed = config.sft, config.seed
    assert sft.learning_rate is not None
    (micro, passes), shards = memory.micro_batches(sft), memory.is_sharded(sft)
    for name in (
        "ACCELERATE_MIXED_PRECISION",
        "ACCELERATE_DYNAMO_BACKEND",
    ):  # of `accelerate launch`: not hashed
        os.environ.pop(name, None)
    eager = sft.optimizer == "adamw_8bit" and not torch.cuda.is_available()
    # torchao compiles its steps, which costs a CPU more than it saves; the next training of the
    # process may compile
    torch.compiler.set_stance("force_eager" if eager else "default")
    newer = (
        "activation_checkpointing" in TrainingArguments.__dataclass_fields__
    )  # its name in transformers since 5.21
    checkpointing: Any = {
        f"{'activation' if newer else 'gradient'}_checkpointing": sft.gradient_checkpointing
    }
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
        train_sampling_strategy="sequential",  # of the order that get_train_dataloader gives
        max_length=sft.seq_length,
        packing=sft.packing,
        packing_strategy="wrapped",
        assistant_only_loss=sft.loss_on == "assistant_turns" and not text,
        completion_only_loss=None if text else sft.loss_on == "response",
        bf16=sft.precision == "bf16",
        torch_compile=sft.compile,
        use_liger_kernel=sft.liger,
        use_cpu=not torch.cuda.is_available(),
        **checkpointing,
        eval_strategy="steps" if validated else "no",
        logging_nan_inf_filter=False,
        disable_tqdm=True,
        ddp_find_unused_parameters=sft.method == "simultaneous",
        fsdp=shards,  # type: ignore[arg-type]
        # not FSDP's own checkpointing, which renames the parameters
        fsdp_config={"version": 2} if shards else None,
        optim={"adamw": "adamw_torch_fused", "adamw_8bit": "adamw_torch_8bit"}[
            sft.optimizer
        ],  # of torch, and torchao
        optim_args="bf16_stochastic_round=True" if sft.optimizer == "adamw_8bit" else None,
    )


def plan_steps(args: SFTConfig, sft: Sft, number: int) -> None:
    """Set what depends on the number of steps, known after packing: the schedule, and when to
    validate.
    """
    args.max_steps = number
    warmup, decay = (
        sft.warmup_steps,
        max(1, round(number * sft.decay_share)) if sft.schedule == "wsd" else 1,
    )
    wsd = {"num_decay_steps": decay, "decay_type": "linear"}
    if warmup > number - decay:
        share = max(
            (min(warmup, number) - 1) / warmup, (number - warmup) / decay
        )  # the first step has rate 0
        warn(
            f"sft.warmup_steps={warmup} of {number} steps: the rate is {share:.0%} of"
            f" sft.learning_rate={sft.learning_rate} at most; lower sft.warmup_steps"
            + " or sft.decay_share"
            * (decay > 1)
        )
    args.lr_scheduler_type, args.lr_scheduler_kwargs = {
        "wsd": ("warmup_stable_decay", wsd),
        "linear": ("linear", {}),
        "constant": ("constant_with_warmup", {}),
    }[sft.schedule]
    args.eval_steps = max(1, number // 4)


def warn_of_rate(sft: Sft) -> None:
    """Warn of a rate at which what is trained hardly moves: adapters, of which one factor starts
    from zero, and bfloat16 weights that are rounded to nearest.
    """
    rate = sft.learning_rate or LOW_RATE
    if rate >= LOW_RATE:
        return
    low = f"sft.learning_rate={rate:g} is below {LOW_RATE:g}, where"
    if sft.adapter == "lora":
        warn(
            f"{low} adapters hardly move: give sft.learning_rate=6e-5, the papers'"
            " (recipe=unreasonable_lora)"
        )
    elif sft.weights == "bfloat16" and sft.optimizer == "adamw":
        warn(
            f"{low} most updates of bfloat16 weights are lost in rounding, 84 % at 1e-05 and 98 %"
            " at 1e-06: give sft.weights=float32, or sft.optimizer=adamw_8bit"
        )
