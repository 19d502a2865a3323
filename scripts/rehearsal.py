"""Run every table of the papers with narrow models and a Hub on this machine.

The tables run with the program's own commands (prefetch, plan, table, report). Recipes, mixtures,
seeds, partitions, choices, evaluations, numbers of layers, architectures and tokenizer classes are
the shipped ones. The Hub of tests/rehearsal has the repositories that the tables read, with their
published layout. The models are narrower. Settings of every. reduce the rows, the validation rows,
the interval of snapshots and the questions. A training has two or three optimizer steps, except
table A.3, which keeps its 2,000. Random models seldom end an answer early, so most answers reach
the length limit.

    python scripts/rehearsal.py                                      # all tables
    python scripts/rehearsal.py layer_swapping_table1 unreasonable_table2
    python scripts/rehearsal.py --quick                              # a part of one table per paper
    python scripts/rehearsal.py --slurm unreasonable_table_a2        # on the Slurm of tests/slurm
    python scripts/rehearsal.py --record results/bench/rehearsal.json

With --record, tables that do not run keep their record. The exit status is 1 if a command fails. It
is also 1 if a published cell is empty and the plan gives no reason.
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
    "layer_swapping_table1",
    "layer_swapping_table2",
    "layer_swapping_table5",
    "layer_swapping_table6",
    "layer_swapping_claims",
    "layer_swapping_figures",
]
UNREASONABLE = [
    "unreasonable_table_a8",
    "unreasonable_table2",
    "unreasonable_table3",
    "unreasonable_table1",
    "unreasonable_table_a1",
    "unreasonable_table_a2",
    "unreasonable_bars",
    "unreasonable_correlations",
    "unreasonable_friedman",
    "unreasonable_table_a3",
]
LATER = ["adaptive_swap", "merging_pool", "native_reasoning"]  # later papers
UNGATED = ["native_reasoning"]
# The first paper trains three steps of 8 rows. The first step of a warm-up changes no weight, and a
# merge refuses a snapshot that equals its base.
# The second paper trains two steps of 32 rows, or of 64 rows per side if two sides train.
# Continual pretraining reads 64 pages of 1,100 tokens, packed into rows of 1,024 tokens. These rows
# are too long for eager attention.
# Table A.3 keeps its 2,000 steps, with turns of up to 1,000 steps. It needs 64,000 rows per side.
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
        "hardware=two_cores",
        "every.sft.micro_batch_size=64",
        "every.data.size=64000",
        "every.data.validation=2",
    ],
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
    """Return the reduced settings of a table, without keys that all its runs ignore."""
    words = []
    if table not in UNSCORED:
        words += SCORING
    if table not in UNTRAINED:
        words += training_words(table)
    return words


def training_words(table: str) -> list[str]:
    if table in OTHER:
        return OTHER[table]
    if table.startswith("layer_swapping"):
        return TRAINING["layer_swapping"]
    return TRAINING["unreasonable"]


class Place:
    """The folders, the Hub and the environment of the commands."""

    def __init__(self, folder: Path, address: str, certificate: Path) -> None:
        self.folder, self.runs = folder, folder / "runs"
        self.environment = {}
        for key, value in os.environ.items():
            if "proxy" not in key.lower() and key != "HF_TOKEN":
                self.environment[key] = value
        self.environment |= {
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
        environment = self.environment.copy()
        if offline:
            environment |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
        if token:
            environment["HF_TOKEN"] = token
        conf = f"--config-dir={ROOT / 'tests/rehearsal/conf'}"
        command = [conf, *words, f"runs_dir={self.runs}", "tracking.mode=disabled"]
        process = [sys.executable, "-m", "pipeline", *command]
        begun = time.perf_counter()
        done = subprocess.run(process, env=environment, capture_output=True, text=True)
        seconds = time.perf_counter() - begun
        line = " ".join(command)
        output = done.stdout + done.stderr
        with open(self.folder / "commands.log", "a", encoding="utf-8") as log:
            log.write(f"$ {line}\n{output}")
            log.write(f"status {done.returncode}, {seconds:.1f} s\n\n")
        if done.returncode != status:
            last_lines = output.splitlines()[-15:]
            last = "\n".join(last_lines)
            raise SystemExit(f"{line}\nended with {done.returncode}, not {status}:\n{last}")
        if status:
            return output, seconds
        return done.stdout, seconds


def refuse_without_token(place: Place, table: str, words: list[str]) -> list[str]:
    """Check that gated repositories are refused without a token, and return problems."""
    told, _ = place.command("stage=prefetch", f"table={table}", *words, status=1, token=None)
    for name in GATED:
        _, _, repository = name.partition("/")
        if f"({repository}) is gated. Accept its terms" in told:
            return []
    return [f"Without a token, no repository is reported as gated: {told.splitlines()[-1]}"]


def done_of(plan: str) -> list[int]:
    """Return the number of finished runs of a plan, and of all runs."""
    found = re.search(r"([\d,]+) runs?, ([\d,]+) done\.", plan)
    assert found is not None, plan
    total, done = map(number_of, found.groups())
    return [done, total]


def number_of(text: str) -> int:
    return int(text.replace(",", ""))


def rehearse(
    place: Place, table: str, words: list[str], launcher: list[str], cluster: Any = None
) -> dict[str, Any]:
    """Run a table and read its report. Return its row of the record."""
    name, begun = Path(table).stem, time.perf_counter()
    problems = []
    if table not in UNGATED and not (place.runs / "hub.lock.json").is_file():
        problems += refuse_without_token(place, table, words)
    launcher_name, status = " ".join(launcher), 0
    if cluster:
        launcher_name, status = "slurm, two nodes", 75
    words = [f"table={table}", *words]
    _, prefetching = place.command("stage=prefetch", *words)
    plan, _ = place.command("stage=plan", "plan.lines=1", *words, offline=True)
    _, seconds = place.command("stage=table", *words, *launcher, offline=True, status=status)
    if cluster:
        cluster.idle(3600)
        place.command("stage=table", *words, *launcher, offline=True)
    again, _ = place.command("stage=plan", *words, offline=True)
    place.command("stage=report", *words, offline=True)
    done, total = done_of(plan)
    done_at_end, total_at_end = done_of(again)
    if done_at_end != total_at_end:
        problems.append(f"not finished: {again.splitlines()[1]}")
    kinds = {}
    for kind, count in re.findall(r"^([a-z ]+?)  +([\d,]+)", again, re.M):
        kinds[kind] = number_of(count)
    cells = read_cells(place.runs / "reports" / name, plan, problems)
    minutes = (time.perf_counter() - begun) / 60
    return {
        "table": name,
        "launcher": launcher_name,
        "runs": total,
        "computed": total - done,
        "kinds": kinds,
        **cells,
        "prefetch_seconds": round(prefetching, 1),
        "table_seconds": round(seconds, 1),
        "minutes": round(minutes, 1),
        "problems": problems,
    }


def read_cells(report: Path, plan: str, problems: list[str]) -> dict[str, Any]:
    """Return the counts of a report's cells, and append errors to `problems`."""
    with open(report / "cells.csv", encoding="utf-8", newline="") as lines:
        cells = list(csv.DictReader(lines))
    published = filled = published_filled = 0
    reasons: Counter[str] = Counter()
    for cell in cells:
        published += bool(cell["published"])
        if cell["value"]:
            filled += 1
            published_filled += bool(cell["published"])
            continue
        missing = cell["missing"]
        reasons[re.sub(r"\S+-[0-9a-f]{12}\b", "RUN", missing)] += 1
        place = f"{cell['row']} {cell['column']}"
        if not missing:
            problems.append(f"empty without a reason: {place}")
        elif cell["published"] and f"left out: {missing}" not in plan:
            problems.append(f"the plan does not say that {place} is empty: {missing}")
    return {
        "cells": len(cells),
        "filled": filled,
        "published": published,
        "published_filled": published_filled,
        "missing": dict(reasons),
    }


