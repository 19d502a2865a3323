"""Hooks of mkdocs: README.md as the first page, the knobs of each stage, the functions of Python, and files that pages
link to outside of docs/."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\]\((?!https?:|#|mailto:)(?P<place>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")
# the file that a block is, or a mark of the tests, behind the language
FENCE = re.compile(r"^( *```\w+) (?:(?P<file>[\w./-]+\.\w+)|.*)$", re.MULTILINE)
COPIES = "repository"  # folder of the site
API = """# Python

::: pipeline.api
    options: {members: [train, merge, evaluate, table, report, Report]}
"""


def on_files(files: Any, config: Any) -> Any:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    texts = [(page.read_text(encoding="utf-8"), page) for page in sorted(Path(config.docs_dir).glob("*.md"))]
    for text, page in [(readme, ROOT / "README.md"), *texts]:
        for link in LINK.finditer(text):
            if (file := outside(page.parent, link["place"])) and files.get_file_from_path(copied(file)) is None:
                files.append(File.generated(config, copied(file), abs_src_path=str(file)))
    files.append(File.generated(config, "index.md", content=rewritten(readme, ROOT)))
    files.append(File.generated(config, "knobs.md", content=knobs()))
    files.append(File.generated(config, "api.md", content=API))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    return markdown if page.file.generated_by else rewritten(markdown, Path(config.docs_dir))


def outside(folder: Path, place: str) -> Path | None:
    """The file that a link of a page in `folder` leads to, if it is neither in docs/ nor the first page."""
    file = (folder / place).resolve()
    return file if file.is_file() and file.parent != ROOT / "docs" and file != ROOT / "README.md" else None


def copied(file: Path) -> str:
    """Where a file is in the site; Markdown, which would become a page, as text."""
    return f"{COPIES}/{file.relative_to(ROOT)}{'.txt' if file.suffix == '.md' else ''}"


def rewritten(text: str, folder: Path) -> str:
    """A page with links and fences as the site has them. A link to a folder of the repository becomes its text."""

    def lead(link: re.Match[str]) -> str:
        file, anchor = (folder / link["place"]).resolve(), link["anchor"] or ""
        if file == ROOT / "README.md":
            return f"](index.md{anchor})"
        if found := outside(folder, link["place"]):
            return f"]({copied(found)})"
        return "]" if file.is_dir() else f"]({file.relative_to(ROOT / 'docs')}{anchor})"

    text = FENCE.sub(lambda fence: fence[1] + (f' title="{fence["file"]}"' if fence["file"] else ""), text)
    return LINK.sub(lead, text)


def knobs() -> str:
    """The manual of each stage, as `stage=STAGE --help` prints it."""
    from pipeline.config import conf
    from pipeline.config.manual import manual_text

    text = "# Knobs\n\nWhat `python -m pipeline stage=STAGE --help` prints of each stage.\n"
    for stage in sorted(conf.options("stage")):
        text += f"\n## {stage}\n\n```text\n{manual_text([f'stage={stage}'])}\n```\n"
    return text
