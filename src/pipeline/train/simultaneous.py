"""Simultaneous training (unreasonable, section 4.5): two sides of a partition learn from two sets, turn by turn.

A step on a batch of the math set moves the math side, a step on a batch of the language set the language side. One
AdamW holds the moments of both; those of the inactive side do not change, because its gradients are None and not
zero (with zeros AdamW would move it by momentum and decay). One schedule counts all steps.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import TrainerCallback

from pipeline.config.training import Sft
from pipeline.errors import PipelineError
from pipeline.train.steps import SIDES, side_of_step
from pipeline.train.trainable import Parts
from pipeline.train.trainer import Trainer, pass_order


class Alternating(Trainer):
    """Trainer whose steps take turns between two sets and the parts that learn from them."""

    def __init__(self, *args: Any, train_dataset: dict[str, Any], parts: Parts, **keywords: Any) -> None:
        """`train_dataset`: side -> its examples, kept separate also when rows are packed."""
        first, second = SIDES
        super().__init__(*args, train_dataset=train_dataset[first], **keywords)
        refuse_flat_shards(self)
        config: Any = self.args
        tokenizer: Any = self.processing_class
        second_set = self._prepare_dataset(train_dataset[second], tokenizer, config, config.packing, None, second)
        self.sets, self.parts = {first: self.train_dataset, second: second_set}, parts
        self.add_callback(Toggle(self))

    def parameters_of(self, side: str) -> list[torch.nn.Parameter]:
        assert self.model is not None
        parameters = dict(self.model.named_parameters())
        return [parameters[name] for name in self.parts[side]]

    def create_optimizer(self, model: Any = None) -> Any:
        """One optimizer over both sides, including the one that is frozen."""
        for side in SIDES:
            for parameter in self.parameters_of(side):
                parameter.requires_grad_(True)
        return super().create_optimizer(model)

    def get_train_dataloader(self) -> DataLoader[Any]:
        from datasets import concatenate_datasets

        joined = concatenate_datasets([self._remove_unused_columns(self.sets[side]) for side in SIDES])
        rows = {side: len(self.sets[side]) for side in SIDES}
        return self.loader(joined, order_of_turns(rows, self.sft, self.args.max_steps, self.args.seed))


class Toggle(TrainerCallback):
    """Before each step, enables gradients of the side whose turn it is, by the step number only."""

    def __init__(self, trainer: Alternating) -> None:
        self.trainer = trainer
        self.parameters: dict[str, list[torch.nn.Parameter]] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.parameters = {side: self.trainer.parameters_of(side) for side in SIDES}
        if self.trainer.is_fsdp_enabled:
            # before a side is frozen: FSDP2 settles the dtype of a shard's gradients once, if it is trained then
            model: Any = self.trainer.model
            model._get_fsdp_state()._lazy_init()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        turn = side_of_step(state.global_step, self.trainer.sft.steps_per_switch)
        for side, parameters in self.parameters.items():
            for parameter in parameters:
                parameter.requires_grad_(side == turn)


def order_of_turns(rows: dict[str, int], sft: Sft, steps: int, seed: int) -> list[int]:
    """Row numbers of the steps, a pure function of seed and step: those of a step are all from one side's set.

    They count the math set first, then the language set. Each set is shuffled by the seed, anew for each pass.
    """
    orders = {}
    for number, side in enumerate(SIDES):
        first = rows[SIDES[0]] if number else 0
        orders[side] = iter([first + row for row in pass_order(rows[side], sft, seed * len(SIDES) + number)])
    turns = (side_of_step(step, sft.steps_per_switch) for step in range(steps))
    return [row for side in turns for row in islice(orders[side], sft.batch_size)]


def refuse_flat_shards(trainer: Trainer) -> None:
    """Raise PipelineError for FSDP1, which an accelerate configuration may set, with a partition."""
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if trainer.is_fsdp_enabled and getattr(plugin, "fsdp_version", 2) == 1:
        raise PipelineError(
            "FSDP1 concatenates the parameters of a layer, so that a part of them cannot be frozen: with a "
            "partition use sft.parallel=fsdp2 or ddp, and no FSDP1 in accelerate's configuration"
        )
