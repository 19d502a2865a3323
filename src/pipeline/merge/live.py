"""A merge in a model in memory: what differs from what the model holds is copied in place, nothing
else is touched.

Parameters are copied into, never rebound: a tensor mapped from a file is read-only memory, and to
write there ends the process. Going back is applying another merge.
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

COPY = 2**23  # entries of a source's tensor that are copied at once


@dataclass
class Live:
    """A model in memory, and for each parameter what it holds.

    `kind`: what else decides its answers, and its dtype.
    """

    model: Any
    tokenizer: Any
    kind: tuple[Any, ...] = ()
    holds: dict[str, str] = field(default_factory=dict)

    def apply(self, merge: Merging, threads: int | None = None) -> list[str]:
        """Make the model the merge; gives the names of the parameters that changed.

        Where it fails midway, what was half copied is not taken for anything, and the next merge
        copies it anew.
        """
        parameters = self._parameters(merge)
        signatures = {name: merge.signature(name) for name in parameters}
        changed = [name for name in parameters if self.holds.get(name) != signatures[name]]
        if changed:
            verify_sources(merge, threads)
            merge.ready(threads)

        def put_tensor(name: str) -> None:
            self.holds.pop(name, None)
            _put_tensor(merge, name, parameters[name])
            self.holds[name] = signatures[name]

        in_threads(put_tensor, sorted(changed, key=lambda name: -prod(merge.shape(name))), threads)
        if changed and merge.layout.tied_head:
            tie_head(self.model)
        return changed

    def _parameters(self, merge: Merging) -> dict[str, torch.Tensor | SplitLinear]:
        """Return the model's tensors by the merge's names, or the layers that hold them split.

        Towers that the model does not have are left out.

        Raises: PipelineError: the model has other parameters than the merge.
        """
        held = {
            name: parameter.data for name, parameter in self.model.named_parameters()
        } | split_layers(self.model)
        if merge.layout.tied_head:
            held = {
                name: target
                for name, target in held.items()
                if target is not self.model.get_output_embeddings()
            }
        in_memory = dict(self.model.named_buffers()) | held
        places = {name: in_memory[own] for own, name in tensor_names(in_memory).items()}
        needed, wanted = set(tensor_names(held).values()), set(merge.names)
        different = sorted((needed - wanted) | (wanted - places.keys() - set(towers(wanted))))
        if different:
            raise PipelineError(
                f"the model in memory has other parameters than {merge.layout.folder}:"
                f" {different[0]}"
            )
        found = {}
        for name in merge.names:
            if name in places:
                found[name] = places[name]
        return found


def _put_tensor(merge: Merging, name: str, target: torch.Tensor | SplitLinear) -> None:
    """One tensor of a merge into a parameter, bit for bit where the dtypes agree, else as torch
    casts.
    """
    dtype, place = torch_dtype(merge.stored_dtype(name)), 0
    for piece in merge.pieces(name, COPY):
        part = torch.from_numpy(piece.reshape(-1).view(np.uint8)).view(dtype)
        if isinstance(target, SplitLinear):
            target.write(place, part)
        else:
            target.view(-1)[place : place + part.numel()].copy_(part)
        place += part.numel()


def tie_head(model: Any) -> None:
    """Give an output head the embeddings' values, which it shares or holds split."""
    head = model.get_output_embeddings()
    if isinstance(head, SplitLinear):
        head.write(0, model.get_input_embeddings().weight.data)
    else:
        model.tie_weights()


def merge_of_one(folder: Path) -> Merging:
    """Return a checkpoint or adapter by itself, as a merge of one."""
    return _alone(open_source(folder))


def _alone(source: Source) -> Merging:
    weights = {name: {"0": 1.0} for name in source.names}
    return Merging(Soup(experts=[str(source.folder)]), {"0": source}, Linear(weights))


# --- a model for it ---


def model_of(merge: Merging, dtype: str, device: str, products: str = IEEE) -> Live:
    """Build the merge as a model in memory, with the tokenizer and generation config of the side
    that gives them.

    Args: dtype: `auto` is that of the written merge; torch's name else. products: of its linear
    layers (models/products.py).

    Raises: PipelineError: the files of the source cannot be loaded.
    """
    kind = (*kind_of(merge.giver, merge.dtype, dtype, device), products)
    live_model = next((live for live in LIVE_MODELS if live.kind == kind), None)
    if live_model is None:
        release_models()  # before the next takes its room
        live_model = _load_live(merge, dtype, device)
        if products == BF16X3:
            split_products(live_model.model)
        live_model.kind = kind
        if keeps_models():
            LIVE_MODELS.append(live_model)
    live_model.apply(merge)
    return live_model


def kind_of(giver: Source, stored: str | None, dtype: str, device: str) -> tuple[Any, ...]:
    """Return what models in memory must share for one to become the other: all but their
    weights.
    """
    dtypes = [giver.config.get(key) for key in ("dtype", "torch_dtype")]
    unread = ("dtype", "torch_dtype", "_name_or_path", "transformers_version")
    settings = {}
    for key, value in giver.config.items():
        if key not in unread:
            settings[key] = value
    as_stored = None
    if dtype == "auto":
        as_stored = (stored, dtypes, isinstance(giver, Adapted))
    texts = tokenizer_folder(giver)
    places = [
        (texts if name != "generation_config.json" else giver.folder) / name
        for name in BESIDE_WEIGHTS[1:]
    ]
    digests = [sha256(path) if path.is_file() else None for path in places]
    return json.dumps(settings, sort_keys=True), as_stored, tuple(digests), dtype, device


def _load_live(merge: Merging, dtype: str, device: str) -> Live:
    giver = merge.giver
    folder = giver.model.folder
    stored = merge.dtype or ("float32" if isinstance(giver, Adapted) else "auto")
    build_skeleton(folder, "checkpoint")
    tokenizer = load_tokenizer(tokenizer_folder(giver))
    model = load_model(folder, dtype=stored if dtype == "auto" else dtype)
    if isinstance(giver, Adapted):
        rows = text_settings(giver.config).get("vocab_size")
        if rows:
            model.resize_token_embeddings(
                rows, mean_resizing=False
            )  # of a vocabulary that grew in training
    take_generation_config(model, giver.folder)
    for parameter in model.parameters():  # memory of our own: what was loaded may be mapped
        if device != "cpu":
            parameter.data = parameter.data.to(device)
        else:
            parameter.data = parameter.data.clone()
    model.to(device)
    model.tie_weights()
    loaded = _alone(giver)
    if isinstance(giver, Adapted):
        holds = {}
    else:
        holds = {name: loaded.signature(name) for name in giver.names}
    return Live(model, tokenizer, holds=holds)
