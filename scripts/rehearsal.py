"""Run every table of the papers with narrow models and a Hub on this machine.

Recipes, mixtures, seeds, partitions, choices, evaluations, numbers of layers, architectures and
tokenizer classes are the shipped ones. The commands are the program's own (prefetch, plan, table,
report). The Hub of tests/rehearsal has the repositories that the tables read, with their published
layout. Smaller are the width of the models and, by every., the rows (two or three optimizer steps
per training; table A.3 keeps its 2,000), the validation rows, the interval of snapshots and the
questions. Random models seldom end an answer before the limit, so the limit of most contexts is
reached.

    python scripts/rehearsal.py                                      # all tables
    python scripts/rehearsal.py layer_swapping_table1 unreasonable_table2
    python scripts/rehearsal.py --quick                              # a part of one table per paper
    python scripts/rehearsal.py --slurm unreasonable_table_a2        # on the Slurm of tests/slurm
    python scripts/rehearsal.py --record results/bench/rehearsal.json

With --record, tables that do not run keep their record. The exit status is 1 if a command fails, or
if a published cell is empty without a reason from the plan.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
for below in ("rehearsal", "data", "slurm"):
    sys.path.insert(0, str(ROOT / "tests" / below))

from fake_hub import serving  # noqa: E402
from published import GATED, TOKEN, add_troubles, fill, proxy_certificate  # noqa: E402

from pipeline.runs.provenance import machine_facts, package_versions  # noqa: E402

LAYER_SWAPPING = [
    f"layer_swapping_{name}"
    for name in ("table1", "table2", "table5", "table6", "claims", "figures")
]
UNREASONABLE = [
    f"unreasonable_{name}"
    for name in (
        "table_a8",
        "table2",
        "table3",
        "table1",
        "table_a1",
        "table_a2",
        "bars",
        "correlations",
        "friedman",
        "table_a3",
    )
]
LATER = ["adaptive_swap", "merging_pool", "native_reasoning"]  # papers that followed
UNGATED = ["native_reasoning"]
# Steps of the largest batch: three of 8 rows in the first paper, as the first of a warm-up moves
# nothing and merges refuse a snapshot that is its base; two of 32 rows in the second, or of 64 a
# side where two sides train. Of continual pretraining 64 pages of 1,100 tokens, packed into rows of
# 1,024: too long for eager attention. Table A.3 has its own 2,000 steps, with turns of up to 1,000:
# these take 64,000 rows a side.
SCORING = ["every.eval.limit=2"]
TRAINING = {
    "layer_swapping": [
        "every.data.size=24",
        "every.sft.snapshot_every=12",
        "every.select.eval.limit=2",
    ],
    "unreasonable": ["hardware=two_cores", "every.data.size=64", "every.data.validation=2"],
}
OTHER = {
    "unreasonable_table_a2": [*TRAINING["unreasonable"], "every.model.attn_implementation=sdpa"],
    "unreasonable_table_a3": [
        *(
            "hardware=two_cores",
            "every.sft.micro_batch_size=64",
            "every.data.size=64000",
            "every.data.validation=2",
        )
    ],
}
OTHER |= {
    "native_reasoning": ["every.eval.max_gen_toks=16"],
    "adaptive_swap": TRAINING["unreasonable"],
    "merging_pool": ["every.data.size=24"],
}
UNTRAINED, UNSCORED = ["unreasonable_table_a8"], ["layer_swapping_figures"]
QUICK = {
    "layer_swapping_table6": "axes: {language: [sw], m: [1, 2], l: [1, 2]}",
    "unreasonable_table2": "axes: {model: [qwen2.5_7b_instruct]}",
}


def words_of(table: str) -> list[str]:
    """Return the lowered settings of a table, without keys that none of its runs reads."""
    training = OTHER.get(table) or next(
        TRAINING[name] for name in TRAINING if table.startswith(name)
    )
    return [
        *(SCORING if table not in UNSCORED else []),
        *(training if table not in UNTRAINED else []),
    ]


class Place:
    """Where it runs: folders, the Hub, and the commands' environment."""

    def __init__(self, folder: Path, address: str, certificate: Path) -> None:
        self.folder, self.runs = folder, folder / "runs"
        self.environment = {
            **{
                key: value
                for key, value in os.environ.items()
                if "proxy" not in key.lower() and key != "HF_TOKEN"
            },
            "http_proxy": address,
            "https_proxy": address,
            "no_proxy": "127.0.0.1,localhost",
            "SSL_CERT_FILE": str(certificate),
            "HF_ENDPOINT": address,
            "HF_HOME": str(folder / "home"),
            "HF_HUB_DISABLE_XET": "1",
            "OMP_NUM_THREADS": "1",
            "WANDB_MODE": "disabled",
            "TOKENIZERS_PARALLELISM": "false",
        }

    def command(
        self, *words: str, offline: bool = False, status: int = 0, token: str | None = TOKEN
    ) -> tuple[str, float]:
        """Run a command of the program with its output in a log, and return output and seconds.

        For a command that should fail, the output is its error message.

        Raises:
            SystemExit: it ended with another status.
        """
        there = {}
        if offline:
            there = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
        if token:
            there |= {"HF_TOKEN": token}
        own = f"--config-dir={ROOT / 'tests' / 'rehearsal' / 'conf'}"
        begun, command = (
            time.perf_counter(),
            [own, *words, f"runs_dir={self.runs}", "tracking.mode=disabled"],
        )
        done = subprocess.run(
            [sys.executable, "-m", "pipeline", *command],
            env=self.environment | there,
            capture_output=True,
            text=True,
        )
        seconds = time.perf_counter() - begun
        with open(self.folder / "commands.log", "a", encoding="utf-8") as log:
            log.write(
                f"$ {' '.join(command)}\n{done.stdout}{done.stderr}status {done.returncode},"
                f" {seconds:.1f} s\n\n"
            )
        if done.returncode != status:
            told = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
            raise SystemExit(
                f"{' '.join(command)}\nended with {done.returncode}, not {status}:\n{told}"
            )
        return done.stdout + (done.stderr if status else ""), seconds


