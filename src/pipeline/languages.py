"""The languages: our code (as in MGSM), and the codes of the same language in other benchmarks and data sets.

Each is a file, conf/language/<code>.yaml; a folder given by --config-dir may hold more. Shipped are Belebele's 122,
MGSM's among them (scripts/make_languages.py writes them).
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from pipeline.errors import PipelineError
from pipeline.files import added_conf, shipped_conf

GROUP = "language"  # folder of conf/ with the language files
MGSM = ("en", "sw", "bn", "te", "ja", "de", "fr", "zh", "ru", "es", "th")  # its languages
TEN = ("en", "de", "fr", "zh", "ru", "es", "ja", "bn", "sw", "te")  # MGSM's average in the papers: all but Thai


@dataclass(frozen=True)
class Language:
    """One language. `stock` is the code whose stock task file of the harness is used: English for constructed ones.

    The format of numbers is not a field: it is detected in all languages (evaluate/metrics.py, last_number).
    """

    code: str
    name: str  # English name, as in prompts
    flores: str  # FLORES and Belebele
    scripts: tuple[str, ...] = ("LATIN",)  # Unicode's names of its scripts
    mgsm: str = ""  # its codes there, if they differ from ours
    global_mmlu: str = ""
    aya: str = ""  # the column `language` of the Aya dataset, if it differs from the name
    aya_codes: tuple[str, ...] = ()  # the column `language_code`, which differs between releases
    constructed: bool = False

    @property
    def stock(self) -> str:
        return "en" if self.constructed else self.code


def language(code: str) -> Language:
    """The language of a code. ISO 639's private-use codes, qaa to qtz, are constructed: Qaa is qaa everywhere.

    Raises PipelineError with close matches for an unknown code.
    """
    file = file_of(code)
    if file is not None:
        return _read_language(file, file.stat().st_mtime_ns)
    if re.fullmatch("q[a-t][a-z]", code):
        return Language(code, code.capitalize(), code, aya=code.capitalize(), aya_codes=(code,), constructed=True)
    raise PipelineError(f"unknown language {code!r}: {suggest_language(code)}")


def language_folders() -> list[Path]:
    return [root / GROUP for root in (shipped_conf(), *added_conf())]


def file_of(code: str) -> Path | None:
    """The file of a language; None where it has none."""
    if not re.fullmatch(r"[A-Za-z][\w-]*", code):
        return None
    return next((path for folder in language_folders() if (path := folder / f"{code}.yaml").is_file()), None)


def custom_language_file(code: str) -> tuple[Path, str] | None:
    """(file, digest of the fields) of a language that is not shipped, which affects run hashes; None for shipped
    ones."""
    file = file_of(code)
    if file is None or file.parent == language_folders()[0]:
        return None
    text = json.dumps(asdict(language(code)), sort_keys=True, ensure_ascii=False)
    return file, hashlib.sha256(text.encode()).hexdigest()


def all_languages() -> Iterator[Language]:
    for folder in language_folders():
        for path in sorted(folder.glob("*.yaml")):
            yield language(path.stem)


def suggest_language(code: str) -> str:
    """Hint for an unknown code: close matches, and how to add a language."""
    spellings: dict[str, Language] = {}
    for entry in all_languages():
        for spelling in (entry.code, entry.name, entry.aya, entry.flores, *entry.aya_codes):
            spellings.setdefault(spelling.lower(), entry)
    near = difflib.get_close_matches(code.lower(), [word for word in spellings if word], n=3, cutoff=0.6)
    hint = ", ".join(dict.fromkeys(f"{spellings[word].code} ({spellings[word].name})" for word in near))
    hint = f"did you mean {hint}? " if hint else ""
    file = f"DIR/{GROUP}/{code or 'CODE'}.yaml"
    return f"{hint}to add it, write {file} with name, flores and scripts, and give --config-dir=DIR"


@lru_cache(maxsize=256)
def _read_language(file: Path, _: int) -> Language:
    import yaml

    names = {item.name for item in fields(Language)} - {"code", "constructed"}
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise PipelineError(f"{file} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict) or not {"name", "flores"} <= content.keys():
        raise PipelineError(f"{file} must have name and flores (its code in FLORES and Belebele, such as swh_Latn)")
    if unknown := sorted(set(map(str, content)) - names):
        raise PipelineError(f"{file}: {unknown[0]} is not a field of a language; there are {', '.join(sorted(names))}")
    for key, value in content.items():
        is_list = key in ("scripts", "aya_codes")
        texts = value if is_list and isinstance(value, list) else [] if is_list else [value]
        if not texts or not all(isinstance(item, str) for item in texts):
            expected = "a list of text, such as [LATIN]" if is_list else "text; quote no, yes and numbers"
            raise PipelineError(f"{file}: {key}={value!r} must be {expected}")
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in content.items()}
    return Language(**{"code": file.stem, "aya": content["name"], **values})
