"""The analyze stage: what training changed, parameter by parameter, and where two experts agree.

Streams a piece of a tensor at a time. A row is an input feature by default, as in the published maps
(papers/decisions.md); a vector is one row, of which the mean absolute change is shown.
"""

from __future__ import annotations

import csv
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.knobs import PipelineError
from pipeline.merge.adapters import Source, open_source
from pipeline.merge.checks import check_sources
from pipeline.merge.formulas import by_size, refuse_not_finite, task_vectors
from pipeline.models.anatomy import Site, anatomy
from pipeline.models.floats import buffers, in_threads, matrix, pieces
from pipeline.runs import read_manifest

if TYPE_CHECKING:
    from pipeline.config import Analyze
    from pipeline.runs import Parent, Run
    from pipeline.tracking import Tracker

COLUMNS = {  # a parameter of a layer -> its column in the published figures
    "self_attn.q_proj.weight": "attention.wq", "self_attn.k_proj.weight": "attention.wk",
    "self_attn.v_proj.weight": "attention.wv", "self_attn.o_proj.weight": "attention.wo",
    "mlp.gate_proj.weight": "feed_forward.w1", "mlp.up_proj.weight": "feed_forward.w3",
    "mlp.down_proj.weight": "feed_forward.w2",
}  # fmt: skip


@dataclass
class Change:
    """One tensor of one expert: norms are Euclidean, `share` is of rows whose mean absolute change is above."""

    mean: float  # of the rows' mean absolute changes
    share: float
    norm: float
    relative: float  # to the base's norm; nan where that is 0
    same: float  # share of entries that did not move


def make(run: Run, work: Path, tracker: Tracker) -> dict[str, Any]:
    """The analyze stage: delta.csv, pairs.csv where there are two experts or more, and the maps."""
    from pipeline.report.maps import png_of_maps, svg_of_maps

    config: Any = run.config
    parents = {role: parent for role, parent in run.parents.items() if role != "base"}
    base = open_source(run.parents["base"].folder)
    experts = {role: open_source(parent.folder, run.parents["base"].folder) for role, parent in parents.items()}
    facts = {role: about(parent, experts[role], config.analyze) for role, parent in parents.items()}
    if not config.analyze.compare_unlike:
        refuse_unlike(facts)
    for role, expert in experts.items():  # dtypes may differ between them, which the flag above allows
        check_sources({role: expert}, base, lambda role: "base" if role == "base" else f"checkpoint[{role}]")

    limits = [facts[role]["threshold"] for role in experts]
    names = by_size(base)
    several, axis = list(experts.values()), config.analyze.axis
    tasks = [lambda name=name: changes(several, base, name, limits, axis) for name in names]  # type: ignore[misc]
    found = dict(zip(names, in_threads(tasks, config.threads), strict=True))
    sites = anatomy(base.names)

    rows = [
        {"expert": facts[role]["name"], **place(name, sites[name]), **vars(found[name][0][index])}
        for index, role in enumerate(experts)
        for name in base.names
    ]
    write_csv(work / "delta.csv", rows)
    pairs = [
        {"first": facts[a]["name"], "second": facts[b]["name"], **place(name, sites[name]), **found[name][1][a, b]}
        for a, b in itertools.combinations(experts, 2)
        for name in base.names
    ]
    if pairs:
        write_csv(work / "pairs.csv", pairs)
    maps = [map_of(facts[role], rows) for role in experts]
    (work / "map.svg").write_text(svg_of_maps(maps, "delta", "share of rows that training changed"), encoding="utf-8")
    (work / "map.png").write_bytes(png_of_maps(maps))
    (work / "facts.json").write_text(json.dumps(facts, indent=1) + "\n")
    tracker.table("delta", list(rows[0]), [[*({**row, "layer": str(row["layer"])}).values()] for row in rows])
    return {"experts": facts, "axis": config.analyze.axis}


def about(parent: Parent, expert: Source, asked: Analyze) -> dict[str, Any]:
    """What must stand on an expert's map: its threshold, stored dtype and optimizer, by its manifest."""
    config = (read_manifest(parent.folder) or {}).get("config") or {}
    side = (config.get("expert") or {}).get("side")
    threshold = asked.threshold
    if threshold is None:
        if side not in ("math", "language"):
            raise PipelineError(
                f"{parent.name} is of no side that has a published threshold: give analyze.threshold=1e-5"
            )
        threshold = asked.threshold_math if side == "math" else asked.threshold_language
    dtypes = sorted({expert.info(name).dtype for name in expert.names})
    optimizer = (config.get("sft") or {}).get("optimizer") or "unknown"
    return {
        "name": parent.name,
        "side": side,
        "threshold": threshold,
        "dtype": "+".join(dtypes),
        "optimizer": optimizer,
    }


