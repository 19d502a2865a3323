"""Merges applied in place to a model in memory, copying only the tensors that change.

Parameters are overwritten, never rebound: a tensor that is mapped from a file is read-only memory,
and writing to it ends the process. To undo a merge, apply another merge.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipeline.errors import PipelineError
from pipeline.files import sha256
from pipeline.merge.adapters import Adapted, Source, open_source
from pipeline.merge.digests import verify_sources
from pipeline.merge.merge import Linear, Merging
from pipeline.merge.methods.soup import Soup
from pipeline.merge.resident import LIVE_MODELS, keeps_models, release_models
from pipeline.merge.same_tokenizer import tokenizer_folder
from pipeline.models.anatomy import towers
from pipeline.models.arrays import in_threads
from pipeline.models.checkpoint import text_settings, torch_dtype
from pipeline.models.files import BESIDE_WEIGHTS
from pipeline.models.load import load_model, load_tokenizer, take_generation_config
from pipeline.models.names import tensor_names
from pipeline.models.products import BF16X3, IEEE, SplitLinear, split_layers, split_products
from pipeline.models.skeleton import build_skeleton

COPY = 2**23  # entries of a tensor that are copied at once


@dataclass
class Live:
    """A model in memory, and what each of its parameters holds.

    `kind` is what two models must share, besides their parameters, to become one another.
    """

    model: Any
    tokenizer: Any
    kind: tuple[Any, ...] = ()
    holds: dict[str, str] = field(default_factory=dict)

    def apply(self, merge: Merging, threads: int | None = None) -> list[str]:
        """Turn the model into the merge, and return the names of the parameters that changed.

        If it fails midway, the next merge copies the unfinished parameters again.
        """
        parameters = self._parameters(merge)
        signatures = {name: merge.signature(name) for name in parameters}
        changed = [name for name in parameters if self.holds.get(name) != signatures[name]]
        if not changed:
            return []
        verify_sources(merge, threads)
        merge.ready(threads)

        def put_tensor(name: str) -> None:
            self.holds.pop(name, None)
            _put_tensor(merge, name, parameters[name])
            self.holds[name] = signatures[name]

        largest_first = sorted(changed, key=lambda name: -prod(merge.shape(name)))
        in_threads(put_tensor, largest_first, threads)
        if merge.layout.tied_head:
            tie_head(self.model)
        return changed

    def _parameters(self, merge: Merging) -> dict[str, torch.Tensor | SplitLinear]:
        """Return the model's tensors by the merge's names; for split layers, the layer.

        Towers that the model does not have are left out.

        Raises:
            PipelineError: the model has other parameters than the merge.
        """
        trained: dict[str, torch.Tensor | SplitLinear] = {}
        for name, parameter in self.model.named_parameters():
            trained[name] = parameter.data
        trained |= split_layers(self.model)
        if merge.layout.tied_head:
            head = self.model.get_output_embeddings()
            trained = {name: target for name, target in trained.items() if target is not head}
        in_memory = dict(self.model.named_buffers()) | trained
        places = {}
        for own_name, name in tensor_names(in_memory).items():
            places[name] = in_memory[own_name]
        wanted = set(merge.names)
        unexpected = set(tensor_names(trained).values()) - wanted
        missing = wanted - places.keys() - set(towers(wanted))
        if unexpected or missing:
            raise PipelineError(
                f"The model in memory has other parameters than {merge.layout.folder}:"
                f" {min(unexpected | missing)}. Merge models of one architecture."
            )
        return {name: places[name] for name in merge.names if name in places}


def _put_tensor(merge: Merging, name: str, target: torch.Tensor | SplitLinear) -> None:
    """Copy a tensor of a merge into a parameter, cast by torch if the dtypes differ."""
    dtype = torch_dtype(merge.stored_dtype(name))
    start = 0
    for piece in merge.pieces(name, COPY):
        raw = torch.from_numpy(piece.reshape(-1).view(np.uint8))
        part = raw.view(dtype)
        stop = start + part.numel()
        if isinstance(target, SplitLinear):
            target.write(start, part)
        else:
            target.view(-1)[start:stop].copy_(part)
        start = stop


def tie_head(model: Any) -> None:
    """Tie the output head to the embeddings. A head with split weights gets a copy of them."""
    head = model.get_output_embeddings()
    if isinstance(head, SplitLinear):
        head.write(0, model.get_input_embeddings().weight.data)
    else:
        model.tie_weights()


def merge_of_one(folder: Path) -> Merging:
    """Return a checkpoint or an adapter as a merge of one source."""
    return _alone(open_source(folder))


def _alone(source: Source) -> Merging:
    weights = {name: {"0": 1.0} for name in source.names}
    return Merging(Soup(experts=[str(source.folder)]), {"0": source}, Linear(weights))


# --- loading a model ---


def model_of(merge: Merging, dtype: str, device: str, products: str = IEEE) -> Live:
    """Return the merge as a model in memory, with its tokenizer and generation config.

    Args:
        merge: the merge. `merge.giver` has the tokenizer and the generation config.
        dtype: torch's name, or `auto` for the dtype of the written merge.
        device: torch's name of the device.
        products: how linear layers multiply (models/products.py).

    Raises:
        PipelineError: the files of the source cannot be loaded.
    """
    kind = (*kind_of(merge.giver, merge.dtype, dtype, device), products)
    live_model: Live | None = next((live for live in LIVE_MODELS if live.kind == kind), None)
    if live_model is None:
        release_models()  # frees memory for the new model
        live_model = _load_live(merge, dtype, device)
        if products == BF16X3:
            split_products(live_model.model)
        live_model.kind = kind
        if keeps_models():
            LIVE_MODELS.append(live_model)
    live_model.apply(merge)
    return live_model


def kind_of(giver: Source, stored: str | None, dtype: str, device: str) -> tuple[Any, ...]:
    """Return what two models in memory must share to become one another: all but weights."""
    settings = dict(giver.config)
    dtypes = [settings.pop(key, None) for key in ("dtype", "torch_dtype")]
    for unread in ("_name_or_path", "transformers_version"):
        settings.pop(unread, None)
    as_stored = None
    if dtype == "auto":
        as_stored = (stored, dtypes, isinstance(giver, Adapted))
    texts = tokenizer_folder(giver)
    digests = []
    for name in BESIDE_WEIGHTS[1:]:
        path = texts / name
        if name == "generation_config.json":
            path = giver.folder / name
        digest = None
        if path.is_file():
            digest = sha256(path)
        digests.append(digest)
    return json.dumps(settings, sort_keys=True), as_stored, tuple(digests), dtype, device


def _load_live(merge: Merging, dtype: str, device: str) -> Live:
    giver = merge.giver
    folder = giver.model.folder
    is_adapter = isinstance(giver, Adapted)
    if dtype == "auto":
        dtype = merge.dtype or ("float32" if is_adapter else "auto")
    build_skeleton(folder, "checkpoint")
    tokenizer = load_tokenizer(tokenizer_folder(giver))
    model = load_model(folder, dtype=dtype)
    rows = text_settings(giver.config).get("vocab_size")
    if is_adapter and rows:  # the vocabulary may have grown in training
        model.resize_token_embeddings(rows, mean_resizing=False)
    take_generation_config(model, giver.folder)
    for parameter in model.parameters():  # copied, as the loaded memory may be mapped
        parameter.data = parameter.data.to(device, copy=True)
    model.to(device)
    model.tie_weights()
    holds = {}
    if not is_adapter:
        loaded = _alone(giver)
        holds = {name: loaded.signature(name) for name in giver.names}
    return Live(model, tokenizer, holds=holds)
