"""Write conf/languages.yaml with Belebele's 122 languages.

    python scripts/make_languages.py     # a test compares the file with this output

The list comes from the harness, names and codes from langcodes. Our code is the shortest tag of the
language, or of its macrolanguage if FLORES uses that (swh is sw). A second script of a language
follows its code (ar_latn). OURS has the names and codes of the Aya data set and MGSM that differ.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

# ISO 15924 code -> the script's name in Unicode's names of letters
SCRIPTS = {
    "Arab": "ARABIC",
    "Armn": "ARMENIAN",
    "Beng": "BENGALI",
    "Cyrl": "CYRILLIC",
    "Deva": "DEVANAGARI",
    "Ethi": "ETHIOPIC",
    "Geor": "GEORGIAN",
    "Grek": "GREEK",
    "Gujr": "GUJARATI",
    "Guru": "GURMUKHI",
    "Hang": "HANGUL",
    "Hans": "CJK",
    "Hant": "CJK",
    "Hebr": "HEBREW",
    "Khmr": "KHMER",
    "Knda": "KANNADA",
    "Laoo": "LAO",
    "Latn": "LATIN",
    "Mlym": "MALAYALAM",
    "Mymr": "MYANMAR",
    "Orya": "ORIYA",
    "Sinh": "SINHALA",
    "Taml": "TAMIL",
    "Telu": "TELUGU",
    "Thai": "THAI",
    "Tibt": "TIBETAN",
}
OURS: dict[str, dict[str, Any]] = {
    "bn": {"name": "Bengali"},
    "ja": {"scripts": ["HIRAGANA", "KATAKANA", "KATAKANA-HIRAGANA", "CJK"]},
    "sw": {"aya_codes": ["swh", "swa"]},
    "zh": {"aya": "Simplified Chinese"},
    "zh_hant": {"aya": "Traditional Chinese"},
}
# The script that a language's plain code stands for. By default it is the script that is not Latin.
FIRST = {"zh": "Hans"}


def listed() -> list[str]:
    """Return the FLORES codes of Belebele's languages, from the harness' tasks."""
    spec = importlib.util.find_spec("lm_eval")
    assert spec and spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0]) / "tasks/belebele"
    return sorted(path.stem.removeprefix("belebele_") for path in folder.glob("belebele_*_*.yaml"))


def languages() -> dict[str, dict[str, Any]]:
    """Return our code -> its fields."""
    from langcodes import Language, standardize_tag

    codes = listed()
    tags = {code: standardize_tag(code.partition("_")[0], macro=True) for code in codes}
    found: dict[str, dict[str, Any]] = {}
    for code, tag in tags.items():
        alpha3, _, script = code.partition("_")
        ours, name = tag, Language.get(tag).display_name()
        has_other_scripts = list(tags.values()).count(tag) > 1
        if has_other_scripts and not is_first(script, tag):
            ours = f"{tag}_{script.lower()}"
            script_name = Language.get(f"{tag}-{script}").script_name()
            name += f" ({script_name} script)"
        fields: dict[str, Any] = {"name": name, "flores": code}
        fields["scripts"] = [SCRIPTS.get(script, "")]
        fields["aya_codes"] = [alpha3]
        found[ours] = fields | OURS.get(ours, {})
    return found


def is_first(script: str, tag: str) -> bool:
    """Return True if the language's plain code stands for this script."""
    if tag in FIRST:
        return FIRST[tag] == script
    return script != "Latn"


def text(fields: dict[str, Any]) -> str:
    entries = []
    for key, value in fields.items():
        if isinstance(value, list):
            value = f"[{', '.join(value)}]"
        entries.append(f"{key}: {value}")
    return "{" + ", ".join(entries) + "}"


if __name__ == "__main__":
    file = Path(__file__).parent.parent / "conf/languages.yaml"
    head = (
        "# The languages, by our codes (as in MGSM), with their codes elsewhere; by"
        " scripts/make_languages.py.\n"
    )
    found = languages()
    lines = [f'"{code}": {text(fields)}\n' for code, fields in sorted(found.items())]
    file.write_text(head + "".join(lines), encoding="utf-8")
    print(f"{len(found)} languages in {file}")
