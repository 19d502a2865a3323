"""How far parameters move in a step, and how many of the asked-for updates are lost in rounding, on a sample."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

SAMPLE = 1024  # elements a tensor


class Sample:
    """Evenly spaced elements of each parameter (all of a small one), read before and after a step.

    Costs a few milliseconds and `SAMPLE` values a tensor, where a copy of the weights would cost as much as they do.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self.parameters = list(parameters)
        sizes = [own_shard(p).numel() for p in self.parameters]
        self.strides = [max(1, size // SAMPLE) for size in sizes]
        counts = [-(-size // stride) for size, stride in zip(sizes, self.strides, strict=True)]
        shares = [size / max(count, 1) for size, count in zip(sizes, counts, strict=True)]
        device = own_shard(self.parameters[0]).device
        self.shares = torch.repeat_interleave(torch.tensor(shares), torch.tensor(counts)).to(device)
        self.weights = self.asked = torch.empty(0)

    def before(self) -> None:
        """Call when the gradients are there and the step is not."""
        self.weights = self.read(self.parameters)
        self.asked = self.read([p if p.grad is None else p.grad for p in self.parameters]) != 0

    def after(self) -> torch.Tensor:
        """Call after the step. Three sums, of the whole part by its sample: squared movement, entries that stayed
        although their gradient was not zero, entries whose gradient was not zero."""
        moved = self.read(self.parameters) - self.weights
        stayed = self.asked & (moved == 0)
        terms = [moved.square(), stayed, self.asked]
        return torch.stack([(self.shares * term).sum() for term in terms])

    def read(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        pairs = zip(tensors, self.strides, strict=True)
        return torch.cat([own_shard(t.detach()).reshape(-1)[::stride].float() for t, stride in pairs])


def own_shard(tensor: torch.Tensor) -> torch.Tensor:
    """The shard of this process, where there are shards."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
