"""Languages: our codes (as in MGSM) and their codes in other benchmarks and data sets.

conf/languages.yaml has the 122 languages of Belebele, with those of MGSM. scripts/make_languages.py
writes it. A folder given by --config-dir may hold more languages, each in a file
language/CODE.yaml.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass, fields
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from pipeline.errors import PipelineError, close_matches
from pipeline.files import added_conf, read_yaml, shipped_conf

GROUP = "language"  # folder of the user's language files, below --config-dir
MGSM = ("en", "sw", "bn", "te", "ja", "de", "fr", "zh", "ru", "es", "th")  # languages of MGSM

CONSTRUCTED = re.compile("q[a-t][a-z]")  # ISO 639's private-use codes


@dataclass(frozen=True)
class Language:
    """A language.

    `stock` is the code whose task file of the harness is used; constructed languages use English.
    The number format is not a field, because it is detected for all languages (evaluate/metrics.py,
    last_number).
    """

    code: str
    name: str  # English name, as in prompts
    flores: str  # code in FLORES and Belebele
    scripts: tuple[str, ...] = ("LATIN",)  # Unicode names of its scripts
    mgsm: str = ""  # codes there, if they differ from ours
    global_mmlu: str = ""
    aya: str = ""  # Aya's column `language`, if it differs from the name
    aya_codes: tuple[str, ...] = ()  # Aya's column `language_code`, which differs between releases
    constructed: bool = False

    @property
    def stock(self) -> str:
        if self.constructed:
            return "en"
        return self.code


def language(code: str) -> Language:
    """Return the language of a code.

    ISO 639's private-use codes, qaa to qtz, are constructed languages; qaa is named Qaa.

    Raises:
        PipelineError: the code is unknown. It has close matches.
    """
    if code in shipped_languages():
        return shipped_languages()[code]
    file = own_files().get(code)
    if file is not None:
        return read_own(file, file.stat().st_mtime_ns)
    if CONSTRUCTED.fullmatch(code):
        return Language(
            code,
            code.capitalize(),
            code,
            aya=code.capitalize(),
            aya_codes=(code,),
            constructed=True,
        )
    raise PipelineError(f"unknown language {code!r}: {suggest_language(code)}")


def named_language(code: str) -> Language:
    """Return the language of a code, even if only the code is known.

    A task with one test set needs no more than the code.

    Raises:
        PipelineError: the text is not a code, for example the name of a language.
    """
    is_known = code in shipped_languages() or code in own_files() or CONSTRUCTED.fullmatch(code)
    if is_known or not re.fullmatch("[a-z]{2,3}(_[A-Za-z]+)?", code):
        return language(code)
    return Language(code, code, code)


@cache
def shipped_languages() -> dict[str, Language]:
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    content = yaml.load((shipped_conf() / "languages.yaml").read_bytes(), loader)
    return {code: of_fields(code, fields) for code, fields in content.items()}


def own_files() -> dict[str, Path]:
    """Return code -> file of the languages in folders of --config-dir."""
    found = {}
    for folder in added_conf():
        for path in sorted((folder / GROUP).glob("*.yaml")):
            found[path.stem] = path
    return found


def custom_language_file(code: str) -> tuple[Path, str] | None:
    """Return (file, digest of its fields) of a language that is not shipped, or None.

    The digest affects hashes of runs.
    """
    file = own_files().get(code)
    if file is None:
        return None
    text = json.dumps(asdict(language(code)), sort_keys=True, ensure_ascii=False)
    return file, hashlib.sha256(text.encode()).hexdigest()


def suggest_language(code: str) -> str:
    """Return a hint for an unknown code: close matches, and how to add a language."""
    known: dict[str, Language] = {}
    for entry in (*shipped_languages().values(), *map(language, own_files())):
        known[entry.code] = known[entry.name.lower()] = entry
    lowered = code.lower()  # the value may begin with a code, as in zh-CN or Deutsch
    near = [*close_matches(lowered, known), lowered[:2]]
    found = [f"{known[word].code} ({known[word].name})" for word in near if word in known]
    hint = ""
    if found:
        hint = f"did you mean {', '.join(dict.fromkeys(found))}? "
    file = f"DIR/{GROUP}/{code or 'CODE'}.yaml"
    return f"{hint}to add it, write {file} with name, flores and scripts, and give --config-dir=DIR"


@cache
def type_adapter() -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(Language)


def of_fields(code: str, content: dict[str, Any]) -> Language:
    """Return a language from the fields of its file.

    Raises:
        ValidationError: a field is unknown or has another type.
    """
    given = {"code": code, "aya": content.get("name"), **content}
    made: Language = type_adapter().validate_python(given, extra="forbid")
    return made


@lru_cache(maxsize=256)
def read_own(file: Path, _: int) -> Language:
    from pydantic import ValidationError

    content = read_yaml(file)
    if not isinstance(content, dict) or not {"name", "flores"} <= content.keys():
        raise PipelineError(
            f"{file} must have name and flores (its code in FLORES and Belebele, such as swh_Latn)"
        )
    try:
        return of_fields(file.stem, {str(key): value for key, value in content.items()})
    except ValidationError as error:
        first = error.errors()[0]
        key = first["loc"][0]
        names = sorted({item.name for item in fields(Language)} - {"code", "constructed"})
        raise PipelineError(
            f"{file}: {key}={content[key]!r}: {first['msg']}. The fields are {', '.join(names)};"
            " scripts and aya_codes are lists. Put the texts no and yes, and numbers, in quotes."
        ) from error
