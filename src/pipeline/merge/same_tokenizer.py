"""Compare the tokenizers of a merge's experts by their vocabularies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.errors import PipelineError
from pipeline.merge.adapters import Source
from pipeline.models.checkpoint import read_json


def tokenizer_folder(source: Source) -> Path:
    """Return the folder of a source's tokenizer; for an adapter it may be its base's folder."""
    has_tokenizer = any(
        (source.folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model")
    )
    if has_tokenizer:
        return source.folder
    return source.model.folder


def same_tokenizer(first: Source, second: Source, keys: tuple[str, str]) -> None:
    """Raise PipelineError if two experts have different vocabularies.

    Rows of their embeddings would then mean different tokens. Formats that differ between versions
    of the tokenizers library are equal. An expert without a tokenizer fits every other expert.
    """
    for name in ("tokenizer.json", "tokenizer.model"):
        file = tokenizer_folder(first) / name
        other_file = tokenizer_folder(second) / name
        if not (file.is_file() and other_file.is_file()):
            continue
        if _read_vocabulary(file) != _read_vocabulary(other_file):
            raise PipelineError(
                f"{keys[1]}: the tokenizers of {second.folder} and of {keys[0]} ({first.folder})"
                " have different vocabularies. Transplant a vocabulary with"
                " mergekit-tokensurgeon."
            )
        return


def _read_vocabulary(file: Path) -> Any:
    """Return the vocabulary with its merges, in one format, and the added tokens."""
    if file.suffix != ".json":
        return file.read_bytes()
    content = read_json(file)
    try:
        model = content.get("model") or {}
        merges = []
        for pair in model.get("merges") or []:
            if not isinstance(pair, str):
                pair = " ".join(pair)
            merges.append(pair)
        added = {token["content"]: token["id"] for token in content.get("added_tokens") or []}
        return model.get("vocab"), merges, added
    except (AttributeError, KeyError, TypeError) as error:
        raise PipelineError(
            f"{file} is not a file of the tokenizers library ({error!r}). Copy it again."
        ) from error
