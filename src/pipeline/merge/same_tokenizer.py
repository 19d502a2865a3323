"""Compare the tokenizers of a merge's experts by their vocabularies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.errors import PipelineError
from pipeline.merge.adapters import Source
from pipeline.models.checkpoint import read_json


def tokenizer_folder(source: Source) -> Path:
    """Folder of a source's tokenizer: for an adapter it may be its base's."""
    has_tokenizer = any((source.folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model"))
    return source.folder if has_tokenizer else source.model.folder


def same_tokenizer(first: Source, second: Source, keys: tuple[str, str], vocabulary: str | None) -> None:
    """Raise PipelineError if two experts have different vocabularies.

    Rows of their embeddings would then mean different tokens. Tokens that only one expert has added are allowed if
    merge.vocabulary says what becomes of them. Formats that differ between versions of the tokenizers library are
    equal. An expert without a tokenizer fits every other expert.
    """

    def refuse(difference: str, remedy: str = "mergekit-tokensurgeon transplants a vocabulary") -> None:
        raise PipelineError(f"{keys[1]}: {second.folder} has {difference} than {keys[0]}: {first.folder}; {remedy}")

    for name in ("tokenizer.json", "tokenizer.model"):
        one, other = (tokenizer_folder(source) / name for source in (first, second))
        if not (one.is_file() and other.is_file()):
            continue
        if one.read_bytes() == other.read_bytes():
            return
        if name == "tokenizer.model":
            refuse("another tokenizer")
        (model, ours), (other_model, theirs) = _read_vocabulary(one), _read_vocabulary(other)
        only_added = ours.items() <= theirs.items() or theirs.items() <= ours.items()
        if model != other_model or not only_added:
            refuse("another tokenizer")
        if ours != theirs and vocabulary is None:
            token = min(dict(ours.items() ^ theirs.items()))
            remedy = "give merge.vocabulary=union to keep them, or merge.vocabulary=common to leave them out"
            refuse(f"other added tokens ({token})", remedy)
        return


def added_tokens(source: Source) -> dict[str, int]:
    """The tokens added to a source's vocabulary, token -> place; empty without a tokenizer.json."""
    file = tokenizer_folder(source) / "tokenizer.json"
    return _read_vocabulary(file)[1] if file.is_file() else {}


def _read_vocabulary(file: Path) -> tuple[Any, dict[str, int]]:
    """The vocabulary with its merges, in one format, and the added tokens."""
    content = read_json(file)
    try:
        model = content.get("model") or {}
        merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model.get("merges") or []]
        added = {token["content"]: token["id"] for token in content.get("added_tokens") or []}
        return [model.get("vocab"), merges], added
    except (AttributeError, KeyError, TypeError) as error:
        raise PipelineError(f"{file} is no file of the tokenizers library ({error!r}): copy it again") from error
