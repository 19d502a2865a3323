"""The inputs of the backends: a model's folder or a merge, its configuration and its tokenizer.

A backend (TorchBackend, VllmBackend) loads weights and answers prompts of token ids. `Answering`
(model.py) converts the harness' requests to token ids, and handles texts and stored answers.
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

Tokens = Sequence[int]


def without_weights(weights: Merging | Path) -> tuple[Any, Any]:
    """Return the model on the meta device, with its generation config, and its tokenizer."""
    if isinstance(weights, Path):
        return _without_weights(weights, weights, weights, _digests(weights))
    giver = weights.giver
    folders = (giver.model.folder, tokenizer_folder(giver), giver.folder)
    return _without_weights(*folders, _digests(*folders))


def _digests(*folders: Path) -> tuple[str, ...]:
    digests = []
    for folder in dict.fromkeys(folders):
        for name in BESIDE_WEIGHTS:
            file = folder / name
            if file.is_file():
                digests.append(f"{file} {sha256(file)}")
    return tuple(digests)


@lru_cache(maxsize=1)
def _without_weights(
    folder: Path, texts: Path, generation: Path, digests: tuple[str, ...]
) -> tuple[Any, Any]:
    """Build the model and load the tokenizer once for all evaluations of a table.

    Loading a tokenizer takes seconds. `digests` is a part of the cache's key: it changes with the
    files.
    """
    model = build_skeleton(folder, "checkpoint")
    take_generation_config(model, generation)
    return model, load_tokenizer(texts)
