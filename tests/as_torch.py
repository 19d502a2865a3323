"""Tensors of models and merges for torch."""

from typing import Any

import torch

from pipeline.merge.merge import Merging
from pipeline.models.arrays import matrix
from pipeline.models.checkpoint import torch_dtype


def as_torch(source: Any, name: str) -> torch.Tensor:
    """One tensor of a checkpoint, of an adapter on its base, or of a merge, whole."""
    if isinstance(source, Merging):
        source.ready()
        parts, shape, dtype = source.pieces(name), source.shape(name), source.stored_dtype(name)
    else:
        info = source.info(name)
        parts, shape, dtype = (
            [source.stored_rows(name, 0, matrix(info.shape)[0])],
            info.shape,
            info.dtype,
        )
    data = bytearray(b"".join(part.tobytes() for part in parts))
    kind = torch_dtype(dtype)
    return (
        torch.frombuffer(data, dtype=kind).reshape(shape)
        if data
        else torch.empty(shape, dtype=kind)
    )
