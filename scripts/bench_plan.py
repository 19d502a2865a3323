"""What planning and listing cost beside many finished runs, in CPU seconds of the whole command.

Makes runs_dirs of 1,000 and 10,000 folders whose manifests are like those of real runs (a copy of the shipped base's,
with other names and hashes), and runs the commands beside them: a plan of 1,241 runs, the plan of table=sandbox_full,
status, and a RUN found by a prefix of its name.

    python scripts/bench_plan.py                    # prints the table
    python scripts/bench_plan.py --record results/bench/plan.json
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import subprocess
import sys
import tempfile
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

from pipeline.runs.manifest import read_manifest
from pipeline.runs.provenance import machine, versions

COMMANDS = {
    "plan of 1,241 runs": ["stage=plan", "table=layer_swapping_table1"],
    "plan of sandbox_full (288 runs)": ["stage=plan", "table=sandbox_full"],
    "status": ["stage=status"],
    "a RUN by its prefix": ["stage=analyze", "checkpoint=[other-7-]"],  # found, then refused: it holds no weights
    "imports alone": ["stage=status", "status.nothing=1"],  # refused before anything is read
}
GOALS = {("plan of 1,241 runs", 0): 5.0, ("plan of sandbox_full (288 runs)", 10_000): 5.0, ("status", 10_000): 3.0}


def fill(runs_dir: Path, count: int) -> None:
    """`count` finished runs of other tables."""
    shipped = read_manifest(Path(str(files("pipeline") / "data/sandbox_base")))
    assert shipped is not None
    for number in range(count):
        run_hash = hashlib.sha256(str(number).encode()).hexdigest()
        folder = runs_dir / f"other-{number}-{run_hash[:8]}"
        folder.mkdir(parents=True)
        replace(shipped, name=folder.name, hash=run_hash).write(folder)


def cpu_seconds(words: list[str], runs_dir: Path) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "pipeline", *words, f"runs_dir={runs_dir}"]
    subprocess.run(command, capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="the least of so many runs stands")
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    rows = []
    for count in (0, 1_000, 10_000):
        with tempfile.TemporaryDirectory() as folder:
            runs_dir = Path(folder) / "runs"
            fill(runs_dir, count)
            for name, words in COMMANDS.items():
                seconds = min(cpu_seconds(words, runs_dir) for _ in range(options.rounds))
                goal = GOALS.get((name, count))
                rows.append({"command": name, "folders": count, "cpu_seconds": round(seconds, 2), "goal": goal})
                print(f"{count:>6} folders  {name:<32} {seconds:6.2f} s" + (f"  (goal {goal})" if goal else ""))
    if options.record:
        record = {"machine": machine(), "versions": versions(), "load": os.getloadavg()[0], "rows": rows}
        options.record.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
