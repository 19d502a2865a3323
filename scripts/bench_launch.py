"""What launching costs: submitting 1,000 trainings, a job's start, a table with 1 and 2 workers and on two nodes, and
the CPU seconds of a table as jobs, one at a time, beside those of the same table made here.

Submitting is measured with a stand-in for sbatch, so that it is this program's own time; beside the trainings it
submits the data set that each needs. Tables are made from nothing each time. --job, --makespan and --cpu bring up the
real Slurm of two nodes that tests/slurm has, as root: a job's overhead is from the first line of its script to the
first step of its training, a makespan from the submission to the end of the last job. The critical path beside it is
the longest chain of runs by their own seconds; what a choice waits for is not in it.

    python scripts/bench_launch.py                                             # prints the rows
    python scripts/bench_launch.py --table sandbox --job --makespan sandbox --record results/bench/launch.json

Rows of an earlier record that are not asked for stay in it.
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

from pipeline.runs.folders import finished_manifests
from pipeline.runs.provenance import machine_facts, package_versions

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
    words = ["-m", "stage=sft", "expert=math", "model=sandbox", "recipe=sandbox_math", "threads=1"]
    words += [f"seed={seeds}", f"runs_dir={folder}/runs", "launcher=slurm", "launcher.gpus=0"]
    status, wall, cpu = pipeline(words, PATH=f"{folder}:{os.environ['PATH']}")
    assert status == 75, status  # all are in the queue
    return {"what": f"submit {count} trainings", "wall_seconds": round(wall, 1), "cpu_seconds": round(cpu, 1)}


def table(folder: Path, name: str, workers: int) -> dict[str, Any]:
    words = ["stage=table", f"table={name}", f"runs_dir={folder}/{workers}", f"launcher.workers={workers}"]
    status, wall, cpu = pipeline(words)
    assert status == 0, status
    return {"what": f"table={Path(name).stem}, launcher.workers={workers}", "wall_seconds": round(wall, 1),
            "cpu_seconds": round(cpu, 1)}  # fmt: skip


def starting(folder: Path, cluster: Any) -> dict[str, Any]:
    """From the first line of a job's script to the first step of its training."""
    world = [sys.executable, "-m", "pipeline", "stage=data", "expert=sandbox", f"runs_dir={folder}/runs"]
    data_root = subprocess.run(world, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    words = ["stage=sft", "expert=math", "model=sandbox", "recipe=sandbox_math", "threads=1"]
    words += [f"data_root={data_root}", f"runs_dir={folder}/runs"]
    words += ["launcher=slurm", "launcher.gpus=0", "launcher.memory=1500M"]
    words += [f"launcher.setup=['date +%s.%N > {folder}/$SLURM_ARRAY_JOB_ID']"]
    status, _, _ = pipeline(words, **cluster.environment)
    assert status == 75, status
    told: dict[str, Any] = {}
    while told.get("stage") != "sft" or not told.get("step"):
        time.sleep(0.02)
        if not cluster.jobs():
            raise SystemExit("".join(path.read_text() for path in (folder / "runs/.logs").glob("*")))
        for path in (folder / "runs/.work").glob("*/state.json"):
            told = json.loads(path.read_text())
            if told.get("stage") == "sft":
                break
    seconds = path.stat().st_mtime - float((folder / told["job"].partition("_")[0]).read_text())
    cluster.run("scancel", "--me")
    cluster.idle(60)
    return {"what": "a job from its start to its first step", "step": told["step"], "wall_seconds": round(seconds, 1)}


def makespan(folder: Path, name: str, minutes: float, cluster: Any) -> dict[str, Any]:
    words = ["stage=table", f"table={name}", f"runs_dir={folder}/runs", "launcher=slurm", "launcher.gpus=0"]
    words += ["launcher.memory=900M", f"launcher.batch_minutes={minutes:g}"]
    begun = time.perf_counter()
    status, _, _ = pipeline(words, **cluster.environment)
    assert status == 75, status
    cluster.idle(4 * 3600)  # the last job asks again by itself until all is done
    wall = time.perf_counter() - begun
    status, _, _ = pipeline(words, **cluster.environment)
    assert status == 0, status
    longest, total = critical_path(folder / "runs")
    what = f"table={Path(name).stem}, two nodes, launcher.batch_minutes={minutes:g}"
    return {"what": what, "wall_seconds": round(wall, 1),
            "critical_path_seconds": round(longest, 1), "sum_of_runs_seconds": round(total, 1)}  # fmt: skip


SMALL = """
name: small
axes: {density: [0.2, 0.8]}
every: {model: sandbox, data_root: world, threads: 1, sft.steps: 8, sft.warmup_steps: 1, eval.limit: 20}
runs:
  world: {stage: data, expert: sandbox, expert.world.items: 40}
  math: {stage: sft, expert: math, recipe: sandbox_math}
  language: {stage: sft, expert: qac, recipe: sandbox_language}
  TIES: {merge: ties, merge.experts: [math, language], merge.density: '{density}'}
score: {eval: mgsm_0shot, eval.max_gen_toks: 40}
columns: {en: {in: en}, qac: {in: qac}}
rows:
  math: {run: math}
  language: {run: language}
  TIES: {run: TIES, best: [density], by: {eval: mgsm_0shot, eval.split: dev, eval.max_gen_toks: 40, in: qac}}
"""
COUNTED = """#!{python}
import resource, subprocess, sys
status = subprocess.call([sys.executable, *sys.argv[2:]])
used = resource.getrusage(resource.RUSAGE_CHILDREN)
with open({file!r}, "a") as counted:
    print(used.ru_utime + used.ru_stime, file=counted)
sys.exit(status)
"""


def cpu(folder: Path, name: str, cluster: Any) -> dict[str, Any]:
    """CPU seconds of all processes of a table: of its jobs and their submission, and of one worker here."""
    wrap, counted, what = folder / "counted", folder / "cpu", f"table={name}, CPU seconds of all processes"
    if name == "small":
        name = f"{folder}/small.yaml"
        Path(name).write_text(SMALL)
    wrap.write_text(COUNTED.format(python=sys.executable, file=str(counted)))
    wrap.chmod(0o755)
    words = ["stage=table", f"table={name}", f"runs_dir={folder}/jobs", "launcher=slurm", "launcher.gpus=0"]
    words += ["launcher.memory=900M", f"launcher.wrap={wrap}"]
    words += ['launcher.options=["--exclusive","--nodelist=n1"]']  # one at a time, as here
    status, _, submitting = pipeline(words, **cluster.environment)
    assert status == 75, status
    cluster.idle(3600)
    jobs = [float(line) for line in counted.read_text().splitlines()]
    status, _, _ = pipeline(words, **cluster.environment)
    assert status == 0, status
    here = table(folder, name, 1)["cpu_seconds"]
    return {"what": what, "submitting": round(submitting, 1),
            "each_job": [round(one, 1) for one in jobs], "as_jobs": round(submitting + sum(jobs), 1), "here": here,
            "ratio": round((submitting + sum(jobs)) / here, 2)}  # fmt: skip


def critical_path(runs_dir: Path) -> tuple[float, float]:
    """Seconds of the longest chain of parents, and of all runs."""
    made = {one.hash: one for one in finished_manifests(runs_dir)}
    longest: dict[str, float] = {}

    def until(run_hash: str) -> float:
        if run_hash not in longest:
            one = made[run_hash]
            before = [until(parent.hash) for parent in one.parents.values() if parent.hash in made]
            longest[run_hash] = one.seconds + max(before, default=0.0)
        return longest[run_hash]

    return max(map(until, made)), sum(one.seconds for one in made.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--table", help="one that is made with 1 and 2 workers")
    parser.add_argument("--job", action="store_true", help="a job's overhead, on two nodes of a real Slurm")
    parser.add_argument(
        "--cpu", metavar="TABLE", nargs="+", default=[], help="as jobs there, and here; small: of SMALL"
    )
    parser.add_argument("--makespan", metavar="TABLE", help="one that is made there")
    parser.add_argument(
        "--batch-minutes", type=float, nargs="+", default=[60.0, 0.2], help="of --makespan, one row each"
    )
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []

    def measured(measure: Any, *given: Any) -> None:
        load = round(os.getloadavg()[0], 2)
        with tempfile.TemporaryDirectory() as folder:
            Path(folder).chmod(0o755)
            rows.append({**measure(Path(folder), *given), "load_before": load})
        print(json.dumps(rows[-1]), flush=True)

    if options.runs:
        measured(submitting, options.runs)
    for workers in (1, 2) if options.table else ():
        measured(table, options.table, workers)
    if options.job or options.makespan or options.cpu:
        sys.path.insert(0, str(Path(__file__).parents[1] / "tests/slurm"))
        from cluster import two_nodes

        with two_nodes() as cluster:
            if options.job:
                measured(starting, cluster)
            for name in options.cpu:
                measured(cpu, name, cluster)
            for minutes in options.batch_minutes if options.makespan else ():
                measured(makespan, options.makespan, minutes, cluster)
    if options.record:
        before = json.loads(options.record.read_text()) if options.record.is_file() else {"machine": {}, "rows": []}
        new = {row["what"] for row in rows}
        kept = [{"machine": before["machine"], **row} for row in before["rows"] if row["what"] not in new]
        record = {"machine": machine_facts(), "versions": package_versions(), "rows": [*kept, *rows]}
        options.record.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
