"""What the backends are given: a model's folder or a merge, its configuration and its tokenizer.

A backend (TorchBackend, VllmBackend) loads weights and answers prompts of token ids; texts, tokens, stored answers and
scores are of `Answering` (model.py), which puts the harness' requests to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.files import sha256
from pipeline.merge.same_tokenizer import tokenizer_folder
from pipeline.models.files import BESIDE_WEIGHTS
from pipeline.models.load import load_tokenizer, take_generation_config
from pipeline.models.skeleton import build_skeleton

if TYPE_CHECKING:
    from pipeline.merge.merge import Merging
    from pipeline.runs.run import Run

Tokens = Sequence[int]


def merge_or_folder(run: Run, scratch: Path) -> Merging | Path:
    """Return the weights that a run scores.

    That is a merge that is put together in memory, such as of an adapter with its base, or the folder of a checkpoint;
    a model on the Hub is in its cache. A method of another program writes its merge into `scratch`.
    """
    from pipeline.hub.models import local_folder
    from pipeline.merge.live import merge_of_one
    from pipeline.merge.resident import keeps_models
    from pipeline.merge.stage import merge_of, write_elsewhere
    from pipeline.models.checkpoint import is_adapter

    if "checkpoint" in run.parents:
        folder = local_folder(run.parents["checkpoint"].folder)
    elif run.config.merge.writes_folder:
        folder = scratch
        write_elsewhere(run, folder)
    else:
        return merge_of(run)
    in_memory = keeps_models() and run.config.eval.backend == "hf"
    return merge_of_one(folder) if is_adapter(folder) or in_memory else folder


def without_weights(weights: Merging | Path) -> tuple[Any, Any]:
    """The model on the meta device, with its generation config, and its tokenizer."""
    if isinstance(weights, Path):
        return _without_weights(weights, weights, weights, _digests(weights))
    giver = weights.giver
    folders = (giver.model.folder, tokenizer_folder(giver), giver.folder)
    return _without_weights(*folders, _digests(*folders))


def _digests(*folders: Path) -> tuple[str, ...]:
    files = (folder / name for folder in dict.fromkeys(folders) for name in BESIDE_WEIGHTS)
    return tuple(f"{file} {sha256(file)}" for file in files if file.is_file())


@lru_cache(maxsize=1)
def _without_weights(folder: Path, texts: Path, generation: Path, digests: tuple[str, ...]) -> tuple[Any, Any]:
    """Cached, as tokenizers take seconds to load and the evaluations of a table share theirs."""
    model = build_skeleton(folder, "checkpoint")
    take_generation_config(model, generation)
    return model, load_tokenizer(texts)
