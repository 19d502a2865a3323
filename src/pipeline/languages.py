"""The languages: our code (as MGSM spells it), and what the other benchmarks and data sets call the same language.

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

GROUP = "language"  # the folder of conf/ that holds them
MGSM = ("en", "sw", "bn", "te", "ja", "de", "fr", "zh", "ru", "es", "th")  # what it is in
TEN = ("en", "de", "fr", "zh", "ru", "es", "ja", "bn", "sw", "te")  # MGSM's average in the papers: all but Thai


@dataclass(frozen=True)
class Language:
    """One language. `stock` is the code whose stock task file of the harness is used: English for constructed ones.

    How numbers are written is no field: their form decides in all languages (evaluate/metrics.py, last_number).
    """

    code: str
    name: str  # English name, as prompts spell it
    flores: str  # FLORES and Belebele
    scripts: tuple[str, ...] = ("LATIN",)  # as Unicode names its letters
    mgsm: str = ""  # its codes there, where they are not ours
    global_mmlu: str = ""
    aya: str = ""  # the column `language` of the Aya dataset, where it is not the name
    aya_codes: tuple[str, ...] = ()  # the column `language_code`, which is not the same in every release
    constructed: bool = False

    @property
    def stock(self) -> str:
        return "en" if self.constructed else self.code


def language(code: str) -> Language:
    """The language of a code. ISO 639's private-use codes, qaa to qtz, are constructed: Qaa is qaa everywhere.

    Raises PipelineError, naming near ones, for an unknown code.
    """
    file = file_of(code)
    if file is not None:
        return _read(file, file.stat().st_mtime_ns)
    if re.fullmatch("q[a-t][a-z]", code):
        return Language(code, code.capitalize(), code, aya=code.capitalize(), aya_codes=(code,), constructed=True)
    raise PipelineError(f"unknown language {code!r}: {suggestion(code)}")


def folders() -> list[Path]:
    return [one / GROUP for one in (shipped_conf(), *added_conf())]


def file_of(code: str) -> Path | None:
    """The file of a language that has one."""
    if not re.fullmatch(r"[A-Za-z][\w-]*", code):
        return None
    return next((path for one in folders() if (path := one / f"{code}.yaml").is_file()), None)


def own(code: str) -> tuple[Path, str] | None:
    """The file and the digest of the fields of a language that is not shipped; it decides what is made with it."""
    file = file_of(code)
    if file is None or file.parent == folders()[0]:
        return None
    text = json.dumps(asdict(language(code)), sort_keys=True, ensure_ascii=False)
    return file, hashlib.sha256(text.encode()).hexdigest()


def all_languages() -> Iterator[Language]:
    for folder in folders():
        for path in sorted(folder.glob("*.yaml")):
            yield language(path.stem)


def suggestion(code: str) -> str:
    """What near languages there are, and how to add one."""
    spellings: dict[str, Language] = {}
    for known in all_languages():
        for spelling in (known.code, known.name, known.aya, known.flores, *known.aya_codes):
            spellings.setdefault(spelling.lower(), known)
    near = difflib.get_close_matches(code.lower(), [word for word in spellings if word], n=3, cutoff=0.6)
    hint = ", ".join(dict.fromkeys(f"{spellings[word].code} ({spellings[word].name})" for word in near))
    return (
        f"did you mean {hint}? " if hint else ""
    ) + f"to add it, write DIR/{GROUP}/{code or 'CODE'}.yaml with name, flores and scripts, and give --config-dir=DIR"


@lru_cache(maxsize=256)
def _read(file: Path, _: int) -> Language:
    import yaml

    known = {one.name for one in fields(Language)} - {"code", "constructed"}
    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise PipelineError(f"{file} is no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(found, dict) or not {"name", "flores"} <= found.keys():
        raise PipelineError(f"{file} must have name and flores (its code in FLORES and Belebele, such as swh_Latn)")
    if odd := sorted(set(map(str, found)) - known):
        raise PipelineError(f"{file}: {odd[0]} is no field of a language; there are {', '.join(sorted(known))}")
    for key, value in found.items():
        many = key in ("scripts", "aya_codes")
        texts = value if many and isinstance(value, list) else [] if many else [value]
        if not texts or not all(isinstance(one, str) for one in texts):
            wanted = "a list of text, such as [LATIN]" if many else "text; quote no, yes and numbers"
            raise PipelineError(f"{file}: {key}={value!r} must be {wanted}")
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in found.items()}
    return Language(**{"code": file.stem, "aya": found["name"], **values})
