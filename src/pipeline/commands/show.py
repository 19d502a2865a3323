"""Stage show: what a run is, read from its folder: what decided it, parents, curve, scores, cost, and some answers."""

from __future__ import annotations

import json
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

from pipeline.config.stages import ShowStage
from pipeline.config.training import Sft
from pipeline.data.rows import read_jsonl
from pipeline.errors import PipelineError
from pipeline.launch.run_json import rebuilt
from pipeline.report.load.scores import score_lines
from pipeline.report.render.text import aligned
from pipeline.runs.find import find
from pipeline.runs.folders import folder_of
from pipeline.runs.manifest import Manifest, read_manifest
from pipeline.runs.run import flat

POINTS = 8  # of a curve
LONGEST = 600  # characters of a prompt's end and of an answer


def show_run(config: ShowStage) -> str:
    """The run's page for a terminal."""
    found = find(config.run, Path(config.runs_dir), "run")
    folder = getattr(found, "folder", None)
    manifest = read_manifest(folder) if folder else None
    if folder is None or manifest is None:
        raise PipelineError(f"run={config.run} is no run of this program: it has no manifest.json")
    parts = [heading(manifest), decided(manifest), parents(manifest), curve(folder), score_lines(folder)]
    if config.show.samples:
        parts.append(answers(folder, config.show.samples))
    if config.show.rows:
        parts.append(rows_of(manifest, folder, config))
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def rows_of(manifest: Manifest, folder: Path, config: ShowStage) -> list[str]:
    """The first rows that a training reads, its trained part green on a terminal and in [[ ]] elsewhere; of a data run
    its rows as they are.

    Raises:
        PipelineError: neither is asked for, or the training's data run is gone.
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
            f"show.rows={config.show.rows}: {manifest.name} has no training set; give a run of stage=sft"
        )
    from pipeline.models.load import load_tokenizer, with_template_date
    from pipeline.train.examples import tokens_of

    data = folder_of(manifest.parents["data"].hash, Path(config.runs_dir))
    if data is None:
        raise PipelineError(f"show.rows: {manifest.parents['data'].name}, the training set of {manifest.name}, is gone")
    sft = rebuilt(Sft, manifest.config["sft"])
    tokenizer = with_template_date(load_tokenizer(folder), sft.template_date)
    rows, _ = tokens_of(read_jsonl(data / "train.jsonl")[: config.show.rows], tokenizer, sft)
    before, after = ("\033[32m", "\033[0m") if sys.__stdout__ and sys.__stdout__.isatty() else ("[[", "]]")
    lines = ["rows (what is trained on is marked):"]
    for ids, mask in rows:
        text, at = "", 0
        for trained, part in groupby(mask[: sft.seq_length]):
            length = len(list(part))
            words = tokenizer.decode(ids[at : at + length])
            text += f"{before}{words}{after}" if trained else words
            at += length
        lines += [*(f"  | {line}" for line in text.splitlines()), ""]
    return lines[:-1]


def heading(manifest: Manifest) -> list[str]:
    cost, machine = manifest.cost, manifest.machine
    said = [f"stage={manifest.stage}", f"attempt {manifest.attempt}", f"began {manifest.started}"]
    spent = [f"{cost['seconds']:.0f} s"]
    if cost.get("predicted_seconds") is not None:
        spent.append(f"predicted {cost['predicted_seconds']:.0f} s")
    if cost.get("peak_memory_bytes"):
        spent.append(f"{cost['peak_memory_bytes'] / 1e9:.1f} GB at most")
    on = ", ".join(f"{key} {value}" for key, value in machine.items() if isinstance(value, str | int) and value != "")
    source = manifest.adopted_from
    lines = [manifest.name, ", ".join(said), ", ".join(spent), *([f"on {on}"] if on else []), f"hash {manifest.hash}"]
    return lines + ([f"adopted from {source['name']}, which read the same and computed its files"] if source else [])


def decided(manifest: Manifest) -> list[str]:
    """What differs from the defaults, as words that a command takes: all else stood at its default."""
    knobs = flat(manifest.decided_by.get("config", {}))
    words = [f"{key}={word(value)}" for key, value in knobs.items() if key != "stage"]
    return ["decided by (all else is at its default):", *(f"  {word}" for word in words or ["nothing but its parents"])]


def word(value: Any) -> str:
    """A knob's value as a command takes it."""
    plain = isinstance(value, str) and value and not any(letter.isspace() for letter in value)
    return str(value) if plain else json.dumps(value, ensure_ascii=False)


def parents(manifest: Manifest) -> list[str]:
    rows = [(f"  {role}", parent.name, parent.hash[:12]) for role, parent in manifest.parents.items()]
    return ["parents:", *aligned(rows)] if rows else []


def curve(folder: Path) -> list[str]:
    """Some steps of a training's log, the first and the last among them, and all of its validation losses."""
    path = folder / "log.jsonl"
    if not path.is_file():
        return []
    logged = list(read_jsonl(path))
    steps = [row for row in logged if "loss" in row]
    chosen = {round(place * (len(steps) - 1) / (POINTS - 1)) for place in range(POINTS)} if steps else set()
    points = [steps[place] for place in sorted(chosen)]
    points += [row for row in logged if any(key.startswith("validation") for key in row)]
    points.sort(key=lambda row: row["step"])
    names = list(dict.fromkeys(key for row in points for key in row if "loss" in key or key == "grad_norm"))
    rows = [("  step", *names)]
    rows += [(f"  {row['step']}", *(f"{row[key]:.4g}" if key in row else "" for key in names)) for row in points]
    return [f"curve ({len(steps)} logged steps, log.jsonl has all):", *aligned(rows)]


def answers(folder: Path, count: int) -> list[str]:
    """The first questions of each task and language with what the model answered."""
    files = sorted((folder / "samples").glob("*.jsonl"))
    if not files:
        raise PipelineError(f"show.samples={count}: {folder.name} has no answers; stage=eval keeps them in samples/")
    lines = []
    for file in files:
        lines += [f"answers of {file.stem}:"]
        for sample in list(read_jsonl(file))[:count]:
            marks = "right" if sample.get("correct") else "wrong" if "correct" in sample else ""
            lines += [f"  [{sample['doc_id']}] {marks} (wanted: {sample.get('target', '')})"]
            lines += [f"    | {one}" for one in str(sample.get("prompt", ""))[-LONGEST:].splitlines()]
            lines += [f"    > {one}" for one in str(sample.get("response", ""))[:LONGEST].splitlines() or [""]]
    return lines
