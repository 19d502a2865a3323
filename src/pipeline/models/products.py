"""float32 products of matrices as three of bfloat16: the numbers of float32 at the rate of tensor
cores.

A weight is held as two bfloat16 tensors, its value rounded and what that leaves, 16 bits of the 24
that float32 has; an activation is split alike when it comes, and x W = xh Wh + xl Wh + xh Wl with
float32 sums (Henry, Tang, Heinecke 2019, arXiv:1904.06376). Of the log-likelihood of a text the
largest error is ten times that of float32, a sixtieth of that of TF32
(docs/explanation/numerics.md).
"""

from __future__ import annotations

from typing import Any

import torch

IEEE, BF16X3 = "ieee", "bf16x3"  # eval.products


def split(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 values as bfloat16 ones and the rest, bfloat16 too."""
    high = values.bfloat16()
    return high, (values - high).bfloat16()


class SplitLinear(torch.nn.Module):
    """A linear layer in float32 whose weight [2, out, in] has its values in bfloat16 and the rest
    of them.
    """

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bias = (
            linear.in_features,
            linear.out_features,
            linear.bias,
        )
        parts = torch.empty(
            2, *linear.weight.shape, dtype=torch.bfloat16, device=linear.weight.device
        )
        self.weight = torch.nn.Parameter(parts, requires_grad=False)
        self.write(0, linear.weight.data)

    def write(self, place: int, values: torch.Tensor) -> None:
        """Set entries of the weight from `place` on, in the order in which they lie."""
        high, rest = split(values.reshape(-1).to(self.weight.device, torch.float32))
        for part, entries in zip(self.weight.data.flatten(1), (high, rest), strict=True):
            part[place : place + entries.numel()] = entries

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        rows, (weight, left) = inputs.reshape(-1, self.in_features), self.weight.transpose(1, 2)
        if rows.is_cuda:  # the larger part of the weight is read once for both parts of the rows
            parts = rows.new_empty(2, *rows.shape, dtype=torch.bfloat16)
            torch.sub(rows, parts[0].copy_(rows), out=parts[1])
            both = torch.mm(parts.flatten(0, 1), weight, out_dtype=torch.float32)
            products = torch.addmm(
                both[: len(rows)] + both[len(rows) :], parts[0], left, out_dtype=torch.float32
            )
        else:
            high, rest, weight, left = (part.float() for part in (*split(rows), weight, left))
            products = high @ weight + rest @ weight + high @ left
        if self.bias is not None:
            products += self.bias
        return products.view(*inputs.shape[:-1], self.out_features)


def split_products(model: Any) -> Any:
    """Return the model with all its float32 linear layers, the output head too, computing by split
    weights.

    Embeddings, norms, attention and what is no linear layer (experts of a mixture in one tensor)
    stay float32.
    """
    for name, module in list(model.named_modules()):
        if isinstance(module, torch.nn.Linear) and module.weight.dtype == torch.float32:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, SplitLinear(module))
    return model


def split_layers(model: Any) -> dict[str, SplitLinear]:
    """Name of the weight -> layer."""
    found = {}
    for name, part in model.named_modules():
        if isinstance(part, SplitLinear):
            found[f"{name}.weight"] = part
    return found
