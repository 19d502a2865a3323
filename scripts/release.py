"""Run every test suite of a release, also those that .ci/run leaves out.

    python scripts/release.py                     # suites that have not passed on this commit
    python scripts/release.py test-vllm lowest    # these suites, even if they have passed

When a suite ends, its result, seconds and last lines go to results/bench/release.json, so that an
interrupted run continues. Another commit begins anew. The output of a suite is in
release/SUITE.log. The exit status is 0 if all suites passed. Run it with `make release` in a clean
checkout, because only committed changes are released.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from pipeline.files import write_atomically
from pipeline.runs.provenance import git_state, machine_facts, package_versions

ROOT = Path(__file__).resolve().parents[1]
RECORD, LOGS = ROOT / "results/bench/release.json", ROOT / "release"
FOUND = filter(None, (shutil.which(f"python{name}") for name in ("3.11", "3.12", "3.13")))
PYTHONS = [
    path for path in FOUND if subprocess.run([path, "-V"], capture_output=True).returncode == 0
]  # pyenv's shims
DAY = time.strftime("%Y%m%d")  # a seed that is another one tomorrow
SUITES = {
    **{name: ["make", name] for name in ("check", "docs", "test", "rehearsal-quick", "test-slurm")},
    "test-kill": ["make", "test-kill", "N=25", f"SEED={DAY}"],
    **{
        name: ["make", name]
        for name in ("test-shapes", "test-mergekit", "test-latex", "test-vllm", "lowest")
    },
    **{name: ["make", name] for name in ("canary", "notebook")},
    **{
        f"demo on {name}": [
            "make",
            "demo",
            f"PYTHON={python}",
            f"VENV=.venv-{name}",
            f"WORDS=runs_dir=release/{name}",
        ]
        for python in PYTHONS
        if (name := Path(python).name)
    },
    "mutants": [sys.executable, "tests/mutants.py", "--record", "results/bench/mutants.json"],
}


def main() -> None:
    code, asked = git_state(), sys.argv[1:]
    unknown = [name for name in asked if name not in SUITES]
    if unknown:
        raise SystemExit(f"{unknown[0]} is no suite: {', '.join(SUITES)}")
    record = {}
    if RECORD.exists():
        record = json.loads(RECORD.read_text())
    if record.get("code", {}).get("commit") != code["commit"]:
        record = {
            "code": code,
            "machine": machine_facts(),
            "versions": package_versions(),
            "suites": {},
        }
    suites = record["suites"]
    for name, command in SUITES.items():
        if name in asked or (not asked and not suites.get(name, {}).get("passed")):
            suites[name] = run_suite(name, command)
            write_atomically(RECORD, json.dumps(record, indent=1) + "\n")
    missing = []
    for name in SUITES:
        if not suites.get(name, {}).get("passed"):
            missing.append(name)
    print(
        f"{len(SUITES) - len(missing)} of {len(SUITES)} suites passed"
        + "".join(f"\nnot {name}" for name in missing)
    )
    raise SystemExit(bool(missing))


def run_suite(name: str, command: list[str]) -> dict[str, Any]:
    """Run one suite to its end. Its last lines say how many tests passed, and what was left out."""
    LOGS.mkdir(exist_ok=True)
    shutil.rmtree(
        LOGS / name.rpartition(" ")[2], ignore_errors=True
    )  # the runs of a demo, which it would find again
    begun, log = time.monotonic(), LOGS / f"{name.replace(' ', '-')}.log"
    print(f"{name}: {' '.join(command)}", flush=True)
    with open(log, "w") as file:
        status = subprocess.run(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT).returncode
    seconds = round(time.monotonic() - begun)
    told = log.read_text(errors="replace").splitlines()
    # pip's on mirrors
    lines = []
    for line in told:
        if not line.startswith(("make", "WARNING: Location")):
            lines.append(line)
    print(f"  {'passed' if status == 0 else 'failed'} in {seconds} s", flush=True)
    return {"passed": status == 0, "seconds": seconds, "ended": [line[:200] for line in lines[-3:]]}


if __name__ == "__main__":
    main()
