"""Whether two models read text as the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.errors import PipelineError
from pipeline.merge.adapters import Source
from pipeline.models.checkpoint import read_json
from pipeline.models.load import load_tokenizer

PROBES = (  # texts that normalizers, pre-tokenizers and post-processors treat differently
    "", " ", "a", " a", "a ", "  a  b   c    d", "\n", "\n\n\n", "line\nline\n\nline \r\n\tline",
    "Hello, World! HELLO hello HeLLo e-mail@example.org snake_case camelCase x=1;y[2]=3", "don't we're I'LL it's",
    "0 7 42 123 1234567890 3.14159 1,250.50 $5.00 + 10% 1/2 × 3 = 1.5 ٣٤٥ ১২৩ ౧౨౩ ๑๒๓ １２３",
    "é ü ñ ç å e\u0301 u\u0308 n\u0303 ﬁ ﬀ Ⅳ ² ½ ß ẞ İ ı “quotes” ‘single’ «guillemets» — … a\u00a0b\u200bc\ufeffd",
    "Mji mkuu wa Kenya ni upi? ¿Cuánto cuesta? ¡Ocho! L'élève a mangé. Wie groß ist die Straße? Сколько стоит хлеб?",
    "ケニアの首都はどこですか。肯尼亚的首都是哪里？케냐의 수도는 어디입니까? কেনিয়ার রাজধানী কোথায়? కెన్యా రాజధాని ఏది?",
    "เมืองหลวงของเคนยาคืออะไร ما هي عاصمة كينيا؟ מהי בירת קניה? 😀👍🏽 👩‍👩‍👧 𝒳𝒴 𠀀",
)  # fmt: skip


def tokenizer_folder(source: Source) -> Path:
    """Folder of a source's tokenizer: for an adapter it may be its base's."""
    has_tokenizer = any((source.folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model"))
    return source.folder if has_tokenizer else source.model.folder


def same_tokenizer(first: Source, second: Source, keys: tuple[str, str], vocabulary: str | None) -> None:
    """Raise PipelineError for experts that tokenize text differently: rows of their embeddings would mean different
    tokens.

    Where files differ, the vocabularies must be equal, but for tokens added on one side where merge.vocabulary says
    what becomes of them, and so must the tokens of PROBES. A tokenizer that only one has is no obstacle; formats that
    differ between library versions are none either.
    """

    def refuse(difference: str, remedy: str = "mergekit-tokensurgeon transplants a vocabulary") -> None:
        raise PipelineError(f"{keys[1]}: {second.folder} has {difference} than {keys[0]}: {first.folder}; {remedy}")

    folders = [tokenizer_folder(source) for source in (first, second)]
    pairs = ([folder / name for folder in folders] for name in ("tokenizer.json", "tokenizer.model"))
    files = next((pair for pair in pairs if all(map(Path.is_file, pair))), None)
    if files is None:
        return
    same_vocabulary = same_file(*files)
    if not same_vocabulary:
        if files[0].suffix != ".json":
            refuse("another tokenizer")
        (model, added), (other_model, other_added) = map(_read_vocabulary, files)
        ours, theirs = added.items(), other_added.items()
        if model != other_model or not (ours <= theirs or theirs <= ours):
            refuse("another tokenizer")
        if ours != theirs and vocabulary is None:
            remedy = "give merge.vocabulary=union to keep them, or merge.vocabulary=common to leave them out"
            refuse(f"other added tokens ({min(dict(ours ^ theirs))})", remedy)
    if not (same_vocabulary and same_file(*(folder / "tokenizer_config.json" for folder in folders))):
        for text, *tokens in zip(PROBES, *map(_tokens_of, folders), strict=True):
            if tokens[0] != tokens[1]:
                refuse(f"a tokenizer of the same vocabulary that reads {text!r} as other tokens")


def same_file(*files: Path) -> bool:
    """Whether all of them hold the same, or none is there."""
    return len({file.read_bytes() if file.is_file() else b"" for file in files}) == 1


def added_tokens(source: Source) -> dict[str, int]:
    """The tokens added to a source's vocabulary, token -> place; empty without a tokenizer.json."""
    file = tokenizer_folder(source) / "tokenizer.json"
    return _read_vocabulary(file)[1] if file.is_file() else {}


def _tokens_of(folder: Path) -> list[list[int]]:
    """The tokens of PROBES as transformers calls the tokenizer: without truncation and padding that a file holds."""
    return list(load_tokenizer(folder)(list(PROBES)).input_ids)


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