def part_of(folder: Path, table: str) -> str:
    """Write a part of a table to a file, and return the file."""
    file = folder / f"{table}_part.yaml"
    file.write_text(f"defaults: [{table}]\nname: {file.stem}\n{QUICK[table]}\n")
    return str(file)


HEADS = (
    "table",
    "runs",
    "computed here",
    "published cells filled",
    "all cells filled",
    "minutes",
    "missing",
)


def show(rows: list[dict[str, Any]]) -> str:
    """Return the rows as aligned text."""
    lines = [HEADS, *map(cells_of, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = []
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        text.append("  ".join(cells))
    return "\n".join(text)


def cells_of(row: dict[str, Any]) -> tuple[str, ...]:
    if "failed" in row:
        error = row["failed"].splitlines()[0]
        return (row["table"], "", "", "", "", "", f"FAILED {error}")
    runs, computed, minutes = str(row["runs"]), str(row["computed"]), str(row["minutes"])
    published = f"{row['published_filled']} of {row['published']}"
    filled = f"{row['filled']} of {row['cells']}"
    counts = [f"{count}: {reason}" for reason, count in row["missing"].items()]
    missing = "; ".join(counts)
    return (row["table"], runs, computed, published, filled, minutes, missing)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("tables", nargs="*", default=[*LAYER_SWAPPING, *UNREASONABLE, *LATER])
    add("--quick", action="store_true", help="a small part of one table per paper")
    slurm_help = "run this table on the two Slurm nodes of tests/slurm"
    add("--slurm", action="append", default=[], metavar="TABLE", help=slurm_help)
    add("--workers", type=int, default=2)
    add("--folder", type=Path, help="keep all files here; by default they are deleted at the end")
    add("--record", type=Path)
    return parser.parse_args()


def main() -> int:
    asked = arguments()
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
        for table, by_slurm in jobs_of(asked):
            words = words_of(table)
            source = table
            if asked.quick:
                source = part_of(folder, table)
            try:
                if by_slurm:
                    row = rehearse_by_slurm(place, source, words)
                else:
                    launcher = ["launcher=local", f"launcher.workers={asked.workers}"]
                    row = rehearse(place, source, words, launcher)
            except SystemExit as error:
                row = {"table": table, "failed": str(error)}
                print(f"{table}: {error}", file=sys.stderr)
            rows.append(row)
            print(show([row]), file=sys.stderr)
            # The record is written after each table, so that an interruption loses no result.
            if asked.record:
                write_record(asked.record, rows, (time.perf_counter() - begun) / 60)
        minutes = (time.perf_counter() - begun) / 60
        asked_for = Counter(line.split()[0] for line in hub.asked)
    print(show(rows))
    for row in rows:
        for problem in row.get("problems", [])[:20]:
            print(f"{row['table']}: {problem}")
    print(f"{minutes:.1f} minutes; requests to the Hub: {dict(asked_for)}")
    return int(any("failed" in row or row["problems"] for row in rows))


def jobs_of(asked: argparse.Namespace) -> list[tuple[str, bool]]:
    """Return the tables, and True for each table that runs on Slurm."""
    tables = asked.tables
    if asked.quick:
        tables = list(QUICK)
    jobs = []
    for table in tables:
        if asked.quick or table not in asked.slurm:
            jobs.append((table, False))
    jobs += [(table, True) for table in asked.slurm]
    return jobs


def rehearse_by_slurm(place: Place, source: str, words: list[str]) -> dict[str, Any]:
    from cluster import two_nodes

    with two_nodes() as cluster:
        for key in ("SLURM_CONF", "PIPELINE_PYTHON"):
            place.environment[key] = cluster.environment[key]
        launcher = ["launcher=slurm", "launcher.gpus=0", "launcher.memory=1500M"]
        return rehearse(place, source, [*words, "every.threads=1"], launcher, cluster)


def write_record(file: Path, rows: list[dict[str, Any]], minutes: float) -> None:
    earlier = []
    if file.is_file():
        earlier = json.loads(file.read_text())["rows"]
    new = [(row["table"], row.get("launcher")) for row in rows]
    kept = []
    for row in earlier:
        if (row["table"], row.get("launcher")) not in new:
            kept.append(row)
    words = {table: words_of(table) for table in [*LAYER_SWAPPING, *UNREASONABLE]}
    record = {
        "machine": machine_facts(),
        "versions": package_versions(),
        "note": NOTE,
        "words": words,
        "minutes_of_last": round(minutes, 1),
        "rows": [*kept, *rows],
    }
    file.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


NOTE = (
    "Narrow random models (hidden size 12 to 28, 1,100 pieces) with the true layers, architectures"
    " and tokenizer classes; their output heads end most contexts, so that answers are short."
    " Limits of answers, recipes, mixtures, seeds, partitions, choices and evaluations are the"
    " shipped ones; only `words` were changed. Tables share one runs_dir, in the order of rows:"
    " `computed` counts the runs that no earlier table had."
)

if __name__ == "__main__":
    sys.exit(main())
