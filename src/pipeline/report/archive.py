"""The folder of a table's report as one zip file, with the table as it was requested: what a colleague opens."""

from __future__ import annotations

import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from pipeline.files import added_conf, replacing
from pipeline.report.load.contents import Results
from pipeline.report.private import without_private
from pipeline.report.write import write_report

NOT_SHARED = ("tracking", "launcher")  # options of a site, which may hold secrets


def write_archive(results: Results, table: str, file: Path, roots: Sequence[str] = ()) -> Path:
    """Write the report to a zip file as TABLE/index.html and so on, without weights, local paths or credentials. Its
    bytes depend only on the results.

    table: the text of its YAML, stored with the options and languages of --config-dir; roots: local folders to remove
    from all texts.
    """
    own = [path for folder in added_conf() for path in folder.glob("*/*.yaml") if path.parent.name not in NOT_SHARED]
    with (
        replacing(file) as partial, zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as archive,
        tempfile.TemporaryDirectory() as folder,
    ):  # fmt: skip
        report = write_report(without_private(results, roots), Path(folder)).parent
        contents = {path.relative_to(report).as_posix(): path.read_bytes() for path in report.glob("**/*.*")}
        texts = {f"conf/{path.parent.name}/{path.name}": path.read_text(encoding="utf-8") for path in own}
        for name, text in {"table.yaml": table, **texts}.items():
            contents[name] = without_private(text, roots).encode()
        for name, content in sorted(contents.items()):
            member = zipfile.ZipInfo(f"{results.table}/{name}")  # dated 1980: the bytes must not depend on the time
            member.compress_type, member.create_system, member.external_attr = zipfile.ZIP_DEFLATED, 3, 0o644 << 16
            archive.writestr(member, content)
    return file
