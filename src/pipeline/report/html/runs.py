"""The runs behind a page: their lines, and the details in its dialog (configuration, parents, data card, curve)."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pipeline.data.rows import read_jsonl
from pipeline.report.load.contents import TRAININGS, Results, RunResult
from pipeline.report.render.plots import Curve, thin_points

KINDS = {"sft": "training", "cpt": "training", "eval": "evaluation", "select": "selection", "analyze": "analysis"}
LONGEST_CARD = 20_000  # characters


@dataclass(frozen=True)
class RunLine:
    """A run behind the table; `serves`: the cells that it scores; `href`: its folder relative to the page."""

    kind: str
    name: str
    href: str
    serves: str
    model: str
    seconds: float | None
    finished: bool


def run_lines(results: Results, folder: Path) -> list[RunLine]:
    """Lines of all runs behind the table: trainings, then evaluations, then the rest."""
    serves: dict[str, dict[str, None]] = {}
    for cell in results.cells:
        for score in cell.scores:
            serves.setdefault(score.run, {})[f"{cell.row}, {cell.column}"] = None
    order = [*TRAININGS, "eval"]
    runs = sorted(results.runs, key=lambda run: order.index(run.stage) if run.stage in order else 9)
    return [
        RunLine(
            KINDS.get(run.stage, run.stage),
            run.name,
            relative_address(run.folder, folder) if results.linked else "",
            "; ".join(serves.get(run.name, {})) or (run.label if run.stage in TRAININGS else ""),
            run.model,
            run.seconds,
            run.finished,
        )
        for run in runs
    ]


def describe_runs(results: Results, folder: Path, curves: Mapping[str, Curve]) -> dict[str, Any]:
    """Run name -> its details in the dialog of the page."""
    return {
        run.name: {
            "stage": run.stage, "model": run.model, "time": "" if run.seconds is None else duration(run.seconds),
            "made": ", ".join(filter(None, [run.started, describe_machine(run.machine, run.versions)])),
            "attempt": run.attempt, "root": run.weights_root, "parents": dict(run.parents), "config": dict(run.config),
            "card": run.card, "href": relative_address(run.folder, folder) if results.linked else "",
            "note": "; ".join(filter(None, [run.stale and f"stale: {run.stale}", *run.unlike, run.reason])),
            "text": card_lines(run.folder) if run.stage == "data" else "",
            "curve": curve_points(curves[run.name]) if run.name in curves else [],
        }
        for run in results.runs
    }  # fmt: skip


def describe_machine(machine: Mapping[str, Any], versions: Mapping[str, str]) -> str:
    parts = [machine.get("device"), f"{machine['threads']} threads" if "threads" in machine else None]
    parts += [f"torch {versions['torch']}" if "torch" in versions else None]
    return ", ".join(str(part) for part in parts if part)


def card_lines(folder: Path) -> str:
    path = folder / "data_card.md"
    return path.read_text(encoding="utf-8", errors="replace")[:LONGEST_CARD] if path.is_file() else ""


def curves_of(trainings: Sequence[RunResult]) -> dict[str, Curve]:
    """Run name -> the training's curve, empty if it has no log."""
    curves = {}
    for training in trainings:
        path = training.folder / "log.jsonl"
        rows = read_jsonl(path) if path.is_file() else []
        curves[training.name] = Curve(
            loss=[(row["step"], row["loss"]) for row in rows if "loss" in row],
            validation=[(row["step"], row["validation_loss"]) for row in rows if "validation_loss" in row],
        )
    return curves


def curve_points(curve: Curve) -> list[list[float]]:
    return [[round(x, 1), float(f"{y:.4g}")] for x, y in thin_points(curve.loss, 120) if math.isfinite(y)]


def relative_address(target: Path, folder: Path) -> str:
    """The address of a folder relative to the page's; empty if it does not exist."""
    return quote(Path(os.path.relpath(target, folder)).as_posix()) + "/" if target.is_dir() else ""


def duration(seconds: float) -> str:
    """Seconds as text: 42 -> 42 s, 412 -> 6 min 52 s, 7260 -> 2 h 1 min."""
    rounded = round(seconds)
    if rounded < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{rounded} s"
    if rounded < 3600:
        return f"{rounded // 60} min {rounded % 60} s"
    return f"{rounded // 3600} h {rounded % 3600 // 60} min"
