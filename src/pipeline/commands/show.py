"""Stage show: prints a run's configuration, parents, loss curve, scores and cost.

It reads the run's folder. On request it also prints some rows of a training.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

from pipeline.config.overrides import override_of
from pipeline.config.stages import ShowStage
from pipeline.data.rows import read_jsonl
from pipeline.errors import PipelineError
from pipeline.evaluate.shown_scores import score_lines
from pipeline.runs.find import find_run
from pipeline.runs.manifest import Manifest, read_manifest
from pipeline.runs.run import flatten_dict
from pipeline.text import align_columns
from pipeline.train.examples import ROWS

POINTS = 8  # points of a curve


def show_run(config: ShowStage) -> str:
    """Return text for a terminal that describes a finished run."""
    folder = find_run(config.run, config.runs_path, "run").folder
    manifest = read_manifest(folder)
    if manifest is None:
        raise PipelineError(
            f"run={config.run} has no manifest.json. Name a run that stage=status lists."
        )
    parts = [
        heading_lines(manifest, folder),
        deciding_lines(manifest),
        parent_lines(manifest),
        curve_lines(folder),
        score_lines(folder),
    ]
    if config.show.rows:
        parts.append(rows_of(manifest, folder, config))
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def indented(mark: str, lines: Iterable[str]) -> list[str]:
    return [f"{mark}{line}" for line in lines]


def rows_of(manifest: Manifest, folder: Path, config: ShowStage) -> list[str]:
    """Return the first rows that a training reads. The trained part is in [[ ]].

    Raises:
        PipelineError: the run has no rows.
    """
    if not (folder / ROWS).is_file():
        raise PipelineError(
            f"show.rows={config.show.rows}: {manifest.name} has no {ROWS}. Name a run of stage=sft."
        )
    from pipeline.models.load import load_tokenizer

    tokenizer = load_tokenizer(folder)
    lines = ["rows (what is trained on is marked):"]
    for row in read_jsonl(folder / ROWS)[: config.show.rows]:
        text = ""
        pairs = zip(row["input_ids"], row["labels"], strict=True)
        for trained, part in groupby(pairs, key=lambda pair: pair[1] != -100):
            decoded = tokenizer.decode([token for token, _ in part])
            text += f"[[{decoded}]]" if trained else decoded
        lines += [*indented("  | ", text.splitlines()), ""]
    return lines[:-1]


def heading_lines(manifest: Manifest, folder: Path) -> list[str]:
    lines = [manifest.name]
    merge = manifest.facts.get("merge")
    if merge:
        lines.append(f"merge: {merge}")
    lines.append(f"stage={manifest.stage}, attempt {manifest.attempt}, began {manifest.started}")
    device = manifest.machine.get("device", "?")
    lines.append(f"{manifest.seconds:.0f} s on {device}, in {folder}")
    lines.append(f"hash {manifest.hash}")
    return lines


def deciding_lines(manifest: Manifest) -> list[str]:
    """Return the options that differ from their defaults, as KEY=VALUE."""
    knobs = flatten_dict(manifest.decided_by.get("config", {}))
    assignments = []
    for key, value in knobs.items():
        if key != "stage":
            assignments.append(override_of(key, value))
    if not assignments:
        assignments = ["only its parents"]
    return ["decided by (other options have their defaults):", *indented("  ", assignments)]


def parent_lines(manifest: Manifest) -> list[str]:
    rows = []
    for role, parent in manifest.parents.items():
        rows.append((f"  {role}", parent.name, parent.hash[:12]))
    if rows:
        return ["parents:", *align_columns(rows)]
    return []


def curve_lines(folder: Path) -> list[str]:
    """Return some steps of a training's log, with the last, and all validation losses."""
    path = folder / "log.jsonl"
    if not path.is_file() or not path.stat().st_size:
        return []
    import pandas as pd

    log = pd.read_json(path, lines=True)
    log = log.set_index("step").filter(regex="loss|grad_norm")
    logged = log[log["loss"].notna()]
    validated = log.drop(columns="loss").filter(like="validation").notna().any(axis=1)
    every = max(1, len(logged) // POINTS)
    steps = {*logged.index[::every], *logged.index[-1:], *log.index[validated]}
    points = log[log.index.isin(steps)]
    table = points.reset_index().to_string(index=False, na_rep="", float_format="{:.4g}".format)
    return [f"curve ({len(logged)} logged steps, log.jsonl has all):", *table.splitlines()]
