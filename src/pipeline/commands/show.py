"""Stage show: prints a run from its folder: configuration, parents, loss curve, scores, cost, and
some answers.
"""

from __future__ import annotations

import json
import sys
from itertools import groupby
from pathlib import Path

from pipeline.commands.status import all_statuses
from pipeline.config.overrides import override_of
from pipeline.config.stages import ShowStage
from pipeline.data.rows import read_jsonl
from pipeline.errors import PipelineError
from pipeline.evaluate.shown_scores import score_lines
from pipeline.runs.find import find_run
from pipeline.runs.folders import finished_names
from pipeline.runs.manifest import Manifest, read_manifest
from pipeline.runs.run import flatten_dict
from pipeline.text import align_columns
from pipeline.train.examples import ROWS

POINTS = 8  # of a curve
LOG_LINES = 30
LONGEST = 600  # characters of a prompt's end and of an answer


def show_run(config: ShowStage) -> str:
    """Text that describes the run, for a terminal."""
    unfinished = unfinished_text(config)
    if unfinished:
        return unfinished
    folder = find_run(config.run, config.runs_path, "run").folder
    manifest = read_manifest(folder)
    if manifest is None:
        raise PipelineError(
            f"run={config.run} has no manifest.json: give one of the runs that stage=status lists"
        )
    parts = [
        heading_lines(manifest),
        deciding_lines(manifest),
        parent_lines(manifest),
        curve_lines(folder),
        score_lines(folder),
    ]
    if config.show.samples:
        parts.append(answer_lines(folder, config.show.samples))
    if config.show.rows:
        parts.append(rows_of(manifest, folder, config))
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def unfinished_text(config: ShowStage) -> str:
    """Return the state of an unfinished run and the end of its log, or "" if no run has this
    name.
    """
    runs_dir = config.runs_path
    if "/" in config.run or finished_names(runs_dir, config.run):
        return ""
    statuses = []
    for run_status in all_statuses(runs_dir):
        if run_status.run.startswith(config.run) and run_status.state != "finished":
            statuses.append(run_status)
    if len({run_status.run for run_status in statuses}) != 1:
        return ""
    status = statuses[-1]
    reason = status.detail.removesuffix(f"; {status.log}")
    heading = [status.run, f"stage={status.stage}, {status.state}: {reason}"]
    if status.log is None:
        return "\n".join([*heading, "it has no log of its own: its command printed what it said"])
    lines = Path(status.log).read_text(encoding="utf-8", errors="replace").splitlines()
    cut = ""
    if len(lines) > LOG_LINES:
        cut = f", the last {LOG_LINES} of {len(lines)} lines"
    return "\n".join(
        [*heading, "", f"log: {status.log}{cut}:", *(f"  {line}" for line in lines[-LOG_LINES:])]
    )


def rows_of(manifest: Manifest, folder: Path, config: ShowStage) -> list[str]:
    """Return the first rows that a training reads, or the rows of a data run as JSON.

    The trained part is green on a terminal, and in [[ ]] elsewhere.

    Raises: PipelineError: the run is neither, or was trained by a version that kept no rows.
    """
    if manifest.stage == "data":
        return [
            "rows:",
            *(
                f"  {json.dumps(row, ensure_ascii=False)}"
                for row in read_jsonl(folder / "train.jsonl")[: config.show.rows]
            ),
        ]
    if manifest.stage not in ("sft", "cpt"):
        raise PipelineError(
            f"show.rows={config.show.rows}: {manifest.name} has no training set; give a run of"
            " stage=sft"
        )
    if not (folder / ROWS).is_file():
        raise PipelineError(
            f"show.rows: {manifest.name} has no {ROWS}, which earlier versions did not write: show"
            f" the rows of its data run, run={manifest.parents['data'].name}"
        )
    from pipeline.models.load import load_tokenizer

    tokenizer = load_tokenizer(folder)
    if sys.__stdout__ and sys.__stdout__.isatty():
        start_mark, end_mark = ("\033[32m", "\033[0m")
    else:
        start_mark, end_mark = ("[[", "]]")
    lines = ["rows (what is trained on is marked):"]
    for row in read_jsonl(folder / ROWS)[: config.show.rows]:
        text = ""
        pairs = zip(row["input_ids"], row["labels"], strict=True)
        for trained, part in groupby(pairs, key=lambda pair: pair[1] != -100):
            decoded = tokenizer.decode([token for token, _ in part])
            if trained:
                text += f"{start_mark}{decoded}{end_mark}"
            else:
                text += decoded
        lines += [*(f"  | {line}" for line in text.splitlines()), ""]
    return lines[:-1]


