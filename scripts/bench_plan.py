"""What planning and listing cost beside many finished runs, in CPU seconds of the whole command.

Makes a runs_dir of 1,000 and one of 10,000 folders whose manifests are like those of real runs (a copy of the shipped
base's, 14 KB, with other names and hashes), and runs the commands beside them: the plans of layer_swapping_table1 with
all 81 configurations of the swap, of unreasonable_table3 and of sandbox_full, status, and a RUN found by a prefix of
its name.

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
from importlib.resources import files
from pathlib import Path

from pipeline.runs.manifest import MANIFEST, read_manifest
from pipeline.runs.provenance import machine_facts, package_versions

IMPORTS = "imports alone"
COMMANDS = {  # name -> words
    IMPORTS: ["stage=status", "status.nothing=1"],  # refused before anything is read
    "plan of layer_swapping_table1, 81 configurations": ["stage=plan", "table=all"],
    "plan of unreasonable_table3": ["stage=plan", "table=unreasonable_table3"],
    "plan of sandbox_full": ["stage=plan", "table=sandbox_full"],
    "status": ["stage=status"],
    "a RUN by its prefix": ["stage=analyze", "checkpoint=[other-7-]"],  # found, then refused: its files are not there
}
GOALS = {  # (name, folders) -> CPU seconds; of a RUN beside the imports
    ("plan of layer_swapping_table1, 81 configurations", 0): 5.0,
    ("plan of unreasonable_table3", 0): 5.0,
    ("plan of sandbox_full", 10_000): 5.0,
    ("status", 10_000): 3.0,
    ("a RUN by its prefix", 10_000): 0.5,
}


def all_configurations(folder: Path) -> None:
    """DIR/tables/all.yaml: layer_swapping_table1 with each transition zone of its own, 3 x 3 x 9 swaps."""
    zones = {f"{bottom}+{top}": {"bottom": bottom, "top": top} for bottom in range(3) for top in range(3)}
    (folder / "tables").mkdir(parents=True)
    table = {"name": "all", "defaults": ["layer_swapping_table1"], "axes": {"t": zones}}
    (folder / "tables/all.yaml").write_text(json.dumps(table), encoding="utf-8")  # JSON is YAML


def fill(runs_dir: Path, count: int) -> None:
    """`count` finished runs of other tables."""
    home = Path(str(files("pipeline") / "data/sandbox_base"))
    shipped, text = read_manifest(home), (home / MANIFEST).read_text(encoding="utf-8")
    assert shipped is not None
    for number in range(count):
        run_hash = hashlib.sha256(str(number).encode()).hexdigest()
        folder = runs_dir / f"other-{number}-{run_hash[:8]}"
        folder.mkdir(parents=True)
        named = text.replace(shipped.hash, run_hash).replace(f'"{shipped.name}"', f'"{folder.name}"')
        (folder / MANIFEST).write_text(named, encoding="utf-8")


def cpu_seconds(words: list[str], runs_dir: Path) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "pipeline", *words, f"runs_dir={runs_dir}"]
    command += [f"--config-dir={runs_dir.parent / 'conf'}"]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    refused = words in (COMMANDS[IMPORTS], COMMANDS["a RUN by its prefix"])
    if (done.returncode != 0) != refused or "Traceback" in done.stderr or "no finished run" in done.stderr:
        raise SystemExit(f"{' '.join(command)}: {done.stderr[-500:]}")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="the least of so many runs stands")
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    rows, load = [], os.getloadavg()
    for count in (0, 1_000, 10_000):
        with tempfile.TemporaryDirectory() as folder:
            runs_dir = Path(folder) / "runs"
            fill(runs_dir, count)
            all_configurations(Path(folder) / "conf")
            imports = 0.0
            for name, words in COMMANDS.items():
                if count == 0 and words == COMMANDS["a RUN by its prefix"]:
                    continue
                seconds = min(cpu_seconds(words, runs_dir) for _ in range(options.rounds))
                imports = seconds if name == IMPORTS else imports
                row = {"command": name, "folders": count, "cpu_seconds": round(seconds, 2)}
                row["beside_imports"] = round(seconds - imports, 2)
                row["goal"] = GOALS.get((name, count))
                rows.append(row)
                print(" ".join(f"{key}={value}" for key, value in row.items()), flush=True)
    if options.record:
        record = {
            "machine": machine_facts(),
            "versions": package_versions(),
            "load": load,
            "rounds": options.rounds,
            "rows": rows,
        }
        options.record.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
