"""The rows of each step: a pure function of seed, sets and turns."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import torch
from torch.utils.data import Sampler

from pipeline.config.training import Sft
from pipeline.train.steps import side_of_step


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
