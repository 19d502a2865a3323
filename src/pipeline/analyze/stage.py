"""The analyze stage: the changes by training, parameter by parameter."""

from __future__ import annotations

import csv
import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.analyze.changes import (
    Change,
    agreement_facts,
    agreement_sums,
    row_key,
    tensor_changes,
)
from pipeline.errors import PipelineError
from pipeline.merge.adapters import Source, open_source
from pipeline.merge.compatibility import check_sources
from pipeline.merge.formulas import by_size
from pipeline.models.anatomy import anatomy
from pipeline.models.arrays import in_threads
from pipeline.progress import Bar
from pipeline.runs.manifest import read_manifest

if TYPE_CHECKING:
    import numpy as np

    from pipeline.config.merging import Analyze
    from pipeline.config.stages import AnalyzeStage
    from pipeline.runs.run import Parent, Run
    from pipeline.runs.tracking import Tracker


def make(run: Run[AnalyzeStage], work: Path, tracker: Tracker) -> dict[str, Any]:
    """Write delta.csv and map.svg, the share of rows above each threshold as in the papers.

    Returns the facts of each expert, and the agreement of several experts' changes.
    """
    from pipeline.analyze.heatmaps import map_of, svg_of_maps

    config, base_folder = run.config, run.parents["base"].folder
    base = open_source(base_folder)
    experts, facts = {}, {}
    for role, parent in run.parents.items():
        if role != "base":
            experts[role] = open_source(parent.folder, base_folder)
            facts[role] = expert_facts(parent, experts[role], config.analyze)
    for role, expert in experts.items():
        # one by one, because the experts may have different dtypes
        keys = {role: f"checkpoint[{role}]", "base": "base"}
        check_sources({role: expert, "base": base}, keys.__getitem__)
    results = measure_changes(experts, base, facts, config)
    sites = anatomy(base.names)
    labels = [fact["name"] for fact in facts.values()]
    rows = []
    for index, label in enumerate(labels):
        for name, site in sites.items():
            change = vars(results[name][index])
            rows.append({"expert": label, **row_key(name, site), **change})
    write_csv(work / "delta.csv", rows)
    maps = [map_of(fact, rows) for fact in facts.values()]
    (work / "map.svg").write_text(svg_of_maps(maps, "delta", "share of rows"), encoding="utf-8")
    agreement: dict[str, Any] = {}
    if len(experts) > 1:
        pairs = compare_pairs(experts, labels, base, config.threads)
        agreement = agreement_facts(pairs, sites)
    return {"experts": facts, "axis": config.analyze.axis, **agreement}


def measure_changes(
    experts: Mapping[str, Source],
    base: Source,
    facts: Mapping[str, Mapping[str, Any]],
    config: AnalyzeStage,
) -> dict[str, list[Change]]:
    """Return, for each parameter, its change in each expert."""
    names, limits = by_size(base), [fact["threshold"] for fact in facts.values()]
    sources = list(experts.values())
    with Bar("changes", sum(base.info(name).nbytes for name in names), "byte") as bar:

        def measure(name: str) -> list[Change]:
            changes = tensor_changes(sources, base, name, limits, config.analyze.axis)
            bar.update(base.info(name).nbytes)
            return changes

        return dict(zip(names, in_threads(measure, names, config.threads), strict=True))


def compare_pairs(
    experts: Mapping[str, Source], labels: Sequence[str], base: Source, threads: int | None
) -> dict[str, dict[str, np.ndarray]]:
    """Return the `agreement_sums` of each parameter, for each pair of experts."""
    names = by_size(base)
    labelled = zip(labels, experts.values(), strict=True)
    pairs = {}
    for (label, first), (other, second) in itertools.combinations(labelled, 2):
        sums = in_threads(partial(agreement_sums, first, second, base), names, threads)
        pairs[f"{label} {other}"] = dict(zip(names, sums, strict=True))
    return pairs


def expert_facts(parent: Parent, expert: Source, knobs: Analyze) -> dict[str, Any]:
    """Return the facts for the label of an expert's map, from its manifest.

    These are its threshold, its stored dtype and its optimizer.
    """
    manifest = read_manifest(parent.folder)
    if manifest and "choice" in manifest.facts:  # a select run: read the chosen training's manifest
        training = manifest.facts["choice"]["checkpoint"].partition("@")[0]
        manifest = read_manifest(parent.folder.parent / training)
    config: Mapping[str, Any] = {}
    if manifest:
        config = manifest.config
    side = (config.get("expert") or {}).get("side")
    threshold = knobs.threshold
    if threshold is None:
        published = {"math": knobs.threshold_math, "language": knobs.threshold_language}
        threshold = published.get(str(side))
    if threshold is None:
        raise PipelineError(
            f"{parent.name} has no side with a published threshold. Give analyze.threshold=1e-5."
        )
    dtypes = {info.dtype for info in expert.infos.values()}
    optimizer = (config.get("sft") or {}).get("optimizer") or "unknown"
    return {
        "name": parent.name,
        "side": side,
        "threshold": threshold,
        "dtype": "+".join(sorted(dtypes)),
        "optimizer": optimizer,
    }


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    with open(path, "w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
