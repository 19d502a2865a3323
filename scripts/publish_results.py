"""Copy tables, scores and plots of the finished reports in runs/reports into results/.

    make results        # or: python scripts/publish_results.py [TABLE ...]

The pages are not copied, because their generations make them too large for git.
"""

from __future__ import annotations

import gzip
import shutil
import sys
from pathlib import Path

REPORTS, RESULTS = Path("runs/reports"), Path("results")
PUBLISHED = ("cells.md", "cells.csv", "results.csv", "contrasts.csv", "claims.csv", "plots/*.svg")
COMPRESSED = ("results.csv",)  # pandas reads the compressed file
LARGEST_BYTES = 3 * 2**19  # limit for all files below results/


def publish(report: Path) -> None:
    target = RESULTS / report.name
    shutil.rmtree(target, ignore_errors=True)
    for pattern in PUBLISHED:
        for path in sorted(report.glob(pattern)):
            copy = target / path.relative_to(report)
            copy.parent.mkdir(parents=True, exist_ok=True)
            if path.name in COMPRESSED:
                compressed = gzip.compress(path.read_bytes(), mtime=0)
                copy.with_name(f"{path.name}.gz").write_bytes(compressed)
            else:
                shutil.copyfile(path, copy)
    print(f"{report} -> {target}")


def main(names: list[str]) -> int:
    if names:
        reports = [REPORTS / name for name in names]
    else:
        reports = sorted(path.parent for path in REPORTS.glob("*/index.html"))
    missing = []
    for report in reports:
        if not (report / "index.html").is_file():
            missing.append(str(report))
    if missing or not reports:
        places = ", ".join(missing) or REPORTS
        error = f"no report at {places}. Make a report with python -m pipeline stage=table."
        print(f"error: {error}", file=sys.stderr)
        return 1
    for report in reports:
        publish(report)
    size = 0
    for path in RESULTS.rglob("*"):
        if path.is_file():
            size += path.stat().st_size
    if size > LARGEST_BYTES:
        megabytes, limit = size / 2**20, LARGEST_BYTES / 2**20
        error = f"results/ has {megabytes:.1f} MB, more than {limit:.1f}. Publish fewer reports."
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
