"""A merge in a model in memory: what differs from what the model holds is copied in place, nothing else is touched.

Parameters are copied into, never rebound: a tensor mapped from a file is read-only memory, and to write there ends the
process. Going back is applying another merge.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipeline.errors import PipelineError
from pipeline.files import sha256
from pipeline.merge.adapters import Adapted, open_source
from pipeline.merge.formulas import linear_formula
from pipeline.merge.merge import Merging
from pipeline.merge.methods.soup import Soup
from pipeline.merge.resident import LIVE_MODELS, keeps_models, release_models
from pipeline.merge.same_tokenizer import tokenizer_folder
from pipeline.merge.write import Known
from pipeline.models.checkpoint import DTYPES, digest_tensor, torch_dtype
from pipeline.models.files import BESIDE_WEIGHTS
from pipeline.models.floats import STORED, buffers, in_threads
from pipeline.models.load import load_model, load_tokenizer
from pipeline.models.skeleton import build_skeleton

COPY = 2**23  # entries that go to another device at once


@dataclass
class Live:
    """A model in memory, and for each parameter what it holds. `folder`: from which it was loaded; `kind`: what else
    decides its answers, and its dtype; `digested`: the digest of a parameter, and what it held then; `served`: a
    process that computes with these weights (evaluate/vllm_backend.py).
    """

    model: Any
    tokenizer: Any
    folder: Path | None = None
    kind: tuple[Any, ...] = ()
    holds: dict[str, Any] = field(default_factory=dict)
    digested: dict[str, tuple[Any, str]] = field(default_factory=dict)
    served: Any = None

    def apply(self, merge: Merging, threads: int | None = None) -> list[str]:
        """Make the model the merge; gives the names of the parameters that changed.

        Where it fails midway, what was half copied is not taken for anything, and the next merge copies it anew.
        """
        merge.ready(threads)
        parameters = {name: parameter.data for name, parameter in self.model.named_parameters()}
        if set(parameters) != set(merge.names):
            different = sorted(set(parameters) ^ set(merge.names))
            raise PipelineError(f"the model in memory has other parameters than {merge.layout.folder}: {different[0]}")
        changed = [name for name in merge.names if self.holds.get(name) != merge.signature(name)]

        def put_tensor(name: str) -> None:
            self.holds.pop(name, None)
            _put_tensor(merge, name, parameters[name])
            self.holds[name] = merge.signature(name)

        largest_first = sorted(changed, key=lambda name: -parameters[name].numel())
        in_threads([partial(put_tensor, name) for name in largest_first], threads)
        if changed and merge.layout.tied_head:
            self.model.tie_weights()
        return changed

    def digests(self, merge: Merging, recorded_digests: Known, threads: int | None = None) -> dict[str, str]:
        """The digest of each tensor of the merge that the model holds: those that writing it would give.

        A tensor that is one source's has the digest on record (`known`); what did not change since the last merge, that
        of then. Raises PipelineError for values that are not finite.
        """
        parameters = {name: parameter.data for name, parameter in self.model.named_parameters()}

        def digest_of(name: str) -> tuple[str, str]:
            recorded = recorded_digests.get(merge.copied_from(name) or "", {}).get(name)
            signature, value = self.digested.get(name, (None, ""))
            if recorded or signature == merge.signature(name):
                return name, recorded or value
            shape, dtype = merge.layout.info(name).shape, merge.stored_dtype(name)
            parameter = _parameter_pieces(merge, name, parameters[name])
            value = digest_tensor(dtype, shape, parameter, f"the merge in memory: {name}")
            self.digested[name] = merge.signature(name), value
            return name, value

        return dict(in_threads([partial(digest_of, name) for name in merge.names], threads))


def _parameter_pieces(merge: Merging, name: str, parameter: torch.Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor as the merge stores it: from the parameter, unless its dtype cannot hold them all."""
    stored = torch_dtype(merge.stored_dtype(name))
    if torch.promote_types(parameter.dtype, stored) != parameter.dtype:
        for piece in _stored_pieces(merge, name, parameter.view(-1)):
            yield piece.reshape(-1).view(np.uint8).data
        return
    for part in parameter.view(-1).split(COPY):
        yield part.to(stored).cpu().view(torch.uint8).numpy().data


