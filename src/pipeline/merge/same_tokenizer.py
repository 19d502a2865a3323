"""Compare the tokenizers of a merge's experts by their vocabularies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.errors import PipelineError
from pipeline.merge.adapters import Source
from pipeline.models.checkpoint import read_json


def tokenizer_folder(source: Source) -> Path:
    """Folder of a source's tokenizer: for an adapter it may be its base's."""
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
        files = [tokenizer_folder(source) / name for source in (first, second)]
        if all(file.is_file() for file in files):
            one, other = (_read_vocabulary(file) for file in files)
            if one != other:
                raise PipelineError(
                    f"{keys[1]}: the tokenizer of {second.folder} has another vocabulary than that"
                    f" of {keys[0]}: {first.folder}. mergekit-tokensurgeon transplants a"
                    " vocabulary."
                )
            return


def _read_vocabulary(file: Path) -> Any:
    """Return the vocabulary with its merges, in one format, and the added tokens."""
    if file.suffix != ".json":
        return file.read_bytes()
    content = read_json(file)
    try:
        model = content.get("model") or {}
        merges = [
            pair if isinstance(pair, str) else " ".join(pair) for pair in model.get("merges") or []
        ]
        added = {token["content"]: token["id"] for token in content.get("added_tokens") or []}
        return model.get("vocab"), merges, added
    except (AttributeError, KeyError, TypeError) as error:
        raise PipelineError(
            f"{file} is no file of the tokenizers library ({error!r}): copy it again"
        ) from error
