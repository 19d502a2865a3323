"""TRL's SFTTrainer with a recipe's order of rows and FSDP2 in the recipe's dtypes; loss and labels are TRL's."""

from __future__ import annotations

from contextlib import AbstractContextManager
from itertools import islice
from statistics import fmean
from typing import Any, cast

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.data import BatchSampler, DataLoader
from trl import SFTTrainer

from pipeline.config.training import Sft
from pipeline.train.steps import side_of_step
from pipeline.train.trainable import Parts


def shard_dtypes(sft: Sft) -> MixedPrecisionPolicy:
    """FSDP2's dtypes: computed as under DDP, and gradients reduced in float32.

    Layers keep a residual stream in the dtype of the weights: their input is not cast, their output is float32 where
    the weights are.
    """
    computed = torch.bfloat16 if sft.precision == "bf16" else None
    reduced = torch.float32 if computed or sft.weights == "bfloat16" else None
    output = torch.float32 if computed and sft.weights == "float32" else None
    return MixedPrecisionPolicy(computed, reduced, output, cast_forward_inputs=False)


class Trainer(SFTTrainer):
    """Trains the parts of a model in turns, each on the rows of its own set in the order of the seed.

    One part is trained in all steps. Of two (simultaneous training: unreasonable, section 4.5) a step on a batch of one
    side's set moves that side. One AdamW holds the moments of both; those of the inactive side do not change, because
    its gradients are None and not zero (with zeros AdamW would move it by momentum and decay). One schedule counts all
    steps.
    """

    def __init__(self, *, sft: Sft, parts: Parts, train_dataset: dict[str, Any], **keywords: Any) -> None:
        """`train_dataset`: part -> its examples, kept separate also when rows are packed."""
        self.sft, self.parts = sft, parts
        first, *others = train_dataset
        super().__init__(train_dataset=train_dataset[first], **keywords)
        config, tokenizer = cast(Any, self.args), cast(Any, self.processing_class)
        self.sets: dict[str, Any] = {first: self.train_dataset}
        for side in others:
            self.sets[side] = self._prepare_dataset(train_dataset[side], tokenizer, config, config.packing, None, side)
        self.stop_backward_at_lowest()

    def get_train_dataloader(self) -> DataLoader[Any]:
        """A loader over all passes in sequence: a step may span two, and none is short, for any number of processes."""
        from datasets import concatenate_datasets

        rows = concatenate_datasets([self._remove_unused_columns(rows) for rows in self.sets.values()])
        counts = {side: len(rows) for side, rows in self.sets.items()}
        lengths = [len(ids) for batch in rows.select_columns("input_ids").iter(1000) for ids in batch["input_ids"]]
        order = order_of_turns(counts, self.sft, self.args.max_steps, self.args.seed)
        order = sort_by_length(order, lengths, self.sft.batch_size)
        # processes take every n-th micro-batch: a step's are the same rows, however many processes share them
        batches = BatchSampler(order, self.args.per_device_train_batch_size, drop_last=False)
        return self.accelerator.prepare(DataLoader(rows, batch_sampler=batches, collate_fn=self.data_collator))

    def evaluate(self, eval_dataset: Any = None, *args: Any, **keywords: Any) -> dict[str, float]:
        """Metrics; for a joint set each side's loss, and their mean as the loss of both."""
        metrics = super().evaluate(eval_dataset, *args, **keywords)
        if eval_dataset is None and isinstance(self.eval_dataset, dict):
            metrics["eval_loss"] = fmean(metrics[f"eval_{side}_loss"] for side in self.eval_dataset)
            self.log({name: value for name, value in metrics.items() if name.endswith("_loss")})
        return metrics

    def training_step(self, *args: Any, **keywords: Any) -> torch.Tensor:
        """A micro-batch of a step; of two parts it trains the one whose turn the step is, by its number alone."""
        model: Any = self.model
        if len(self.parts) > 1:
            if self.is_fsdp_enabled:  # before a side is frozen: the dtype of a shard's gradients is settled here, if
                model._get_fsdp_state()._lazy_init()  # it is trained then
            turn = side_of_step(self.state.global_step, self.sft.steps_per_switch)
            for side, names in self.parts.items():
                for name in names:
                    model.get_parameter(name).requires_grad_(side == turn)
        return super().training_step(*args, **keywords)

    def create_optimizer(self, model: Any = None) -> Any:
        self.stop_backward_at_lowest()
        return super().create_optimizer(model)

    def stop_backward_at_lowest(self) -> None:
        """Let the backward pass end at the lowest trained layer: TRL, and again transformers before it creates the
        optimizer, make the embeddings' output require a gradient, which today's checkpointing does not need."""
        if self.args.activation_checkpointing:
            self.model.disable_input_require_grads()  # type: ignore[union-attr,operator]

    # ------------------------------------------------------------------------------------------------ processes

    def _build_accelerator_args(self, **given: Any) -> dict[str, Any]:
        """Accelerate's settings. Shards get our dtypes: told of bf16, it would upcast trained weights to float32 and
        reduce gradients in bf16. Each gradient is held once: shards are reduced after every micro-batch, and those of
        whole copies are views of DDP's buckets."""
        settings = super()._build_accelerator_args(**given)
        if (plugin := given["fsdp_plugin"]) is not None:
            plugin.mixed_precision_policy = shard_dtypes(self.sft)
            settings["mixed_precision"] = "no"
            settings["gradient_accumulation_plugin"].sync_each_batch = True
        for handler in settings["kwargs_handlers"]:
            handler.gradient_as_bucket_view = True
        return settings

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> AbstractContextManager[Any]:
        """Autocast, which accelerate adds itself but under FSDP2, where it is not told of bf16."""
        if self.is_fsdp_enabled and self.args.bf16:
            return torch.autocast(self.args.device.type, torch.bfloat16)
        return super().autocast_smart_context_manager(cache_enabled)


# ---------------------------------------------------------------------------------------------------- order of rows


def pass_order(rows: int, sft: Sft, seed: int) -> list[int]:
    """Row numbers of sft.epochs passes, one after the other, each shuffled with the next draws of the seed."""
    generator = torch.Generator().manual_seed(seed)
    order: list[int] = []
    for _ in range(sft.epochs):
        order += torch.randperm(rows, generator=generator).tolist() if sft.shuffle else range(rows)
    return order


def order_of_turns(rows: dict[str, int], sft: Sft, steps: int, seed: int) -> list[int]:
    """Row numbers of the steps; those of a step are all from one side's set. They count the sets' rows one set after
    the other. Each set is shuffled by the seed, anew for each pass."""
    orders, first = {}, 0
    for number, (side, count) in enumerate(rows.items()):
        orders[side] = iter([first + row for row in pass_order(count, sft, seed * len(rows) + number)])
        first += count
    turns = (side_of_step(step, sft.steps_per_switch, [*rows]) for step in range(steps))
    return [row for side in turns for row in islice(orders[side], sft.batch_size)]


def sort_by_length(order: list[int], lengths: list[int], step: int) -> list[int]:
    """`order` with the rows of each `step` of them sorted by length: micro-batches need hardly any padding, and a
    step's rows, and so its loss, stay the same."""
    steps = (order[start : start + step] for start in range(0, len(order), step))
    return [row for rows in steps for row in sorted(rows, key=lambda row: lengths[row])]
