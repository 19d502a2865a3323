"""A table's report and its YAML as one zip file, to share with a colleague."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from pipeline.files import added_conf, replacing
from pipeline.hub.addresses import without_credentials
from pipeline.report.load.contents import Results
from pipeline.report.write import write_report

NOT_SHARED = ("tracking", "launcher")  # options of a site, which may hold secrets


def write_archive(results: Results, table: str, file: Path) -> Path:
    """Write the report to a zip file as TABLE/index.html and so on.

    The file also has the table and the options of --config-dir, and no weights.

    `table` is the text of the table's YAML.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = write_report(results, Path(folder, results.table)).parent
        (report / "table.yaml").write_text(without_credentials(table), encoding="utf-8")
        for conf in added_conf():
            for option in conf.glob("*/*.yaml"):
                group = option.parent.name
                if group in NOT_SHARED:
                    continue
                copy = report / "conf" / group / option.name
                copy.parent.mkdir(parents=True, exist_ok=True)
                text = without_credentials(option.read_text(encoding="utf-8"))
                copy.write_text(text, encoding="utf-8")
        packed = shutil.make_archive(f"{folder}/packed", "zip", folder, results.table)
        with replacing(file) as partial:
            shutil.copyfile(packed, partial)
    return file
