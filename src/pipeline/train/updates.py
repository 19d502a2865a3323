"""How far parameters move in a step, and how many updates are lost in rounding, on a sample."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

SAMPLE = 1024  # elements per tensor


class Sample:
    """Evenly spaced elements of each parameter (all of a small one), read before and after a step.

    Costs a few milliseconds and `SAMPLE` values per tensor; a copy of the weights would double their memory.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self.parameters = list(parameters)
        sizes = [own_shard(p).numel() for p in self.parameters]
        self.strides = [max(1, size // SAMPLE) for size in sizes]
        counts = [-(-size // stride) for size, stride in zip(sizes, self.strides, strict=True)]
        shares = [size / max(count, 1) for size, count in zip(sizes, counts, strict=True)]
        device = own_shard(self.parameters[0]).device
        repeats, total = torch.tensor(counts), sum(counts)
        self.shares = torch.repeat_interleave(torch.tensor(shares), repeats, output_size=total).to(device)
        self.weights = self.has_gradient = torch.empty(0)

    def record_before_step(self) -> None:
        """Call when the gradients are computed, before the step."""
        self.weights = self.read_sample(self.parameters)
        self.has_gradient = self.read_sample([p if p.grad is None else p.grad for p in self.parameters]) != 0

    def measure_step(self) -> torch.Tensor:
        """Three sums over the part, estimated from the sample: squared movement, entries that stayed although their
        gradient was not zero, entries whose gradient was not zero. Call after the step."""
        moved = self.read_sample(self.parameters) - self.weights
        stayed = self.has_gradient & (moved == 0)
        terms = [moved.square(), stayed, self.has_gradient]
        return torch.stack([(self.shares * term).sum() for term in terms])

    def read_sample(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        pairs = zip(tensors, self.strides, strict=True)
        return torch.cat([own_shard(t.detach()).reshape(-1)[::stride].float() for t, stride in pairs])


def own_shard(tensor: torch.Tensor) -> torch.Tensor:
    """This process' shard of a tensor, or the tensor itself where it is not sharded."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
