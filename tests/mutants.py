"""Count the mutants in tests/mutants.json that the tests of their packages kill.

    python tests/mutants.py --record results/bench/mutants.json [--only PACKAGE ...]

A test may only be deleted if no fewer mutants die. A mutant is one edit of src/pipeline in a
temporary copy that PYTHONPATH names, so the working tree does not change. It is killed if a test
fails that passes on the unchanged copy. The test that killed it last time runs first. The old text
of an edit occurs once in its file. If the text is missing, that is an error.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from pipeline.runs.provenance import git_state, machine_facts, package_versions

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 120  # seconds of a mutant's tests


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--record", type=Path, required=True, help="rows that it has of other packages are kept"
    )
    parser.add_argument(
        "--only", nargs="+", metavar="PACKAGE", help="'top' names the files of src/pipeline itself"
    )
    given = parser.parse_args()
    data = json.loads((ROOT / "tests/mutants.json").read_text())
    before = json.loads(given.record.read_text())["mutants"] if given.record.exists() else []
    last = {key_of(row): row for row in before}
    rows = {
        key_of(mutant): {**last.get(key_of(mutant), {}), **mutant} for mutant in data["mutants"]
    }
    facts = {
        "code": git_state(),
        "versions": package_versions(),
        "machine": machine_facts(),
        "limit_s": LIMIT,
    }
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for path in ROOT.iterdir():
            if path.name != "src" and not path.name.startswith(".venv"):
                (copy / path.name).symlink_to(path)
        shutil.copytree(ROOT / "src", copy / "src")
        for mutant in data["mutants"]:
            package, slash, _ = mutant["file"].partition("/")
            package, key = package if slash else "top", key_of(mutant)
            if not given.only or package in given.only:
                killer = rows[key].get("by")
                tests = [*([killer] if killer else []), *data["tests"][package]]
                rows[key] = {**mutant, **outcome(copy, mutant, tests)}
                print(rows[key], flush=True)
                given.record.write_text(
                    json.dumps({**facts, "mutants": list(rows.values())}, indent=1) + "\n"
                )
    counts = Counter(row.get("outcome", "not run") for row in rows.values())
    print(counts)
    if counts["gone"]:
        sys.exit(
            "the old text of an edit is not once in its file: find where it went in"
            " tests/mutants.json"
        )


def key_of(row: dict[str, Any]) -> tuple[str, str]:
    return row["file"], row["old"]


def outcome(copy: Path, mutant: dict[str, Any], tests: list[str]) -> dict[str, Any]:
    file = copy / "src/pipeline" / mutant["file"]
    text = file.read_text() if file.is_file() else ""
    if text.count(mutant["old"]) != 1:
        return {"outcome": "gone"}
    start = time.monotonic()
    file.write_text(text.replace(mutant["old"], mutant["new"]))
    status, failed = run(copy, tests)
    file.write_text(text)
    found: dict[str, Any] = {"outcome": status, "seconds": round(time.monotonic() - start)}
    if status == "killed":
        found |= {"by": failed}
        if not failed or run(copy, [failed])[0] != "survived":
            found["outcome"] = "invalid"  # it fails on the unchanged copy too
    return found


def exists(test: str) -> bool:
    """Whether a file, or a test by its name, is still there: of a record it may have gone."""
    file, _, name = test.partition("::")
    name = name.partition("[")[0]
    return (ROOT / file).exists() and (
        not name or f"def {name}(" in (ROOT / file).read_text(encoding="utf-8")
    )


def run(copy: Path, tests: list[str]) -> tuple[str, str]:
    """ "killed", "survived" or "timeout"; and the first test that fails."""
    there = [test for test in tests if test.startswith("-") or exists(test)]
    command = [
        "timeout",
        "-k",
        "5",
        str(LIMIT),
        sys.executable,
        "-m",
        "pytest",
        "-xq",
        "-p",
        "no:cacheprovider",
    ]
    environment = {
        "PYTHONPATH": f"{copy}/src",
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command += [f"--basetemp={copy}/pytest", *there]
    done = subprocess.run(
        command, cwd=copy, env=os.environ | environment, capture_output=True, text=True
    )
    failed = re.search(
        r"^(?:FAILED|ERROR) (\S+?\.py(?:::.*?)?)(?: - .*)?$", done.stdout, re.MULTILINE
    )
    status = {0: "survived", 124: "timeout", 137: "timeout", -9: "timeout"}.get(
        done.returncode, "killed"
    )
    return status, failed[1] if failed else ""


if __name__ == "__main__":
    main()
