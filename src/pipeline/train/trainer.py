"""TRL's SFTTrainer with a recipe's order of rows and FSDP2 in the recipe's dtypes; loss and labels are TRL's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.data import DataLoader, Sampler
from trl import SFTTrainer

from pipeline.config.training import Sft


def pass_order(rows: int, sft: Sft, seed: int) -> list[int]:
    """Row numbers of sft.epochs passes, one after the other, each shuffled with the next draws of the seed."""
    generator = torch.Generator().manual_seed(seed)
    order: list[int] = []
    for _ in range(sft.epochs):
        order += torch.randperm(rows, generator=generator).tolist() if sft.shuffle else range(rows)
    return order


def sort_by_length(order: list[int], lengths: list[int], step: int) -> list[int]:
    """`order` with the rows of each `step` of them sorted by length: micro-batches need hardly any padding, and a
    step's rows, and so its loss, stay the same."""
    steps = (order[start : start + step] for start in range(0, len(order), step))
    return [row for rows in steps for row in sorted(rows, key=lambda row: lengths[row])]


class InOrder(Sampler[list[int]]):
    """Micro-batches of row numbers in a given order.

    Processes take every n-th micro-batch, so a step's are the same rows however many processes share them.
    """

    def __init__(self, order: list[int], micro: int) -> None:
        self.order = order
        self.batch_size, self.drop_last = micro, False  # accelerate reads them

    def __len__(self) -> int:
        return len(self.order) // self.batch_size

    def __iter__(self) -> Iterator[list[int]]:
        return (self.order[start : start + self.batch_size] for start in range(0, len(self.order), self.batch_size))


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
    """One part of the model, trained in all steps, on rows in the order of the seed."""

    def __init__(self, *args: Any, sft: Sft, **keywords: Any) -> None:
        self.sft = sft
        super().__init__(*args, **keywords)
        self.stop_backward_at_lowest()

    def get_train_dataloader(self) -> DataLoader[Any]:
        """A loader over all passes in sequence: a step may span two, and none is short, for any number of processes."""
        rows: Any = self._remove_unused_columns(self.train_dataset)  # type: ignore[arg-type]
        return self.loader(rows, pass_order(len(rows), self.sft, self.args.seed))

    def loader(self, rows: Any, order: list[int]) -> DataLoader[Any]:
        size = self.sft.batch_size
        lengths = [len(ids) for batch in rows.select_columns("input_ids").iter(1000) for ids in batch["input_ids"]]
        sorted_rows = sort_by_length(order[: self.args.max_steps * size], lengths, size)
        batches = InOrder(sorted_rows, self.args.per_device_train_batch_size)
        return self.accelerator.prepare(DataLoader(rows, batch_sampler=batches, collate_fn=self.data_collator))

    def evaluate(self, eval_dataset: Any = None, *args: Any, **keywords: Any) -> dict[str, float]:
        """Metrics; for a joint set each side's loss, and their mean as the loss of both."""
        metrics = super().evaluate(eval_dataset, *args, **keywords)
        if eval_dataset is None and isinstance(self.eval_dataset, dict):
            losses = {f"eval_{side}_loss": metrics[f"eval_{side}_loss"] for side in self.eval_dataset}
            metrics["eval_loss"] = sum(losses.values()) / len(losses)
            self.log(losses | {"eval_loss": metrics["eval_loss"]})
        return metrics

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