def refuse_without_token(place: Place, table: str, words: list[str]) -> list[str]:
    """Return what is wrong with the refusal of gated repositories without a token."""
    told, _ = place.command("stage=prefetch", f"table={table}", *words, status=1, token=None)
    refused = any(
        f"({name.partition('/')[2]}) is gated. Accept its terms" in told for name in GATED
    )
    if refused:
        return []
    return [f"without a token nothing is said to be gated: {told.splitlines()[-1]}"]


def done_of(plan: str) -> list[int]:
    """Return the number of finished runs of a plan, and of all runs."""
    found = re.search(r"([\d,]+) runs?, ([\d,]+) done\.", plan)
    assert found is not None, plan
    total, done = (int(count.replace(",", "")) for count in found.groups())
    return [done, total]


def rehearse(
    place: Place, table: str, words: list[str], launcher: list[str], cluster: Any = None
) -> dict[str, Any]:
    """Run a table and read its report. Returns its row of the record."""
    name, begun = Path(table).stem, time.perf_counter()
    refusals = []
    if table not in UNGATED and not (place.runs / "hub.lock.json").is_file():
        refusals = refuse_without_token(place, table, words)
    words = [f"table={table}", *words]
    _, prefetching = place.command("stage=prefetch", *words)
    plan, _ = place.command("stage=plan", "plan.lines=1", *words, offline=True)
    _, seconds = place.command(
        "stage=table", *words, *launcher, offline=True, status=75 if cluster else 0
    )
    if cluster:
        cluster.idle(3600)
        place.command("stage=table", *words, *launcher, offline=True)
    again, _ = place.command("stage=plan", *words, offline=True)
    place.command("stage=report", *words, offline=True)
    done, total = done_of(plan)
    problems = refusals + (
        [] if len({*done_of(again)}) == 1 else [f"not finished: {again.splitlines()[1]}"]
    )
    kinds = {
        kind: int(count.replace(",", ""))
        for kind, count in re.findall(r"^([a-z ]+?)  +([\d,]+)", again, re.M)
    }
    return {
        "table": name,
        "launcher": "slurm, two nodes" if cluster else " ".join(launcher),
        "runs": total,
        "computed": total - done,
        "kinds": kinds,
        **read_cells(place.runs / "reports" / name, plan, problems),
        "prefetch_seconds": round(prefetching, 1),
        "table_seconds": round(seconds, 1),
        "minutes": round((time.perf_counter() - begun) / 60, 1),
        "problems": problems,
    }


def read_cells(report: Path, plan: str, problems: list[str]) -> dict[str, Any]:
    """Return the counts of a report's cells, and add what is wrong to `problems`."""
    with open(report / "cells.csv", encoding="utf-8", newline="") as lines:
        cells = list(csv.DictReader(lines))
    published = [cell for cell in cells if cell["published"]]
    reasons = Counter(
        re.sub(r"\S+-[0-9a-f]{12}\b", "RUN", cell["missing"]) for cell in cells if not cell["value"]
    )
    for cell in cells:
        place = f"{cell['row']} {cell['column']}"
        if not cell["value"] and not cell["missing"]:
            problems.append(f"empty without a reason: {place}")
        elif not cell["value"] and cell["published"] and f"left out: {cell['missing']}" not in plan:
            problems.append(f"the plan does not say that {place} is empty: {cell['missing']}")
    counted = re.findall(r"^published: .* for (\d+) cells?", plan, re.MULTILINE)
    if len(published) != sum(map(int, counted)):
        problems.append(
            f"{len(published)} cells have a published number, the plan counts {counted}"
        )
    return {
        "cells": len(cells),
        "filled": sum(bool(cell["value"]) for cell in cells),
        "published": len(published),
        "published_filled": sum(bool(cell["value"]) for cell in published),
        "missing": dict(reasons),
    }


