"""What launching costs: the CPU of submitting 1,000 trainings, and how long a table takes with 1 and 2 workers.

Submitting is measured with a stand-in for sbatch, so that it is this program's own time; beside the trainings it
submits the data set that each needs. The table is made from nothing each time.

    python scripts/bench_launch.py                                             # prints the rows
    python scripts/bench_launch.py --table sandbox --record results/bench/launch.json
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from pipeline.runs.provenance import machine, versions

STAND_IN = """#!/bin/sh
case $(basename $0) in
  scontrol) echo MaxArraySize = 1001 ;;
  sbatch) date +%s%N ;;
esac
"""


def pipeline(words: list[str], **environment: str) -> tuple[int, float, float]:
    """(status, wall seconds, CPU seconds) of a command."""
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "pipeline", *words, "tracking.mode=disabled"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, **environment},
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return done.returncode, time.perf_counter() - begun, cpu


def submitting(folder: Path, count: int) -> dict[str, Any]:
    for name in ("squeue", "scontrol", "sbatch"):
        (folder / name).write_text(STAND_IN)
        (folder / name).chmod(0o755)
    seeds = ",".join(map(str, range(count)))
    words = ["-m", "stage=sft", "expert=math", "model=sandbox", "recipe=sandbox_math", f"seed={seeds}"]
    words += [f"runs_dir={folder}/runs", "launcher=slurm", "launcher.gpus=0"]
    status, wall, cpu = pipeline(words, PATH=f"{folder}:{os.environ['PATH']}")
    assert status == 75, status  # all are in the queue
    return {"what": f"submit {count} trainings", "wall_seconds": round(wall, 1), "cpu_seconds": round(cpu, 1)}


def table(folder: Path, name: str, workers: int) -> dict[str, Any]:
    words = ["stage=table", f"table={name}", f"runs_dir={folder}/{workers}", f"launcher.workers={workers}"]
    status, wall, cpu = pipeline(words)
    assert status == 0, status
    return {"what": f"table={Path(name).stem}, launcher.workers={workers}", "wall_seconds": round(wall, 1),
            "cpu_seconds": round(cpu, 1)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--table", help="one that is made with 1 and 2 workers")
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    rows, load = [], os.getloadavg()
    with tempfile.TemporaryDirectory() as folder:
        rows.append(submitting(Path(folder), options.runs))
    for workers in (1, 2) if options.table else ():
        with tempfile.TemporaryDirectory() as folder:
            rows.append(table(Path(folder), options.table, workers))
    print("\n".join(json.dumps(row) for row in rows))
    if options.record:
        record = {"machine": machine(), "versions": versions(), "load": load, "rows": rows}
        options.record.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
