"""Run every test suite of a release, including the suites that .ci/run omits.

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
DAY = time.strftime("%Y%m%d")  # a seed that changes every day


def pythons() -> list[str]:
    """Return the Pythons that start. pyenv's shims exist without their Python."""
    found = []
    for version in ("3.11", "3.12", "3.13"):
        path = shutil.which(f"python{version}")
        if path and subprocess.run([path, "-V"], capture_output=True).returncode == 0:
            found.append(path)
    return found


def suites_in_order() -> dict[str, list[str]]:
    """Return the name and command of each suite."""
    suites = {}
    for name in ("check", "docs", "test", "rehearsal-quick", "test-slurm"):
        suites[name] = ["make", name]
    suites["test-kill"] = ["make", "test-kill", "N=25", f"SEED={DAY}"]
    for name in ("test-shapes", "test-mergekit", "test-latex", "test-vllm", "lowest"):
        suites[name] = ["make", name]
    for name in ("canary", "notebook"):
        suites[name] = ["make", name]
    for python in pythons():
        name = Path(python).name
        demo = ["make", "demo", f"PYTHON={python}", f"VENV=.venv-{name}"]
        suites[f"demo on {name}"] = [*demo, f"WORDS=runs_dir=release/{name}"]
    mutants = [sys.executable, "tests/mutants.py"]
    suites["mutants"] = [*mutants, "--record", "results/bench/mutants.json"]
    return suites


SUITES = suites_in_order()


def main() -> None:
    code, asked = git_state(), sys.argv[1:]
    known = ", ".join(SUITES)
    for name in asked:
        if name not in SUITES:
            raise SystemExit(f"Unknown suite {name}. The suites are {known}.")
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
    print(f"{len(SUITES) - len(missing)} of {len(SUITES)} suites passed")
    for name in missing:
        print(f"not {name}")
    raise SystemExit(bool(missing))


def run_suite(name: str, command: list[str]) -> dict[str, Any]:
    """Run one suite. Its last lines have the numbers of passed and skipped tests."""
    LOGS.mkdir(exist_ok=True)
    # A demo would find its earlier runs, and compute no new ones.
    shutil.rmtree(LOGS / name.rpartition(" ")[2], ignore_errors=True)
    begun = time.monotonic()
    log_name = name.replace(" ", "-")
    log = LOGS / f"{log_name}.log"
    print(f"{name}: {' '.join(command)}", flush=True)
    with open(log, "w") as file:
        status = subprocess.run(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT).returncode
    seconds = round(time.monotonic() - begun)
    told = log.read_text(errors="replace").splitlines()
    lines = []
    for line in told:
        # pip warns about the locations of mirrors.
        if not line.startswith(("make", "WARNING: Location")):
            lines.append(line)
    verdict = "failed"
    if status == 0:
        verdict = "passed"
    print(f"  {verdict} in {seconds} s", flush=True)
    last_lines = [line[:200] for line in lines[-3:]]
    return {"passed": status == 0, "seconds": seconds, "ended": last_lines}


if __name__ == "__main__":
    main()