def part_of(folder: Path, table: str) -> str:
    """Return a file with a part of a table."""
    file = folder / f"{table}_part.yaml"
    file.write_text(f"defaults: [{table}]\nname: {file.stem}\n{QUICK[table]}\n")
    return str(file)


def show(rows: list[dict[str, Any]]) -> str:
    heads = (
        "table",
        "runs",
        "computed here",
        "published cells filled",
        "all cells filled",
        "minutes",
        "missing",
    )
    lines = [heads]
    for row in rows:
        if "failed" in row:
            lines.append(
                (row["table"], "", "", "", "", "", "FAILED " + row["failed"].splitlines()[0])
            )
            continue
        missing = "; ".join(f"{count}: {reason}" for reason, count in row["missing"].items())
        filled = (
            f"{row['published_filled']} of {row['published']}",
            f"{row['filled']} of {row['cells']}",
        )
        lines.append(
            (
                row["table"],
                str(row["runs"]),
                str(row["computed"]),
                *filled,
                str(row["minutes"]),
                missing,
            )
        )
    widths = [max(len(line[at]) for line in lines) for at in range(len(heads))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tables", nargs="*", default=[*LAYER_SWAPPING, *UNREASONABLE, *LATER])
    parser.add_argument("--quick", action="store_true", help="a small part of one table a paper")
    parser.add_argument(
        "--slurm",
        action="append",
        default=[],
        metavar="TABLE",
        help="run it on a Slurm of two nodes",
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--folder", type=Path, help="keep everything here; by default it is deleted at the end"
    )
    parser.add_argument("--record", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary, serving() as hub:
        folder = (asked.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        place = Place(folder, hub.address, proxy_certificate(folder, hub))
        begun = time.perf_counter()
        with tempfile.TemporaryDirectory() as published:
            fill(hub, Path(published))
        add_troubles(hub)
        print(f"the Hub is filled: {time.perf_counter() - begun:.0f} s", file=sys.stderr)
        rows = []
        if asked.quick:
            tables = list(QUICK)
        else:
            tables = []
            for table in asked.tables:
                if table not in asked.slurm:
                    tables.append(table)
        jobs = [(table, False) for table in tables] + [(table, True) for table in asked.slurm]
        for table, by_slurm in jobs:
            words = words_of(table)
            if asked.quick:
                source = part_of(folder, table)
            else:
                source = table
            try:
                if by_slurm:
                    from cluster import two_nodes

                    with two_nodes() as cluster:
                        place.environment |= {
                            key: cluster.environment[key]
                            for key in ("SLURM_CONF", "PIPELINE_PYTHON")
                        }
                        words.append("every.threads=1")
                        launcher = ["launcher=slurm", "launcher.gpus=0", "launcher.memory=1500M"]
                        rows.append(rehearse(place, source, words, launcher, cluster))
                else:
                    launcher = ["launcher=local", f"launcher.workers={asked.workers}"]
                    rows.append(rehearse(place, source, words, launcher))
            except SystemExit as error:
                rows.append({"table": table, "failed": str(error)})
                print(f"{table}: {error}", file=sys.stderr)
            print(show(rows[-1:]), file=sys.stderr)
            if asked.record:  # after each: what was computed is not lost where it is stopped
                write_record(asked.record, rows, (time.perf_counter() - begun) / 60)
        minutes = (time.perf_counter() - begun) / 60
        asked_for = Counter(line.split()[0] for line in hub.asked)
    print(show(rows))
    for row in rows:
        for problem in row.get("problems", [])[:20]:
            print(f"{row['table']}: {problem}")
    print(f"{minutes:.1f} minutes; requests to the Hub: {dict(asked_for)}")
    return int(any("failed" in row or row["problems"] for row in rows))


def write_record(file: Path, rows: list[dict[str, Any]], minutes: float) -> None:
    earlier = []
    if file.is_file():
        earlier = json.loads(file.read_text())["rows"]
    key = [(row["table"], row.get("launcher")) for row in rows]
    kept = []
    for row in earlier:
        if (row["table"], row.get("launcher")) not in key:
            kept.append(row)
    record = {
        "machine": machine_facts(),
        "versions": package_versions(),
        "note": NOTE,
        "words": {table: words_of(table) for table in [*LAYER_SWAPPING, *UNREASONABLE]},
        "minutes_of_last": round(minutes, 1),
        "rows": [*kept, *rows],
    }
    file.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


NOTE = (
    "Narrow random models (hidden size 12 to 28, 1,100 pieces) with the true layers, architectures"
    " and tokenizer classes; their output heads end most contexts, so that answers are short."
    " Limits of answers, recipes, mixtures, seeds, partitions, choices and evaluations are the"
    " shipped ones; `words` are all that was changed. Tables share one runs_dir, in the order of"
    " rows: `computed` are the runs that no earlier table had."
)

if __name__ == "__main__":
    sys.exit(main())
