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
from pipeline.train.trainer import InOrder, Trainer, pass_order


class Alternating(Trainer):
    """Trainer whose steps take turns between two sets and the parts that learn from them."""

    def __init__(self, *args: Any, train_dataset: dict[str, Any], **keywords: Any) -> None:
        """`train_dataset`: side -> its examples, kept separate also when rows are packed."""
        first, second = SIDES
        super().__init__(*args, train_dataset=train_dataset[first], **keywords)
        refuse_parallel(self)
        config: Any = self.args
        tokenizer: Any = self.processing_class
        second_set = self._prepare_dataset(train_dataset[second], tokenizer, config, config.packing, None, second)
        self.sets = {first: self.train_dataset, second: second_set}
        self.active: dict[str, list[torch.nn.Parameter]] = {}
        self.add_callback(Toggle(self))

    def part_of(self, step: int) -> str:
        return side_of_step(step, self.sft.steps_per_switch)

    def own_step(self, step: int) -> int:
        turn = self.sft.steps_per_switch
        return step // (len(SIDES) * turn) * turn + step % turn

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
        args = self.args
        batches = Turns(rows, self.sft, args.per_device_train_batch_size, args.max_steps, args.seed)
        return self.make_loader(joined, batches)


class Toggle(TrainerCallback):
    """Before each step, enables gradients of the side whose turn it is, by the step number only."""

    def __init__(self, trainer: Alternating) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.trainer.active = {side: self.trainer.parameters_of(side) for side in SIDES}
        if self.trainer.is_fsdp_enabled:
            # before a side is frozen: FSDP2 settles the dtype of a shard's gradients once, if it is trained then
            model: Any = self.trainer.model
            model._get_fsdp_state()._lazy_init()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        turn = self.trainer.part_of(state.global_step)
        for side, parameters in self.trainer.active.items():
            for parameter in parameters:
                parameter.requires_grad_(side == turn)


class Turns(InOrder):
    """Micro-batches of row numbers: those of a step all from one side's set. A pure function of seed and step.

    Row numbers count the math set first, then the language set. Each set is shuffled by the seed, anew for each pass.
    """

    def __init__(self, rows: dict[str, int], sft: Sft, micro: int, steps: int, seed: int) -> None:
        orders = {}
        for number, side in enumerate(SIDES):
            first = rows[SIDES[0]] if number else 0
            orders[side] = iter([first + row for row in pass_order(rows[side], sft, seed * len(SIDES) + number)])
        turns = [side_of_step(step, sft.steps_per_switch) for step in range(steps)]
        super().__init__([row for side in turns for row in islice(orders[side], sft.batch_size)], micro)


def refuse_parallel(trainer: Trainer) -> None:
    """Raise PipelineError for multi-process settings under which turns go wrong, mostly silently."""
    args = trainer.args
    refuse_flat_shards(trainer)
    if args.world_size > 1 and not trainer.is_fsdp_enabled and not args.ddp_find_unused_parameters:
        raise PipelineError(
            "sft=simultaneous with several processes needs ddp_find_unused_parameters=True: without it the first step "
            "uses gradients that were not averaged"
        )
    if args.ddp_static_graph:
        raise PipelineError("sft=simultaneous needs ddp_static_graph=False: each switch changes the graph")


def refuse_flat_shards(trainer: Trainer) -> None:
    """Raise PipelineError for FSDP1, which an accelerate configuration may set, with a partition."""
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if trainer.is_fsdp_enabled and getattr(plugin, "fsdp_version", 2) == 1:
        raise PipelineError(
            "FSDP1 concatenates the parameters of a layer, so that a part of them cannot be frozen: with a "
            "partition use sft.parallel=fsdp2 or ddp, and no FSDP1 in accelerate's configuration"
        )
