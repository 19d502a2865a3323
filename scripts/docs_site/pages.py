"""Hooks of mkdocs for the documentation's site.

They add README.md as the first page, the keys of each stage, the Python functions, and files
outside of docs/ that pages link to.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
LINK = re.compile(r"\]\((?!https?:|#|mailto:)(?P<place>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")
# The language of a block, then the file that it shows or a mark of the tests
FENCE = re.compile(r"^( *```\w+) (?:(?P<file>[\w./-]+\.\w+)|.*)$", re.MULTILINE)
COPIES = "repository"  # folder of the site
API = """# Python

::: pipeline.api
    options: {members: [train, merge, evaluate, table, report, Report]}
"""


def on_files(files: Any, config: Any) -> Any:
    readme = ROOT / "README.md"
    for page in [readme, *sorted(Path(config.docs_dir).rglob("*.md"))]:
        for link in LINK.finditer(page.read_text(encoding="utf-8")):
            file = outside(page.parent, link["place"])
            if file and files.get_file_from_path(copied(file)) is None:
                files.append(File.generated(config, copied(file), abs_src_path=str(file)))
    index = rewritten(readme.read_text(encoding="utf-8"), ROOT, DOCS)
    files.append(File.generated(config, "index.md", content=index))
    files.append(File.generated(config, "knobs.md", content=knobs()))
    files.append(File.generated(config, "api.md", content=API))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    if page.file.generated_by:
        return markdown
    folder = Path(page.file.abs_src_path).parent
    return rewritten(markdown, folder, folder)


def outside(folder: Path, place: str) -> Path | None:
    """Return the file that a link leads to, if it is neither below docs/ nor the first page.

    Args:
        folder: the folder of the page.
        place: the link.
    """
    file = (folder / place).resolve()
    if file.is_file() and not file.is_relative_to(DOCS) and file != ROOT / "README.md":
        return file
    return None


def copied(file: Path) -> str:
    """Return the place of a file in the site.

    Markdown would become a page, so it is copied as text.
    """
    place = f"{COPIES}/{file.relative_to(ROOT)}"
    if file.suffix == ".md":
        place += ".txt"
    return place


def rewritten(text: str, folder: Path, place: Path) -> str:
    """Return a page with links and fences as the site has them.

    A link to a folder of the repository becomes its text.

    Args:
        text: the page.
        folder: the page's folder, which its links start from.
        place: the folder below docs/ where the page is in the site.
    """

    def lead(link: re.Match[str]) -> str:
        file, anchor = (folder / link["place"]).resolve(), link["anchor"] or ""
        if file.is_dir():
            return "]"
        if file == ROOT / "README.md":
            target = DOCS / "index.md"
        else:
            target = file
        found = outside(folder, link["place"])
        if found:
            target = DOCS / copied(found)
        return f"]({os.path.relpath(target, place)}{anchor})"

    def entitle(fence: re.Match[str]) -> str:
        if fence["file"]:
            return f'{fence[1]} title="{fence["file"]}"'
        return fence[1]

    return LINK.sub(lead, FENCE.sub(entitle, text))


def knobs() -> str:
    """Return the manual of each stage, as `stage=STAGE --help` prints it."""
    from pipeline.config import conf
    from pipeline.config.manual import manual_text

    text = "# Knobs\n\nWhat `python -m pipeline stage=STAGE --help` prints of each stage.\n"
    for stage in sorted(conf.options("stage")):
        text += f"\n## {stage}\n\n```text\n{manual_text([f'stage={stage}'])}\n```\n"
    return text