def heading_lines(manifest: Manifest) -> list[str]:
    cost = manifest.cost
    machine = manifest.machine
    facts = [f"stage={manifest.stage}", f"attempt {manifest.attempt}", f"began {manifest.started}"]
    spent = [f"{cost['seconds']:.0f} s"]
    if cost.get("predicted_seconds") is not None:
        spent.append(f"predicted {cost['predicted_seconds']:.0f} s")
    if cost.get("peak_memory_bytes"):
        spent.append(f"{cost['peak_memory_bytes'] / 1e9:.1f} GB at most")
    hardware = ", ".join(
        f"{key} {value}"
        for key, value in machine.items()
        if isinstance(value, str | int) and value != ""
    )
    merge = manifest.facts.get("merge")
    return [
        manifest.name,
        *([f"merge: {merge}"] if merge else []),
        ", ".join(facts),
        ", ".join(spent),
        *([f"on {hardware}"] if hardware else []),
        f"hash {manifest.hash}",
    ]


def deciding_lines(manifest: Manifest) -> list[str]:
    """Return the knobs that differ from their defaults, as KEY=VALUE of the command line."""
    knobs = flatten_dict(manifest.decided_by.get("config", {}))
    assignments = []
    for key, value in knobs.items():
        if key != "stage":
            assignments.append(override_of(key, value))
    return [
        "decided by (all else is at its default):",
        *(f"  {assignment}" for assignment in assignments or ["nothing but its parents"]),
    ]


def parent_lines(manifest: Manifest) -> list[str]:
    rows = [
        (f"  {role}", parent.name, parent.hash[:12]) for role, parent in manifest.parents.items()
    ]
    if rows:
        return ["parents:", *align_columns(rows)]
    return []


def curve_lines(folder: Path) -> list[str]:
    """Return some steps of a training's log, including the first and the last, and all validation
    losses.
    """
    path = folder / "log.jsonl"
    if not path.is_file():
        return []
    logged = list(read_jsonl(path))
    steps = [row for row in logged if "loss" in row]
    indices = set()
    if steps:
        indices = {round(index * (len(steps) - 1) / (POINTS - 1)) for index in range(POINTS)}
    points = [steps[index] for index in sorted(indices)]
    points += [row for row in logged if any(key.startswith("validation") for key in row)]
    points.sort(key=lambda row: row["step"])
    names = list(
        dict.fromkeys(key for row in points for key in row if "loss" in key or key == "grad_norm")
    )
    rows = [("  step", *names)]
    rows += [
        (f"  {row['step']}", *(f"{row[key]:.4g}" if key in row else "" for key in names))
        for row in points
    ]
    return [f"curve ({len(steps)} logged steps, log.jsonl has all):", *align_columns(rows)]


def answer_lines(folder: Path, count: int) -> list[str]:
    """Return the first questions of each task and language with what the model answered."""
    files = sorted((folder / "samples").glob("*.jsonl"))
    if not files:
        raise PipelineError(
            f"show.samples={count}: {folder.name} has no answers; stage=eval keeps them in samples/"
        )
    lines = []
    for file in files:
        lines += [f"answers of {file.stem}:"]
        for sample in list(read_jsonl(file))[:count]:
            marks = {True: "right", False: "wrong"}.get(sample.get("correct"), "")
            lines += [f"  [{sample['doc_id']}] {marks} (wanted: {sample.get('target', '')})"]
            lines += [
                f"    | {line}" for line in str(sample.get("prompt", ""))[-LONGEST:].splitlines()
            ]
            lines += [
                f"    > {line}"
                for line in str(sample.get("response", ""))[:LONGEST].splitlines() or [""]
            ]
    return lines
