"""float32 products of matrices as three bfloat16 products, at the speed of tensor cores.

A weight is stored as two bfloat16 tensors, its rounded value and the remainder: 16 of float32's 24
bits. Activations are split when they arrive. With float32 sums, x W = xh Wh + xl Wh + xh Wl (Henry,
Tang, Heinecke 2019, arXiv:1904.06376). The largest error of a text's log-likelihood is ten times
float32's, and a sixtieth of TF32's (docs/explanation/numerics.md).
"""

from __future__ import annotations

from typing import Any

import torch

IEEE, BF16X3 = "ieee", "bf16x3"  # eval.products


def split(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split float32 values into bfloat16 values and their bfloat16 remainders."""
    high = values.bfloat16()
    return high, (values - high).bfloat16()


class SplitLinear(torch.nn.Module):
    """A float32 linear layer whose weight [2, out, in] has bfloat16 values and remainders."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        shape, device = (2, *linear.weight.shape), linear.weight.device
        parts = torch.empty(shape, dtype=torch.bfloat16, device=device)
        self.weight = torch.nn.Parameter(parts, requires_grad=False)
        self.write(0, linear.weight.data)

    def write(self, place: int, values: torch.Tensor) -> None:
        """Set the weight's entries from `place` on, in stored order."""
        values = values.reshape(-1).to(self.weight.device, torch.float32)
        stop = place + values.numel()
        for part, entries in zip(self.weight.data.flatten(1), split(values), strict=True):
            part[place:stop] = entries

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        rows = inputs.reshape(-1, self.in_features)
        weight, remainder = self.weight.transpose(1, 2)
        if rows.is_cuda:
            # One product reads the weight's larger part once for both parts of the rows
            parts = rows.new_empty(2, *rows.shape, dtype=torch.bfloat16)
            high = parts[0].copy_(rows)
            torch.sub(rows, high, out=parts[1])
            both = torch.mm(parts.flatten(0, 1), weight, out_dtype=torch.float32)
            products = both[: len(rows)] + both[len(rows) :]
            products = torch.addmm(products, high, remainder, out_dtype=torch.float32)
        else:
            high, rest = (part.float() for part in split(rows))
            weight, remainder = weight.float(), remainder.float()
            products = high @ weight + rest @ weight + high @ remainder
        if self.bias is not None:
            products += self.bias
        return products.view(*inputs.shape[:-1], self.out_features)


def split_products(model: Any) -> Any:
    """Replace a model's float32 linear layers by layers with split weights, and return the model.

    The output head is included. Embeddings, norms, attention and experts of a mixture that are in
    one tensor stay float32.
    """
    for name, module in list(model.named_modules()):
        if isinstance(module, torch.nn.Linear) and module.weight.dtype == torch.float32:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, SplitLinear(module))
    return model


def split_layers(model: Any) -> dict[str, SplitLinear]:
    """Return the layers with split weights by the names of their weights."""
    found = {}
    for name, part in model.named_modules():
        if isinstance(part, SplitLinear):
            found[f"{name}.weight"] = part
    return found