def refuse_unlike(facts: Mapping[str, Mapping[str, Any]]) -> None:
    """Rounding noise is in a change: one scale for experts of other dtypes or optimizers misleads."""
    (first, *others) = facts.values()
    for other in others:
        for key in ("dtype", "optimizer"):
            if first[key] != other[key]:
                raise PipelineError(
                    f"{first['name']} has {key} {first[key]}, {other['name']} has {other[key]}: their maps are not "
                    "comparable; analyze them apart, or give analyze.compare_unlike=true"
                )


def changes(
    experts: Sequence[Source], base: Source, name: str, limits: Sequence[float], axis: str
) -> tuple[list[Change], dict[tuple[str, str], dict[str, float]]]:
    """One tensor: the change of each expert, and for each pair the cosine and the share of entries that conflict.

    A conflict is an entry that both moved, in opposite directions.
    """
    shape = base.info(name).shape
    rows, columns = matrix(shape)
    length = columns if axis == "input" and len(shape) > 1 else rows
    sums, squares = np.zeros((len(experts), length)), np.zeros(len(experts))
    same, size = np.zeros(len(experts)), 0.0
    dots = np.zeros((len(experts), len(experts)))
    conflicts = np.zeros((len(experts), len(experts)))
    for start, stop in pieces(shape):
        vectors = task_vectors(experts, base, name, start, stop)
        size += float(np.vdot(wide := buffers("base", vectors[0].shape).astype(np.float64), wide))
        for index, vector in enumerate(vectors):
            sized = np.abs(vector, out=buffers("sized", vector.shape))
            if axis == "input" and len(shape) > 1:
                sums[index] += sized.sum(axis=0, dtype=np.float64)
            else:
                sums[index, start:stop] = sized.sum(axis=1, dtype=np.float64)
            same[index] += vector.size - np.count_nonzero(vector)
            mine = vector.astype(np.float64)
            squares[index] += float(np.vdot(mine, mine))
            for earlier in range(index):
                dots[earlier, index] += float(np.vdot(vectors[earlier].astype(np.float64), mine))
                other = vectors[earlier]
                against = ((other > 0) & (vector < 0)) | ((other < 0) & (vector > 0))
                conflicts[earlier, index] += np.count_nonzero(against)
    if not np.isfinite(squares).all():
        refuse_not_finite([base, *experts], [name])
    entries = max(1, rows * columns)
    means = sums / max(1, rows if axis == "input" and len(shape) > 1 else columns)
    each = [
        Change(
            float(means[index].mean()) if length else 0.0,
            float((means[index] > limit).mean()) if length else 0.0,
            math.sqrt(squares[index]),
            math.sqrt(squares[index] / size) if size else math.nan,
            float(same[index] / entries),
        )
        for index, limit in enumerate(limits)
    ]
    pairs = {}
    for a, b in itertools.combinations(range(len(experts)), 2):
        norms = math.sqrt(squares[a] * squares[b])
        pairs[str(a), str(b)] = {
            "cosine": dots[a, b] / norms if norms else math.nan,
            "sign_conflicts": conflicts[a, b] / entries,
        }
    return each, pairs


def place(name: str, site: Site) -> dict[str, Any]:
    """Where a parameter stands: its layer, its column in the published maps (the rest of its name, else), its name."""
    rest = name.split(".", 3)[3] if site.layer is not None else name
    return {"layer": "" if site.layer is None else site.layer, "column": COLUMNS.get(rest, rest), "parameter": name}


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    with open(path, "w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def map_of(facts: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Any:
    """The published figure of one expert: share of rows above the threshold, layer by column of two dimensions."""
    from pipeline.report.maps import Map

    shown = {(row["layer"], row["column"]): row["share"] for row in rows if row["expert"] == facts["name"]}
    layers = sorted({layer for layer, _ in shown if layer != ""}, reverse=True)
    columns = [column for column in COLUMNS.values() if any((layer, column) in shown for layer in layers)]
    values = [[shown.get((layer, column)) for column in columns] for layer in layers]
    note = f"rows above {facts['threshold']:g} · {facts['dtype']} · {facts['optimizer']}"
    return Map(f"{facts['name']}\n{note}", [str(layer) for layer in layers], columns, values)