def _put_tensor(merge: Merging, name: str, target: torch.Tensor) -> None:
    """One tensor of a merge into a parameter, bit for bit where the dtypes agree, else as torch casts."""
    dtype, flat, place = torch_dtype(merge.stored_dtype(name)), target.view(-1), 0
    for piece in _stored_pieces(merge, name, flat):
        part = torch.from_numpy(piece.reshape(-1).view(np.uint8)).view(dtype)
        flat[place : place + part.numel()].copy_(part)
        place += part.numel()


def _stored_pieces(merge: Merging, name: str, flat: torch.Tensor) -> Iterator[np.ndarray]:
    role = merge.copied_from(name)
    if role is None:
        yield from merge.pieces(name)
        return
    source = merge.sources[role]
    info, kind = source.stored(name), STORED[merge.stored_dtype(name)]
    reader = source.base if isinstance(source, Adapted) else source
    assert info is not None
    if flat.device.type == "cpu" and flat.dtype == torch_dtype(info.dtype):  # read to where it belongs
        reader.read(info, 0, flat.view(torch.uint8).numpy())
        return
    for start in range(0, flat.numel(), COPY):
        part = buffers("copied", (min(COPY, flat.numel() - start),), kind)
        reader.read(info, start * part.itemsize, part)
        yield part


def merge_of_one(folder: Path) -> Merging:
    """A checkpoint or adapter by itself, as a merge of one."""
    sources = {"0": open_source(folder)}
    weights = {name: {"0": 1.0} for name in sources["0"].names}
    return Merging(Soup(experts=[str(folder)]), sources, linear_formula(sources, weights), weights, [])


# ---------------------------------------------------------------------------------------------------- a model for it


def model_of(merge: Merging, dtype: str, device: str, threads: int | None = None) -> Live:
    """The merge as a model in memory, with the tokenizer and generation config of the side that gives them.

    dtype: `auto` is that of the written merge; torch's name else. Raises PipelineError where the files of the source
    cannot be loaded.
    """
    giver = merge.sources[merge.config.files_from] if merge.config.files_from else merge.layout
    kind = kind_of(giver, merge.dtype, dtype, device)
    live_model = next((live for live in LIVE_MODELS if live.kind == kind), None)
    if live_model is None:
        release_models()  # before the next takes its room
        live_model = _load_live(merge, giver, dtype, device)
        live_model.kind = kind
        if keeps_models():
            LIVE_MODELS.append(live_model)
    live_model.apply(merge, threads)
    return live_model


def kind_of(giver: Any, stored: str | None, dtype: str, device: str) -> tuple[Any, ...]:
    """What models in memory must share for one to become the other: all but their weights."""
    folder = giver.base.folder if isinstance(giver, Adapted) else giver.folder
    config = json.loads((folder / "config.json").read_bytes())
    dtypes = [config.pop(key, None) for key in ("dtype", "torch_dtype")]
    settings = {key: value for key, value in config.items() if key not in ("_name_or_path", "transformers_version")}
    as_stored = (stored, dtypes, isinstance(giver, Adapted)) if dtype == "auto" else None
    texts = tokenizer_folder(giver)
    places = [(texts if name != "generation_config.json" else giver.folder) / name for name in BESIDE_WEIGHTS[1:]]
    digests = [sha256(path) if path.is_file() else None for path in places]
    return json.dumps(settings, sort_keys=True), as_stored, tuple(digests), dtype, device


def _load_live(merge: Merging, giver: Any, dtype: str, device: str) -> Live:
    from transformers import GenerationConfig

    folder = giver.base.folder if isinstance(giver, Adapted) else giver.folder
    load_dtype = (merge.dtype or ("float32" if isinstance(giver, Adapted) else "auto")) if dtype == "auto" else dtype
    build_skeleton(folder, "checkpoint")
    tokenizer = load_tokenizer(tokenizer_folder(giver))
    model = load_model(folder, dtype=load_dtype)
    if (giver.folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(giver.folder)
    for parameter in model.parameters():  # memory of our own: what was loaded may be mapped
        parameter.data = parameter.data.to(device) if device != "cpu" else parameter.data.clone()
    model.to(device)
    model.tie_weights()
    holds: dict[str, Any] = {}
    if not isinstance(giver, Adapted):
        holds = {name: (((str(folder), 1.0),), giver.info(name).dtype) for name in giver.names}
    assert set(DTYPES) >= {str(parameter.dtype).removeprefix("torch.") for parameter in model.parameters()}
    return Live(model, tokenizer, folder, holds=holds)
